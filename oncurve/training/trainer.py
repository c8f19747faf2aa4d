"""Trains a run from its first step to its last: stages in order, each step recorded, checkpoints, resume.

The trainer knows stages only by the `StageLoop` protocol. Exactness rests on three rules. A step is a pure function of
(weights, optimiser, reference, seed, step number) and of replies from outside, which are stored. A checkpoint holds all of
these. On resume everything recorded after the checkpoint is deleted and done again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from oncurve.agents.episode_record import PREFIX as EPISODE_PREFIX
from oncurve.distributed.signals import STOPPING, graceful_shutdown
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import MAX_EARLIER, MAX_REMEMBERED, Engine, build_engine
from oncurve.errors import ChangedTextError, OncurveError, RecipeError, RunError, troubleshooting
from oncurve.models import lora
from oncurve.models.loading.load import ModelSummary, choose_device, load_policy, loading_message
from oncurve.models.parallel.dtensor import copy_from_full, is_dtensor
from oncurve.models.policy import Policy
from oncurve.recipe.defaults import seed_for_stage, task_for_stage
from oncurve.recipe.load import dump_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Stage
from oncurve.records import EvalReport, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.step_spans import Decode
from oncurve.rewards.reply_cache import ReplyCache, Write
from oncurve.runs.atomic_files import clear_partial_writes, write_folder_atomically
from oncurve.runs.bad_batches import save_bad_batch
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.files import Checkpoint
from oncurve.runs.checkpoints.listing import best_step, list_checkpoints
from oncurve.runs.database.reader import STARTED, RunReader
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder, Status
from oncurve.runs.step_notes import Note, collect_notes, note, watch_progress
from oncurve.tasks.base import Task
from oncurve.training.checkpoint_writer import (
    SHARD_FOLDER,
    CheckpointRequest,
    CheckpointState,
    CheckpointWriter,
    SavedCheckpoint,
    collect_checkpoint_state,
)
from oncurve.training.collapse_watch import CollapseWatch, learning_rate_warning
from oncurve.training.determinism import enable_determinism
from oncurve.training.evaluate import answer_sampling, evaluate
from oncurve.training.listeners import Listener, Listeners, Recorder
from oncurve.training.preflight import check_policy
from oncurve.training.sinks import build_sinks
from oncurve.training.stages.table import StageContext, StageLoop, build_loop

MAX_ROLLBACKS = 3
"""Roll-backs to one checkpoint before a run gives up: other samples did not help."""
ROLLBACK_SEED = 1_000_003
"""Added to the seed by each roll-back, so that other samples are drawn: the same ones would fail again."""


class TimeUp(OncurveError):
    """The process's time limit has passed: the step was finished and saved. Not a failure."""

    exit_code = 0

    def __init__(self, run: RunFolder, minutes: float) -> None:
        because = "that is its time limit; the step was finished and saved"
        fix = f"resume with: oncurve train --resume {run.shown}"
        super().__init__(run.name, f"stopped after {minutes:g} minutes", because=because, fix=fix)


class Interrupted(OncurveError):
    """The user stopped the run: the step was finished and saved."""

    def __init__(self, run: RunFolder, signal_number: int) -> None:
        fix = f"resume with: oncurve train --resume {run.shown}"
        super().__init__(run.name, "stopped by you", because="the step was finished and saved", fix=fix)
        self.exit_code = 128 + signal_number


class RollBack(Exception):
    """Too many bad updates in a row: the stage returns to its last checkpoint and draws other samples."""


TaskOf = Callable[[Stage], Task]
RewardsOf = Callable[[Stage], RewardMix]


class Trainer:
    """Runs a recipe in a folder. ``task_of`` and ``rewards_of`` return each stage's task and rewards."""

    restarts_changed_steps = True
    """Whether a step starts again, once, after a ChangedTextError."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, task_of: TaskOf, rewards_of: RewardsOf, listeners: Sequence[Listener] = (),
        policy: Policy | None = None, minutes: float | None = None, world: World = SINGLE_PROCESS,
    ) -> None:  # fmt: skip
        self.recipe, self.run, self.task_of, self.rewards_of, self.world = recipe, run, task_of, rewards_of, world
        self.sinks = build_sinks(recipe) if world.is_rank_zero else []
        self.listeners, self.minutes, self.started = (*listeners, *self.sinks), minutes, time.monotonic()
        is_ready = policy is not None and world.size == 1  # a new run loads and checks its policy before it has a folder
        self.policy = policy if is_ready else load_policy_for(recipe, task_of, self.listeners, policy, world)
        set_threads(recipe, world)
        self.reply_cache = ReplyCache()
        self.engine = None if self.policy is None else with_agents(build_engine(self.policy, recipe), recipe)
        if self.engine is not None:
            self.engine.replies = self.reply_cache
        for stage in recipe.stages:
            rewards_of(stage).bind(self._decode, run.path)
            rewards_of(stage).use_cache(self.reply_cache)
        self.determinism = None if self.policy is None else enable_determinism(recipe.deterministic, self.policy)
        self.stop_signal: int | None = None

    def _decode(self) -> Decode:
        """The policy's decode function, for rewards that read tokens."""
        if self.policy is None:
            raise RecipeError(
                "rewards", "one that rewards single steps", because="it reads tokens, and an endpoint returns texts",
                fix="reward complete completions: answer, math, code, judge …",
            )  # fmt: skip
        return self.policy.decode

    def train(self, *, writes_recipe: bool = False) -> None:
        """Runs all stages, or those that follow the last checkpoint. At the end ``model/`` is written and the run is marked as
        finished. ``writes_recipe``: the recipe has changed, and is written once the run is locked."""
        with RunWriter.open(self.run.path) as store:
            if writes_recipe:
                self.run.write_recipe(dump_recipe(self.recipe))
            self.store = store
            self.notify = Listeners([Recorder(store), *self.listeners])
            for sink in self.sinks:
                sink.notify = self.notify
            self.checkpoint_writer, self.collapse_watch = CheckpointWriter(self.run.checkpoints), CollapseWatch()
            store.record_event("run", STARTED)
            self.run.set_status("running")
            tokenizer = self.run.tokenizer
            if self.policy is not None and not tokenizer.exists():  # so that a running run's tokens can be shown
                write_folder_atomically(tokenizer, self.policy.tokenizer.save_pretrained)
            status: Status = "failed"
            gc.freeze()  # what is loaded by now stays, and the garbage collector need not scan it again
            try:
                with graceful_shutdown(lambda: self.stop_signal is not None, self._request_stop):
                    start = self._last_checkpoint()
                    clear_partial_writes(self.run.path)
                    self._rewind(store, start)
                    self.load_answers(store, start)
                    self._run_stages(start)
                    self._report_saved(self.checkpoint_writer.wait())
                    self.world.send_command("model")
                    self.save_model()
                status = "finished"
            except (Interrupted, TimeUp, KeyboardInterrupt):
                status = "interrupted"
                raise
            except Exception as error:
                with contextlib.suppress(Exception):  # if the disk is full, say, the error itself is what the user must see
                    store.record_event("failed", str(error) or type(error).__name__)
                raise
            finally:
                gc.unfreeze()
                if self.engine is not None:
                    self.engine.close()
                self.checkpoint_writer.close()
                self.run.set_status(status)
                self.notify.on_run_end(status)

    def load_answers(self, store: RunReader, start: Checkpoint | None) -> None:
        """Replaces the engine's answers with those that were recorded up to a checkpoint. The engine looks for drafts in them,
        and which group is complete first may depend on the accepted drafts (``carry_over``)."""
        if self.engine is not None and start is not None and self.recipe.engine.draft != "off":
            self.engine.answers.clear()
            self.engine.answers.update(store.last_answers(MAX_EARLIER, MAX_REMEMBERED, start.stage, start.step))

    def _run_stages(self, start: Checkpoint | None) -> None:
        resumed_from = (start.stage, start.step) if start else None
        parameters = 0 if self.policy is None else sum(p.numel() for p in self.policy.model.parameters())
        self.notify.on_run_start(self.recipe, self.run.path, parameters, resumed_from)
        for line in () if self.engine is None else self.engine.log_lines:
            self.notify.on_event("engine", line)
        if self.policy is not None and self.recipe.model.source != "tiny":
            self.notify.on_event("model", f"{self.recipe.model.source}: {ModelSummary.of(self.policy)}")
        for line in () if self.policy is None else self.policy.warnings:
            self.notify.on_event("warning", line)
        if self.determinism is not None:
            self.notify.on_event("deterministic", self.determinism)
        names = [s.label for s in self.recipe.stages]
        first = names.index(start.stage) if start else 0
        if start and self.policy is not None:
            load_weights(self.policy, start.tensors["model"])
        for position, stage in enumerate(self.recipe.stages):
            if position >= first:
                self._run_stage(position, stage, start if start and position == first else None)

    def _run_stage(self, position: int, stage: Stage, start: Checkpoint | None) -> None:
        while True:
            try:
                return self._run_steps(position, stage, start)
            except RollBack:
                start = self._roll_back(stage)

    def _run_steps(self, position: int, stage: Stage, start: Checkpoint | None) -> None:
        """Runs a stage from its beginning, or from one of its checkpoints."""
        done = completed_steps(start, stage)
        rollbacks = count_rollbacks(self.store, stage.label, done)
        checkpoint = str(start.path) if start else None
        self.world_of(stage).send_command("stage", position=position, rollbacks=rollbacks, start=checkpoint)
        loop = self.build_loop(stage, rollbacks, start)
        self.notify.on_stage_start(stage.label, stage.type, position, stage.steps, done)
        warning = learning_rate_warning(stage)
        if warning is not None:
            self.notify.on_event("warning", warning, stage.label)
        for line in getattr(self.task_of(stage), "log_lines", ()):
            self.notify.on_event("task", line, stage.label)
        for line in self.rewards_of(stage).log_lines:
            self.notify.on_event("rewards", line, stage.label)
        if done == 0 and self.rewards_of(stage).accuracy_reward is None:
            self._evaluate(stage, 0)  # a mean reward means little by itself: it is compared with that of the start
        last = done
        for n in range(done + 1, stage.steps + 1):
            if loop.is_over or self._is_out_of_patience(stage) or self.notify.wants_stop:
                break
            self._step_and_record(stage, loop, n)
            last = n
        if last > done and self._is_stopping:
            self._save(stage, loop, last)
            self._stop_if_requested()  # an evaluation may take long: it is made when the run resumes
        if not any(report.step == last for report in self.store.evals(stage.label)):
            self._evaluate(stage, last)
        if last > done:
            self._save(stage, loop, last)
        if not stage.runs_on_all_ranks and self.policy is not None:
            self.world.send_command("weights")
            self.world.broadcast_(list(self.policy.trainable.values()))
        self.notify.on_stage_end(stage.label)
        if last > done:  # a stage that was complete before takes no time: a run in slices must get past it
            self._stop_if_requested()

    def _is_out_of_patience(self, stage: Stage) -> bool:
        """Whether the last `patience` evaluations were not better than an earlier one. Reads the recorded evaluations: a
        resumed run stops at the same step."""
        if stage.heldout_patience is None:
            return False
        results = [
            r for e in self.store.evals(stage.label) if (r := e.reward if e.accuracy is None else e.accuracy) is not None
        ]
        return bool(results) and len(results) - 1 - results.index(max(results)) >= stage.heldout_patience

    def world_of(self, stage: Stage) -> World:
        """The ranks that run a stage."""
        return self.world if stage.runs_on_all_ranks else SINGLE_PROCESS

    def seed_of(self, stage: Stage, rollbacks: int) -> int:
        """The seed of a stage's samples. Each roll-back changes it, so that other samples are drawn."""
        return seed_for_stage(self.recipe, stage) + rollbacks * ROLLBACK_SEED

    def build_loop(self, stage: Stage, rollbacks: int, start: Checkpoint | None) -> StageLoop:
        """A stage's loop, ready for its first step or for the one after the checkpoint ``start``, if it is of this stage."""
        recipe = self.recipe.model_copy(update={"seed": self.seed_of(stage, rollbacks)})
        loop = build_loop(
            stage,
            StageContext(recipe, self.task_of(stage), self.engine, self.rewards_of(stage), self.run.path, self.world_of(stage)),
        )
        if start is not None and start.stage == stage.label:
            loop.load_state(start.tensors)
        return loop

    def _step_and_record(self, stage: Stage, loop: StageLoop, n: int) -> None:
        known_replies = self.store.replies(stage.label, n)
        self.world_of(stage).send_command("step", n=n, replies=known_replies)
        try:
            with collect_notes() as notes, watch_progress(partial(self.notify.on_measuring, stage.label, n)):
                write = partial(self.store.record_replies, stage.label, n, "train")
                report, new_replies = self.run_step(stage, loop, n, known_replies, write)
        except OncurveError:
            all_failed = self.world_of(stage).all_failed(f"{stage.label}/{n}")
            if n > 1 and all_failed and not notes.has_update:  # half a step can't be resumed
                self._save(stage, loop, n - 1)
                self._report_saved(self.checkpoint_writer.wait())
            raise
        self.store.record_replies(stage.label, n, "train", new_replies)
        self.notify.on_step(report)
        self._report_saved(self.checkpoint_writer.completed())
        self._handle_notes(stage, report, notes)
        is_last = n == stage.steps
        if stage.eval_every and n % stage.eval_every == 0 and not is_last:
            self._evaluate(stage, n)
        if stage.save_every and n % stage.save_every == 0 and not is_last:
            self._save(stage, loop, n)
        if self._is_stopping and not is_last:
            self._save(stage, loop, n)
            self._stop_if_requested()

    def run_step(
        self, stage: Stage, loop: StageLoop, n: int, replies: Mapping[str, str], write: Write | None = None
    ) -> tuple[StepReport, dict[str, str]]:
        """Collective: (the step's report, the replies from outside that are new). ``replies`` were stored by an earlier try;
        ``write`` stores some of the new ones at once.

        If an environment begins with another text when the step extends its groups, the recorded episodes belong to other
        prompts: they are dropped, and the step starts again, once."""
        self._load_replies(stage, replies, write)
        self.world_of(stage).set_step(stage.label, n)
        with _restored_directory():
            try:
                report = loop.step(n)
            except ChangedTextError:
                if not self.restarts_changed_steps:
                    raise
                dropped = self.reply_cache.drop_episodes()
                note("episodes", f"{dropped} finished episodes start again: their environment now begins with another text")
                report = loop.step(n)
        return report, self.world_of(stage).all_gather_dict(self.reply_cache.new_replies)

    def _load_replies(self, stage: Stage, replies: Mapping[str, str], write: Write | None) -> None:
        """Loads recorded replies. Recorded episodes are left out if a reward reads the environments themselves: such a reward
        needs episodes that have run in this process."""
        if self.rewards_of(stage).reads_environments:
            replies = {key: reply for key, reply in replies.items() if not key.startswith(EPISODE_PREFIX)}
        self.reply_cache.load(replies, write)

    def _handle_notes(self, stage: Stage, report: StepReport, notes: Sequence[Note]) -> None:
        """Logs a step's notes, saves a bad batch, warns of a collapse, and rolls back after too many bad steps in a row."""
        for item in notes:
            self.notify.on_event(item.kind, f"{stage.label} {report.step}: {item.message}", stage.label, report.step)
        for warning in self.collapse_watch.check(report):
            self.notify.on_event("warning", warning, stage.label, report.step)
        bad = [item.message for item in notes if item.kind == "bad"]
        if bad:
            save_bad_batch(self.run.path, report, bad)
            patience = stage.optimiser.guard.rollback_after
            skipped = dict(self.store.metric("skipped_updates", stage.label)) if patience else {}
            if patience and all(skipped.get(report.step - i, 0.0) > 0 for i in range(patience)):
                raise RollBack

    def _roll_back(self, stage: Stage) -> Checkpoint:
        """Loads the last checkpoint and deletes the steps after it. The event is recorded first, so a kill changes nothing."""
        self._report_saved(self.checkpoint_writer.wait())
        start = self._last_checkpoint()
        to = completed_steps(start, stage)
        earlier = [e for e in self.store.events("rollback") if e.stage == stage.label and e.data["to"] == to]
        if start is None or len(earlier) >= MAX_ROLLBACKS:
            because = "there is no checkpoint to return to" if start is None else "other samples did not help"
            after = "" if start is None else f" after {len(earlier)} roll-backs to step {to}"
            raise RunError(
                self.run.name, f"stage '{stage.label}' keeps producing bad updates{after}", because=because,
                fix=f"oncurve show {self.run.shown} --bad; lower optimiser.learning_rate, fix the reward, or set save_every; "
                + troubleshooting("NaN and skipped updates"),
            )  # fmt: skip
        count = stage.optimiser.guard.rollback_after
        message = f"{stage.label}: back to {start.path.name} after {count} bad {'step' if count == 1 else 'steps in a row'}"
        data = {"to": to, "number": count_rollbacks(self.store, stage.label, to) + 1}
        self.store.record_event("rollback", message, stage=stage.label, step=to, data=data)
        for listener in self.listeners:
            listener.on_event("rollback", message, stage.label, to)
        self.store.forget_after(start.stage, start.step)
        if self.policy is not None:
            load_weights(self.policy, start.tensors["model"])
        self.load_answers(self.store, start)
        return start

    def _stop_if_requested(self) -> None:
        if self.stop_signal is not None:
            self._report_saved(self.checkpoint_writer.wait())
            raise Interrupted(self.run, self.stop_signal)
        if self.minutes is not None and self._time_is_up:
            self._report_saved(self.checkpoint_writer.wait())
            raise TimeUp(self.run, self.minutes)

    @property
    def _is_stopping(self) -> bool:
        return self.stop_signal is not None or self._time_is_up

    @property
    def _time_is_up(self) -> bool:
        return self.minutes is not None and time.monotonic() - self.started > 60 * self.minutes

    def _evaluate(self, stage: Stage, step: int) -> None:
        if not self.task_of(stage).heldout or not stage.updates_policy or not self.rewards_of(stage).rewards:
            return
        known_replies = self.store.replies(stage.label, step, "eval")
        self.world_of(stage).send_command("evaluate", step=step, replies=known_replies)
        with watch_progress(partial(self.notify.on_measuring, stage.label, step)):
            write = partial(self.store.record_replies, stage.label, step, "eval")
            report, new_replies = self.run_evaluation(stage, step, known_replies, write)
        self.store.record_replies(stage.label, step, "eval", new_replies)
        self.notify.on_eval(report)

    def run_evaluation(
        self, stage: Stage, step: int, replies: Mapping[str, str], write: Write | None = None
    ) -> tuple[EvalReport, dict[str, str]]:
        """Collective: measures the policy on the held-out prompts of a stage's task."""
        self._load_replies(stage, replies, write)
        prompts, world = self.task_of(stage).heldout, self.world_of(stage)
        world.set_phase("measure")
        assert self.engine is not None, "only stages that update the policy are evaluated"
        with _restored_directory():
            report = evaluate(
                self.engine, self.rewards_of(stage), prompts, world=world, samples=self.recipe.evaluation.samples,
                sampling=answer_sampling(self.recipe, stage, self.engine.policy, prompts),
                seed=self.recipe.seed, stage=stage.label, step=step,
            )  # fmt: skip
        return report, world.all_gather_dict(self.reply_cache.new_replies)

    def _save(self, stage: Stage, loop: StageLoop, step: int) -> None:
        self._report_saved(self.checkpoint_writer.wait())
        self.world_of(stage).send_command("state")
        state = self.checkpoint_state(stage, loop)
        self.store.flush()  # the steps of a checkpoint must be on disk before it
        steps = self._saved_steps(stage) | {step}
        best = best_step(self.store, stage.label, stage.keep_best, steps)
        recent = set(sorted(steps)[-stage.keep_checkpoints :])
        protect = set() if best is None else {best} - recent
        documents = {"state": {"stage": stage.label, "step": step}, **state.documents}
        request = CheckpointRequest(stage.label, step, documents, stage.keep_checkpoints, protect, state.shards)
        self._report_saved(self.checkpoint_writer.save(request, state.tensors))

    def checkpoint_state(self, stage: Stage, loop: StageLoop) -> CheckpointState:
        """Collective: everything that a checkpoint must hold. Each rank writes its shards of it."""
        world = self.world_of(stage)
        world.set_phase("save")
        model = {} if self.policy is None else {"model": trained_weights(self.policy)}
        return collect_checkpoint_state(world, self.run.path / SHARD_FOLDER, {**model, **loop.state()})

    def _saved_steps(self, stage: Stage) -> set[int]:
        return {entry.step for entry in list_checkpoints(self.run.checkpoints) if entry.stage == stage.label}

    def _report_saved(self, saved: Sequence[SavedCheckpoint]) -> None:
        for checkpoint in saved:
            self.notify.on_checkpoint(checkpoint.stage, checkpoint.step, checkpoint.path)

    def _last_checkpoint(self) -> Checkpoint | None:
        def report_damage(path: Path, reason: str) -> None:
            self.notify.on_event("damaged", f"{path.name} is damaged ({reason}); resuming from the one before")

        files.remove_leftovers(self.run.checkpoints)
        return files.newest_valid(self.run.checkpoints, report_damage)

    def _rewind(self, store: RunWriter, start: Checkpoint | None) -> None:
        """Deletes what was recorded after the checkpoint."""
        parent = self.run.state().parent
        if parent is not None and (start is None or start.stage not in {stage.name for stage in store.stages()}):
            raise RunError(
                self.run.name, "an incomplete fork",
                because=f"the files copied from {parent.run} are missing or damaged, so it would train from the start",
                fix=f"delete it and fork again: oncurve fork {parent.run} --stage {parent.stage} --step {parent.step}",
            )  # fmt: skip
        if start is None:
            store.forget_after(self.recipe.stages[0].label, 0)
            return
        if start.stage not in [s.label for s in self.recipe.stages]:
            raise RunError(
                self.run.name, f"its last checkpoint is of stage '{start.stage}'", because="the recipe has no such stage",
                fix="resume with the run's own recipe",
            )  # fmt: skip
        store.forget_after(start.stage, start.step)

    def save_model(self) -> None:
        """Collective: rank 0 writes the model; sharded weights are gathered for it."""
        policy = self.policy
        if policy is None:
            return
        weights = policy.full_state_dict(self.world.is_rank_zero)
        if not self.world.is_rank_zero:
            return
        write_folder_atomically(self.run.model, lambda folder: policy.save(folder, weights))
        if lora.is_attached(policy.model):
            write_folder_atomically(self.run.path / "adapter", lambda folder: lora.save(policy.model, folder))

    def _request_stop(self, number: int) -> None:
        self.stop_signal = number
        for listener in self.listeners:  # not the recorder: the signal may interrupt its transaction
            listener.on_event("signal", STOPPING)


@contextlib.contextmanager
def _restored_directory() -> Iterator[None]:
    """A reward that calls os.chdir does not change what the recipe's relative paths mean to later stages."""
    before = os.open(".", os.O_RDONLY)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def completed_steps(start: Checkpoint | None, stage: Stage) -> int:
    """How many steps of a stage a checkpoint includes: 0 without one, and if it is of another stage."""
    return start.step if start is not None and start.stage == stage.label else 0


def load_policy_for(
    recipe: Recipe,
    task_of: TaskOf,
    listeners: Sequence[Listener] = (),
    policy: Policy | None = None,
    world: World = SINGLE_PROCESS,
) -> Policy | None:
    """The given policy or the recipe's, checked against the prompts of all stages; None if no stage uses one."""
    if not recipe.uses_policy:
        return None
    set_threads(recipe, world)
    if policy is None and recipe.model.source != "tiny":
        for listener in listeners:
            listener.on_event("loading", loading_message(recipe.model))
    # A policy that will be sharded may be too large for any GPU, and is loaded on the CPU.
    model = recipe.model.model_copy(update={"device": "cpu"}) if recipe.scale.shard == "full" else recipe.model
    alphabet = task_of(recipe.stages[0]).alphabet
    sharded = shard_policy(policy or load_policy(model, alphabet=alphabet, seed=recipe.seed), recipe, world)
    check_policy(sharded, recipe, task_of)
    return sharded


def shard_policy(policy: Policy, recipe: Recipe, world: World) -> Policy:
    """The policy as the ranks hold it: with `shard = "full"`, each rank has a shard of every weight."""
    if world.shard != "full":
        return policy
    if lora.is_attached(policy.model):
        raise RecipeError(
            "scale.shard",
            "full",
            because="an adapter is small: its base is frozen, and shards of it would be gathered for every pass",
            fix='use scale.shard = "optimiser"' + (" and scale.tensor = 1" if world.tp_size > 1 else ""),
        )
    from oncurve.models.parallel.fsdp import ShardedPolicy  # torch's FSDP2 is slow to import

    device, scale = choose_device(recipe.model.device), recipe.scale
    return ShardedPolicy(policy, device, world.collective, offload=scale.offload, gather=scale.gather, tensor=world.tp_size)


def with_agents(engine: Engine, recipe: Recipe) -> Engine:
    """The engine, which also runs agents if a stage's task has them. The caller closes it."""
    if not any(task_for_stage(recipe, stage).type == "agent" for stage in recipe.stages):
        return engine
    from oncurve.agent_programs.agent_engine import AgentEngine  # its endpoint needs an optional package

    return AgentEngine(engine)


def set_threads(recipe: Recipe, world: World) -> None:
    torch.set_num_threads(max(1, (recipe.threads or os.cpu_count() or 1) // world.local_size))


def count_rollbacks(store: RunReader, stage: str, step: int) -> int:
    """The number of roll-backs to ``step`` or an earlier one: it changes the seed of the steps after it. A resume keeps
    roll-back events, so a resumed run counts the same."""
    rollbacks = [e for e in store.events("rollback") if e.stage == stage and e.data["to"] <= step]
    return max((int(e.data["number"]) for e in rollbacks), default=0)


def trained_weights(policy: Policy) -> dict[str, Tensor]:
    """The policy's trained weights by name; with LoRA only the adapter. Tied weights appear under each of their names, or, if
    they are sharded, under the first."""
    is_sharded = is_dtensor(next(policy.model.parameters()))
    return {name: p.detach() for name, p in policy.model.named_parameters(remove_duplicate=is_sharded) if p.requires_grad}


def load_weights(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Copies weights into the tensors that sampler and learner share."""
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            copy_from_full(p, tensors[name])
