"""`oncurve train --ray`: looks at the cluster, puts the actors up, shows what the learner tells, and sees it through.

The driver trains nothing itself. Where the learner dies, it is started again by Ray and goes on from the last checkpoint;
where the driver dies, Ray ends the actors, and `--resume` goes on.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oncurve import trust
from oncurve.cluster import node_checks, ray_client
from oncurve.cluster.learner_actor import LearnerActor, LearnerTask
from oncurve.cluster.messages import Actors
from oncurve.cluster.ray_client import START_S, Actor, ActorDied, PlacementGroup, ProcessLocation, result_of
from oncurve.cluster.reward_actor import RewardActor
from oncurve.cluster.sampler_actor import SamplerActor
from oncurve.distributed.signals import STOPPING, graceful_shutdown
from oncurve.errors import ClusterError, OncurveError, RecipeError, error_from_json
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import PolicyGradientStage, RolloutStage
from oncurve.runs.folder import RunFolder
from oncurve.training import trainer as running
from oncurve.training.listeners import Listener
from oncurve.training.rank_commands import check_scale
from oncurve.training.start import build_tasks_and_rewards, check_resumable, with_machine_overrides

MOST_DEATHS = 3
"""Deaths of the learner in a row, without a step between them, before the run gives up."""
HEAR_S = 1.0


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What the command line asked for: a recipe to begin, or a run to go on with."""

    recipe: Recipe | None = None
    run: RunFolder | None = None
    sets: tuple[str, ...] = ()
    runs_dir: Path = Path("runs")
    out: Path | None = None
    minutes: float | None = None


def train(asked: TrainRequest, address: str, listeners: Sequence[Listener] = ()) -> RunFolder:
    """Trains on the cluster at an address, which has been found to answer. Returns the run when it has finished."""
    if asked.run is not None:
        check_resumable(asked.run)
        trust.check(asked.run)
    recipe = asked.recipe if asked.run is None else with_machine_overrides(asked.run, asked.sets)
    assert recipe is not None
    _check_shares(recipe)
    _check_staleness(recipe)
    build_tasks_and_rewards(recipe)  # a recipe that can't run is told before anything is started
    ray_client.connect(address)
    try:
        node_checks.check_room(recipe)
        node_checks.check_alike(recipe)
        with actor_group(recipe) as (learners, crew), folder(asked, recipe) as run:
            begin = None if asked.run is not None else recipe.model_dump_json(exclude_none=True)
            task = LearnerTask(run.path.resolve(), Path.cwd(), begin, asked.sets, asked.minutes)
            Drive(learners, crew, listeners, recipe.scale.timeout_s).run(run, task)
            return run
    finally:
        ray_client.leave()


def _check_shares(recipe: Recipe) -> None:
    check_scale(recipe)
    scale = recipe.scale
    if scale.shard == "full" and scale.samplers:
        raise RecipeError(
            "scale.shard",
            scale.shard,
            because="samplers apart are sent whole weights, and no learner has them",
            fix='use shard = "optimiser", or samplers = 0: then the learners gather weights and sample',
        )
    if 0 < scale.samplers < scale.ranks:
        raise RecipeError(
            "scale.samplers",
            scale.samplers,
            because=f"each of the {scale.ranks} learner ranks has samplers of its own for its share of the prompts",
            fix=f"use {scale.ranks} or more, or 0: then the learners sample",
        )


def _check_staleness(recipe: Recipe) -> None:
    """Stale samples need a correction (`recipe.resolve.corrected`), which is a surrogate's."""
    for stage in recipe.stages if recipe.scale.max_staleness else ():
        if isinstance(stage, RolloutStage) and not isinstance(stage, PolicyGradientStage):
            raise RecipeError(
                "scale.max_staleness",
                recipe.scale.max_staleness,
                because=f"the stage '{stage.label}' ({stage.type}) has no correction for samples of older weights",
                fix="use 0 (synchronous), or a stage of type grpo or ppo",
            )


@contextmanager
def actor_group(recipe: Recipe) -> Iterator[tuple[tuple[Actor, ...], Actors]]:
    """The actors, in places kept for them; gone at the end, however it comes."""
    scale = recipe.scale
    learner, sampler = node_checks.needs(recipe)
    places = [PlacementGroup("the learner", [learner] * scale.ranks, "PACK")]
    if scale.samplers:
        places.append(PlacementGroup("samplers", [sampler] * scale.samplers, "SPREAD"))
    peers: list[Actor] = []
    try:
        for one in places:
            one.wait()
        peers += [ray_client.start_actor(f"rank-{i}", LearnerActor, learner, places[0], i) for i in range(scale.ranks)]
        peers += [ray_client.start_actor(f"sampler-{i}", SamplerActor, sampler, places[1], i) for i in range(scale.samplers)]
        peers += [ray_client.start_actor(f"reward-{i}", RewardActor, {"CPU": 1.0}) for i in range(scale.reward_workers)]
        ranks, crew = scale.ranks, scale.ranks + scale.samplers
        yield tuple(peers[:ranks]), Actors(tuple(peers[ranks:crew]), tuple(peers[crew:]))
    finally:
        for peer in peers:
            peer.kill(for_good=True)
        for one in places:
            one.free()


@contextmanager
def folder(asked: TrainRequest, recipe: Recipe) -> Iterator[RunFolder]:
    """The run's folder. A new one is taken away again where the learner never came to its first stage."""
    if asked.run is not None:
        yield asked.run
        return
    run = RunFolder.create_at(asked.out) if asked.out else RunFolder.create(asked.runs_dir, recipe.name)
    try:
        trust.grant(run, recipe)
        yield run
    except BaseException:
        if not run.database.exists():
            shutil.rmtree(run.path, ignore_errors=True)
        raise


class Drive:
    """One run, from the driver's seat."""

    def __init__(self, learners: Sequence[Actor], crew: Actors, listeners: Sequence[Listener], timeout_s: float) -> None:
        self.learners, self.crew, self.listeners, self.timeout_s = learners, crew, listeners, timeout_s
        self.learner = learners[0]
        self.stop: int | None = None
        self.steps = 0

    def run(self, run: RunFolder, task: LearnerTask) -> None:
        deaths = 0
        while True:
            before = self.steps
            try:
                with graceful_shutdown(lambda: self.stop is not None, self._stop):
                    ended = self._watch(task)
            except ActorDied as error:
                deaths = deaths + 1 if self.steps == before else 1
                if deaths > MOST_DEATHS:
                    raise self._given_up(run, deaths, error) from error
                line = f"the learner died ({str(error)[:200]}); it is started again and goes on from the last checkpoint"
                self._tell("on_event", ("cluster", line))
                for other in self.learners if len(self.learners) > 1 else ():  # ranks go on together or not at all
                    other.kill(for_good=False)
                begun = run.database.exists()
                task = replace(task, recipe=None if begun else task.recipe, notes=(line,))
            else:
                if ended is not None:
                    raise error_of(ended, run, task.minutes)
                return

    def _watch(self, task: LearnerTask) -> Mapping[str, Any] | None:
        """How the learner ended; meanwhile it is heard, and what it says is handed on."""
        task = self._meeting(task)
        ends = [learner.call("train", task, self.crew, rank) for rank, learner in enumerate(self.learners)]
        hearing, heard = self.learner.call("hear", HEAR_S), time.monotonic()
        asked_to_stop = False
        while True:
            for ref in ray_client.first_ready([*ends, hearing], HEAR_S):
                said = result_of(ref, HEAR_S)
                if ref is ends[0]:
                    self._hand_on(result_of(self.learner.call("hear", 0.05), self.timeout_s))
                    return said  # type: ignore[no-any-return]
                if ref is hearing:
                    self._hand_on(said)
                    heard, hearing = time.monotonic(), self.learner.call("hear", HEAR_S)
                else:
                    ends.remove(ref)  # another rank is done; what it has to say, the first one tells
            if self.stop is not None and not asked_to_stop:
                self.learner.call("stop", self.stop)
                asked_to_stop = True
            if time.monotonic() - heard > self.timeout_s:
                self.learner.kill(for_good=False)
                raise ActorDied(f"it had not answered the driver for {self.timeout_s:g} s, and was killed")

    def _meeting(self, task: LearnerTask) -> LearnerTask:
        """With all learners up: where each is, and where they meet."""
        ranks = tuple(self._up(learner) for learner in self.learners)
        port = result_of(self.learner.call("free_port"), self.timeout_s)
        return replace(task, session=uuid.uuid4().hex, ranks=ranks, port=port)

    def _up(self, learner: Actor) -> ProcessLocation:
        """Ray may be starting it again, or waiting for a node that has room."""
        limit = max(self.timeout_s, START_S)
        deadline = time.monotonic() + limit
        while True:
            try:
                at: ProcessLocation = result_of(learner.call("where"), limit)
            except (ActorDied, ray_client.ActorTimeout) as error:
                if time.monotonic() > deadline or isinstance(error, ray_client.ActorTimeout):
                    raise ClusterError(
                        "--ray",
                        f"the driver has waited {limit:g} s for {learner.name} to start",
                        because=str(error)[:200]
                        or f"its process has not come up; {ray_client.resources_text(ray_client.available())} is free",
                        fix="`ray status` shows the nodes; when there is one again: oncurve train --resume RUN --ray auto",
                    ) from error
                time.sleep(0.5)
            else:
                return at

    def _hand_on(self, news: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        for name, given in news:
            self._tell(name, given)
            self.steps += name == "on_step"

    def _tell(self, name: str, given: tuple[Any, ...]) -> None:
        for listener in self.listeners:
            getattr(listener, name)(*given)

    def _given_up(self, run: RunFolder, deaths: int, error: Exception) -> ClusterError:
        return ClusterError(
            run.name,
            f"the learner died {deaths} times without a step between",
            because=str(error)[:300],
            fix=f"look at its node's memory and Ray's logs (/tmp/ray/session_latest/logs), then --resume {run.path}",
        )

    def _stop(self, number: int) -> None:
        """The learner finishes its step and saves."""
        self.stop = number
        self._tell("on_event", ("signal", STOPPING))


def error_of(data: Mapping[str, Any], run: RunFolder, minutes: float | None) -> OncurveError:
    """What ended the learner, as the error that it was."""
    if data["kind"] == "TimeUp" and minutes is not None:
        return running.TimeUp(run, minutes)
    return error_from_json(dict(data))
