"""What is printed when a run ends: how far it came, one group to look at, where it lies, and what to type next."""

from __future__ import annotations

from functools import partial

from rich.console import Group, RenderableType
from rich.text import Text

from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.stages import SAMPLED_TYPES
from oncurve.recipe.validate import is_from_python
from oncurve.records import GradedGroup
from oncurve.runs.database.reader import RunReader, StageRow
from oncurve.runs.folder import RunFolder
from oncurve.terminal.evaluation import heldout_tables
from oncurve.terminal.group import GroupTable
from oncurve.terminal.text import duration, percent, score

LOOK_BACK = 20
"""Steps from the end in which a group worth showing is looked for."""
BESIDE = {
    "reward_model": {"heldout_pair_accuracy": "{} of held-out pairs right", "calibration_error": "calibration error {}"},
    "training_free": {
        "heldout_without": "held-out accuracy {} without its experiences",
        "heldout_with": "{} with them",
        "heldout_reward_without": "held-out reward {} without its experiences",
        "heldout_reward_with": "{} with them",
    },
}
"""What is worth telling of stages that leave the policy as it is."""


def render_summary(run: RunFolder, seconds: float) -> RenderableType:
    """What came of a run. ``seconds`` is the time that this process took."""
    with RunReader.open(run.path) as store:
        parts = heldout_tables(store.evals())
        beside = [Text(line) for line in map(partial(beside_policy, store), store.stages()) if line]
        parts += [*beside, Text()] if beside else []
        found = characteristic_group(store)
        if found is not None:
            stage, step, position, graded = found
            parts += [Text(f"group {position} of {stage} step {step}", "dim"), GroupTable(graded), Text()]
            look = f"oncurve show {run.path} --step {step} --group {position}"
        else:
            look = f"oncurve show {run.path}"
    parts += [
        Text.assemble("Done in ", (duration(seconds), "bold"), ". The run is ", (str(run.path), "bold"), "."),
        next_steps(run, look),
    ]
    return Group(*parts)


def beside_policy(store: RunReader, stage: StageRow) -> str | None:
    """How far a stage came that moves something else than the policy: the last that it measured on what was kept aside."""
    seen = {name: curve[-1][1] for name in BESIDE.get(stage.type, {}) if (curve := store.metric(name, stage.name))}
    shown = {name: score(value) if name.startswith("heldout_reward") else percent(value, 1) for name, value in seen.items()}
    said = ", ".join(BESIDE[stage.type][name].format(figure) for name, figure in shown.items())
    return f"{stage.name}: {said}" if said else None


def next_steps(run: RunFolder, look: str) -> Text:
    recipe = load_recipe(run.recipe)
    lines = [("look at what it wrote", look)]
    libraries = [run.path / "experience" / f"{s.label}.md" for s in recipe.stages if s.type == "training_free"]
    lines += [("read its experiences", str(file)) for file in libraries if file.is_file()]
    if any(s.updates_policy for s in recipe.stages):
        lines += [("ask it something", f"oncurve chat {run.path}")]
        lines += [] if is_from_python(recipe) else [("measure it again", f"oncurve eval {run.path}")]
    return Text("\n").join(Text.assemble((f"  {why:<23}", "dim"), (command, "cyan")) for why, command in lines)


def characteristic_group(store: RunReader) -> tuple[str, int, int, GradedGroup] | None:
    """(stage, step, position, group): one with signal from late in training, the likest half right, half wrong.

    A step is read whole, so only the last one that has such a group is; where none of the last steps has, none is shown.
    """
    for stage in reversed([s for s in store.stages() if s.type in SAMPLED_TYPES]):
        for step in range(stage.done, max(stage.done - LOOK_BACK, 0), -1):
            rows = [row for row in store.groups(stage.name, step) if row.has_signal]
            if rows:
                groups = [(row.position, store.group(stage.name, step, row.position).graded) for row in rows]
                position, graded = max(groups, key=lambda item: _tells(item[1]))
                return stage.name, step, position, graded
    return None


def _tells(graded: GradedGroup) -> tuple[float, int]:
    """How much a group shows: rewards on both sides of its middle, then how many different texts."""
    totals = [t for t in graded.scored.totals if t is not None]
    middle = (min(totals) + max(totals)) / 2 if totals else 0.0
    above = sum(t > middle for t in totals)
    texts = {s.completion.text for s in graded.scored.scored}
    return float(min(above, len(totals) - above)), len(texts)
