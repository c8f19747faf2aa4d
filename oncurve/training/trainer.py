"""A run from its first weight to its last: stages in order, each step recorded, checkpoints, resume.

The trainer knows stages only as things that can step and be saved. Exactness rests on three rules: a step is a pure function
of (weights, optimiser, reference, seed, step number) and of what came from outside, which is kept; a checkpoint holds all of
these; on resume everything recorded after it is forgotten and done again.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from oncurve.distributed.signals import STOPPING, graceful_shutdown
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import build_engine
from oncurve.errors import OncurveError, RecipeError, RunError
from oncurve.models import lora
from oncurve.models.loading.load import ModelSummary, load_policy, loading_message
from oncurve.models.parallel.dtensor import copy_from_full, is_dtensor
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import RolloutStage, Stage
from oncurve.records import EvalReport, Prompt, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.step_spans import Decode
from oncurve.rewards.reply_cache import ReplyCache
from oncurve.runs.atomic_files import clear_partial_writes, write_folder_atomically
from oncurve.runs.bad_batches import save_bad_batch
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.files import Checkpoint
from oncurve.runs.checkpoints.listing import best_step, list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder, Status
from oncurve.runs.step_notes import Note, collect_notes, watch_progress
from oncurve.tasks.base import Task
from oncurve.training.checkpoint_writer import CheckpointRequest, CheckpointWriter, SavedCheckpoint
from oncurve.training.collapse_watch import CollapseWatch
from oncurve.training.determinism import enable_determinism
from oncurve.training.evaluate import evaluate, usual_limit
from oncurve.training.learner.oom_retry import OutOfMemory
from oncurve.training.learner.sharded_optimiser import (
    PIECES,
    CheckpointState,
    checkpoint_state,
    load_policy_for_world,
    shard_policy,
)
from oncurve.training.listeners import Listener, Listeners, Recorder
from oncurve.training.preflight import check_prompts
from oncurve.training.sinks import sinks_of
from oncurve.training.stages.table import StageContext, StageLoop, loop_for, runs_on_all_ranks

MOST_ROLLBACKS = 3
"""Roll-backs to one checkpoint before a run gives up: other samples did not help."""
ROLLBACK_SEED = 1_000_003
"""Added to the seed by each roll-back: the same samples would meet the same end."""


class TimeUp(OncurveError):
    """The time that this process was given has passed: the step was finished and saved. Not a failure."""

    exit_code = 0

    def __init__(self, run: RunFolder, minutes: float) -> None:
        because = "that is how long it was given; the step was finished and saved"
        go_on = f"go on with: oncurve train --resume {run.path}"
        super().__init__(run.name, f"stopped after {minutes:g} minutes", because=because, fix=go_on)


class Interrupted(OncurveError):
    """The user asked the run to stop: the step was finished and saved."""

    def __init__(self, run: RunFolder, signal_number: int) -> None:
        go_on = f"oncurve train --resume {run.path}"
        super().__init__(run.name, "stopped by you", because="the step was finished and saved", fix=f"go on with: {go_on}")
        self.exit_code = 128 + signal_number


class RollBack(Exception):
    """Too many updates in a row were bad: the stage goes on from its last checkpoint, on other samples."""


TaskOf = Callable[[Stage], Task]
RewardsOf = Callable[[Stage], RewardMix]


class Trainer:
    """Runs a recipe in a folder. ``task_of`` and ``rewards_of`` say what each stage asks and rewards."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, task_of: TaskOf, rewards_of: RewardsOf, listeners: Sequence[Listener] = (),
        policy: Policy | None = None, minutes: float | None = None, world: World = SINGLE_PROCESS,
    ) -> None:  # fmt: skip
        self.recipe, self.run, self.task_of, self.rewards_of, self.world = recipe, run, task_of, rewards_of, world
        sinks = sinks_of(recipe) if world.is_rank_zero else ()
        self.listeners, self.minutes, self.began = (*listeners, *sinks), minutes, time.monotonic()
        known = policy is not None and world.size == 1  # whoever begins a run loads its policy before there is a folder
        self.policy = policy if known else load_policy_for(recipe, task_of, self.listeners, policy, world)
        use_threads(recipe, world)
        self.engine = None if self.policy is None else build_engine(self.policy, recipe)
        self.memory = ReplyCache()
        for stage in recipe.stages:
            rewards_of(stage).bind(self._decode, run.path)
            rewards_of(stage).use_cache(self.memory)
        self.remark = None if self.policy is None else enable_determinism(recipe.deterministic, self.policy)
        self.stop_signal: int | None = None

    def _decode(self) -> Decode:
        """For rewards that read tokens; an endpoint gives none."""
        if self.policy is None:
            raise RecipeError(
                "rewards", "one that rewards single steps", because="it reads tokens, and the stages have texts of an endpoint",
                fix="reward whole completions: answer, math, code, judge …",
            )  # fmt: skip
        return self.policy.decode

    def train(self, resume: bool = False) -> None:
        """All stages, or those that are left. Ends with ``model/`` written and the run marked finished."""
        with RunWriter.open(self.run.path) if resume else RunWriter.create(self.run.path) as store:
            self.store = store
            self.notify = Listeners([Recorder(store), *self.listeners])
            self.saver, self.watch = CheckpointWriter(self.run.checkpoints), CollapseWatch()
            self.run.set_status("running")
            words = self.run.tokenizer
            if self.policy is not None and not words.exists():  # so that a live run's tokens can be shown
                write_folder_atomically(words, self.policy.tokenizer.save_pretrained)
            status: Status = "failed"
            gc.freeze()  # what is loaded by now stays: the collector need not look through it again and again
            try:
                with graceful_shutdown(lambda: self.stop_signal is not None, self._stop):
                    start = self._last_checkpoint() if resume else None
                    if resume:
                        clear_partial_writes(self.run.path)
                        self._rewind(store, start)
                    self._stages(start)
                    self._note_saved(self.saver.wait())
                    self.world.send_command("model")
                    self.save_model()
                status = "finished"
            except (Interrupted, TimeUp, KeyboardInterrupt):
                status = "interrupted"
                raise
            finally:
                gc.unfreeze()
                if self.engine is not None:
                    self.engine.close()
                self.saver.close()
                self.run.set_status(status)
                self.notify.on_run_end(status)

    def _stages(self, start: Checkpoint | None) -> None:
        place = (start.stage, start.step) if start else None
        parameters = 0 if self.policy is None else sum(p.numel() for p in self.policy.model.parameters())
        self.notify.on_run_start(self.recipe, self.run.path, parameters, place)
        for remark in () if self.engine is None else self.engine.log_lines:
            self.notify.on_event("engine", remark)
        if self.policy is not None and self.recipe.model.source != "tiny":
            self.notify.on_event("model", f"{self.recipe.model.source}: {ModelSummary.of(self.policy)}")
        if self.remark is not None:
            self.notify.on_event("deterministic", self.remark)
        names = [s.label for s in self.recipe.stages]
        first = names.index(start.stage) if start else 0
        if start and self.policy is not None:
            load_weights(self.policy, start.tensors["model"])
        for position, stage in enumerate(self.recipe.stages):
            if position >= first:
                self._stage(position, stage, start if start and position == first else None)

    def _stage(self, position: int, stage: Stage, start: Checkpoint | None) -> None:
        while True:
            try:
                return self._steps(position, stage, start)
            except RollBack:
                start = self._roll_back(stage)

    def _steps(self, position: int, stage: Stage, start: Checkpoint | None) -> None:
        """The stage from its beginning, or from a checkpoint of its own."""
        done = completed_steps(start, stage)
        detour = rollbacks_of(self.store, stage.label, done)
        self.world_of(stage).send_command("stage", position=position, detour=detour, start=str(start.path) if start else None)
        loop = self.loop(stage, detour, start)
        self.notify.on_stage_start(stage.label, stage.type, position, stage.steps, done)
        for remark in self.rewards_of(stage).log_lines:
            self.notify.on_event("rewards", remark, stage.label)
        if done == 0 and self.rewards_of(stage).accuracy_reward is None:
            self._measure(stage, 0)  # a reward without a mark at which answers are right says something beside another alone
        last = done
        for n in range(done + 1, stage.steps + 1):
            if loop.out_of_time:
                break
            self._step_and_record(stage, loop, n)
            last = n
        if last > done and self._is_stopping:
            self._save(stage, loop, last)
            self._stop_if_asked()  # a measurement may take long: it is made when the run goes on
        if not any(report.step == last for report in self.store.evals(stage.label)):
            self._measure(stage, last)
        if last > done:
            self._save(stage, loop, last)
        if not runs_on_all_ranks(stage) and self.policy is not None:
            self.world.send_command("weights")
            self.world.broadcast_(list(self.policy.trainable.values()))
        self.notify.on_stage_end(stage.label)
        if last > done:  # a stage that was done before costs no time: a run in slices must get past it
            self._stop_if_asked()

    def world_of(self, stage: Stage) -> World:
        """Who takes part in a stage."""
        return self.world if runs_on_all_ranks(stage) else SINGLE_PROCESS

    def loop(self, stage: Stage, detour: int, start: Checkpoint | None) -> StageLoop:
        """A stage's loop, ready for its first step or for the one after its checkpoint ``start`` (another stage's is passed
        over); after ``detour`` roll-backs it draws other samples."""
        recipe = self.recipe.model_copy(update={"seed": self.recipe.seed + detour * ROLLBACK_SEED}) if detour else self.recipe
        world = self.world_of(stage)
        parts = StageContext(recipe, self.task_of(stage), self.engine, self.rewards_of(stage), self.run.path, world)
        made = loop_for(stage, parts)
        if start is not None and start.stage == stage.label:
            made.load_state(start.tensors)
        return made

    def _step_and_record(self, stage: Stage, loop: StageLoop, n: int) -> None:
        known = self.store.replies(stage.label, n)
        self.world_of(stage).send_command("step", n=n, replies=known)
        try:
            with collect_notes() as notes, watch_progress(partial(self.notify.on_measuring, stage.label, n)):
                report, fresh = self.run_step(stage, loop, n, known)
        except OncurveError as error:
            # Memory may run out between two updates of a step, and half a step is nothing to go on from.
            together = self.world_of(stage).all_failed(f"{stage.label}/{n}")
            if n > 1 and together and not isinstance(error, OutOfMemory):
                self._save(stage, loop, n - 1)
                self._note_saved(self.saver.wait())
            raise
        self.store.record_replies(stage.label, n, "train", fresh)
        self.notify.on_step(report)
        self._note_saved(self.saver.done())
        self._handle_notes(stage, report, notes)
        final = n == stage.steps
        if stage.eval_every and n % stage.eval_every == 0 and not final:
            self._measure(stage, n)
        if stage.save_every and n % stage.save_every == 0 and not final:
            self._save(stage, loop, n)
        if self._is_stopping and not final:
            self._save(stage, loop, n)
            self._stop_if_asked()

    def run_step(self, stage: Stage, loop: StageLoop, n: int, known: Mapping[str, str]) -> tuple[StepReport, dict[str, str]]:
        """A step as every rank that takes part does it, and what came from outside in any of them; ``known`` came before."""
        self.memory.load(known)
        self.world_of(stage).set_step(stage.label, n)
        report = loop.step(n)
        return report, self.world_of(stage).all_gather_dict(self.memory.new_replies)

    def _handle_notes(self, stage: Stage, report: StepReport, notes: Sequence[Note]) -> None:
        """Says what a step noted, keeps a bad batch, warns of a collapse, and goes back where too many were bad in a row."""
        for told in notes:
            self.notify.on_event(told.kind, f"{stage.label} {report.step}: {told.message}", stage.label, report.step)
        for warning in self.watch.check(report):
            self.notify.on_event("warning", warning, stage.label, report.step)
        bad = [told.message for told in notes if told.kind == "bad"]
        if bad:
            save_bad_batch(self.run.path, report, bad)
            patience = stage.optimiser.guard.rollback_after
            skipped = dict(self.store.metric("skipped_updates", stage.label)) if patience else {}
            if patience and all(skipped.get(report.step - i, 0.0) > 0 for i in range(patience)):
                raise RollBack

    def _roll_back(self, stage: Stage) -> Checkpoint:
        """The last checkpoint's weights, the steps after it forgotten. The event says so first: a kill here changes nothing."""
        self._note_saved(self.saver.wait())
        start = self._last_checkpoint()
        to = completed_steps(start, stage)
        been = [e for e in self.store.events("rollback") if e.stage == stage.label and e.data["to"] == to]
        if start is None or len(been) >= MOST_ROLLBACKS:
            found = "no checkpoint to go back to" if start is None else f"{len(been)} roll-backs to step {to} did not help"
            raise RunError(
                self.run.name, f"updates of stage '{stage.label}' stay bad", because=found,
                fix=f"oncurve show {self.run.path} --bad; lower optimiser.learning_rate, mend the reward, or set save_every",
            )  # fmt: skip
        count = stage.optimiser.guard.rollback_after
        message = f"{stage.label}: back to {start.path.name} after {count} bad {'step' if count == 1 else 'steps in a row'}"
        data = {"to": to, "number": rollbacks_of(self.store, stage.label, to) + 1}
        self.store.record_event("rollback", message, stage=stage.label, step=to, data=data)
        for one in self.listeners:
            one.on_event("rollback", message, stage.label, to)
        self.store.forget_after(start.stage, start.step)
        if self.policy is not None:
            load_weights(self.policy, start.tensors["model"])
        return start

    def _stop_if_asked(self) -> None:
        if self.stop_signal is not None:
            self._note_saved(self.saver.wait())
            raise Interrupted(self.run, self.stop_signal)
        if self.minutes is not None and self._time_is_up:
            self._note_saved(self.saver.wait())
            raise TimeUp(self.run, self.minutes)

    @property
    def _is_stopping(self) -> bool:
        return self.stop_signal is not None or self._time_is_up

    @property
    def _time_is_up(self) -> bool:
        return self.minutes is not None and time.monotonic() - self.began > 60 * self.minutes

    def _measure(self, stage: Stage, step: int) -> None:
        if not self.task_of(stage).heldout or not stage.updates_policy or not self.rewards_of(stage).rewards:
            return
        known = self.store.replies(stage.label, step, "eval")
        self.world_of(stage).send_command("measure", step=step, replies=known)
        with watch_progress(partial(self.notify.on_measuring, stage.label, step)):
            report, fresh = self.measure(stage, step, known)
        self.store.record_replies(stage.label, step, "eval", fresh)
        self.notify.on_eval(report)

    def measure(self, stage: Stage, step: int, known: Mapping[str, str]) -> tuple[EvalReport, dict[str, str]]:
        """A measurement as every rank that takes part makes it."""
        self.memory.load(known)
        prompts, world = self.task_of(stage).heldout, self.world_of(stage)
        world.set_phase("measure")
        assert self.engine is not None, "only stages that move the policy are measured here"
        report = evaluate(
            self.engine, self.rewards_of(stage), prompts, self.recipe.evaluation, world=world,
            max_new_tokens=self._answer_limit(stage, prompts), seed=self.recipe.seed, stage=stage.label, step=step,
        )  # fmt: skip
        return report, world.all_gather_dict(self.memory.new_replies)

    def _answer_limit(self, stage: Stage, prompts: Sequence[Prompt]) -> int:
        """Tokens that a held-out answer may have: the stage's, else the most of any, else a default that fits the model."""
        limits = [s.sampling.max_new_tokens for s in self.recipe.stages if isinstance(s, RolloutStage)]
        if isinstance(stage, RolloutStage):
            return stage.sampling.max_new_tokens
        assert self.policy is not None
        return max(limits) if limits else usual_limit(self.policy, prompts)

    def _save(self, stage: Stage, loop: StageLoop, step: int) -> None:
        self._note_saved(self.saver.wait())
        self.world_of(stage).send_command("state")
        checkpoint_state = self.checkpoint_state(stage, loop)
        self.store.flush()  # what a checkpoint follows must be on the disk before it
        steps = self._saved_steps(stage) | {step}
        best = best_step(self.store, stage.label, stage.keep_best, steps)
        recent = set(sorted(steps)[-stage.keep_checkpoints :])
        protect = set() if best is None else {best} - recent
        documents = {"state": {"stage": stage.label, "step": step}, **checkpoint_state.documents}
        wanted = CheckpointRequest(stage.label, step, documents, stage.keep_checkpoints, protect, checkpoint_state.pieces)
        self._note_saved(self.saver.save(wanted, checkpoint_state.tensors))

    def checkpoint_state(self, stage: Stage, loop: StageLoop) -> CheckpointState:
        """All that a checkpoint must hold; each rank that takes part has written its pieces of it."""
        world = self.world_of(stage)
        world.set_phase("save")
        own = {} if self.policy is None else {"model": weights(self.policy)}
        return checkpoint_state(world, self.run.path / PIECES, {**own, **loop.state()})

    def _saved_steps(self, stage: Stage) -> set[int]:
        return {place.step for place in list_checkpoints(self.run.checkpoints) if place.stage == stage.label}

    def _note_saved(self, saved: Sequence[SavedCheckpoint]) -> None:
        for one in saved:
            self.notify.on_checkpoint(one.stage, one.step, one.path)

    def _last_checkpoint(self) -> Checkpoint | None:
        def damaged(path: Path, why: str) -> None:
            self.notify.on_event("damaged", f"{path.name} is damaged ({why}); going on from the one before")

        files.remove_leftovers(self.run.checkpoints)
        return files.newest_valid(self.run.checkpoints, damaged)

    def _rewind(self, store: RunWriter, start: Checkpoint | None) -> None:
        if start is None:
            store.forget_after(self.recipe.stages[0].label, 0)
            return
        if start.stage not in [s.label for s in self.recipe.stages]:
            raise RunError(
                self.run.name, f"its last checkpoint is of a stage '{start.stage}'", because="the recipe has no such stage",
                fix="resume with the run's own recipe",
            )  # fmt: skip
        store.forget_after(start.stage, start.step)

    def save_model(self) -> None:
        """By the first rank; where weights are shared out, all gather them."""
        policy = self.policy
        if policy is None:
            return
        weights = policy.full_state_dict(self.world.is_rank_zero)
        if not self.world.is_rank_zero:
            return
        write_folder_atomically(self.run.model, lambda folder: policy.save(folder, weights))
        if lora.is_attached(policy.model):
            lora.save(policy.model, self.run.path / "adapter")

    def _stop(self, number: int) -> None:
        self.stop_signal = number
        for one in self.listeners:  # not the recorder: the signal may have come amid its transaction
            one.on_event("signal", STOPPING)


def completed_steps(start: Checkpoint | None, stage: Stage) -> int:
    """How many steps of a stage a checkpoint has behind it: none where there is none, or where it is another stage's."""
    return start.step if start is not None and start.stage == stage.label else 0


def load_policy_for(
    recipe: Recipe,
    task_of: TaskOf,
    listeners: Sequence[Listener] = (),
    policy: Policy | None = None,
    world: World = SINGLE_PROCESS,
) -> Policy | None:
    """The policy that was given, or the recipe's, which must be able to read what the stages will give it; None where no stage
    uses one."""
    if not recipe.uses_policy:
        return None
    use_threads(recipe, world)
    if policy is None and recipe.model.source != "tiny":
        for one in listeners:
            one.on_event("loading", loading_message(recipe.model))
    alphabet = task_of(recipe.stages[0]).alphabet
    found = policy or load_policy(load_policy_for_world(recipe), alphabet=alphabet, seed=recipe.seed)
    shared = shard_policy(found, recipe, world)
    check_prompts(shared, recipe, task_of)
    return shared


def use_threads(recipe: Recipe, world: World) -> None:
    torch.set_num_threads(max(1, (recipe.threads or os.cpu_count() or 1) // world.local_size))


def rollbacks_of(store: RunReader, stage: str, step: int) -> int:
    """How many roll-backs came before what follows ``step`` of a stage. Events are never forgotten, so a resumed run agrees."""
    found = [e for e in store.events("rollback") if e.stage == stage and e.data["to"] <= step]
    return max((int(e.data["number"]) for e in found), default=0)


def weights(policy: Policy) -> dict[str, Tensor]:
    """The policy's trained weights by name (under LoRA the adapter alone); tied ones under each of their names, or, where ranks
    share them out, under the first."""
    once = is_dtensor(next(policy.model.parameters()))
    return {name: p.detach() for name, p in policy.model.named_parameters(remove_duplicate=once) if p.requires_grad}


def load_weights(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Into the very tensors that sampler and learner share."""
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            copy_from_full(p, tensors[name])
