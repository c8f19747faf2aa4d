"""Persistent worker processes with a hard time limit on every job.

A reward that may hang can't run in the trainer's process, since a thread can't be stopped. And some packages generate
different problems in every process unless Python's hash seed is set before it starts. Workers are plain child processes that
exchange JSON lines; `oncurve.workers.child` is their loop. One that hangs is killed and one that died is replaced. All are
waited for, so no zombie is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import oncurve

START_SECONDS = 120.0
"""How long a worker may take to start: its imports do not count as a job's time."""


class WorkerDiedError(RuntimeError):
    """A worker died in the middle of a job."""


class WorkerFailedError(RuntimeError):
    """A job raised in its worker; the message is that of the exception. ``place``: where, such as ` (rewards.py:4)`, if the
    worker names places."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class Worker:
    """One child process. Not thread-safe: `Workers` gives it to one thread at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = tuple(command), environment
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Sends a line and returns the answer. After a TimeoutError or WorkerDiedError the next job gets a new process."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._send(line)
            return self._read_line(seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the process and its group, and waits for it."""
        process, self._process, self._unread = self._process, None, b""
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent data can't be flushed any more
                    pipe.close()

    def _start(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
            bufsize=0,
        )
        self._read_line(START_SECONDS)

    def _send(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        view = memoryview(line + b"\n")
        try:
            while view:
                view = view[self._process.stdin.write(view) :]
        except BrokenPipeError:
            raise self._death_error(0.0) from None

    def _read_line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        parts = [self._unread]
        while b"\n" not in parts[-1]:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not poll.poll(remaining * 1000):
                raise TimeoutError(f"it took more than {seconds:g} s")
            parts.append(os.read(descriptor, 1 << 16))
            if not parts[-1]:
                raise self._death_error(seconds)
        line, _, self._unread = b"".join(parts).partition(b"\n")
        return line

    def _death_error(self, seconds: float) -> Exception:
        """Why a dead worker gave no answer. Its own timer may have ended it before ours."""
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGALRM:
            return TimeoutError(f"it took more than {seconds:g} s")
        return WorkerDiedError(f"the worker process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})")


class Workers:
    """Workers that run one command. They start with their first job, and are killed when this object or Python ends."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        environment: Mapping[str, str] | None = None,
        after_close: Callable[[], None] | None = None,
    ) -> None:
        """``after_close`` is called once the workers have been killed."""
        self.count = count
        self._all = [Worker(command, environment) for _ in range(count)]
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()  # the most recently used worker is the warmest
        for worker in self._all:
            self._free.put(worker)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close_all, self._all, after_close)

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [worker.pid for worker in self._all if worker.pid is not None]

    def ask(self, job: Any, seconds: float) -> Any:
        """A worker's answer. Raises TimeoutError, WorkerDiedError or WorkerFailedError if it gives none."""
        line = json.dumps({"seconds": seconds, "job": job}).encode()
        worker = self._free.get()
        try:
            reply = json.loads(worker.ask(line, seconds))
        finally:
            self._free.put(worker)
        if "error" in reply:
            raise WorkerFailedError(reply["error"], reply.get("place", ""))
        return reply["answer"]

    def ask_all(self, jobs: Sequence[Any], seconds: float) -> list[Any]:
        """The answers to many jobs, run on all workers at once; a job that fails has its exception as answer."""
        if len(jobs) == 1:
            return [self._answer_or_error(jobs[0], seconds)]
        return list(self._pool().map(lambda job: self._answer_or_error(job, seconds), jobs))

    def close(self) -> None:
        self._close()
        if self._threads is not None:
            self._threads.shutdown()

    def _answer_or_error(self, job: Any, seconds: float) -> Any:
        try:
            return self.ask(job, seconds)
        except (TimeoutError, WorkerDiedError, WorkerFailedError) as error:
            return error

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="oncurve-workers")
            return self._threads


def python_workers(module: str, count: int, *arguments: str) -> Workers:
    """Workers that run a module of the Oncurve that this process imported.

    Their hash seed is fixed: an answer must not depend on the order of a set of strings.
    """
    root = str(Path(oncurve.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
    return Workers([sys.executable, "-m", module, *arguments], count, environment)


def _close_all(workers: Sequence[Worker], after: Callable[[], None] | None) -> None:
    for worker in workers:
        worker.close()
    if after is not None:
        after()


def shared(start: Callable[..., Workers]) -> Callable[..., Workers]:
    """Decorator: calls with equal arguments share one set of workers."""
    started: dict[Any, Workers] = {}
    lock = threading.Lock()

    def get(*arguments: Any) -> Workers:
        with lock:
            if arguments not in started:
                started[arguments] = start(*arguments)
            return started[arguments]

    return get
