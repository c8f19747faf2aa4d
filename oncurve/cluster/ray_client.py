"""The one door to Ray: finding a cluster, looking at its nodes, placing actors on them, and calls that end in time.

No other file imports Ray. What it raises becomes one of two things here: `Gone`, the process behind a call has died, or
`Silent`, it has not answered in time.
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

LEAST = (2, 50)
"""The oldest Ray that has all that is called here."""

try:
    import ray

    if tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2]) < LEAST:
        raise MissingPackage(
            "--ray",
            f"Ray {ray.__version__} is too old",
            because=f"what is called here came with Ray {LEAST[0]}.{LEAST[1]}",
            fix=f"on every node: pip install 'ray>={LEAST[0]}.{LEAST[1]}'",
        )
    from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RaySystemError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingPackage(
        "--ray",
        "Ray is not installed",
        because="it starts and watches the processes on a cluster",
        fix="pip install 'oncurve[ray]'",
    ) from error

PATIENCE_S = 8.0
"""How long a cluster may take to say that it is there."""
HELD_S = 30.0
"""How long a placement group may wait for what others hold."""
START_S = 300.0
"""How long an actor may take at least to start and to load its model, however short the limit of a call is."""
CALLS = 8
"""Calls that an actor takes at once: a long one, and short ones that ask how it is."""

Ref = Any
"""What a call gives: Ray's reference to an answer that may not be there yet."""


class ActorDied(Exception):
    """The process behind a call has died, or can't be reached."""


class ActorTimeout(Exception):
    """No answer came in time."""


def connect(address: str) -> None:
    """Joins the cluster at HOST:PORT, or with `auto` the one that this machine belongs to."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, configure_logging=False)
    except Exception as error:  # Ray raises errors of many kinds where a node or a session can't be found
        raise ClusterError(
            f"--ray {address}",
            "the cluster answers, and this machine can't join it",
            because=str(error).strip().partition("\n")[0][:300] or type(error).__name__,
            fix="run oncurve on a node of the cluster (ssh to it, or `ray job submit -- oncurve train …`)",
        ) from error


def check_answers(address: str) -> None:
    """Whether there is a cluster. Asked in a process of its own: a wrong address can hold Ray up for minutes."""
    if "://" in address:
        raise ClusterError(
            f"--ray {address}",
            "an address of a Ray client or dashboard",
            because="actors are placed and watched by a process that belongs to the cluster",
            fix="on a node of the cluster use --ray auto, or HOST:PORT as `ray start` printed it (6379 by default)",
        )
    said = _health(()) if address == "auto" else _listens(address) or _health(("--address", address))
    if said:
        raise ClusterError(
            f"--ray {address}",
            "no Ray cluster answers",
            because=said,
            fix="start one: `ray start --head` here, `ray start --address=HOST:6379` on the others; `ray status` shows it",
        )


def _listens(address: str) -> str:
    """Nothing where something listens there, else why that can't be."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3.0).close()
    except ValueError:
        return "an address is HOST:PORT, as `ray start` printed it"
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


ASKING = "import sys; from ray.scripts.scripts import healthcheck; print(flush=True); healthcheck.main(sys.argv[1:])"


def _health(where: Sequence[str]) -> str:
    """Nothing where a cluster answers, else why none does. The time counts from when Ray is loaded and asks."""
    asking = subprocess.Popen([sys.executable, "-c", ASKING, *where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    asking.stdout.readline()
    try:
        wrote, errors = asking.communicate(timeout=PATIENCE_S)
        return "" if asking.returncode == 0 else _last_line(errors or wrote)
    except subprocess.TimeoutExpired:
        asking.kill()
        asking.communicate()
        return f"no answer within {PATIENCE_S:g} s"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it gave no reason"


def leave() -> None:
    ray.shutdown()


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, and what it has in all."""

    id: str
    address: str
    resources: dict[str, float]

    @property
    def label(self) -> str:
        return f"{self.id[:6]} ({self.address})"


def nodes() -> list[Node]:
    found = [n for n in ray.nodes() if n["Alive"]]
    return [Node(n["NodeID"], n["NodeManagerAddress"], dict(n["Resources"])) for n in found]


def ask_nodes(question: Callable[..., Any], *given: Any, timeout_s: float) -> list[tuple[Node, Any]]:
    """What a function says on each node; an exception where it could not be run there. It is sent whole, code and all."""
    remote = ray.remote(num_cpus=0, max_retries=0)(question)
    asked = [
        (node, remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(*given))
        for node in nodes()
    ]
    ray.wait([ref for _, ref in asked], num_returns=len(asked), timeout=timeout_s)
    return [(node, _ready_result(ref)) for node, ref in asked]


def _ready_result(ref: Ref) -> Any:
    try:
        return ray.get(ref, timeout=0)
    except Exception as error:  # a node without our code, or without a working Python: each has an error of its own
        return error


def available() -> dict[str, float]:
    """What nobody holds now."""
    free = ray.available_resources()
    return {key: free.get(key, 0.0) for key in ("CPU", "GPU")}


class PlacementGroup:
    """A placement group: room for some actors, kept for them."""

    def __init__(self, what: str, bundles: Sequence[dict[str, float]], strategy: str) -> None:
        self.what, self.bundles = what, list(bundles)
        self.group = placement_group(self.bundles, strategy=strategy)

    def wait(self) -> None:
        if self.group.wait(HELD_S):
            return
        raise ClusterError(
            f"--ray: {self.what}",
            f"no room for {resources_text(_sum(self.bundles))}",
            because=f"of what the cluster has, {resources_text(available())} is free",
            fix="wait for the other jobs (`ray status` lists what they hold), or ask for less with --set scale.samplers=…",
        )

    def free(self) -> None:
        remove_placement_group(self.group)


def _sum(bundles: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: sum(b.get(key, 0.0) for b in bundles) for key in bundles[0]}


def resources_text(resources: dict[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in resources.items() if value or key == "CPU")


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor as the others know it. Ray starts it again, by the same name, where its process or node dies."""

    name: str
    handle: Any

    def call(self, method: str, *given: Any) -> Ref:
        return getattr(self.handle, method).remote(*given)

    def kill(self, for_good: bool) -> None:
        ray.kill(self.handle, no_restart=for_good)


def start_actor(
    name: str, kind: type[Any], needs: dict[str, float], places: PlacementGroup | None = None, place: int = 0
) -> Actor:
    """An actor of the given class, made with its name; in a place that was kept for it, or anywhere that has what it needs."""
    if places is None:
        strategy: Any = "SPREAD"
    else:
        strategy = PlacementGroupSchedulingStrategy(places.group, placement_group_bundle_index=place)
    options = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0), "scheduling_strategy": strategy}
    made = ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=CALLS, **options)(kind)
    return Actor(name, made.remote(name))


def put(thing: Any) -> Ref:
    """Into the object store, once for all who read it; numpy arrays are read there in place."""
    return ray.put(thing)


def result_of(ref: Ref, timeout_s: float) -> Any:
    """What a call gave. Raises `Gone` or `Silent`; what the actor's own code raised comes as it is."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise ActorTimeout from error
    except (RayActorError, ObjectLostError, RaySystemError) as error:
        raise ActorDied(str(error).strip().partition("\n")[0]) from error


def first_ready(refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
    """Those that have been answered, as soon as one has; none where the time is over first."""
    if not refs:
        time.sleep(0.1)
        return []
    ray.wait(list(refs), num_returns=1, timeout=timeout_s)
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return list(done)


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """A process, and where it runs."""

    node: str
    address: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"node {self.node[:6]} at {self.address}, process {self.pid}"


def this_process() -> ProcessLocation:
    context = ray.get_runtime_context()
    return ProcessLocation(context.get_node_id(), ray.util.get_node_ip_address(), socket.gethostname(), os.getpid())
