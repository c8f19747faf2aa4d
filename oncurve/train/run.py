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

from oncurve.engines.choose import engine_for
from oncurve.errors import OncurveError, RecipeError, RunError
from oncurve.models import lora
from oncurve.models.load import Found, load_policy, loading
from oncurve.models.policy import Policy
from oncurve.models.shards import is_shard, put
from oncurve.recipe.sampled import Sampled
from oncurve.recipe.schema import Recipe, Stage
from oncurve.records import EvalReport, Prompt, StepReport
from oncurve.rewards.memory import Memory
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.steps import Decode
from oncurve.runs import checkpoints
from oncurve.runs.bad import keep_bad
from oncurve.runs.best import best_step
from oncurve.runs.checkpoints import Checkpoint
from oncurve.runs.disk import clear_cut_off, put_whole
from oncurve.runs.folder import RunFolder, Status
from oncurve.runs.notes import Note, collecting, watching
from oncurve.runs.reading import Reader
from oncurve.runs.saved import list_checkpoints
from oncurve.runs.store import Store
from oncurve.scale.signals import STOPPING, heeded
from oncurve.scale.world import ALONE, World
from oncurve.tasks.base import Task
from oncurve.train.determinism import settle
from oncurve.train.evaluate import evaluate, usual_limit
from oncurve.train.listeners import Listener, Listeners, Recorder
from oncurve.train.memory import OutOfMemory
from oncurve.train.readable import check_readable
from oncurve.train.saving import Saved, Saver, Wanted
from oncurve.train.sharded import PIECES, Held, held, loaded_for, shared_out
from oncurve.train.sinks import sinks_of
from oncurve.train.stages import Parts, StageLoop, is_shared, loop_for
from oncurve.train.watch import Watch

MOST_ROLLBACKS = 3
"""Roll-backs to one checkpoint before a run gives up: other samples did not help."""
DETOUR = 1_000_003
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


class GoBack(Exception):
    """Too many updates in a row were bad: the stage goes on from its last checkpoint, on other samples."""


TaskOf = Callable[[Stage], Task]
RewardsOf = Callable[[Stage], RewardMix]


class Trainer:
    """Runs a recipe in a folder. ``task_of`` and ``rewards_of`` say what each stage asks and rewards."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, task_of: TaskOf, rewards_of: RewardsOf, listeners: Sequence[Listener] = (),
        policy: Policy | None = None, minutes: float | None = None, world: World = ALONE,
    ) -> None:  # fmt: skip
        self.recipe, self.run, self.task_of, self.rewards_of, self.world = recipe, run, task_of, rewards_of, world
        sinks = sinks_of(recipe) if world.is_first else ()
        self.listeners, self.minutes, self.began = (*listeners, *sinks), minutes, time.monotonic()
        known = policy is not None and world.size == 1  # whoever begins a run loads its policy before there is a folder
        self.policy = policy if known else loaded(recipe, task_of, self.listeners, policy, world)
        use_threads(recipe, world)
        self.engine = None if self.policy is None else engine_for(self.policy, recipe)
        self.memory = Memory()
        for stage in recipe.stages:
            rewards_of(stage).attach(self._decode, run.path)
            rewards_of(stage).remember_in(self.memory)
        self.remark = None if self.policy is None else settle(recipe.deterministic, self.policy)
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
        with Store.open(self.run.path, read_only=False) if resume else Store.create(self.run.path) as store:
            self.store = store
            self.tell = Listeners([Recorder(store), *self.listeners])
            self.saver, self.watch = Saver(self.run.checkpoints), Watch()
            self.run.set_status("running")
            words = self.run.tokenizer
            if self.policy is not None and not words.exists():  # so that a live run's tokens can be shown
                put_whole(words, self.policy.tokenizer.save_pretrained)
            status: Status = "failed"
            gc.freeze()  # what is loaded by now stays: the collector need not look through it again and again
            try:
                with heeded(lambda: self.stop_signal is not None, self._stop):
                    start = self._last_checkpoint() if resume else None
                    if resume:
                        clear_cut_off(self.run.path)
                        self._rewind(store, start)
                    self._stages(start)
                    self._note_saved(self.saver.wait())
                    self.world.tell("model")
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
                self.tell.on_run_end(status)

    def _stages(self, start: Checkpoint | None) -> None:
        place = (start.stage, start.step) if start else None
        parameters = 0 if self.policy is None else sum(p.numel() for p in self.policy.model.parameters())
        self.tell.on_run_start(self.recipe, self.run.path, parameters, place)
        for remark in () if self.engine is None else self.engine.remarks:
            self.tell.on_event("engine", remark)
        if self.policy is not None and self.recipe.model.source != "tiny":
            self.tell.on_event("model", f"{self.recipe.model.source}: {Found.of(self.policy)}")
        if self.remark is not None:
            self.tell.on_event("deterministic", self.remark)
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
            except GoBack:
                start = self._go_back(stage)

    def _steps(self, position: int, stage: Stage, start: Checkpoint | None) -> None:
        """The stage from its beginning, or from a checkpoint of its own."""
        done = steps_behind(start, stage)
        detour = detours(self.store, stage.label, done)
        self.world_of(stage).tell("stage", position=position, detour=detour, start=str(start.path) if start else None)
        loop = self.loop(stage, detour, start)
        self.tell.on_stage_start(stage.label, stage.type, position, stage.steps, done)
        for remark in self.rewards_of(stage).remarks:
            self.tell.on_event("rewards", remark, stage.label)
        if done == 0 and self.rewards_of(stage).decider is None:
            self._measure(stage, 0)  # a reward without a mark at which answers are right says something beside another alone
        last = done
        for n in range(done + 1, stage.steps + 1):
            if loop.out_of_time:
                break
            self._one_step(stage, loop, n)
            last = n
        if last > done and self._is_stopping:
            self._save(stage, loop, last)
            self._stop_if_asked()  # a measurement may take long: it is made when the run goes on
        if not any(report.step == last for report in self.store.evals(stage.label)):
            self._measure(stage, last)
        if last > done:
            self._save(stage, loop, last)
        if not is_shared(stage) and self.policy is not None:
            self.world.tell("weights")
            self.world.spread(list(self.policy.trained.values()))
        self.tell.on_stage_end(stage.label)
        if last > done:  # a stage that was done before costs no time: a run in slices must get past it
            self._stop_if_asked()

    def world_of(self, stage: Stage) -> World:
        """Who takes part in a stage."""
        return self.world if is_shared(stage) else ALONE

    def loop(self, stage: Stage, detour: int, start: Checkpoint | None) -> StageLoop:
        """A stage's loop, ready for its first step or for the one after its checkpoint ``start`` (another stage's is passed
        over); after ``detour`` roll-backs it draws other samples."""
        recipe = self.recipe.model_copy(update={"seed": self.recipe.seed + detour * DETOUR}) if detour else self.recipe
        world = self.world_of(stage)
        parts = Parts(recipe, self.task_of(stage), self.engine, self.rewards_of(stage), self.run.path, world)
        made = loop_for(stage, parts)
        if start is not None and start.stage == stage.label:
            made.load_state(start.tensors)
        return made

    def _one_step(self, stage: Stage, loop: StageLoop, n: int) -> None:
        known = self.store.replies(stage.label, n)
        self.world_of(stage).tell("step", n=n, replies=known)
        try:
            with collecting() as notes, watching(partial(self.tell.on_measuring, stage.label, n)):
                report, fresh = self.take_step(stage, loop, n, known)
        except OncurveError as error:
            # Memory may run out between two updates of a step, and half a step is nothing to go on from.
            together = self.world_of(stage).all_failed(f"{stage.label}/{n}")
            if n > 1 and together and not isinstance(error, OutOfMemory):
                self._save(stage, loop, n - 1)
                self._note_saved(self.saver.wait())
            raise
        self.store.keep_replies(stage.label, n, "train", fresh)
        self.tell.on_step(report)
        self._note_saved(self.saver.done())
        self._look_at(stage, report, notes)
        final = n == stage.steps
        if stage.eval_every and n % stage.eval_every == 0 and not final:
            self._measure(stage, n)
        if stage.save_every and n % stage.save_every == 0 and not final:
            self._save(stage, loop, n)
        if self._is_stopping and not final:
            self._save(stage, loop, n)
            self._stop_if_asked()

    def take_step(self, stage: Stage, loop: StageLoop, n: int, known: Mapping[str, str]) -> tuple[StepReport, dict[str, str]]:
        """A step as every rank that takes part does it, and what came from outside in any of them; ``known`` came before."""
        self.memory.at(known)
        self.world_of(stage).at(stage.label, n)
        report = loop.step(n)
        return report, self.world_of(stage).put_together(self.memory.fresh)

    def _look_at(self, stage: Stage, report: StepReport, notes: Sequence[Note]) -> None:
        """Says what a step noted, keeps a bad batch, warns of a collapse, and goes back where too many were bad in a row."""
        for told in notes:
            self.tell.on_event(told.kind, f"{stage.label} {report.step}: {told.message}", stage.label, report.step)
        for warning in self.watch.look(report):
            self.tell.on_event("warning", warning, stage.label, report.step)
        bad = [told.message for told in notes if told.kind == "bad"]
        if bad:
            keep_bad(self.run.path, report, bad)
            patience = stage.optimiser.guard.rollback_after
            skipped = dict(self.store.metric("skipped_updates", stage.label)) if patience else {}
            if patience and all(skipped.get(report.step - i, 0.0) > 0 for i in range(patience)):
                raise GoBack

    def _go_back(self, stage: Stage) -> Checkpoint:
        """The last checkpoint's weights, the steps after it forgotten. The event says so first: a kill here changes nothing."""
        self._note_saved(self.saver.wait())
        start = self._last_checkpoint()
        to = steps_behind(start, stage)
        been = [e for e in self.store.events("rollback") if e.stage == stage.label and e.data["to"] == to]
        if start is None or len(been) >= MOST_ROLLBACKS:
            found = "no checkpoint to go back to" if start is None else f"{len(been)} roll-backs to step {to} did not help"
            raise RunError(
                self.run.name, f"updates of stage '{stage.label}' stay bad", because=found,
                fix=f"oncurve show {self.run.path} --bad; lower optimiser.learning_rate, mend the reward, or set save_every",
            )  # fmt: skip
        count = stage.optimiser.guard.rollback_after
        message = f"{stage.label}: back to {start.path.name} after {count} bad {'step' if count == 1 else 'steps in a row'}"
        data = {"to": to, "number": detours(self.store, stage.label, to) + 1}
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
        if not self.task_of(stage).heldout or not stage.moves_policy or not self.rewards_of(stage).rewards:
            return
        known = self.store.replies(stage.label, step, "eval")
        self.world_of(stage).tell("measure", step=step, replies=known)
        with watching(partial(self.tell.on_measuring, stage.label, step)):
            report, fresh = self.measure(stage, step, known)
        self.store.keep_replies(stage.label, step, "eval", fresh)
        self.tell.on_eval(report)

    def measure(self, stage: Stage, step: int, known: Mapping[str, str]) -> tuple[EvalReport, dict[str, str]]:
        """A measurement as every rank that takes part makes it."""
        self.memory.at(known)
        prompts, world = self.task_of(stage).heldout, self.world_of(stage)
        world.enter("measure")
        assert self.engine is not None, "only stages that move the policy are measured here"
        report = evaluate(
            self.engine, self.rewards_of(stage), prompts, self.recipe.evaluation, world=world,
            max_new_tokens=self._answer_limit(stage, prompts), seed=self.recipe.seed, stage=stage.label, step=step,
        )  # fmt: skip
        return report, world.put_together(self.memory.fresh)

    def _answer_limit(self, stage: Stage, prompts: Sequence[Prompt]) -> int:
        """Tokens that a held-out answer may have: the stage's, else the most of any, else a default that fits the model."""
        limits = [s.sampling.max_new_tokens for s in self.recipe.stages if isinstance(s, Sampled)]
        if isinstance(stage, Sampled):
            return stage.sampling.max_new_tokens
        assert self.policy is not None
        return max(limits) if limits else usual_limit(self.policy, prompts)

    def _save(self, stage: Stage, loop: StageLoop, step: int) -> None:
        self._note_saved(self.saver.wait())
        self.world_of(stage).tell("state")
        held = self.held(stage, loop)
        self.store.flush()  # what a checkpoint follows must be on the disk before it
        steps = self._saved_steps(stage) | {step}
        best = best_step(self.store, stage.label, stage.keep_best, steps)
        recent = set(sorted(steps)[-stage.keep_checkpoints :])
        protect = set() if best is None else {best} - recent
        documents = {"state": {"stage": stage.label, "step": step}, **held.documents}
        wanted = Wanted(stage.label, step, documents, stage.keep_checkpoints, protect, held.pieces)
        self._note_saved(self.saver.save(wanted, held.tensors))

    def held(self, stage: Stage, loop: StageLoop) -> Held:
        """All that a checkpoint must hold; each rank that takes part has written its pieces of it."""
        world = self.world_of(stage)
        world.enter("save")
        own = {} if self.policy is None else {"model": weights(self.policy)}
        return held(world, self.run.path / PIECES, {**own, **loop.state()})

    def _saved_steps(self, stage: Stage) -> set[int]:
        return {place.step for place in list_checkpoints(self.run.checkpoints) if place.stage == stage.label}

    def _note_saved(self, saved: Sequence[Saved]) -> None:
        for one in saved:
            self.tell.on_checkpoint(one.stage, one.step, one.path)

    def _last_checkpoint(self) -> Checkpoint | None:
        def damaged(path: Path, why: str) -> None:
            self.tell.on_event("damaged", f"{path.name} is damaged ({why}); going on from the one before")

        checkpoints.sweep(self.run.checkpoints)
        return checkpoints.newest_valid(self.run.checkpoints, damaged)

    def _rewind(self, store: Store, start: Checkpoint | None) -> None:
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
        weights = policy.weights_to_save(self.world.is_first)
        if not self.world.is_first:
            return
        put_whole(self.run.model, lambda folder: policy.save(folder, weights))
        if lora.is_on(policy.model):
            lora.save(policy.model, self.run.path / "adapter")

    def _stop(self, number: int) -> None:
        self.stop_signal = number
        for one in self.listeners:  # not the recorder: the signal may have come amid its transaction
            one.on_event("signal", STOPPING)


def steps_behind(start: Checkpoint | None, stage: Stage) -> int:
    """How many steps of a stage a checkpoint has behind it: none where there is none, or where it is another stage's."""
    return start.step if start is not None and start.stage == stage.label else 0


def loaded(
    recipe: Recipe, task_of: TaskOf, listeners: Sequence[Listener] = (), policy: Policy | None = None, world: World = ALONE
) -> Policy | None:
    """The policy that was given, or the recipe's, which must be able to read what the stages will give it; None where no stage
    uses one."""
    if not recipe.uses_policy:
        return None
    use_threads(recipe, world)
    if policy is None and recipe.model.source != "tiny":
        for one in listeners:
            one.on_event("loading", loading(recipe.model))
    alphabet = task_of(recipe.stages[0]).alphabet
    found = policy or load_policy(loaded_for(recipe), alphabet=alphabet, seed=recipe.seed)
    shared = shared_out(found, recipe, world)
    check_readable(shared, recipe, task_of)
    return shared


def use_threads(recipe: Recipe, world: World) -> None:
    torch.set_num_threads(max(1, (recipe.threads or os.cpu_count() or 1) // world.local_size))


def detours(store: Reader, stage: str, step: int) -> int:
    """How many roll-backs came before what follows ``step`` of a stage. Events are never forgotten, so a resumed run agrees."""
    found = [e for e in store.events("rollback") if e.stage == stage and e.data["to"] <= step]
    return max((int(e.data["number"]) for e in found), default=0)


def weights(policy: Policy) -> dict[str, Tensor]:
    """The policy's trained weights by name (under LoRA the adapter alone); tied ones under each of their names, or, where ranks
    share them out, under the first."""
    once = is_shard(next(policy.model.parameters()))
    return {name: p.detach() for name, p in policy.model.named_parameters(remove_duplicate=once) if p.requires_grad}


def load_weights(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Into the very tensors that sampler and learner share."""
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            put(p, tensors[name])
