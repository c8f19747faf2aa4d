"""`oncurve train --gpus 8`: starts the ranks of one machine, waits for them, and leaves none behind.

Ranks are this same command again, each with a number in its environment as torchrun would set it. This process holds the store
in which they meet, so that no rank's death takes it away.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from oncurve.distributed.heartbeat import LAUNCHER
from oncurve.distributed.rendezvous import port_taken, too_few_gpus
from oncurve.distributed.signals import signal_handlers
from oncurve.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

GRACE_S = 5.0
"""What ranks get to end by themselves once one of them has."""


def check_gpus(recipe: Recipe, gpus: int | None) -> None:
    """A GPU for each rank, where the recipe wants GPUs or the command line named a number of them."""
    import torch

    there = torch.cuda.device_count()
    if there < recipe.scale.ranks and (gpus is not None or (there and recipe.model.device != "cpu")):
        raise too_few_gpus(recipe.scale.ranks, there)


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Runs `oncurve ARGUMENTS` as so many ranks, and returns the first one's exit code, or that of a rank that died."""
    store = _store()
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        LAUNCHER: str(os.getpid()),
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are here: the machine's own name need not resolve
    command = [sys.executable, "-m", "oncurve", *arguments]
    started: list[subprocess.Popen[bytes]] = []
    try:
        with _signals_go_to(started):
            for rank in range(ranks):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                # Only the first rank has anything to show; a traceback of any is worth seeing.
                out = None if rank == 0 else subprocess.DEVNULL
                started.append(subprocess.Popen(command, env=own, stdin=None if rank == 0 else subprocess.DEVNULL, stdout=out))
            return _wait(started)
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _store() -> TCPStore:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    port = os.environ.get("MASTER_PORT", "0")
    try:
        return TCPStore("127.0.0.1", int(port), None, True, wait_for_workers=False)
    except DistNetworkError as error:
        raise port_taken(port) from error


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended; or, where one ended badly, until the others have had time to say so."""
    deadline = None
    while any(process.poll() is None for process in started):
        if deadline is None and any(process.returncode for process in started):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    first = started[0].returncode
    if first is not None and first >= 0:
        return int(first)
    if first is not None:
        print(
            f"rank 0 was ended by signal {-first}; go on from its last checkpoint: oncurve train --resume RUN", file=sys.stderr
        )
    return 2


@contextmanager
def _signals_go_to(started: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Ctrl-C reaches the ranks by themselves, and a SIGTERM is handed to the first, which decides: this process only waits."""

    def hand_on(number: int) -> None:
        if number != signal.SIGINT and started:
            started[0].send_signal(number)

    with signal_handlers(hand_on):
        yield
