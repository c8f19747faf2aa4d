"""Persistent worker processes with a hard time limit on every job.

A reward that may hang can't run in the trainer's process: a thread can't be stopped. And some packages make other problems in
every process, unless Python's hash seed is set before it starts. Workers are plain child processes that
speak JSON lines (`worker_loop` is their inside). One that hangs is killed, one that died is replaced, and each is waited for:
no zombie is left.
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
"""What a worker may take to say that it is ready: its imports are not any job's time."""


class WorkerDiedError(RuntimeError):
    """A worker ended in the middle of a job."""


class WorkerFailedError(RuntimeError):
    """A job raised inside its worker; the message is the worker's."""


class Worker:
    """One child process. Not for two threads at once: `Workers` sees to that."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = tuple(command), environment
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Sends a line and waits for the answer's. After a TimeoutError or WorkerDiedError the next job gets a new process."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._send(line)
            return self._read_line(seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the process with its whole group, and waits for it."""
        process, self._process, self._rest = self._process, None, b""
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent can't be any more
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
            raise self._end(0.0) from None

    def _read_line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError(f"it took more than {seconds:g} s")
            parts.append(os.read(descriptor, 1 << 16))
            if not parts[-1]:
                raise self._end(seconds)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _end(self, seconds: float) -> Exception:
        """Why there is no answer. The worker's own clock is as good as ours."""
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGALRM:
            return TimeoutError(f"it took more than {seconds:g} s")
        return WorkerDiedError(f"the worker process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})")


class Workers:
    """A few workers of one kind; started when first asked, killed when this object goes or Python ends."""

    def __init__(self, command: Sequence[str], count: int, environment: Mapping[str, str] | None = None) -> None:
        self.count = count
        self._all = [Worker(command, environment) for _ in range(count)]
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()  # the last used is the warmest
        for worker in self._all:
            self._free.put(worker)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close_all, self._all)

    @property
    def pids(self) -> list[int]:
        """The processes there are now."""
        return [worker.pid for worker in self._all if worker.pid is not None]

    def ask(self, job: Any, seconds: float) -> Any:
        """What a worker answers; TimeoutError, WorkerDiedError or WorkerFailedError where it gives no answer."""
        line = json.dumps({"seconds": seconds, "job": job}).encode()
        worker = self._free.get()
        try:
            told = json.loads(worker.ask(line, seconds))
        finally:
            self._free.put(worker)
        if "error" in told:
            raise WorkerFailedError(told["error"])
        return told["answer"]

    def ask_all(self, jobs: Sequence[Any], seconds: float) -> list[Any]:
        """The answers to many jobs, as many at once as there are workers; an error takes the place of its own answer."""
        if len(jobs) == 1:
            return [self._tried(jobs[0], seconds)]
        return list(self._pool().map(lambda job: self._tried(job, seconds), jobs))

    def close(self) -> None:
        self._close()
        if self._threads is not None:
            self._threads.shutdown()

    def _tried(self, job: Any, seconds: float) -> Any:
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
    """Workers that run a module of this package; they find it wherever this process found it. Sets of texts have the same
    order in all of them, always: what a worker says must not depend on the hash seed that Python drew for it."""
    home = str(Path(oncurve.__file__).resolve().parent.parent)
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
    return Workers([sys.executable, "-m", module, *arguments], count, environment)


def _close_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.close()


def shared(make: Callable[..., Workers]) -> Callable[..., Workers]:
    """One set of workers per arguments, for all rewards that ask for the same."""
    made: dict[Any, Workers] = {}
    lock = threading.Lock()

    def get(*arguments: Any) -> Workers:
        with lock:
            if arguments not in made:
                made[arguments] = make(*arguments)
            return made[arguments]

    return get
