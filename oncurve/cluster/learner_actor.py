"""The learner on a cluster: the trainer of one process, with samplers and reward workers in other processes."""

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
from pathlib import Path
from typing import Any

from torch import Tensor

from oncurve.cluster.messages import Actors, ClusterSession
from oncurve.cluster.ray_client import ProcessLocation, this_process
from oncurve.cluster.remote_engine import LEARNER, Prefetch, RemoteEngine
from oncurve.cluster.reward_actor import RemoteRewardMix, RewardWorkers
from oncurve.distributed.rank_status import RankStatus, clear_statuses, write_status
from oncurve.distributed.rendezvous import joined_ranks
from oncurve.distributed.signed_store import SECRET
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import ClusterError, OncurveError, RunError, error_to_json, printable
from oncurve.models.loading.load import check_quantised
from oncurve.models.policy import Policy
from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import RolloutStage, Stage
from oncurve.records import EvalReport, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.runs.checkpoints.files import Checkpoint
from oncurve.runs.database.connection import is_empty_database, take_lock
from oncurve.runs.folder import STATE, RunFolder
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.listeners import Listener
from oncurve.training.rank_commands import announce_run, run_worker_rank
from oncurve.training.stages.grpo import staleness_metrics
from oncurve.training.stages.table import StageLoop
from oncurve.training.start import build_tasks_and_rewards, complete_database, with_machine_defaults, with_machine_overrides
from oncurve.training.trainer import RewardsOf, TaskOf, Trainer

LOCK_S = 20.0
"""How long to wait for a previous learner to release the run's lock: Ray ends it some seconds after its driver dies."""
BEAT_S = 0.5
Event = tuple[str, tuple[Any, ...]]
"""A listener's method and its arguments."""


@dataclass(frozen=True, slots=True)
class LearnerTask:
    """What a learner has to do: train a recipe in the folder, or, without one, resume what is there.

    ``notes`` become events. ``session_id`` is new for each start. ``ranks`` are the processes of all learners, by rank, and
    ``port`` is the port on the first one's machine at which they meet.
    """

    folder: Path
    directory: Path
    recipe: str | None
    sets: tuple[str, ...] = ()
    minutes: float | None = None
    notes: tuple[str, ...] = ()
    session_id: str = ""
    ranks: tuple[ProcessLocation, ...] = ()
    port: int = 0


class LearnerActor:
    """The Ray actor. `train` takes as long as the run; the other methods are called meanwhile."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.relay = EventRelay()
        self.trainer: ClusterTrainer | None = None
        self.is_training = False

    def location(self) -> ProcessLocation:
        return this_process()

    def free_port(self) -> int:
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])

    def train(self, task: LearnerTask, actors: Actors, rank: int) -> Mapping[str, Any] | None:
        """None if the run has finished, else the error that ended it, as JSON."""
        if self.is_training:  # the driver lost contact and starts over, so this process must restart too
            os._exit(1)
        self.is_training = True
        try:
            if task.directory.is_dir():
                os.chdir(task.directory)
            run, recipe = self._open_run(task)
            assignment = Assignment(task, actors)
            with _joined_ranks(task, recipe, rank) as world:
                if not world.is_rank_zero:
                    build = partial(ClusterTrainer, assignment=assignment)
                    run_worker_rank(world, build_tasks_and_rewards, build_trainer=build)
                    return None
                self.trainer = self._build_trainer(run, recipe, assignment, world)
                complete_database(run)
                self.trainer.train()
        except OncurveError as error:
            return error_to_json(error, self.name)
        return None

    def _build_trainer(self, run: RunFolder, recipe: Recipe, assignment: Assignment, world: World) -> ClusterTrainer:
        """The trainer of rank 0, which announces the run to the other ranks."""
        task = assignment.task
        is_new = task.recipe is not None or is_empty_database(run.database)
        if is_new:
            recipe = with_machine_defaults(recipe)
        announce_run(world, recipe, run)
        tasks_and_rewards = build_tasks_and_rewards(recipe)
        trainer = ClusterTrainer(
            recipe, run, *tasks_and_rewards, [self.relay], None, task.minutes, world, assignment=assignment
        )  # fmt: skip
        if is_new:
            check_quantised(recipe.model, trainer.policy)
        if is_new or task.sets:
            run.write_recipe(dump_recipe(recipe))
        return trainer

    def _open_run(self, task: LearnerTask) -> tuple[RunFolder, Recipe]:
        run = RunFolder(task.folder)
        if not (run.path / STATE).is_file():
            raise ClusterError(
                str(run.path),
                f"not visible to {this_process()}",
                because="the learner writes the run's folder, and after a restart on another node resumes from it",
                fix="put runs on a disk that all nodes share: --runs or --out DIR",
            )
        if task.recipe is not None:
            return run, parse_recipe(json.loads(task.recipe))
        _wait_for_lock(run)
        return run, with_machine_overrides(run, task.sets)

    def stop(self, number: int) -> None:
        """Stops the run as a signal with this number does: after the current step, which is saved."""
        if self.trainer is not None:
            self.trainer.stop_signal = number

    def next_events(self, wait_s: float) -> list[Event]:
        """The events for the driver's listeners, in order, as soon as there are any."""
        return self.relay.take(wait_s)


@contextmanager
def _joined_ranks(task: LearnerTask, recipe: Recipe, rank: int) -> Iterator[World]:
    """The world of the learners. Sets the environment variables that torchrun would set."""
    size = len(task.ranks)
    if size == 1:
        yield SINGLE_PROCESS
        return
    on_this_host = [r for r, location in enumerate(task.ranks) if location.host == task.ranks[rank].host]
    is_one_machine = len(on_this_host) == size
    environment = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": len(on_this_host),
        "MASTER_ADDR": "127.0.0.1" if is_one_machine else task.ranks[0].address, "MASTER_PORT": task.port,
        SECRET: task.session_id,
    }  # fmt: skip
    os.environ.update({key: str(value) for key, value in environment.items()})
    with joined_ranks(recipe, lambda error: print(printable(str(error)), flush=True), has_own_gpu=True) as world:
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


class EventRelay(Listener):
    """Queues a listener's events until the driver fetches them. Groups are left out: they are in the run's database."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        for name in (name for name in vars(Listener) if name.startswith("on_")):
            setattr(self, name, lambda *arguments, name=name: self._queue.put((name, tuple(map(without_groups, arguments)))))

    def take(self, wait_s: float) -> list[Event]:
        events = []
        try:
            events.append(self._queue.get(timeout=wait_s))
            while True:
                events.append(self._queue.get_nowait())
        except queue.Empty:
            return events


def without_groups(argument: Any) -> Any:
    """A report without its groups; anything else unchanged."""
    if isinstance(argument, StepReport):
        return replace(argument, groups=(), stats=())
    return replace(argument, groups=()) if isinstance(argument, EvalReport) else argument


@dataclass(frozen=True, slots=True)
class Assignment:
    """A learner's task, and the actors that work for the run."""

    task: LearnerTask
    actors: Actors


class ClusterTrainer(Trainer):
    """`Trainer` with samplers and reward workers; what happens to them becomes events of kind `cluster`."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, task_of: TaskOf, rewards_of: RewardsOf, listeners: Sequence[Listener] = (),
        policy: Policy | None = None, minutes: float | None = None, world: World = SINGLE_PROCESS, *, assignment: Assignment,
    ) -> None:  # fmt: skip
        task, actors = assignment.task, assignment.actors
        session = ClusterSession(task.session_id, recipe.model_dump_json(exclude_none=True), run.path, task.directory)
        self.notes, self.actors = task.notes, actors
        self.board = StatusBoard(run.path, world)
        workers = actors.reward_workers
        self.reward_workers = (
            RewardWorkers(workers, session, recipe.scale.timeout_s, self.board.set_phase) if workers else None
        )  # fmt: skip
        mixes = {s.label: self._remote_mix(rewards_of(s), s) for s in recipe.stages}
        super().__init__(recipe, run, task_of, lambda s: mixes[s.label], listeners, policy, minutes, world)
        self.restarts_changed_steps = not actors.samplers  # a sampler that has failed samples again only in a new session
        samplers = actors.samplers[world.rank :: world.size]
        if samplers and self.policy is not None:
            self.engine = RemoteEngine(self.policy, recipe, samplers, session, self._log_event, self.board.set_phase)
        self.board.start()
        if self.reward_workers is not None:
            self.reward_workers.open()

    def _remote_mix(self, mix: RewardMix, stage: Stage) -> RewardMix:
        return mix if self.reward_workers is None else RemoteRewardMix(mix, stage.label, self.reward_workers, self._log_event)

    def _log_event(self, line: str) -> None:
        """Rank 0 records it in the run; another rank prints it to its process's log."""
        if self.world.is_rank_zero:
            self.notify.on_event("cluster", line)
        else:
            print(printable(line), flush=True)

    def train(self, *, writes_recipe: bool = False) -> None:
        try:
            super().train(writes_recipe=writes_recipe)
        finally:
            self.board.stop()

    def _run_stages(self, start: Checkpoint | None) -> None:
        for line in self.notes:
            self._log_event(line)
        locations = self.reward_workers.locations if self.reward_workers else {}
        workers = "".join(f"; {name} on {location}" for name, location in locations.items())
        self._log_event(f"the learner is on {this_process()}; {len(self.actors.samplers)} samplers{workers}")
        super()._run_stages(start)

    def build_loop(self, stage: Stage, rollbacks: int, start: Checkpoint | None) -> StageLoop:
        loop = super().build_loop(stage, rollbacks, start)
        if isinstance(self.engine, RemoteEngine):
            seed = self.seed_of(stage, rollbacks)
            self.engine.prefetch(self._prefetch(stage, seed) if isinstance(stage, RolloutStage) else None)
        return ClusterLoop(loop, self.board, stage, self.recipe.scale.max_staleness > 0)

    def _prefetch(self, stage: RolloutStage, seed: int) -> Prefetch:
        task, world = self.task_of(stage), self.world_of(stage)  # type: ignore[arg-type]
        return Prefetch(
            lambda n: world.local_prompts(prompts_for_step(task, seed, n - 1, stage.prompts_per_step)),
            stage.group_size, stage.sampling, seed, stage.steps,
        )  # fmt: skip


class ClusterLoop:
    """Wraps a stage's loop: publishes the number of each step, and adds staleness metrics to its reports if ``is_async``."""

    def __init__(self, loop: StageLoop, board: StatusBoard, stage: Stage, is_async: bool) -> None:
        self.loop, self.board, self.stage, self.is_async = loop, board, stage, is_async

    @property
    def is_over(self) -> bool:
        return self.loop.is_over

    def step(self, n: int) -> StepReport:
        self.board.set_step(self.stage.label, n)
        report = self.loop.step(n)
        return replace(report, metrics={**report.metrics, **staleness_metrics(report)}) if self.is_async else report

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self.loop.state()

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.loop.load_state(tensors)


class StatusBoard:
    """What each process of the run is doing, for `oncurve status`. The learner writes it for all actors, which it polls."""

    def __init__(self, run: Path, world: World) -> None:
        self.run, self.world = run, world
        self.statuses: dict[str, RankStatus] = {}
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._write_periodically, name="oncurve-board", daemon=True)
        self._step = ("", 0)

    def start(self) -> None:
        if self.world.size == 1:  # with several ranks, the heartbeat of each publishes its status
            clear_statuses(self.run)
            self.set_phase(LEARNER, this_process(), "starting")
        self._thread.start()

    def stop(self) -> None:
        for name in list(self.statuses):
            self.set_phase(name, None, "done")
        self._stopped.set()
        self._thread.join(5.0)
        self._write_all()

    def set_step(self, stage: str, step: int) -> None:
        self._step = (stage, step)

    def set_phase(self, name: str, location: ProcessLocation | None, phase: str) -> None:
        if name == LEARNER and self.world.size > 1:
            return self.world.set_phase(phase)
        with self._lock:
            host = socket.gethostname() if location is None else location.host
            status = self.statuses.get(name) or RankStatus(name, host, 0, "")
            if location is not None:
                status = replace(status, host=location.host, pid=location.pid)
            since = status.since if status.phase == phase else time.time()
            stage, step = self._step
            self.statuses[name] = replace(status, phase=phase, since=since, stage=stage, step=step, beat=time.time())
        return None

    def _write_periodically(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self._write_all()

    def _write_all(self) -> None:
        with self._lock:
            statuses = list(self.statuses.values())
        for status in statuses:
            is_lost = status.phase.startswith(("silent", "died"))
            write_status(self.run, status if is_lost else replace(status, beat=time.time()))
