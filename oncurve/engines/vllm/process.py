"""The handle on a vLLM process: start it, ask it, hear what it says in time, and end it.

Every answer has a time limit, counted from the last sign of life; a process that dies is noticed within a second. Nothing that
happens there can hang or bring down the run: it gets `Lost`, with the reason, and decides.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from oncurve.engines.vllm.messages import Failed

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LOOK_EVERY = 0.5
"""Seconds between two looks at whether the process still lives."""
CLOSING = 1.0
"""Seconds that it is given to leave by itself: it has nothing to save."""


class VllmProcessLost(Exception):
    """The process died, failed or fell silent. ``log`` is what it printed."""

    def __init__(self, what: str, log: Path) -> None:
        super().__init__(what)
        self.log = log


class VllmProcess:
    """A running `oncurve.engines.vllm.worker`. What it prints goes to ``log``, which stays only where it was lost."""

    def __init__(self, limit_s: float, device: torch.device, tensor: int = 1) -> None:
        self.limit_s = limit_s
        handle, name = tempfile.mkstemp(prefix="oncurve-vllm-", suffix=".log")
        self.log = Path(name)
        ours, theirs = socket.socketpair()
        with theirs, os.fdopen(handle, "wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "oncurve.engines.vllm.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                env=environment(device, tensor),
                start_new_session=True,
            )  # fmt: skip
        self.connection, self.is_lost = Connection(ours.detach()), False
        self._end = weakref.finalize(self, _end, self.process, self.connection)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._lost("died") from None

    def receive(self, doing: str) -> object:
        """The next message."""
        since = time.monotonic()
        while not self._is_there():
            if time.monotonic() - since > self.limit_s:
                raise self._lost(f"has said nothing for {self.limit_s:g} s while {doing}")
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost(f"died while {doing}") from None
        if isinstance(message, Failed):
            raise self._lost(f"failed while {doing}: {message.kind}: {message.message}")
        return message

    def _is_there(self) -> bool:
        """Whether there is something to read: a message, or the end."""
        try:
            return self.connection.poll(LOOK_EVERY)
        except OSError:
            return True

    def close(self) -> None:
        self._end()
        if not self.is_lost:
            self.log.unlink(missing_ok=True)

    def _lost(self, what: str) -> VllmProcessLost:
        self.is_lost = True
        self._end()
        code = self.process.returncode
        how = f" (signal {-code}){_last_words(self.log)}" if what.startswith("died") and code and code < 0 else ""
        return VllmProcessLost(f"the vLLM process {self.pid} {what}{how}", self.log)


def environment(device: torch.device, tensor: int = 1) -> Mapping[str, str]:
    """That of this process, with what vLLM must see and without what is meant for this process alone."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN and name not in ALLOCATOR and not name.startswith("TORCHELASTIC_")
    }
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # Plugins and threads: on a CPU vLLM would tie its threads to cores that the learner uses too.
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    env.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // tensor)))
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        given = env.get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible(index + part, given) for part in range(tensor))
    return env


def visible(index: int, given: str | None) -> str:
    """The name by which another process finds this process's GPU number ``index``."""
    names = [name.strip() for name in given.split(",")] if given else []
    return names[index] if index < len(names) else str(index)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"; its last words: {lines[-1].strip()[:300]}" if lines else ""


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Closing the pipe is the word to leave; one that does not is killed."""
    connection.close()
    try:
        process.wait(CLOSING if process.poll() is None else 0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
