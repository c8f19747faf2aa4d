"""`oncurve show`: a run at a glance, a step's groups in a table, one group in full; the same as JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.errors import OncurveError
from oncurve.recipe.load import flatten, load_recipe
from oncurve.recipe.schema.stages import SAMPLED_TYPES
from oncurve.records import GradedGroup
from oncurve.runs.database.reader import RunReader, StageRow
from oncurve.runs.folder import Parent, RunEntry, RunFolder, forks_of
from oncurve.runs.metrics import MAIN_CURVES
from oncurve.runs.views import completion_view, eval_view, finite_values, group_view
from oncurve.terminal.evaluation import heldout_tables
from oncurve.terminal.group import GroupTable, render_group
from oncurve.terminal.live.progress import Heldout
from oncurve.terminal.runs import STYLES, ago, run_data
from oncurve.terminal.text import DASH, duration, number, score, shorten, sparkline

MAX_EVENTS = 12
"""Events of a cluster that are shown, the last ones."""
MAX_REWARDS = 8
"""Rewards that a group's row shows, the best ones."""


def render_run(run: RunFolder) -> RenderableType:
    """A run at a glance: status, forks, each stage's curves, held-out accuracy by difficulty."""
    state = run.state()
    head = Text.assemble(
        (run.name, "bold"),
        "  ",
        (state.current_status, STYLES[state.current_status]),
        (f"  started {ago(state.created)} · {run.path}", "dim"),
    )
    with RunReader.open(run.path) as store:
        parts: list[RenderableType] = [head, *_forks(run, state.parent)]
        stages, evals = store.stages(), store.evals()
        parts += [line for stage in stages for line in (Text(), _stage_line(stage), _curves(store, stage))]
        if evals:
            parts += [Text(), *heldout_tables(evals)[:-1]]
        if state.parent is not None:
            parts += _compare_with_parent(run, state.parent, store)
        parts += [*event_lines(store), Text(), _advice(run, stages)]
    return Group(*parts)


def event_lines(store: RunReader) -> list[RenderableType]:
    """The last events of a cluster run: processes that died, hung or were restarted."""
    events = store.events("cluster")
    lines = [Text.assemble((clock(e.time), "dim"), f"  {e.message}") for e in events[-MAX_EVENTS:]]
    more = [Text(f"  {len(events) - MAX_EVENTS} earlier events", "dim")] if len(events) > MAX_EVENTS else []
    return [Text(), Text("cluster events", "dim"), *more, *lines] if events else []


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _forks(run: RunFolder, parent: Parent | None) -> list[RenderableType]:
    lines = []
    if parent is not None:
        lines.append(Text(f"forked from {parent.run} at {parent.stage} step {parent.step}"))
    for child in forks_of(run):
        assert child.state is not None
        assert child.state.parent is not None
        forked = child.state.parent
        changes = ", ".join(f"{key} = {value}" for key, value in forked.changes.items()) or "no changes"
        lines.append(Text(f"forked at {forked.stage} step {forked.step} into {child.name}: {changes}"))
    return list(lines)


def _stage_line(stage: StageRow) -> Text:
    took = f" in {duration(stage.finished - stage.started)}" if stage.finished is not None else ""
    return Text.assemble((stage.name, "bold"), (f"  {stage.done} of {stage.steps} steps{took}", "dim"))


def _curves(store: RunReader, stage: StageRow) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in MAIN_CURVES.get(stage.type, ("loss",)):
        values = [value for _, value in store.metric(name, stage.name)]
        if values:
            table.add_row(
                Text(f"  {name}", "dim"),
                number(values[0]),
                Text(sparkline(values, 40), "cyan"),
                Text(number(values[-1]), "bold"),
            )
    heldout = [result for report in store.evals(stage.name) for result in Heldout.of(report)]
    if len(heldout) > 1:
        bounds = (None, None) if heldout[-1].what == "reward" else (0.0, 1.0)
        curve = Text(sparkline([result.value for result in heldout], 40, *bounds), "cyan")
        table.add_row(Text("  held-out", "dim"), heldout[0].shown, curve, Text(heldout[-1].shown, "bold"))
    return table


def _compare_with_parent(run: RunFolder, parent: Parent, store: RunReader) -> list[RenderableType]:
    """What the fork changed, and the last figures of both runs side by side."""
    folder = RunFolder(run.path.resolve().parent / parent.run)
    parts: list[RenderableType] = [Text(), _changes(parent, folder)]
    try:
        with RunReader.open(folder.path) as other:
            before, after = _last_figures(other, parent.stage), _last_figures(store, parent.stage)
    except OncurveError:
        return [*parts, Text(f"{parent.run} is no longer in the same folder", "dim")]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column(f"at the end of {parent.stage}")
    table.add_column(parent.run, justify="right")
    table.add_column(run.name, justify="right")
    for name in before | after:
        table.add_row(name, before.get(name, DASH), after.get(name, DASH))
    return [*parts, Text(), table]


def _changes(parent: Parent, folder: RunFolder) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for head in ("changed", "before", "now"):
        table.add_column(head, overflow="fold")
    before = _values(folder.recipe)
    for key, value in parent.changes.items():
        table.add_row(key, str(before.get(key, DASH)), Text(str(value), "bold"))
    if not parent.changes:
        table.add_row("nothing", "", "")
    return table


def _values(recipe: Path) -> dict[str, Any]:
    """Every dotted key of a resolved recipe, stages and rewards by name; empty if the recipe can't be read."""
    try:
        return flatten(load_recipe(recipe))
    except OncurveError:
        return {}


def _last_figures(store: RunReader, stage: str) -> dict[str, str]:
    row = next((s for s in store.stages() if s.name == stage), None)
    if row is None:
        return {"step": "0"}
    metrics, evals = store.metrics_of(stage, row.done), store.evals(stage)
    figures = {"step": str(row.done)}
    for last in Heldout.of(evals[-1]) if evals else []:
        figures[f"held-out {last.what}"] = last.shown
    return figures | {name: number(metrics[name]) for name in MAIN_CURVES.get(row.type, ("loss",)) if name in metrics}


def _advice(run: RunFolder, stages: list[StageRow]) -> Text:
    sampled = next((s for s in reversed(stages) if s.type in SAMPLED_TYPES and s.done), None)
    if sampled is None:
        return Text(f"oncurve eval {run.path}", "dim")
    return Text(f"a step's groups: oncurve show {run.path} --stage {sampled.name} --step {sampled.done}", "dim")


def render_step(run: RunFolder, stage: str | None, step: int) -> RenderableType:
    """A step: its metrics, and its groups in a table."""
    with RunReader.open(run.path) as store:
        name = store.stage_of_step(step, stage)
        report = store.step(name, step)
    head = Text.assemble((f"{run.name}  {name} step {step}", "bold"))
    figures = [Text(f"{key} {number(value)}", "dim") for key, value in report.metrics.items()]
    metrics = Columns(figures, padding=(0, 2), equal=True)
    if not report.groups:
        return Group(head, metrics)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("group", "rewards, best first", "tokens"):
        table.add_column(column, justify="right" if column != "rewards, best first" else "left", no_wrap=True)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis")
    for position, graded in enumerate(report.groups):
        table.add_row(str(position), _reward_row(graded), _lengths(graded), shorten(graded.group.prompt.shown, 40))
    advice = Text(f"a group in full: oncurve show {run.path} --stage {name} --step {step} --group 0", "dim")
    return Group(head, metrics, Text(), table, Text(), advice)


def _reward_row(graded: GradedGroup) -> Text:
    """The rewards, coloured by the sign of their advantages; a group without signal is dim."""
    text = Text()
    order = graded.best_first
    for index in order[:MAX_REWARDS]:
        advantage = graded.advantage_of(index) or 0.0
        style = "green" if advantage > 0 else "red" if advantage < 0 else "dim"
        text.append(f"{score(graded.scored.totals[index]):>5} ", style)
    return text.append("…" if len(order) > MAX_REWARDS else "")


def _lengths(graded: GradedGroup) -> str:
    lengths = [s.completion.length for s in graded.scored.scored]
    return f"{min(lengths)}–{max(lengths)}" if lengths else DASH


def render_one_group(run: RunFolder, stage: str | None, step: int, position: int) -> RenderableType:
    """One group: a table, then every completion in full."""
    with RunReader.open(run.path) as store:
        name = store.stage_of_step(step, stage)
        group = store.group(name, step, position)
    head = Text(f"{run.name}  {name} step {step}  group {position}", "bold")
    return Group(head, GroupTable(group.graded), Text(), render_group(group.graded, group.stats))


def show_data(run: RunFolder, stage: str | None, step: int | None, group: int | None) -> dict[str, Any]:
    """`oncurve show --json`: a run, one of its steps, or one group."""
    if step is None:
        return _run_data(run)
    with RunReader.open(run.path) as store:
        name = store.stage_of_step(step, stage)
        where = {"run": run.name, "stage": name, "step": step}
        if group is not None:
            return {**where, "position": group, **_group_data(store.group(name, step, group).graded)}
        report = store.step(name, step)
    groups = [{"position": i, **_group_data(graded)} for i, graded in enumerate(report.groups)]
    return {**where, "metrics": finite_values(report.metrics), "seconds": finite_values(report.seconds), "groups": groups}


def _run_data(run: RunFolder) -> dict[str, Any]:
    state = run.state()
    data = run_data(RunEntry(run.name, run.path, state.current_status, state))
    with RunReader.open(run.path) as store:
        data["evals"] = [{**eval_view(report), "by_difficulty": dict(report.by_difficulty)} for report in store.evals()]
        begun = [s for s in store.stages() if s.done]
        data["last_metrics"] = {s.name: finite_values(store.metrics_of(s.name, s.done)) for s in begun}
    return data | {"children": [child.name for child in forks_of(run)]}


def _group_data(graded: GradedGroup) -> dict[str, Any]:
    """A group, its completions best first."""
    completions = [
        {
            **completion_view(graded.scored.scored[index]),
            "reward": graded.scored.totals[index],
            "advantage": graded.advantage_of(index),
        }
        for index in graded.best_first
    ]
    return {**group_view(graded.group, completions), "has_signal": graded.has_signal}
