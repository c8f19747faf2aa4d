"""`oncurve show RUN --timing`: where a step's time goes, by stage: medians over its steps."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.runs.database.reader import SECONDS, RunReader, StageRow
from oncurve.runs.folder import RunFolder
from oncurve.terminal.text import number, percent

BESIDE = {
    "tokens_per_s": ("completion tokens a second, over the whole step", 1.0, ""),
    "sample_tokens_per_s": ("while sampling", 1.0, ""),
    "update_tflops": ("the update", 1.0, " TFLOP/s"),
    "mfu": ("of this device's matrix rate", 100.0, " %"),
    "memory_mib": ("peak memory", 1 / 1024, " GiB"),
}
"""What stands under the table: words, factor and unit of each."""


def timing_of(store: RunReader, stage: StageRow) -> dict[str, float]:
    """The median over a stage's steps of each phase's seconds and of each figure beside them. The first step is left out where
    there are others: it also pays for what is compiled and allocated once."""
    steps = [row.step for row in store.steps(stage.name)]
    counted = set(steps[1:] or steps)
    last = store.metrics_of(stage.name, steps[-1]) if steps else {}
    names = [name for name in last if name.startswith(SECONDS) or name in BESIDE]
    return {name: median(value for step, value in store.metric(name, stage.name) if step in counted) for name in names}


def render_timing(run: RunFolder) -> RenderableType:
    parts: list[RenderableType] = [Text(f"{run.name}  a step's time by phase, medians", "bold")]
    with RunReader.open(run.path) as store:
        for stage in store.stages():
            found = timing_of(store, stage)
            if found:
                parts += [Text(), Text(stage.name, "bold"), _table(found), *_beside(found)]
    return Group(*parts)


def _table(found: dict[str, float]) -> Table:
    seconds = {name.removeprefix(SECONDS): value for name, value in found.items() if name.startswith(SECONDS)}
    whole = {phase: value for phase, value in seconds.items() if "/" not in phase}
    total = sum(whole.values())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for phase, value in sorted(whole.items(), key=lambda item: -item[1]):
        table.add_row(phase, number(1e3 * value), percent(value / total if total else None))
        inner = {name: v for name, v in seconds.items() if name.startswith(f"{phase}/")}
        for name, part in sorted(inner.items(), key=lambda item: -item[1]):
            table.add_row(
                f"  {name.partition('/')[2]}", number(1e3 * part), percent(part / total if total else None), style="dim"
            )
    table.add_row("a step", number(1e3 * total), "", style="bold")
    return table


def _beside(found: dict[str, float]) -> list[RenderableType]:
    lines = [f"{number(found[name] * factor)}{unit} {words}" for name, (words, factor, unit) in BESIDE.items() if name in found]
    return [Text(" · ".join(lines), "dim")]


def timing_data(run: RunFolder) -> dict[str, Any]:
    with RunReader.open(run.path) as store:
        return {stage.name: timing_of(store, stage) for stage in store.stages()}
