"""The summary that a finished run prints: held-out results, one example group, the run's folder, and next commands."""

from __future__ import annotations

from functools import partial

from rich.console import Group, RenderableType
from rich.text import Text

from oncurve.recipe.schema.stages import SAMPLED_TYPES
from oncurve.recipe.validate import is_from_python
from oncurve.records import GradedGroup
from oncurve.runs.database.reader import RunReader, StageRow
from oncurve.runs.folder import RunFolder
from oncurve.terminal.evaluation import heldout_tables
from oncurve.terminal.group import GroupTable
from oncurve.terminal.runs import best_line
from oncurve.terminal.text import duration, percent, score
from oncurve.trust import load_recipe_of

LAST_STEPS = 20
"""The example group is taken from this many last steps."""
FINAL_METRICS = {
    "reward_model": {"heldout_pair_accuracy": "held-out pair accuracy {}", "calibration_error": "calibration error {}"},
    "training_free": {
        "heldout_without": "held-out accuracy {} without the experiences",
        "heldout_with": "{} with them",
        "heldout_reward_without": "held-out reward {} without the experiences",
        "heldout_reward_with": "{} with them",
    },
}
"""Results of stages that do not change the policy."""


def render_summary(run: RunFolder, seconds: float) -> RenderableType:
    """The summary. ``seconds`` is the time that this process took."""
    with RunReader.open(run.path) as store:
        parts = heldout_tables(store.evals())
        others = [Text(line) for line in map(partial(final_metrics, store), store.stages()) if line]
        parts += [*others, Text()] if others else []
        remarks = [Text(line, "yellow") for stage in store.stages() for line in reward_remarks(store, stage, run)]
        parts += [*remarks, Text()] if remarks else []
        best = best_line(run)
        parts += [Text(best), Text()] if best is not None else []
        example = example_group(store)
        first = ("look at the run", f"oncurve show {run.shown}")
        if example is not None:
            stage, step, position, graded = example
            parts += [Text(f"group {position} of {stage} step {step}", "dim"), GroupTable(graded), Text()]
            first = ("look at this group", f"oncurve show {run.shown} --step {step} --group {position}")
    parts += [
        Text.assemble("Done in ", (duration(seconds), "bold"), ". The run is in ", (str(run.shown), "bold"), "."),
        next_steps(run, first),
    ]
    return Group(*parts)


def final_metrics(store: RunReader, stage: StageRow) -> str | None:
    """The last held-out results of a stage that does not change the policy; None for any other stage."""
    texts = []
    for name, text in FINAL_METRICS.get(stage.type, {}).items():
        curve = store.metric(name, stage.name)
        if curve:
            value = curve[-1][1]
            texts.append(text.format(score(value) if name.startswith("heldout_reward") else percent(value, 1)))
    return f"{stage.name}: {', '.join(texts)}" if texts else None


def reward_remarks(store: RunReader, stage: StageRow, run: RunFolder) -> list[str]:
    """What is wrong with the rewards of a stage that trained on its own samples: none of its groups had a signal, or rewards
    failed."""
    if stage.type not in SAMPLED_TYPES:
        return []
    remarks = []
    no_signal = [share for _, share in store.metric("no_signal_share", stage.name)]
    if no_signal and min(no_signal) >= 1:
        remarks.append("no group had a signal in any step, so the rewards did not change the policy")
    if any(share for _, share in store.metric("failure_share", stage.name)):
        failures, completions = store.count_failures(stage.name)
        remarks.append(f"{failures:,} of {completions:,} completions could not be rewarded")
    return [f"{stage.name}: {remark} (oncurve rewards audit {run.shown})" for remark in remarks]


def next_steps(run: RunFolder, first: tuple[str, str]) -> Text:
    """Commands to type next, each with what it does."""
    recipe = load_recipe_of(run)
    lines = [first]
    libraries = [run.path / "experience" / f"{s.label}.md" for s in recipe.stages if s.type == "training_free"]
    lines += [("read the experiences", str(file)) for file in libraries if file.is_file()]
    if any(s.updates_policy for s in recipe.stages):
        lines += [("chat with the model", f"oncurve chat {run.shown}")]
        lines += [] if is_from_python(recipe) else [("evaluate it again", f"oncurve eval {run.shown}")]
    return Text("\n").join(Text.assemble((f"  {purpose:<22}", "dim"), (command, "cyan")) for purpose, command in lines)


def example_group(store: RunReader) -> tuple[str, int, int, GradedGroup] | None:
    """(stage, step, position, group): the group closest to half right, half wrong in the last step that has groups with signal.

    None if none of the last steps has one. Only one step is read, because reading a step is expensive.
    """
    for stage in reversed([s for s in store.stages() if s.type in SAMPLED_TYPES]):
        for step in range(stage.done, max(stage.done - LAST_STEPS, 0), -1):
            rows = [row for row in store.groups(stage.name, step) if row.has_signal]
            if rows:
                groups = [(row.position, store.group(stage.name, step, row.position).graded) for row in rows]
                position, graded = max(groups, key=lambda item: _contrast(item[1]))
                return stage.name, step, position, graded
    return None


def _contrast(graded: GradedGroup) -> tuple[float, int]:
    """How instructive a group is. First, how evenly its completions are split by the midpoint of its rewards: the number of
    completions on the smaller side. Then the number of different texts."""
    totals = [t for t in graded.scored.totals if t is not None]
    middle = (min(totals) + max(totals)) / 2 if totals else 0.0
    above = sum(t > middle for t in totals)
    texts = {s.completion.text for s in graded.scored.scored}
    return float(min(above, len(totals) - above)), len(texts)
