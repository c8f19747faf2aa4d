"""`oncurve show RUN --timing`: the time of each phase of a step, as medians over the steps of a stage."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.runs.database.reader import SECONDS, RunReader, StageRow
from oncurve.runs.folder import RunFolder
from oncurve.terminal.text import number, percent

FIGURES = {
    "tokens_per_s": ("completion tokens/s over the complete step", 1.0, ""),
    "sample_tokens_per_s": ("while sampling", 1.0, ""),
    "update_tflops": ("in the update", 1.0, " TFLOP/s"),
    "mfu": ("MFU", 100.0, " %"),
    "memory_mib": ("peak memory", 1 / 1024, " GiB"),
}
"""Metrics shown below the table: text, factor and unit."""


def timing_of(store: RunReader, stage: StageRow) -> dict[str, float]:
    """The median over a stage's steps of each phase's seconds and of the figures. The first step, which also compiles and
    allocates, is left out if there are others."""
    steps = [row.step for row in store.steps(stage.name)]
    counted = set(steps[1:] or steps)
    last = store.metrics_of(stage.name, steps[-1]) if steps else {}
    names = [name for name in last if name.startswith(SECONDS) or name in FIGURES]
    return {name: median(value for step, value in store.metric(name, stage.name) if step in counted) for name in names}


def render_timing(run: RunFolder) -> RenderableType:
    parts: list[RenderableType] = [Text(f"{run.name}  step time by phase, medians", "bold")]
    with RunReader.open(run.path) as store:
        for stage in store.stages():
            medians = timing_of(store, stage)
            if medians:
                parts += [Text(), Text(stage.name, "bold"), _table(medians), _figures(medians)]
    return Group(*parts)


def _table(medians: dict[str, float]) -> Table:
    seconds = {name.removeprefix(SECONDS): value for name, value in medians.items() if name.startswith(SECONDS)}
    phases = {phase: value for phase, value in seconds.items() if "/" not in phase}
    total = sum(phases.values())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for phase, value in sorted(phases.items(), key=lambda item: -item[1]):
        table.add_row(phase, number(1e3 * value), percent(value / total if total else None))
        inner = {name: v for name, v in seconds.items() if name.startswith(f"{phase}/")}
        for name, part in sorted(inner.items(), key=lambda item: -item[1]):
            table.add_row(
                f"  {name.partition('/')[2]}", number(1e3 * part), percent(part / total if total else None), style="dim"
            )
    table.add_row("step", number(1e3 * total), "", style="bold")
    return table


def _figures(medians: dict[str, float]) -> Text:
    texts = [
        f"{number(medians[name] * factor)}{unit} {text}" for name, (text, factor, unit) in FIGURES.items() if name in medians
    ]
    return Text(" · ".join(texts), "dim")


def timing_data(run: RunFolder) -> dict[str, Any]:
    with RunReader.open(run.path) as store:
        return {stage.name: timing_of(store, stage) for stage in store.stages()}
