"""The handle on a vLLM process: start it, send and receive messages within a time limit, and end it.

The limit counts from the last message; a process that dies is noticed within a second. Nothing that happens there can hang or
crash the run: it gets a `VllmProcessLost` with the reason, and decides.
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
CHECK_EVERY_S = 0.5
"""Seconds between two checks that the process is alive."""
EXIT_S = 1.0
"""Seconds that it has to exit by itself; it has nothing to save."""


class VllmProcessLost(Exception):
    """The process died, failed or stopped sending messages. ``log`` is what it printed."""

    def __init__(self, what: str, log: Path) -> None:
        super().__init__(what)
        self.log = log


class VllmProcess:
    """A running `oncurve.engines.vllm.worker`. Its output goes to ``log``, which is kept only if the process is lost."""

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
        """Wait for the next message."""
        since = time.monotonic()
        while not self._can_read():
            if time.monotonic() - since > self.limit_s:
                raise self._lost(f"has sent nothing for {self.limit_s:g} s while {doing}")
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost(f"died while {doing}") from None
        if isinstance(message, Failed):
            raise self._lost(f"failed while {doing}: {message.kind}: {message.message}")
        return message

    def _can_read(self) -> bool:
        """Whether there is a message, or the end of the pipe."""
        try:
            return self.connection.poll(CHECK_EVERY_S)
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
        detail = f" (signal {-code}){_last_line(self.log)}" if what.startswith("died") and code and code < 0 else ""
        return VllmProcessLost(f"the vLLM process {self.pid} {what}{detail}", self.log)


def environment(device: torch.device, tensor: int = 1) -> Mapping[str, str]:
    """This process's environment, with vLLM's settings and without variables meant only for this process."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN and name not in ALLOCATOR and not name.startswith("TORCHELASTIC_")
    }
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # On a CPU vLLM would bind its threads to cores that the learner also uses.
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    env.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // tensor)))
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        devices = env.get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(device_name(index + part, devices) for part in range(tensor))
    return env


def device_name(index: int, devices: str | None) -> str:
    """How another process names this process's GPU number ``index``, by this process's CUDA_VISIBLE_DEVICES."""
    names = [name.strip() for name in devices.split(",")] if devices else []
    return names[index] if index < len(names) else str(index)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"; its last line: {lines[-1].strip()[:300]}" if lines else ""


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Close the pipe, upon which the process exits; kill it if it does not."""
    connection.close()
    try:
        process.wait(EXIT_S if process.poll() is None else 0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
