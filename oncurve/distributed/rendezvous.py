"""How a process becomes a rank: it finds the others by the environment that torchrun, Slurm or `oncurve train` itself set up,
and they make sure that they run the same code on the same recipe. A process that stands alone imports nothing for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
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
    from torch._C._distributed_c10d import Store

    from oncurve.distributed.heartbeat import Speak

PACKAGE = Path(__file__).parents[1]


def world_size() -> int:
    """Ranks that this process was started among; 1 where nobody said so."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def is_worker_rank() -> bool:
    """Whether another process speaks for this one."""
    return this_rank() > 0


def join(recipe: Recipe, speak: Speak) -> World:
    """The world that this process was started in, once all of its ranks are there and found alike."""
    global _joined
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
    rank, local = this_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    timeout = timedelta(seconds=recipe.scale.timeout_s)
    store = _store(timeout)
    _join_ranks = True
    _roll_call(store, rank, size, recipe)
    backend = _backend(recipe, local)
    own: Store = store.clone()  # type: ignore[attr-defined]
    heart = Heartbeat(own, rank, size, recipe.scale.timeout_s, speak)
    heart.start()
    # The heart ends what takes too long, and says why; torch's own limit comes after it.
    late = timeout + timedelta(seconds=60)
    dist.init_process_group(backend, store=PrefixStore("ranks", store), rank=rank, world_size=size, timeout=late)
    scale = recipe.scale
    return ProcessGroupWorld(
        store, rank, size, local, heart, scale.shard, scale.tensor, in_step=scale.tensor > 1 and not scale.gather
    )


@contextmanager
def joined_ranks(recipe: Recipe, speak: Speak) -> Iterator[World]:
    """The world that this process belongs to, left in good order whatever happens within."""
    world = join(recipe, speak)
    try:
        yield world
    except BaseException as error:
        world.close(error)
        raise
    world.close()


def with_ranks(recipe: Recipe) -> Recipe:
    """A recipe that leaves the number of ranks open, for as many as were started."""
    if recipe.scale.ranks > 1 or world_size() == 1:
        return recipe
    return recipe.model_copy(update={"scale": recipe.scale.model_copy(update={"ranks": world_size()})})


_join_ranks = False


def report_to_rank_zero(error: OncurveError) -> None:
    """What a rank met before it could join, such as a recipe that its machine does not have: the first rank tells it. Where the
    first has met the same, it has told it already, and may be gone."""
    if not _join_ranks:
        with suppress(OncurveError, RuntimeError):
            said = {"host": platform.node(), "failed": error_to_json(error, f"rank {this_rank()}")}
            _store(timedelta(seconds=5)).set(f"here/{this_rank()}", json.dumps(said))


def _store(timeout: timedelta) -> Store:
    from torch.distributed import DistNetworkError
    from torch.distributed.rendezvous import rendezvous

    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store: Store = next(iter(rendezvous("env://", timeout=timeout)))[0]
        return store
    except DistNetworkError as error:
        said = str(error).partition("\n")[0]
        if "EADDRINUSE" in said:
            raise port_taken(os.environ.get("MASTER_PORT", "?")) from error
        raise ScaleError(
            where, "the first rank does not answer there", because=said[:200], fix="check MASTER_ADDR and MASTER_PORT"
        ) from error
    except ValueError as error:
        raise ScaleError(
            "environment", "incomplete", because=str(error)[:200], fix="start ranks by oncurve train --gpus N, or by torchrun"
        ) from error


def port_taken(port: str) -> ScaleError:
    return ScaleError(
        f"port {port}",
        "already taken",
        because="another program listens there, perhaps ranks of another run",
        fix="set MASTER_PORT to a free one (torchrun: --master-port), or leave it out: then one is found",
    )


def signature(recipe: Recipe) -> dict[str, str]:
    """What must be the same on every rank."""
    import torch

    code = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".c")):
        code.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        "recipe": hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()[:16],
        "Oncurve's code": code.hexdigest()[:16],
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def _roll_call(store: Store, rank: int, size: int, recipe: Recipe) -> None:
    """Every rank says what it is; the first compares, and all go on or none."""
    from torch.distributed import DistStoreError

    mine = {"host": platform.node(), "is": signature(recipe)}
    store.set(f"here/{rank}", json.dumps(mine))
    if rank:
        store.wait(["go"])
        if store.get("go") != b"yes":
            sys.exit(2)
        return
    try:
        try:
            store.wait([f"here/{other}" for other in range(size)])
        except DistStoreError as error:
            missing = [other for other in range(size) if not store.check([f"here/{other}"])]
            raise ScaleError(
                f"rank {', '.join(map(str, missing))} of {size}",
                f"not there after {recipe.scale.timeout_s:g} s",
                because="it has not been started, or can't reach this machine",
                fix="look at that process; raise scale.timeout_s where machines start slowly",
            ) from error
        compare([json.loads(store.get(f"here/{other}")) for other in range(size)])
    except BaseException:
        store.set("go", "no")
        raise
    store.set("go", "yes")


def compare(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises what a rank met, or how one differs from the first."""
    for rank, one in enumerate(ranks):
        if "failed" in one:
            error = error_from_json(one["failed"])
            where = f"rank {rank} on {one['host']}: {error.where}"
            raise type(error)(where, error.what, because=error.because, fix=error.fix)
        for what, value in one["is"].items():
            if value != ranks[0]["is"][what]:
                raise ScaleError(
                    f"rank {rank} on {one['host']}",
                    f"has another {what} than rank 0",
                    because=f"it has {value}, and rank 0 on {ranks[0]['host']} has {ranks[0]['is'][what]}; ranks that differ "
                    "would train a model that belongs to none of them",
                    fix="install the same version everywhere, and start every rank with the same recipe and --set",
                )


def _backend(recipe: Recipe, local: int) -> str:
    import torch

    if recipe.model.device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    if torch.cuda.device_count() < local:
        raise too_few_gpus(local, torch.cuda.device_count())
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return "cpu:gloo,cuda:nccl"


def too_few_gpus(asked: int, there: int) -> ScaleError:
    return ScaleError(
        f"{asked} ranks",
        f"this machine has {there} GPU{'' if there == 1 else 's'}",
        because="every rank has one of its own",
        fix=f"use --gpus {there} or fewer" if there else "on a CPU use --set scale.ranks=N in place of --gpus",
    )
