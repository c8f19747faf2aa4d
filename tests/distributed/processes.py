"""Ranks as real processes over gloo, forked from a server that has already imported everything."""

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
TIMEOUT_S = 600


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
        world = join(recipe, lambda error: report.send(("printed", str(error))))
        result = work(world, *arguments)
        world.close()
        report.send(("done", result))
    except BaseException:
        report.send(("raised", traceback.format_exc()))
        raise


def in_ranks(size: int, work: Callable[..., Any], *arguments: Any, recipe: Recipe | None = None) -> list[Any]:
    """The results of ``work(world, …)`` on ``size`` ranks; one rank runs in this process, without torch.distributed."""
    if size == 1:
        return [work(World(), *arguments)]
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    run = recipe or small(f"scale.ranks={size}", "grpo.prompts_per_step=8", "scale.timeout_s=300.0")
    started = []
    for rank in range(size):
        receiver, sender = SERVER.Pipe(duplex=False)
        child = SERVER.Process(target=_rank, args=(run, environment(rank, size, store.port), sender, work, arguments))
        child.start()
        sender.close()
        started.append((child, receiver))
    reports = [receiver.recv() if receiver.poll(TIMEOUT_S) else ("silent", None) for _, receiver in started]
    for child, _ in started:
        child.join(120)
        if child.is_alive():
            child.kill()
    for status, result in reports:
        assert status == "done", f"{status}: {result}"
    return [result for _, result in reports]
