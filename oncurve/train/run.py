"""A run from its first weight to its last: stages in order, each step recorded, checkpoints, resume.

The trainer knows stages only as things that can step and be saved. Exactness rests on three rules: a step is a pure function
of (weights, optimiser, reference, seed, step number); a checkpoint holds all of these; on resume everything recorded after it
is forgotten and done again.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from oncurve.engines.native import NativeEngine
from oncurve.errors import OncurveError, RunError
from oncurve.models import lora
from oncurve.models.load import Found, load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.sampled import Sampled
from oncurve.recipe.schema import Recipe, Stage
from oncurve.records import EvalReport
from oncurve.rewards.mix import RewardMix
from oncurve.runs import checkpoints
from oncurve.runs.checkpoints import Checkpoint
from oncurve.runs.folder import RunFolder, Status
from oncurve.runs.store import Store
from oncurve.tasks.base import Task
from oncurve.train.evaluate import evaluate
from oncurve.train.listeners import Listener, Listeners, Recorder
from oncurve.train.room import check_room
from oncurve.train.stages import Parts, StageLoop, loop_for

EVAL_TOKENS = 256
"""Length limit of held-out answers where neither the recipe nor any of its stages sets one."""


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


TaskOf = Callable[[Stage], Task]
RewardsOf = Callable[[Stage], RewardMix]


class Trainer:
    """Runs a recipe in a folder. ``task_of`` and ``rewards_of`` say what each stage asks and rewards."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, task_of: TaskOf, rewards_of: RewardsOf, listeners: Sequence[Listener] = (),
        policy: Policy | None = None, minutes: float | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.run, self.task_of, self.rewards_of = recipe, run, task_of, rewards_of
        self.listeners, self.minutes, self.began = listeners, minutes, time.monotonic()
        torch.set_num_threads(recipe.threads or os.cpu_count() or 1)
        alphabet = task_of(recipe.stages[0]).alphabet
        self.policy = policy or load_policy(recipe.model, alphabet=alphabet, seed=recipe.seed)
        check_room(self.policy, recipe, task_of)
        self.engine = NativeEngine(self.policy, recipe.engine)
        for stage in recipe.stages:
            rewards_of(stage).decode_with(self.policy.decode)
        self.stop_signal: int | None = None

    def train(self, resume: bool = False) -> None:
        """All stages, or those that are left. Ends with ``model/`` written and the run marked finished."""
        with Store.open(self.run.path, read_only=False) if resume else Store.create(self.run.path) as store:
            self.store = store
            self.tell = Listeners([Recorder(store), *self.listeners])
            self.run.set_status("running")
            status: Status = "failed"
            try:
                with self._signals():
                    start = self._last_checkpoint() if resume else None
                    if resume:
                        self._rewind(store, start)
                    self._stages(start)
                    self._save_model()
                status = "finished"
            except (Interrupted, TimeUp, KeyboardInterrupt):
                status = "interrupted"
                raise
            finally:
                self.run.set_status(status)
                self.tell.on_run_end(status)

    def _stages(self, start: Checkpoint | None) -> None:
        place = (start.stage, start.step) if start else None
        parameters = sum(p.numel() for p in self.policy.model.parameters())
        self.tell.on_run_start(self.recipe, self.run.path, parameters, place)
        if self.recipe.model.source != "tiny":
            self.tell.on_event("model", f"{self.recipe.model.source}: {Found.of(self.policy)}")
        names = [s.label for s in self.recipe.stages]
        first = names.index(start.stage) if start else 0
        if start:
            load_weights(self.policy, start.tensors["model"])
        for position, stage in enumerate(self.recipe.stages):
            if position >= first:
                self._stage(position, stage, start if start and position == first else None)

    def _stage(self, position: int, stage: Stage, start: Checkpoint | None) -> None:
        loop = self._loop(stage)
        done = start.step if start else 0
        if start:
            loop.load_state(start.tensors)
        self.tell.on_stage_start(stage.label, stage.type, position, stage.steps, done)
        for remark in self.rewards_of(stage).remarks:
            self.tell.on_event("rewards", remark, stage.label)
        last = done
        for n in range(done + 1, stage.steps + 1):
            if loop.out_of_time:
                break
            self._one_step(stage, loop, n)
            last = n
        if last > done:
            self._measure(stage, last)
            self._save(stage, loop, last)
        self.tell.on_stage_end(stage.label)
        self._stop_if_asked()

    def _loop(self, stage: Stage) -> StageLoop:
        return loop_for(stage, Parts(self.recipe, self.task_of(stage), self.engine, self.rewards_of(stage)))

    def _one_step(self, stage: Stage, loop: StageLoop, n: int) -> None:
        try:
            report = loop.step(n)
        except OncurveError:
            if n > 1:
                self._save(stage, loop, n - 1)
            raise
        self.tell.on_step(report)
        final = n == stage.steps
        if stage.eval_every and n % stage.eval_every == 0 and not final:
            self._measure(stage, n)
        if stage.save_every and n % stage.save_every == 0 and not final:
            self._save(stage, loop, n)
        if (self.stop_signal is not None or self._time_is_up) and not final:
            self._save(stage, loop, n)
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self.stop_signal is not None:
            raise Interrupted(self.run, self.stop_signal)
        if self.minutes is not None and self._time_is_up:
            raise TimeUp(self.run, self.minutes)

    @property
    def _time_is_up(self) -> bool:
        return self.minutes is not None and time.monotonic() - self.began > 60 * self.minutes

    def _measure(self, stage: Stage, step: int) -> EvalReport | None:
        prompts = self.task_of(stage).heldout
        if not prompts:
            return None
        limits = [s.sampling.max_new_tokens for s in self.recipe.stages if isinstance(s, Sampled)]
        limit = stage.sampling.max_new_tokens if isinstance(stage, Sampled) else max(limits, default=EVAL_TOKENS)
        report = evaluate(
            self.engine, self.rewards_of(stage), prompts, self.recipe.evaluation,
            max_new_tokens=limit, seed=self.recipe.seed, stage=stage.label, step=step,
        )  # fmt: skip
        self.tell.on_eval(report)
        return report

    def _save(self, stage: Stage, loop: StageLoop, step: int) -> None:
        tensors = {"model": weights(self.policy), **loop.state()}
        self.store.flush()  # what a checkpoint follows must be on the disk before it
        path = checkpoints.save(
            self.run.checkpoints, stage.label, step, tensors, {"state": {"stage": stage.label, "step": step}}
        )
        checkpoints.prune(self.run.checkpoints, stage.label, stage.keep_checkpoints)
        self.tell.on_checkpoint(stage.label, step, path)

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

    def _save_model(self) -> None:
        aside = self.run.path / ".writing-model"
        shutil.rmtree(aside, ignore_errors=True)
        self.policy.save(aside)
        shutil.rmtree(self.run.model, ignore_errors=True)
        aside.rename(self.run.model)
        if lora.is_on(self.policy.model):
            lora.save(self.policy.model, self.run.path / "adapter")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM finishes the step and saves; a second one ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stop_signal is not None:
                os._exit(128 + number)
            self.stop_signal = number
            for one in self.listeners:  # not the recorder: the signal may have come amid its transaction
                one.on_event("signal", "stopping after this step; once more stops at once")

        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def weights(policy: Policy) -> dict[str, Tensor]:
    """The policy's trained weights by name (under LoRA the adapter alone); tied ones under each of their names."""
    return {name: p.detach() for name, p in policy.model.named_parameters(remove_duplicate=False) if p.requires_grad}


@torch.no_grad()
def load_weights(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Into the very tensors that sampler and learner share."""
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            p.copy_(tensors[name])
