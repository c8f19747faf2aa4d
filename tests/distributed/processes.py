"""Ranks as real processes that talk by gloo: each is forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from oncurve.distributed.rendezvous import join
from oncurve.distributed.world import World
from oncurve.recipe.schema.recipe import Recipe
from tests.training.builders import recipe as small

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.distributed.stage_cases", "torch.distributed"])
PATIENCE = 120


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """As torchrun would set it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _rank(recipe: Recipe, environ: dict[str, str], report: Connection, work: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        world = join(recipe, lambda error: report.send(("spoke", str(error))))
        found = work(world, *arguments)
        world.close()
        report.send(("done", found))
    except BaseException:
        report.send(("raised", traceback.format_exc()))
        raise


def in_ranks(size: int, work: Callable[..., Any], *arguments: Any, recipe: Recipe | None = None) -> list[Any]:
    """What ``work(world, …)`` returns on each of so many ranks; on one, in this process and without any torch.distributed."""
    if size == 1:
        return [work(World(), *arguments)]
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    asked = recipe or small(f"scale.ranks={size}", "grpo.prompts_per_step=8", "scale.timeout_s=60.0")
    started = []
    for rank in range(size):
        mine, theirs = SERVER.Pipe(duplex=False)
        child = SERVER.Process(target=_rank, args=(asked, environment(rank, size, store.port), theirs, work, arguments))
        child.start()
        theirs.close()
        started.append((child, mine))
    found = [mine.recv() if mine.poll(PATIENCE) else ("silent", None) for _, mine in started]
    for child, _ in started:
        child.join(20)
        if child.is_alive():
            child.kill()
    for how, what in found:
        assert how == "done", f"{how}: {what}"
    return [what for _, what in found]
