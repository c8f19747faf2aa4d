"""`oncurve replay`: does a recorded step again, from the checkpoint before it, and compares. The run is not changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oncurve import trust
from oncurve.errors import CheckpointError, RunError
from oncurve.recipe.schema.stages import Stage
from oncurve.recipe.validate import reject_python_only
from oncurve.records import GradedGroup, StepReport
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.files import Checkpoint
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.inputs import changed_inputs, folder_of_inputs
from oncurve.training.semantics import as_first_trained, check_semantics
from oncurve.training.start import build_tasks_and_rewards
from oncurve.training.trainer import Trainer, completed_steps, count_rollbacks, load_weights


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A group as recorded and as replayed. ``start`` is the checkpoint that was replayed from; None: the first weights."""

    stage: str
    step: int
    start: tuple[str, int] | None
    steps: int
    recorded: GradedGroup
    replayed: GradedGroup
    changed_inputs: tuple[str, ...] = ()
    """Reward functions and data files that have changed since the run began. Scores that were stored are not computed again."""

    @property
    def differences(self) -> list[str]:
        """What differs, one line each; none if every bit is the same."""
        if self.recorded.group.prompt.id != self.replayed.group.prompt.id:
            return [f"another prompt: {self.recorded.group.prompt.id} recorded, {self.replayed.group.prompt.id} replayed"]
        if len(self.recorded.group.completions) != len(self.replayed.group.completions):
            return ["another number of completions"]
        return [line for index in range(len(self.recorded.group.completions)) for line in self._completion_differences(index)]

    def _completion_differences(self, index: int) -> Iterator[str]:
        recorded, replayed = self.recorded.group.completions[index], self.replayed.group.completions[index]
        if not np.array_equal(recorded.token_ids, replayed.token_ids):
            shorter = min(len(recorded.token_ids), len(replayed.token_ids))
            different = np.flatnonzero(recorded.token_ids[:shorter] != replayed.token_ids[:shorter])
            yield f"completion {index}: other tokens from token {int(different[0]) if len(different) else shorter} on"
            return
        if not np.array_equal(recorded.logps, replayed.logps):
            yield f"completion {index}: log-probs differ by up to {float(np.abs(recorded.logps - replayed.logps).max()):.2g}"
        before, after = self.recorded.scored.scored[index], self.replayed.scored.scored[index]
        if (before.total, before.failure) != (after.total, after.failure):
            yield f"completion {index}: reward {before.total} recorded, {after.total} replayed"
        elif not np.array_equal(self.recorded.advantages[index], self.replayed.advantages[index]):
            yield f"completion {index}: another advantage"


def replay(run: RunFolder, stage: str | None, step: int, position: int) -> ReplayResult:
    """Repeats the steps from the last checkpoint before this step up to the step itself.

    The stored results of nondeterministic rewards and environments are used instead of new ones.
    """
    run = RunFolder(run.path.absolute())
    with folder_of_inputs(run):
        return _replay(run, stage, step, position)


def _replay(run: RunFolder, stage: str | None, step: int, position: int) -> ReplayResult:
    recipe = as_first_trained(run, trust.load_recipe_of(run))
    reject_python_only(recipe)
    check_semantics(run, recipe)
    trust.check(run)
    names = [s.label for s in recipe.stages]
    with RunReader.open(run.path) as store, tempfile.TemporaryDirectory(prefix="oncurve-replay-") as scratch:
        name = stage or _find_stage(store, run, step)
        recorded = store.group(name, step, position).graded
        trainer = Trainer(recipe, _copy_without_weights(run, Path(scratch)), *build_tasks_and_rewards(recipe))
        start = _checkpoint_before(run, names, names.index(name), step)
        if start is not None and trainer.policy is not None:
            load_weights(trainer.policy, start.tensors["model"])
        trainer.load_answers(store, start)
        reports = list(_replay_steps(trainer, store, start, name, step))
    origin = None if start is None else (start.stage, start.step)
    changed = tuple(changed_inputs(run, recipe))
    return ReplayResult(name, step, origin, len(reports), recorded, reports[-1].groups[position], changed)


HEAVY = shutil.ignore_patterns("checkpoints", "model", "run.db*", "run.lock", "bad")


def _copy_without_weights(run: RunFolder, scratch: Path) -> RunFolder:
    """A copy of what stages read from a run and write to it (reward models, kept samples). The run itself is not changed."""
    return RunFolder(Path(shutil.copytree(run.path, scratch / run.path.name, ignore=HEAVY)))


def _find_stage(store: RunReader, run: RunFolder, step: int) -> str:
    for stage in reversed(store.stages()):
        if store.groups(stage.name, step):
            return stage.name
    raise RunError(
        run.name,
        f"no groups at step {step}",
        because="no stage recorded groups at this step",
        fix="name a step that sampled, with --stage",
    )


def _checkpoint_before(run: RunFolder, names: list[str], position: int, step: int) -> Checkpoint | None:
    """The last valid checkpoint before a step; None if the replay must start from the first weights."""
    entries = [entry for entry in list_checkpoints(run.checkpoints) if entry.stage in names]
    earlier = [entry for entry in entries if (names.index(entry.stage), entry.step) < (position, step)]
    for entry in sorted(earlier, key=lambda e: (names.index(e.stage), e.step), reverse=True):
        try:
            return files.load(entry.path)
        except CheckpointError:
            continue
    parent = run.state().parent
    if parent is not None:
        raise RunError(
            run.name,
            f"no checkpoint before step {step}",
            because=f"it is a fork of {parent.run}, which recorded its first steps",
            fix=f"replay them there: oncurve replay {parent.run} --step {step}",
        )
    return None


def _replay_steps(trainer: Trainer, store: RunReader, start: Checkpoint | None, name: str, step: int) -> Iterator[StepReport]:
    done = {stage.name: stage.done for stage in store.stages()}
    stages: list[Stage] = list(trainer.recipe.stages)
    names = [s.label for s in stages]
    first = names.index(start.stage) if start is not None else 0
    for stage in stages[first : names.index(name) + 1]:
        completed = completed_steps(start, stage)
        loop = trainer.build_loop(stage, count_rollbacks(store, stage.label, completed), start)
        for n in range(completed + 1, (step if stage.label == name else done[stage.label]) + 1):
            trainer.reply_cache.load(store.replies(stage.label, n))
            yield loop.step(n)
