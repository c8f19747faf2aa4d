"""`oncurve train --gpus 8`: starts the ranks of one machine, waits for them, and leaves no process behind.

Each rank runs the same command again, with the environment variables that torchrun would set. The launcher hosts the store in
which they meet, so the store survives the death of a rank.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from oncurve.distributed.heartbeat import LAUNCHER
from oncurve.distributed.rendezvous import loopback_store, too_few_gpus_error
from oncurve.distributed.signals import signal_handlers
from oncurve.recipe.schema.recipe import Recipe

GRACE_S = 5.0
"""How long ranks may take to end by themselves after one of them has failed."""


def check_gpus(recipe: Recipe, gpus: int | None) -> None:
    """Refuses more ranks than GPUs, if --gpus was given or the machine has GPUs and the recipe may use them."""
    import torch

    available = torch.cuda.device_count()
    if available and recipe.scale.backend == "gloo":
        return
    if available < recipe.scale.ranks and (gpus is not None or (available and recipe.model.device != "cpu")):
        raise too_few_gpus_error(recipe.scale.ranks, available)


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Runs `oncurve ARGUMENTS` on ``ranks`` processes. Returns the exit code of rank 0, or 2 if it was killed."""
    from oncurve.distributed.signed_store import SECRET

    store = loopback_store(os.environ.get("MASTER_PORT", "0"))
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        LAUNCHER: str(os.getpid()),
        SECRET: secrets.token_hex(16),
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here: the machine's host name need not resolve
    command = [sys.executable, "-m", "oncurve", *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _forward_signals(processes):
            for rank in range(ranks):
                # Only rank 0 reads the terminal and prints to it. Tracebacks of any rank go to standard error.
                stream = None if rank == 0 else subprocess.DEVNULL
                of_rank = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=of_rank, stdin=stream, stdout=stream))
            return _wait(processes)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits until all ranks have ended, or `GRACE_S` after one has failed."""
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.returncode for process in processes):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    code = processes[0].returncode
    if code is not None and code >= 0:
        return int(code)
    if code is not None:
        print(
            f"rank 0 was killed by signal {-code}; resume from its last checkpoint: oncurve train --resume RUN",
            file=sys.stderr,
        )
    return 2


@contextmanager
def _forward_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Forwards SIGTERM to rank 0, which decides when the run stops. Ctrl-C is not forwarded, because the terminal sends it to
    every rank. This process itself only waits."""

    def forward(number: int) -> None:
        if number != signal.SIGINT and processes:
            processes[0].send_signal(number)

    with signal_handlers(forward):
        yield
