"""A recorded step done again, from the checkpoint before it: the proof that a run is what it says it is. Nothing is written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oncurve import trust
from oncurve.errors import CheckpointError, RunError
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.stages import Stage
from oncurve.recipe.validate import reject_python_only
from oncurve.records import GradedGroup, StepReport
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.files import Checkpoint
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.start import build_tasks_and_rewards
from oncurve.training.trainer import Trainer, completed_steps, count_rollbacks, load_weights


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A group as it was recorded and as it comes out now. ``start`` is the checkpoint begun from; None: the first weights."""

    stage: str
    step: int
    start: tuple[str, int] | None
    steps: int
    was: GradedGroup
    now: GradedGroup

    @property
    def differences(self) -> list[str]:
        """What is not the same, in words; nothing where every bit is."""
        if self.was.group.prompt.id != self.now.group.prompt.id:
            return [f"another prompt: {self.was.group.prompt.id} then, {self.now.group.prompt.id} now"]
        if len(self.was.group.completions) != len(self.now.group.completions):
            return ["another number of completions"]
        return [line for place in range(len(self.was.group.completions)) for line in self._of_completion(place)]

    def _of_completion(self, place: int) -> Iterator[str]:
        was, now = self.was.group.completions[place], self.now.group.completions[place]
        if not np.array_equal(was.token_ids, now.token_ids):
            shorter = min(len(was.token_ids), len(now.token_ids))
            apart = np.flatnonzero(was.token_ids[:shorter] != now.token_ids[:shorter])
            yield f"completion {place}: other tokens from token {int(apart[0]) if len(apart) else shorter} on"
            return
        if not np.array_equal(was.logps, now.logps):
            yield f"completion {place}: log-probs up to {float(np.abs(was.logps - now.logps).max()):.2g} apart"
        before, after = self.was.scored.scored[place], self.now.scored.scored[place]
        if (before.total, before.failure) != (after.total, after.failure):
            yield f"completion {place}: reward {before.total} then, {after.total} now"
        elif not np.array_equal(self.was.advantages[place], self.now.advantages[place]):
            yield f"completion {place}: another advantage"


def replay(run: RunFolder, stage: str | None, step: int, position: int) -> ReplayResult:
    """Does the step again, and those between it and the last checkpoint before it, with the replies that were kept."""
    recipe = load_recipe(run.recipe)
    reject_python_only(recipe)
    trust.check(run)
    names = [s.label for s in recipe.stages]
    with RunReader.open(run.path) as store, tempfile.TemporaryDirectory(prefix="oncurve-replay-") as scratch:
        name = stage or _stage_with(store, run, step)
        was = store.group(name, step, position).graded
        trainer = Trainer(recipe, _without_weights(run, Path(scratch)), *build_tasks_and_rewards(recipe))
        start = _before(run, names, names.index(name), step)
        if start is not None and trainer.policy is not None:
            load_weights(trainer.policy, start.tensors["model"])
        reports = list(_again(trainer, store, start, name, step))
    place = None if start is None else (start.stage, start.step)
    return ReplayResult(name, step, place, len(reports), was, reports[-1].groups[position])


HEAVY = shutil.ignore_patterns("checkpoints", "model", "run.db*", "run.lock", "bad")


def _without_weights(run: RunFolder, scratch: Path) -> RunFolder:
    """A copy of what stages read of a run and write into it (reward models, kept samples): the run itself stays as it is."""
    return RunFolder(Path(shutil.copytree(run.path, scratch / run.path.name, ignore=HEAVY)))


def _stage_with(store: RunReader, run: RunFolder, step: int) -> str:
    for stage in reversed(store.stages()):
        if store.groups(stage.name, step):
            return stage.name
    raise RunError(
        run.name,
        f"no groups at step {step}",
        because="no stage recorded any there",
        fix="name a step that sampled, and --stage",
    )


def _before(run: RunFolder, names: list[str], position: int, step: int) -> Checkpoint | None:
    """The last whole checkpoint before a step; None where the run must be done again from its first weights."""
    places = [p for p in list_checkpoints(run.checkpoints) if p.stage in names]
    earlier = [p for p in places if (names.index(p.stage), p.step) < (position, step)]
    for place in sorted(earlier, key=lambda p: (names.index(p.stage), p.step), reverse=True):
        try:
            return files.load(place.path)
        except CheckpointError:
            continue
    parent = run.state().parent
    if parent is not None:
        raise RunError(
            run.name,
            f"no checkpoint before step {step}",
            because=f"it is a fork of {parent.run}, where its first steps were taken",
            fix=f"replay them there: oncurve replay {parent.run} --step {step}",
        )
    return None


def _again(trainer: Trainer, store: RunReader, start: Checkpoint | None, name: str, step: int) -> Iterator[StepReport]:
    done = {stage.name: stage.done for stage in store.stages()}
    stages: list[Stage] = list(trainer.recipe.stages)
    names = [s.label for s in stages]
    first = names.index(start.stage) if start is not None else 0
    for stage in stages[first : names.index(name) + 1]:
        begun = completed_steps(start, stage)
        loop = trainer.build_loop(stage, count_rollbacks(store, stage.label, begun), start)
        for n in range(begun + 1, (step if stage.label == name else done[stage.label]) + 1):
            trainer.reply_cache.load(store.replies(stage.label, n))
            yield loop.step(n)
