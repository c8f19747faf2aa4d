"""How a process becomes a rank: it finds the others through the environment that torchrun, Slurm or `oncurve train` set up.

The ranks then check that they run the same code on the same recipe. A single process imports nothing for this.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import OncurveError, ScaleError, error_from_json, error_to_json
from oncurve.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from oncurve.distributed.heartbeat import PrintError
    from oncurve.distributed.signed_store import SignedStore

PACKAGE = Path(__file__).parents[1]


def world_size() -> int:
    """The number of ranks that this process was started among; 1 if it was started alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def is_worker_rank() -> bool:
    """Whether this is a rank other than 0, which prints nothing itself."""
    return this_rank() > 0


_has_checked_in = False
"""Whether this process takes part in the check-in, after which its errors reach rank 0 by the heartbeat."""


def join(recipe: Recipe, print_error: PrintError, *, has_own_gpu: bool = False) -> World:
    """The world that this process was started in, once all of its ranks are there and run the same code and recipe."""
    global _has_checked_in
    size = world_size()
    if size == 1:
        return SINGLE_PROCESS
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from oncurve.distributed.heartbeat import Heartbeat
    from oncurve.distributed.process_group import ProcessGroupWorld

    # The new names are not in every torch that we support, and FSDP2 itself calls the old ones.
    old = r".torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor). is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning)
    rank, local_size = this_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    timeout = timedelta(seconds=recipe.scale.timeout_s)
    store = _store(timeout)
    _has_checked_in = True
    _check_in(store, rank, size, recipe)
    backend = _backend(recipe, 1 if has_own_gpu else local_size)
    heartbeat = Heartbeat(store.clone(), rank, size, recipe.scale.timeout_s, print_error)
    heartbeat.start()
    # The heartbeat ends a collective that takes too long, with a message that names the late rank. torch's limit is a backstop.
    backstop = timeout + timedelta(seconds=60)
    dist.init_process_group(backend, store=PrefixStore("ranks", store.store), rank=rank, world_size=size, timeout=backstop)
    scale = recipe.scale
    lockstep = scale.tensor > 1 and not scale.gather
    return ProcessGroupWorld(store, rank, size, local_size, heartbeat, scale.shard, scale.tensor, samples_in_lockstep=lockstep)


@contextmanager
def joined_ranks(recipe: Recipe, print_error: PrintError, *, has_own_gpu: bool = False) -> Iterator[World]:
    """The world that this process belongs to. If the block raises an exception, the world is closed with that error.

    ``has_own_gpu``: the process sees no GPU of another rank, as Ray's actors do.
    """
    world = join(recipe, print_error, has_own_gpu=has_own_gpu)
    try:
        yield world
    except BaseException as error:
        world.close(error)
        raise
    world.close()


def with_ranks(recipe: Recipe) -> Recipe:
    """The recipe with ``scale.ranks`` set to the number of ranks that were started, unless it names a number itself."""
    if recipe.scale.ranks > 1 or world_size() == 1:
        return recipe
    return recipe.model_copy(update={"scale": recipe.scale.model_copy(update={"ranks": world_size()})})


def report_to_rank_zero(error: OncurveError) -> None:
    """If a rank fails before it can join (its machine lacks the recipe, for example), rank 0 gets the error and prints it.

    If rank 0 met the same error, it has printed it already and may be gone; then this does nothing.
    """
    if not _has_checked_in:
        with suppress(OncurveError, RuntimeError):
            entry = {"host": platform.node(), "failed": error_to_json(error, f"rank {this_rank()}")}
            _store(timedelta(seconds=5)).set(f"check-in/{this_rank()}", json.dumps(entry))


def _store(timeout: timedelta) -> SignedStore:
    from torch.distributed import DistNetworkError
    from torch.distributed.rendezvous import rendezvous

    from oncurve.distributed.signed_store import SignedStore

    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    is_host = this_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if is_host and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        return SignedStore.from_environment(loopback_store(os.environ.get("MASTER_PORT", "0"), timeout))
    try:
        return SignedStore.from_environment(next(iter(rendezvous("env://", timeout=timeout)))[0])
    except DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in reason:
            raise port_taken_error(os.environ.get("MASTER_PORT", "?")) from error
        raise ScaleError(
            address, "rank 0 does not answer there", because=reason[:200], fix="check MASTER_ADDR and MASTER_PORT"
        ) from error
    except ValueError as error:
        raise ScaleError(
            "environment",
            "incomplete",
            because=str(error)[:200],
            fix="start ranks with oncurve train --gpus N, or with torchrun",
        ) from error


def loopback_store(port: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Hosts a store that only this machine can reach: torch itself would listen on every address. Port 0: any free one."""
    from torch._C._distributed_c10d import TCPStore

    try:
        listening = socket.create_server(("127.0.0.1", int(port)), backlog=1024)
    except OSError as error:
        raise port_taken_error(port) from error
    number, descriptor = listening.getsockname()[1], listening.detach()
    return TCPStore("127.0.0.1", number, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def port_taken_error(port: str) -> ScaleError:
    return ScaleError(
        f"port {port}",
        "already taken",
        because="another program listens there, perhaps ranks of another run",
        fix="set MASTER_PORT to a free one (torchrun: --master-port), or unset it to have a free one chosen",
    )


def code_digest(package: Path) -> str:
    """A digest of all source files of a package. Self-contained: Ray nodes run its source text (`cluster.driver`)."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".c")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def signature(recipe: Recipe) -> dict[str, str]:
    """What must be equal on every rank."""
    import torch

    return {
        "recipe": hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()[:16],
        "Oncurve's code": code_digest(PACKAGE),
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def _check_in(store: SignedStore, rank: int, size: int, recipe: Recipe) -> None:
    """Every rank publishes its signature; rank 0 compares them, and all continue or all end."""
    from torch.distributed import DistStoreError

    entry = {"host": platform.node(), "signature": signature(recipe)}
    store.set(f"check-in/{rank}", json.dumps(entry))
    if rank:
        if store.get("check-in") != b"passed":
            sys.exit(2)
        return
    try:
        try:
            store.wait([f"check-in/{other}" for other in range(size)])
        except DistStoreError as error:
            missing = [other for other in range(size) if store.find(f"check-in/{other}") is None]
            raise ScaleError(
                f"rank {', '.join(map(str, missing))} of {size}",
                f"did not connect within {recipe.scale.timeout_s:g} s",
                because="the rank was not started, or can't reach this machine",
                fix="check that process; raise scale.timeout_s if machines start slowly",
            ) from error
        check_ranks_match([json.loads(store.get(f"check-in/{other}")) for other in range(size)])
    except BaseException:
        store.set("check-in", "failed")
        raise
    store.set("check-in", "passed")


def check_ranks_match(entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises the error that a rank reported, or an error about the first difference from rank 0. ``entries`` has one entry for
    each rank, in order."""
    for rank, entry in enumerate(entries):
        if "failed" in entry:
            error = error_from_json(entry["failed"])
            where = f"rank {rank} on {entry['host']}: {error.where}"
            raise type(error)(where, error.what, because=error.because, fix=error.fix)
        for name, value in entry["signature"].items():
            expected = entries[0]["signature"][name]
            if value != expected:
                raise ScaleError(
                    f"rank {rank} on {entry['host']}",
                    f"{name} differs from rank 0's",
                    because=f"it has {value}, and rank 0 on {entries[0]['host']} has {expected}; ranks that differ would "
                    "compute gradients of different models",
                    fix="install the same version everywhere, and start every rank with the same recipe and --set",
                )


def _backend(recipe: Recipe, ranks: int) -> str:
    """``ranks``: those that need a GPU of their own among the GPUs that this process sees."""
    import torch

    if recipe.model.device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if recipe.scale.backend == "gloo":
        torch.cuda.set_device(local_rank % gpus)
        return "gloo"
    if gpus < ranks:
        raise too_few_gpus_error(ranks, gpus)
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"


def too_few_gpus_error(ranks: int, gpus: int) -> ScaleError:
    return ScaleError(
        f"{ranks} ranks",
        f"this machine has {gpus} GPU{'' if gpus == 1 else 's'}",
        because="every rank needs its own GPU",
        fix=f"use --gpus {gpus} or fewer, or let ranks share a GPU: --set scale.ranks={ranks} --set scale.backend=gloo"
        if gpus
        else "on a CPU use --set scale.ranks=N instead of --gpus",
    )
