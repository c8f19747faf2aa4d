"""The learner on a cluster: the trainer of one process, but others write its samples and compute its rewards."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from oncurve.cluster.messages import Actors, Session
from oncurve.cluster.ray_client import ProcessLocation, this_process
from oncurve.cluster.remote_engine import LEARNER, Prefetch, RemoteEngine
from oncurve.cluster.reward_actor import RemoteRewardMix, RewardActors
from oncurve.distributed.rank_status import RankStatus, clear_statuses, write_status
from oncurve.distributed.rendezvous import joined_ranks
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import ClusterError, OncurveError, RunError, error_to_json
from oncurve.models.policy import Policy
from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe, Stage
from oncurve.recipe.schema.stages import RolloutStage
from oncurve.records import EvalReport, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.runs.checkpoints.files import Checkpoint
from oncurve.runs.database.connection import take_lock
from oncurve.runs.folder import STATE, RunFolder
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.listeners import Listener
from oncurve.training.rank_commands import announce_run, run_worker_rank
from oncurve.training.stages.table import StageLoop
from oncurve.training.start import build_tasks_and_rewards, with_machine_defaults, with_machine_overrides
from oncurve.training.trainer import ROLLBACK_SEED, RewardsOf, TaskOf, Trainer

LOCK_S = 20.0
"""How long to wait for a learner before this one to be gone: Ray ends it when its driver dies, and that takes a moment."""
BEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class LearnerTask:
    """What a learner is to do: begin with a recipe in the folder, or go on with what is there. ``notes`` become events.

    ``session`` is new for each start. ``ranks`` are where all learners run, by rank, and ``port`` is where they meet.
    """

    folder: Path
    directory: Path
    recipe: str | None
    sets: tuple[str, ...] = ()
    minutes: float | None = None
    notes: tuple[str, ...] = ()
    session: str = ""
    ranks: tuple[ProcessLocation, ...] = ()
    port: int = 0


class LearnerActor:
    """The actor. `train` takes as long as the run; the others are asked meanwhile."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.relay = Relay()
        self.trainer: ClusterTrainer | None = None
        self.busy = False

    def where(self) -> ProcessLocation:
        return this_process()

    def free_port(self) -> int:
        """One that is free on this machine now."""
        with socket.create_server(("", 0)) as found:
            return int(found.getsockname()[1])

    def train(self, task: LearnerTask, crew: Actors, rank: int) -> Mapping[str, Any] | None:
        """None where the run has finished; else the error that ended it, as data."""
        if self.busy:  # the driver has lost this process from sight, and starts over: so must it
            os._exit(1)
        self.busy = True
        try:
            if task.directory.is_dir():
                os.chdir(task.directory)
            run, recipe = self._open_run(task)
            with _joined(task, recipe, rank) as world:
                if not world.is_rank_zero:
                    run_worker_rank(world, build_tasks_and_rewards, make=partial(ClusterTrainer, of=RankPart(task, crew)))  # type: ignore[arg-type]
                    return None
                self.trainer = trainer = self._leading(run, recipe, RankPart(task, crew), world)
                trainer.train(resume=run.database.exists())
        except OncurveError as error:
            return error_to_json(error, self.name)
        return None

    def _leading(self, run: RunFolder, recipe: Recipe, of: RankPart, world: World) -> ClusterTrainer:
        if of.task.recipe is not None:
            recipe = with_machine_defaults(recipe)
        announce_run(world, recipe, run)
        made = ClusterTrainer(recipe, run, *build_tasks_and_rewards(recipe), [self.relay], None, of.task.minutes, world, of=of)
        if of.task.recipe is not None or of.task.sets:
            run.write_recipe(dump_recipe(recipe))
        return made

    def _open_run(self, task: LearnerTask) -> tuple[RunFolder, Recipe]:
        run = RunFolder(task.folder)
        if not (run.path / STATE).is_file():
            raise ClusterError(
                str(run.path),
                f"{this_process()} does not see it",
                because="the learner writes the run's folder, and goes on from it wherever it is started again",
                fix="put runs on a disk that all nodes share: --runs or --out DIR",
            )
        if task.recipe is not None:
            return run, parse_recipe(json.loads(task.recipe))
        _wait_for_lock(run)
        return run, with_machine_overrides(run, task.sets)

    def stop(self, number: int) -> None:
        """As a signal would: the step is finished and saved."""
        if self.trainer is not None:
            self.trainer.stop_signal = number

    def hear(self, wait_s: float) -> list[tuple[str, tuple[Any, ...]]]:
        """What listeners are to be told, in order, as soon as there is anything."""
        return self.relay.next(wait_s)


@contextmanager
def _joined(task: LearnerTask, recipe: Recipe, rank: int) -> Iterator[World]:
    """The world of the learners, by the environment in which ranks find each other however they were started."""
    size = len(task.ranks)
    if size == 1:
        yield SINGLE_PROCESS
        return
    beside = [r for r, at in enumerate(task.ranks) if at.host == task.ranks[rank].host]
    around = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": len(beside),
        "MASTER_ADDR": task.ranks[0].address, "MASTER_PORT": task.port,
    }  # fmt: skip
    os.environ.update({key: str(value) for key, value in around.items()})
    with joined_ranks(recipe, lambda error: print(error, flush=True)) as world:
        yield world


def _wait_for_lock(run: RunFolder) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            take_lock(run.path).close()
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


class Relay(Listener):
    """Keeps what listeners would hear until the driver fetches it. Groups stay here: they are in the run's database."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        for name in (name for name in vars(Listener) if name.startswith("on_")):
            setattr(self, name, lambda *given, name=name: self._queue.put((name, tuple(map(light, given)))))

    def next(self, wait_s: float) -> list[tuple[str, tuple[Any, ...]]]:
        found = []
        try:
            found.append(self._queue.get(timeout=wait_s))
            while True:
                found.append(self._queue.get_nowait())
        except queue.Empty:
            return found


def light(given: Any) -> Any:
    """A report without its groups."""
    if isinstance(given, StepReport):
        return replace(given, groups=(), stats=())
    return replace(given, groups=()) if isinstance(given, EvalReport) else given


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one learner was told, and all who work for the run."""

    task: LearnerTask
    crew: Actors


class ClusterTrainer(Trainer):
    """`Trainer` with samplers and reward workers; what happens to them is told as events of the kind `cluster`."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, task_of: TaskOf, rewards_of: RewardsOf, listeners: Sequence[Listener] = (),
        policy: Policy | None = None, minutes: float | None = None, world: World = SINGLE_PROCESS, *, of: RankPart,
    ) -> None:  # fmt: skip
        task, crew = of.task, of.crew
        order = Session(task.session, recipe.model_dump_json(exclude_none=True), run.path, task.directory)
        self.notes, self.crew = task.notes, crew
        self.board = StatusBoard(run.path, world)
        self.scorers = RewardActors(crew.scorers, order, recipe.scale.timeout_s, self.board.enter) if crew.scorers else None
        mixes = {s.label: self._mix(rewards_of(s), s) for s in recipe.stages}
        super().__init__(recipe, run, task_of, lambda s: mixes[s.label], listeners, policy, minutes, world)
        own = crew.samplers[world.rank :: world.size]
        if own and self.policy is not None:
            self.engine = RemoteEngine(self.policy, recipe, own, order, self._say, self.board.enter)
        self.board.start()
        if self.scorers is not None:
            self.scorers.open()

    def _mix(self, mix: RewardMix, stage: Stage) -> RewardMix:
        return mix if self.scorers is None else RemoteRewardMix(mix, stage.label, self.scorers, self._say)

    def _say(self, line: str) -> None:
        """The first rank writes it down; another's stands in what its process wrote."""
        if self.world.is_rank_zero:
            self.notify.on_event("cluster", line)
        else:
            print(line, flush=True)

    def train(self, resume: bool = False) -> None:
        try:
            super().train(resume)
        finally:
            self.board.stop()

    def _stages(self, start: Checkpoint | None) -> None:
        for line in self.notes:
            self._say(line)
        workers = "".join(f"; {name} on {at}" for name, at in (self.scorers.at if self.scorers else {}).items())
        self._say(f"the learner is on {this_process()}; {len(self.crew.samplers)} samplers{workers}")
        super()._stages(start)

    def loop(self, stage: Stage, detour: int, start: Checkpoint | None) -> StageLoop:
        made = super().loop(stage, detour, start)
        if isinstance(self.engine, RemoteEngine):
            seed = self.recipe.seed + detour * ROLLBACK_SEED
            self.engine.prefetch(self._ahead(stage, seed) if isinstance(stage, RolloutStage) else None)
        return CancellableLoop(made, self.board, stage, self.recipe.scale.max_staleness > 0)

    def _ahead(self, stage: RolloutStage, seed: int) -> Prefetch:
        asked, world = self.task_of(stage), self.world_of(stage)  # type: ignore[arg-type]
        return Prefetch(
            lambda n: world.local_prompts(prompts_for_step(asked, seed, n - 1, stage.prompts_per_step)),
            stage.group_size, stage.sampling, seed, stage.steps,
        )  # fmt: skip


class CancellableLoop:
    """A stage's loop, whose reports also say by how old weights a step was written."""

    def __init__(self, loop: StageLoop, board: StatusBoard, stage: Stage, stale: bool) -> None:
        self.loop, self.board, self.stage, self.stale = loop, board, stage, stale

    @property
    def out_of_time(self) -> bool:
        return self.loop.out_of_time

    def step(self, n: int) -> StepReport:
        self.board.at(self.stage.label, n)
        report = self.loop.step(n)
        return replace(report, metrics={**report.metrics, **staleness(report)}) if self.stale else report

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self.loop.state()

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.loop.load_state(tensors)


def staleness(report: StepReport) -> dict[str, float]:
    """Over the tokens that a step learned from: updates between the weights that wrote them and those that learned."""
    ages: list[float] = []
    for group in report.groups:
        for completion in group.group.completions:
            spans = [*(completion.versions or ()), (len(completion.token_ids), 0)]
            for (at, version), (until, _) in pairwise(spans):
                ages += [float(report.step - 1 - version)] * (until - at)
    return {"staleness": float(np.mean(ages)), "staleness_max": max(ages)} if ages else {}


class StatusBoard:
    """What each process of the run is doing, for `oncurve status`. The learner writes for all: it asks them anyway."""

    def __init__(self, run: Path, world: World) -> None:
        self.run, self.world = run, world
        self.pulses: dict[str, RankStatus] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._write, name="oncurve-board", daemon=True)
        self._place = ("", 0)

    def start(self) -> None:
        if self.world.size == 1:  # of several ranks each has a pulse already
            clear_statuses(self.run)
            self.enter(LEARNER, this_process(), "starting")
        self._thread.start()

    def stop(self) -> None:
        for name in list(self.pulses):
            self.enter(name, None, "done")
        self._over.set()
        self._thread.join(5.0)
        self._write_all()

    def at(self, stage: str, step: int) -> None:
        self._place = (stage, step)

    def enter(self, name: str, at: ProcessLocation | None, phase: str) -> None:
        if name == LEARNER and self.world.size > 1:
            return self.world.set_phase(phase)
        with self._lock:
            old = self.pulses.get(name) or RankStatus(name, socket.gethostname() if at is None else at.host, 0, "")
            if at is not None:
                old = replace(old, host=at.host, pid=at.pid)
            since = old.since if old.phase == phase else time.time()
            stage, step = self._place
            self.pulses[name] = replace(old, phase=phase, since=since, stage=stage, step=step, beat=time.time())
        return None

    def _write(self) -> None:
        while not self._over.wait(BEAT_S):
            self._write_all()

    def _write_all(self) -> None:
        with self._lock:
            now = list(self.pulses.values())
        for pulse in now:
            lost = pulse.phase.startswith(("silent", "died"))
            write_status(self.run, pulse if lost else replace(pulse, beat=time.time()))
