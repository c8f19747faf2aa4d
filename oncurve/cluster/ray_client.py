"""The only module that imports Ray: finding a cluster, its nodes, placing actors, and calls with time limits.

What Ray raises becomes one of two exceptions: `ActorDied` if the process behind a call has died, `ActorTimeout` if it has not
answered in time.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oncurve.errors import ClusterError, MissingPackage

MIN_VERSION = (2, 50)
"""The oldest Ray with all functions that are used here."""

try:
    import ray

    if tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2]) < MIN_VERSION:
        raise MissingPackage(
            "--ray",
            f"Ray {ray.__version__} is too old",
            because=f"Oncurve uses functions of Ray {MIN_VERSION[0]}.{MIN_VERSION[1]}",
            fix=f"on every node: pip install 'ray>={MIN_VERSION[0]}.{MIN_VERSION[1]}'",
        )
    from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RaySystemError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingPackage(
        "--ray",
        "Ray is not installed",
        because="Ray starts and monitors the processes on a cluster",
        fix="pip install 'oncurve[ray]'",
    ) from error

HEALTH_TIMEOUT_S = 8.0
"""How long a cluster may take to answer Ray's health check."""
PLACEMENT_TIMEOUT_S = 30.0
"""How long a placement group may wait for resources that other jobs hold."""
START_S = 300.0
"""The minimum time limit for an actor to start and load its model, whatever ``scale.timeout_s`` says."""
MAX_CONCURRENT_CALLS = 8
"""Calls that an actor runs at once: a long one, and short ones that poll it."""

Ref = Any
"""Ray's reference to the result of a call, which may not be there yet."""


class ActorDied(Exception):
    """The process behind a call has died, or can't be reached."""


class ActorTimeout(Exception):
    """An actor did not answer in time."""


def connect(address: str) -> None:
    """Connects to the cluster at HOST:PORT, or with `auto` to the one that this machine belongs to."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, configure_logging=False)
    except Exception as error:  # Ray raises many kinds of errors if it finds no node or session
        raise ClusterError(
            f"--ray {address}",
            "the cluster answers, but this machine can't join it",
            because=str(error).strip().partition("\n")[0][:300] or type(error).__name__,
            fix="run oncurve on a node of the cluster (ssh to it, or `ray job submit -- oncurve train …`)",
        ) from error


def check_reachable(address: str) -> None:
    """Checks that a cluster answers, in a separate process: a wrong address can block Ray for minutes."""
    if "://" in address:
        raise ClusterError(
            f"--ray {address}",
            "this is the address of a Ray client or dashboard",
            because="the process that places and monitors actors must run on a node of the cluster",
            fix="on a node of the cluster use --ray auto, or HOST:PORT as `ray start` printed it (6379 by default)",
        )
    problem = _health(()) if address == "auto" else _connection_problem(address) or _health(("--address", address))
    if problem:
        raise ClusterError(
            f"--ray {address}",
            "no Ray cluster answers",
            because=problem,
            fix="start one: `ray start --head` here, `ray start --address=HOST:6379` on the others; `ray status` shows it",
        )


def _connection_problem(address: str) -> str:
    """Empty if something listens at the address, else why not."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3.0).close()
    except ValueError:
        return "an address is HOST:PORT, as `ray start` printed it"
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


HEALTH_CHECK = "import sys; from ray.scripts.scripts import healthcheck; print(flush=True); healthcheck.main(sys.argv[1:])"


def _health(arguments: Sequence[str]) -> str:
    """Empty if a cluster answers, else why none does. The time limit starts once Ray is imported."""
    command = [sys.executable, "-c", HEALTH_CHECK, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        output, errors = process.communicate(timeout=HEALTH_TIMEOUT_S)
        return "" if process.returncode == 0 else _last_line(errors or output)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"no answer within {HEALTH_TIMEOUT_S:g} s"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "Ray gave no reason"


def disconnect() -> None:
    ray.shutdown()


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster and its total resources."""

    id: str
    address: str
    resources: dict[str, float]

    @property
    def label(self) -> str:
        return f"{self.id[:6]} ({self.address})"


def nodes() -> list[Node]:
    alive = [n for n in ray.nodes() if n["Alive"]]
    return [Node(n["NodeID"], n["NodeManagerAddress"], dict(n["Resources"])) for n in alive]


def run_on_nodes(function: Callable[[], Any], timeout_s: float) -> list[tuple[Node, Any]]:
    """Runs a function on each node: (node, its result, or an exception if it could not run there)."""
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = [
        (node, remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote())
        for node in nodes()
    ]
    ray.wait([ref for _, ref in calls], num_returns=len(calls), timeout=timeout_s)
    return [(node, _result_or_error(ref)) for node, ref in calls]


def _result_or_error(ref: Ref) -> Any:
    try:
        return ray.get(ref, timeout=0)
    except Exception as error:  # a node without our code or a working Python: errors of many kinds
        return error


def available_resources() -> dict[str, float]:
    """What no job holds at the moment."""
    free = ray.available_resources()
    return {key: free.get(key, 0.0) for key in ("CPU", "GPU")}


class PlacementGroup:
    """Resources reserved for some actors, one bundle for each."""

    def __init__(self, actors: str, bundles: Sequence[dict[str, float]], strategy: str) -> None:
        self.actors, self.bundles = actors, list(bundles)
        self.group = placement_group(self.bundles, strategy=strategy)

    def wait(self) -> None:
        if self.group.wait(PLACEMENT_TIMEOUT_S):
            return
        raise ClusterError(
            f"--ray: {self.actors}",
            f"no room for {resources_text(_sum(self.bundles))}",
            because=f"only {resources_text(available_resources())} of the cluster is free",
            fix="wait for the other jobs (`ray status` lists what they hold), or ask for less with --set scale.samplers=…",
        )

    def remove(self) -> None:
        remove_placement_group(self.group)


def _sum(bundles: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: sum(b.get(key, 0.0) for b in bundles) for key in bundles[0]}


def resources_text(resources: dict[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in resources.items() if value or key == "CPU")


@dataclass(frozen=True, slots=True)
class Actor:
    """A handle to an actor. Ray restarts the actor under the same name if its process or node dies."""

    name: str
    handle: Any

    def call(self, method: str, *arguments: Any) -> Ref:
        return getattr(self.handle, method).remote(*arguments)

    def kill(self, restart: bool) -> None:
        ray.kill(self.handle, no_restart=not restart)


def start_actor(
    name: str, actor_type: type[Any], resources: dict[str, float], group: PlacementGroup | None = None, bundle: int = 0
) -> Actor:
    """Starts ``actor_type(name)`` as an actor, in a bundle of a placement group or on any node that has the resources."""
    if group is None:
        strategy: Any = "SPREAD"
    else:
        strategy = PlacementGroupSchedulingStrategy(group.group, placement_group_bundle_index=bundle)
    options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "scheduling_strategy": strategy}
    remote = ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=MAX_CONCURRENT_CALLS, **options)(actor_type)
    return Actor(name, remote.remote(name))


def put(value: Any) -> Ref:
    """Puts a value into the object store, once for all readers; numpy arrays are read there without a copy."""
    return ray.put(value)


def get_result(ref: Ref, timeout_s: float) -> Any:
    """The result of a call. Raises `ActorDied` or `ActorTimeout`; exceptions of the actor's own code pass through."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise ActorTimeout from error
    except (RayActorError, ObjectLostError, RaySystemError) as error:
        raise ActorDied(str(error).strip().partition("\n")[0]) from error


def wait_any(refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
    """All finished calls, as soon as there is one; empty after the time limit."""
    if not refs:
        time.sleep(0.1)
        return []
    ray.wait(list(refs), num_returns=1, timeout=timeout_s)
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return list(done)


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """A process, and the node it runs on."""

    node: str
    address: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"node {self.node[:6]} at {self.address}, process {self.pid}"


def this_process() -> ProcessLocation:
    context = ray.get_runtime_context()
    return ProcessLocation(context.get_node_id(), ray.util.get_node_ip_address(), socket.gethostname(), os.getpid())
