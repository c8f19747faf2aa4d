"""`oncurve show` and `oncurve status`, as tables and as JSON: a run at a glance, a step's groups, one group in full, skipped
updates, the time of each phase, and what each process is doing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.distributed.rank_status import RankStatus, read_statuses
from oncurve.errors import OncurveError
from oncurve.recipe.load import flatten
from oncurve.recipe.schema.stages import SAMPLED_TYPES
from oncurve.records import GradedGroup
from oncurve.runs.bad_batches import FOLDER, BadBatch, bad_batches
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.reader import SECONDS, RunReader, StageRow
from oncurve.runs.folder import Parent, RunEntry, RunFolder, Status, forks_of
from oncurve.runs.metrics import main_curves
from oncurve.runs.views import completion_view, eval_view, finite_values, group_view
from oncurve.terminal.evaluation import heldout_tables
from oncurve.terminal.group import Decode, GroupTable, render_group
from oncurve.terminal.live.progress import Heldout
from oncurve.terminal.runs import STYLES, ago, best_line, run_data
from oncurve.terminal.text import DASH, duration, number, percent, score, shorten, shorten_all, sparkline
from oncurve.trust import load_recipe_of

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
        (f"  started {ago(state.created)} · {run.shown}", "dim"),
    )
    with RunReader.open(run.path) as store:
        parts: list[RenderableType] = [head, *_failure(store, state.current_status), *_forks(run, state.parent)]
        stages, evals = store.stages(), store.evals()
        parts += [line for stage in stages for line in (Text(), _stage_line(stage), _curves(store, stage))]
        if evals:
            parts += [Text(), *heldout_tables(evals)[:-1]]
        best = best_line(run)
        if best is not None:
            parts += [Text(), Text(best)]
        if state.parent is not None:
            parts += _compare_with_parent(run, state.parent, store)
        parts += [*event_lines(store), *_advice(run, stages)]
    return Group(*parts)


def _failure(store: RunReader, status: Status) -> list[RenderableType]:
    """Why a failed run ended: the error that was recorded."""
    message = store.last_failure() if status == "failed" else None
    return [] if message is None else [Text(message, "red")]


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
    names = main_curves(stage.type, lambda name: bool(store.metric(name, stage.name)))
    if any(share > 0 for _, share in store.metric("failure_share", stage.name)):
        names.append("failure_share")
    for name in names:
        values = [value for _, value in store.metric(name, stage.name)]
        curve = Text(sparkline(values, 40), "cyan")
        table.add_row(Text(f"  {name}", "dim"), number(values[0]), curve, Text(number(values[-1]), "bold"))
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
    before = _values(folder)
    for key, value in parent.changes.items():
        table.add_row(key, str(before.get(key, DASH)), Text(str(value), "bold"))
    if not parent.changes:
        table.add_row("nothing", "", "")
    return table


def _values(run: RunFolder) -> dict[str, Any]:
    """Every dotted key of a run's recipe, stages and rewards by name; empty if the recipe can't be read."""
    try:
        return flatten(load_recipe_of(run))
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
    return figures | {name: number(metrics[name]) for name in main_curves(row.type, metrics.__contains__)}


def _advice(run: RunFolder, stages: list[StageRow]) -> list[RenderableType]:
    """The command to type next; none for a run without groups and without a checkpoint."""
    sampled = next((s for s in reversed(stages) if s.type in SAMPLED_TYPES and s.done), None)
    if sampled is not None:
        command = f"a step's groups: oncurve show {run.shown} --stage {sampled.name} --step {sampled.done}"
        return [Text(), Text(command, "dim")]
    return [Text(), Text(f"oncurve eval {run.shown}", "dim")] if list_checkpoints(run.checkpoints) else []


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
    table.add_column("prompt")  # the only column that may shrink: the others are no_wrap
    prompts = shorten_all([graded.group.prompt.shown for graded in report.groups], 40)
    for position, (graded, prompt) in enumerate(zip(report.groups, prompts, strict=True)):
        cut = Text(prompt, no_wrap=True, overflow="ellipsis")
        table.add_row(str(position), _reward_row(graded), _lengths(graded), cut)
    advice = Text(f"a group in full: oncurve show {run.shown} --stage {name} --step {step} --group 0", "dim")
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
    return Group(head, GroupTable(group.graded), Text(), render_group(group.graded, group.stats, _decoder(run, group.graded)))


def _decoder(run: RunFolder, graded: GradedGroup) -> Decode | None:
    """Decodes with the run's tokenizer, if an environment replied in the group and the tokenizer's file is there."""
    has_replies = any(not completion.loss_mask.all() for completion in graded.group.completions)
    files = [path for folder in (run.tokenizer, run.model) if (path := folder / "tokenizer.json").is_file()]
    if not has_replies or not files:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(files[0]))
    except Exception:  # tokenizers raises plain Exception for any invalid file
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


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


MAX_GROUPS = 3
"""Groups of a batch that are shown, those with the largest rewards; the file has all."""


def render_bad(run: RunFolder) -> RenderableType:
    batches = bad_batches(run.path)
    if not batches:
        return Text(f"{run.name}: no update was skipped", "green")
    count = "1 batch" if len(batches) == 1 else f"{len(batches)} batches"
    parts: list[RenderableType] = [Text(f"{run.name}  {count} whose update was skipped", "bold")]
    for batch in batches:
        parts += [Text(), *_batch(batch)]
    return Group(*parts, Text(), Text(f"complete batches: {run.path / FOLDER}", "dim"))


def _batch(batch: BadBatch) -> list[RenderableType]:
    figures = ", ".join(
        f"{name} {number(batch.metrics[name])}" for name in ("loss", "grad_norm", "reward", "kl") if name in batch.metrics
    )
    head = [Text.assemble((f"{batch.stage} step {batch.step}", "bold"), f"  {figures}")]
    why = [Text(f"  {line}", "red") for line in batch.why]
    if not batch.groups:
        return [*head, *why]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for name in ("reward", "tokens", "prompt", "completion"):
        table.add_column(name, justify="right" if name in ("reward", "tokens") else "left", no_wrap=True, overflow="ellipsis")
    for group in sorted(batch.groups, key=_largest_reward, reverse=True)[:MAX_GROUPS]:
        largest = max(group["completions"], key=lambda c: abs(c["reward"] or 0.0))
        cells = (
            score(largest["reward"]),
            str(len(largest["token_ids"])),
            shorten(group["prompt"], 24),
            shorten(largest["text"], 40),
        )
        table.add_row(*cells)
    return [*head, *why, table]


def _largest_reward(group: Mapping[str, Any]) -> float:
    return max((abs(c["reward"] or 0.0) for c in group["completions"]), default=0.0)


def bad_data(run: RunFolder) -> list[dict[str, Any]]:
    return [dataclasses.asdict(batch) for batch in bad_batches(run.path)]


FIGURES = {
    "tokens_per_s": ("completion tokens/s over the complete step", 1.0, ""),
    "sample_tokens_per_s": ("while sampling", 1.0, ""),
    "tokens_per_pass": ("tokens per completion and pass", 1.0, ""),
    "draft_accepted": ("of drafted tokens accepted", 100.0, " %"),
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


SILENT_S = 10.0
"""A process writes its status twice a second. A longer silence: it is stopped or swapped out, or its machine is down."""


def status_data(run: RunFolder) -> dict[str, Any]:
    state, last = run.state(), _last_step(run)
    processes = [{**dataclasses.asdict(process), "state": state_of(process)} for process in read_statuses(run.path)]
    return {
        "run": run.name,
        "status": state.current_status,
        "host": state.host,
        "pid": state.pid,
        "last": None if last is None else {"stage": last[0], "step": last[1]},
        "processes": processes,
    }


def render_status(run: RunFolder) -> RenderableType:
    state, last = run.state(), _last_step(run)
    is_running = state.current_status == "running"
    done = f", last recorded step: {last[0]} {last[1]}" if last else f", no step recorded{' yet' if is_running else ''}"
    head = Text(f"{run.name}: {state.current_status}{done}")
    why = _of_store(run, partial(_failure, status=state.current_status))
    processes = read_statuses(run.path)
    if not processes:
        which = "one process" if is_running else "no process is running; the last one was"
        return Group(head, *why, Text(f"{which} {state.pid} on {state.host}", "dim"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("process", "host", "pid", "step", "phase", "for", "state"):
        table.add_column(name, justify="right" if name in ("pid", "for") else "left")
    for process in processes:
        step = f"{process.stage} {process.step}" if process.stage else ""
        phase = f"{process.phase}, waiting in '{process.waiting}'" if process.waiting else process.phase
        seconds = f"{max(process.beat - process.since, 0.0):.0f} s"
        table.add_row(process.name, process.host, str(process.pid), step, phase, seconds, state_of(process))
    return Group(head, *why, Text(), table, *_of_store(run, event_lines))


def _of_store(run: RunFolder, lines_of: Callable[[RunReader], list[RenderableType]]) -> list[RenderableType]:
    """Lines about what a run's database has; none if it can't be read."""
    try:
        with RunReader.open(run.path) as store:
            return lines_of(store)
    except OncurveError:
        return []


def state_of(process: RankStatus) -> str:
    """`done`, `gone`, `silent for 33 s` or `alive`."""
    if process.phase == "done":
        return "done"
    if process.is_alive is False:
        return "gone"
    silent = time.time() - process.beat
    return f"silent for {silent:.0f} s" if silent > SILENT_S else "alive"


def _last_step(run: RunFolder) -> tuple[str, int] | None:
    """The last recorded step as (stage, step)."""
    try:
        with RunReader.open(run.path) as store:
            return next(((stage.name, stage.done) for stage in reversed(store.stages()) if stage.done), None)
    except OncurveError:
        return None
