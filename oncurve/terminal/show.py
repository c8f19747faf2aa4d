"""`oncurve show`: a run at a glance, a step's groups in a table, one group in full."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.errors import OncurveError, RunError, did_you_mean
from oncurve.recipe.load import flat, load_recipe
from oncurve.recipe.schema.stages import SAMPLED_TYPES
from oncurve.records import GradedGroup
from oncurve.runs.database.reader import RunReader, StageRow
from oncurve.runs.folder import Parent, RunEntry, RunFolder, list_runs
from oncurve.terminal.evaluation import heldout_tables
from oncurve.terminal.group import GroupTable, render_group
from oncurve.terminal.live.progress import Heldout
from oncurve.terminal.runs import STYLES, ago
from oncurve.terminal.text import DASH, duration, number, score, shorten, sparkline

CURVES = {
    "sft": ("loss", "entropy"),
    "grpo": ("reward", "entropy", "length_mean", "no_signal_share", "kl"),
    "ppo": ("reward", "entropy", "length_mean", "explained_variance", "value_loss", "kl"),
    "trpo": ("reward", "entropy", "length_mean", "no_signal_share", "step_kl"),
    "dpo": ("loss", "pair_accuracy", "pair_margin", "entropy"),
    "reward_model": ("loss", "pair_accuracy", "heldout_loss", "heldout_pair_accuracy"),
}
"""Which metrics of a stage are drawn, by its type."""
HAPPENED = 12
"""Events of a cluster that are shown."""
SHOWN = 8
"""Rewards of a group that its row shows, the best."""
COMPARED = ("reward", "accuracy", "loss", "entropy", "kl", "length_mean", "no_signal_share")


def render_run(run: RunFolder) -> RenderableType:
    """A run at a glance: how it stands, its family, its stages' curves, held-out accuracy by difficulty."""
    state = run.state()
    head = Text.assemble(
        (run.name, "bold"),
        "  ",
        (state.current_status, STYLES[state.current_status]),
        (f"  begun {ago(state.created)} · {run.path}", "dim"),
    )
    with RunReader.open(run.path) as store:
        parts: list[RenderableType] = [head, *_family(run, state.parent)]
        stages, evals = store.stages(), store.evals()
        parts += [line for stage in stages for line in (Text(), _stage_line(stage), _curves(store, stage))]
        if evals:
            parts += [Text(), *heldout_tables(evals)[:-1]]
        if state.parent is not None:
            parts += _beside_parent(run, state.parent, store)
        parts += [*event_lines(store), Text(), _advice(run, stages)]
    return Group(*parts)


def event_lines(store: RunReader) -> list[RenderableType]:
    """What a cluster has done to the run: who died, hung or was started again, the last of it."""
    told = store.events("cluster")
    lines = [Text.assemble((clock(e.time), "dim"), f"  {e.message}") for e in told[-HAPPENED:]]
    more = [Text(f"  and {len(told) - HAPPENED} events before", "dim")] if len(told) > HAPPENED else []
    return [Text(), Text("on the cluster", "dim"), *more, *lines] if told else []


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _family(run: RunFolder, parent: Parent | None) -> list[RenderableType]:
    lines = []
    if parent is not None:
        lines.append(Text(f"a fork of {parent.run} at {parent.stage} step {parent.step}"))
    for child in children_of(run):
        assert child.state is not None
        assert child.state.parent is not None
        forked = child.state.parent
        changes = ", ".join(f"{key} = {value}" for key, value in forked.changes.items()) or "nothing changed"
        lines.append(Text(f"forked at {forked.stage} step {forked.step} by {child.name}: {changes}"))
    return list(lines)


def children_of(run: RunFolder) -> list[RunEntry]:
    """Runs beside this one that went on from it."""
    entries = list_runs(run.path.resolve().parent)
    return [e for e in entries if e.state is not None and e.state.parent is not None and e.state.parent.run == run.name]


def _stage_line(stage: StageRow) -> Text:
    took = f" in {duration(stage.finished - stage.started)}" if stage.finished is not None else ""
    return Text.assemble((stage.name, "bold"), (f"  {stage.done} of {stage.steps} steps{took}", "dim"))


def _curves(store: RunReader, stage: StageRow) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in CURVES.get(stage.type, ("loss",)):
        values = [value for _, value in store.metric(name, stage.name)]
        if values:
            table.add_row(
                Text(f"  {name}", "dim"),
                number(values[0]),
                Text(sparkline(values, 40), "cyan"),
                Text(number(values[-1]), "bold"),
            )
    measured = [one for report in store.evals(stage.name) for one in Heldout.of(report)]
    if len(measured) > 1:
        ends = (None, None) if measured[-1].what == "reward" else (0.0, 1.0)
        curve = Text(sparkline([one.value for one in measured], 40, *ends), "cyan")
        table.add_row(Text("  held-out", "dim"), measured[0].shown, curve, Text(measured[-1].shown, "bold"))
    return table


def _beside_parent(run: RunFolder, parent: Parent, store: RunReader) -> list[RenderableType]:
    """What the fork changed, and the last figures of both, side by side."""
    beside = RunFolder(run.path.resolve().parent / parent.run)
    parts: list[RenderableType] = [Text(), _changes(parent, beside)]
    try:
        with RunReader.open(beside.path) as other:
            theirs, mine = _last_figures(other, parent.stage), _last_figures(store, parent.stage)
    except OncurveError:
        return [*parts, Text(f"{parent.run} is not beside it any more", "dim")]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column(f"at the end of {parent.stage}")
    table.add_column(parent.run, justify="right")
    table.add_column(run.name, justify="right")
    for name in theirs | mine:
        table.add_row(name, theirs.get(name, DASH), mine.get(name, DASH))
    return [*parts, Text(), table]


def _changes(parent: Parent, beside: RunFolder) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for head in ("changed", "before", "now"):
        table.add_column(head, overflow="fold")
    before = _values(beside.recipe)
    for key, value in parent.changes.items():
        table.add_row(key, str(before.get(key, DASH)), Text(str(value), "bold"))
    if not parent.changes:
        table.add_row("nothing", "", "")
    return table


def _values(recipe: Path) -> dict[str, Any]:
    """Every dotted key of a recipe as it was resolved, stages and rewards by name; nothing where it can't be read."""
    try:
        return flat(load_recipe(recipe))
    except OncurveError:
        return {}


def _last_figures(store: RunReader, stage: str) -> dict[str, str]:
    done = next((s.done for s in store.stages() if s.name == stage), 0)
    metrics = store.metrics_of(stage, done)
    evals = store.evals(stage)
    figures = {"step": str(done)}
    for last in Heldout.of(evals[-1]) if evals else []:
        figures[f"held-out {last.what}"] = last.shown
    return figures | {name: number(metrics[name]) for name in COMPARED if name in metrics}


def _advice(run: RunFolder, stages: list[StageRow]) -> Text:
    looked = next((s for s in reversed(stages) if s.type in SAMPLED_TYPES and s.done), None)
    if looked is None:
        return Text(f"oncurve eval {run.path}", "dim")
    return Text(f"a step's groups: oncurve show {run.path} --stage {looked.name} --step {looked.done}", "dim")


def stage_of(store: RunReader, run: RunFolder, stage: str | None, step: int) -> str:
    """The stage that a step is looked up in: as asked, else the last grpo stage, else the last that has groups or steps."""
    names = {s.name: s for s in store.stages()}
    if stage is not None and stage not in names:
        known = ", ".join(names) or "none yet"
        raise RunError(
            run.name,
            f"no stage '{stage}'{did_you_mean(stage, names)}",
            because=f"its stages are: {known}",
            fix="name one of them",
        )
    if stage is not None:
        return stage
    reached = [s for s in names.values() if s.done >= step] or list(names.values())
    if not reached:
        raise RunError(run.name, f"no step {step}", because="no step is recorded yet", fix="wait for the first step")
    return next((s.name for s in reversed(reached) if s.type in SAMPLED_TYPES), reached[-1].name)


def render_step(run: RunFolder, stage: str | None, step: int) -> RenderableType:
    """A step: its metrics, and its groups in a table."""
    with RunReader.open(run.path) as store:
        name = stage_of(store, run, stage, step)
        report = store.step(name, step)
    head = Text.assemble((f"{run.name}  {name} step {step}", "bold"))
    told = [Text(f"{key} {number(value)}", "dim") for key, value in report.metrics.items()]
    facts = Columns(told, padding=(0, 2), equal=True)
    if not report.groups:
        return Group(head, facts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("group", "rewards, best first", "tokens"):
        table.add_column(column, justify="right" if column != "rewards, best first" else "left", no_wrap=True)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis")
    for position, graded in enumerate(report.groups):
        table.add_row(str(position), _reward_row(graded), _lengths(graded), shorten(graded.group.prompt.shown, 40))
    advice = Text(f"a group in full: oncurve show {run.path} --stage {name} --step {step} --group 0", "dim")
    return Group(head, facts, Text(), table, Text(), advice)


def _reward_row(graded: GradedGroup) -> Text:
    """The rewards in the colours of their advantages; a group without signal is dim."""
    text = Text()
    order = graded.best_first
    for place in order[:SHOWN]:
        advantage = graded.advantage_of(place) or 0.0
        style = "green" if advantage > 0 else "red" if advantage < 0 else "dim"
        text.append(f"{score(graded.scored.totals[place]):>5} ", style)
    return text.append("…" if len(order) > SHOWN else "")


def _lengths(graded: GradedGroup) -> str:
    lengths = [s.completion.length for s in graded.scored.scored]
    return f"{min(lengths)}–{max(lengths)}" if lengths else DASH


def render_one_group(run: RunFolder, stage: str | None, step: int, position: int) -> RenderableType:
    """One group in full, after a table of it."""
    with RunReader.open(run.path) as store:
        name = stage_of(store, run, stage, step)
        kept = store.group(name, step, position)
    head = Text(f"{run.name}  {name} step {step}  group {position}", "bold")
    return Group(head, GroupTable(kept.graded), Text(), render_group(kept.graded, kept.stats))
