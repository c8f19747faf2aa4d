"""The zygote: a process that forks a locked child for every program, so that the standard library is loaded only once.

It exchanges JSON lines with the trainer (`workers/pool.py`) and holds no secrets. Each child gets a scratch folder, limits and
the lock of `lockdown`. The zygote watches it, kills it if it exceeds its time or output, and removes its folder. It runs inside
bubblewrap at that level, else as a plain process.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from oncurve.rewards.sandbox import lockdown, program_child

PRELOADED = (
    "ast bisect collections copy datetime decimal fractions functools heapq io itertools json math operator random re"
    " statistics string sys time typing"
)


@dataclass(frozen=True)
class Settings:
    """How a zygote locks its children; passed on the command line as JSON."""

    locked: bool
    need_landlock: bool
    readable: list[str]
    scratch: str
    libraries: list[str]
    package: str | None
    """A package to import besides the standard library; ``libraries`` are the folders that it is in."""


@dataclass
class Child:
    """A child process, its output so far, and how it ended."""

    pid: int
    pidfd: int
    output: int
    folder: str
    output_left: int
    """Bytes that it may still print."""
    locked: int
    """A pipe on which the child sends one byte once it is locked."""
    written: list[bytes] = field(default_factory=list)
    ended: str | None = None
    """`exit 0`, `signal 9`, `time`, `output`; None while it runs."""


def main(arguments: str) -> None:
    settings = Settings(**json.loads(arguments))
    sys.path += settings.libraries
    for name in (*PRELOADED.split(), *([settings.package] if settings.package else [])):
        importlib.import_module(name)
    jobs, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR) if os.path.exists(os.devnull) else os.pipe()[0]
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    zygote = Zygote(settings, jobs, answers)
    os.write(answers, b"ready\n")
    with os.fdopen(jobs, "rb", closefd=False) as lines:
        for line in lines:
            zygote.answer(line)


class Zygote:
    """Runs jobs, one at a time."""

    def __init__(self, settings: Settings, jobs: int, answers: int) -> None:
        self.settings, self._jobs, self._answers = settings, jobs, answers

    def answer(self, line: bytes) -> None:
        try:
            reply: dict[str, Any] = {"answer": self.run(json.loads(line)["job"])}
        except Exception as error:  # a bug of ours: the trainer reports it, and this process continues
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        data = json.dumps(reply).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        return self._run_program(job) if job["kind"] == "program" else self._run_tests(job)

    def _run_program(self, job: dict[str, Any]) -> dict[str, Any]:
        """Runs a program on an input: its output and how it ended."""
        started = time.monotonic()
        with _input(job.get("stdin", "")) as stdin:
            child = self._fork(job, lambda: program_child.run_program(job["program"]), stdin, keep=())
            self._watch([child], child, job["seconds"])
        text = b"".join(child.written).decode("utf-8", "replace")
        return {"ended": child.ended, "output": text, "seconds": time.monotonic() - started}

    def _run_tests(self, job: dict[str, Any]) -> dict[str, Any]:
        """Runs a program and its tests in a child each; one verdict per test."""
        to_program, from_tests = os.pipe()
        to_tests, from_program = os.pipe()
        results, to_results = os.pipe()
        ends = (to_program, from_tests, to_tests, from_program, to_results)
        program = self._fork(
            job,
            lambda: program_child.serve_program(job["program"], to_program, from_program),
            None,
            keep=(to_program, from_program),
        )
        tests = self._fork(
            job,
            lambda: program_child.run_tests(job, from_tests, to_tests, to_results),
            None,
            keep=(from_tests, to_tests, to_results),
        )
        for end in ends:
            os.close(end)
        verdicts = _JsonLines(results)
        self._watch([program, tests], tests, job["seconds"], verdicts)
        return {"ended": tests.ended, "program": program.ended, "verdicts": verdicts.lines()}

    def _fork(self, job: dict[str, Any], body: Callable[[], int], stdin: int | None, keep: tuple[int, ...]) -> Child:
        folder = tempfile.mkdtemp(prefix="oncurve-", dir=self.settings.scratch)
        output, written = os.pipe()
        locked, to_locked = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._run_child(job, body, stdin, written, folder, (*keep, to_locked))
        os.close(written)
        os.close(to_locked)
        os.set_blocking(output, False)
        return Child(pid, os.pidfd_open(pid), output, folder, job["output"], locked)

    def _run_child(
        self, job: dict[str, Any], body: Callable[[], int], stdin: int | None, out: int, folder: str, keep: tuple[int, ...]
    ) -> NoReturn:
        """The child from fork to exit: closes everything of the zygote's, locks itself, and runs the body."""
        code = 70
        try:
            os.setsid()
            lockdown.die_with_parent()
            _close_all_but(stdin, out, keep)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(PATH="", HOME=folder, TMPDIR=folder, LANG="C.UTF-8")
            tempfile.tempdir = folder
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            program_child.open_streams()
            lockdown.set_limits(job["cpu"], job["memory"], job["file_size"], job["open_files"])
            if self.settings.locked:
                lockdown.lock(self.settings.readable, folder, self.settings.need_landlock)
            os.write(keep[-1], b"!")
            os.close(keep[-1])
            code = body()
        except BaseException as error:
            with contextlib.suppress(Exception):
                os.write(2, f"{type(error).__name__}: {error}"[:500].encode())
        finally:
            os._exit(code & 0xFF)

    def _watch(self, children: list[Child], main: Child, seconds: float, verdicts: _JsonLines | None = None) -> None:
        """Waits for the main child to end, then kills the others. If the trainer closes the pipe, the zygote exits."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._jobs, 0)
        for child in children:
            poll.register(child.pidfd, select.POLLIN)
            poll.register(child.output, select.POLLIN)
        if verdicts is not None:
            poll.register(verdicts.source, select.POLLIN)
        try:
            while main.ended is None:
                left = deadline - time.monotonic()
                ready = dict(poll.poll(max(left, 0) * 1000))
                if self._jobs in ready:
                    os._exit(0)
                for child in children:
                    _read_child(child, ready, poll)
                if verdicts is not None and verdicts.source in ready and not verdicts.read():
                    poll.unregister(verdicts.source)
                if left <= 0 and main.ended is None:
                    main.ended = "time"
        finally:
            for child in (main, *(child for child in children if child is not main)):  # tests must not see their program killed
                _finish(child)
            if verdicts is not None:
                verdicts.close()


def _read_child(child: Child, ready: dict[int, int], poll: select.poll) -> None:
    if child.output in ready:
        data = os.read(child.output, 1 << 16)
        if not data:
            poll.unregister(child.output)
        child.output_left -= len(data)
        child.written.append(data)
        if child.output_left < 0 and child.ended is None:
            child.ended = "output"
    if child.pidfd in ready and child.ended is None:
        child.ended = _exit_status(child)
        poll.unregister(child.pidfd)


def _exit_status(child: Child) -> str:
    result = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    if result.si_code == os.CLD_EXITED:
        return f"exit {result.si_status}"
    return f"signal {result.si_status}"


def _finish(child: Child) -> None:
    """Kills a child and its process group, waits for it, reads the rest of its output, and removes its folder."""
    for kill in (os.killpg, os.kill):  # the group exists only once the child has created it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    was_locked = os.read(child.locked, 1)
    os.close(child.locked)
    with contextlib.suppress(BlockingIOError):
        while child.output_left > 0 and (data := os.read(child.output, 1 << 16)):
            child.output_left -= len(data)
            child.written.append(data)
    os.close(child.output)
    os.close(child.pidfd)
    shutil.rmtree(child.folder, ignore_errors=True)
    if not was_locked:
        output = b"".join(child.written).decode("utf-8", "replace")
        raise OSError(f"the child could not be locked: {output[-200:]}")


class _JsonLines:
    """Lines of JSON from a child."""

    def __init__(self, source: int) -> None:
        self.source = source
        self._data = b""

    def read(self) -> bool:
        data = os.read(self.source, 1 << 16)
        self._data += data
        return bool(data)

    def close(self) -> None:
        os.set_blocking(self.source, False)
        with contextlib.suppress(BlockingIOError):
            while self.read():
                pass
        os.close(self.source)

    def lines(self) -> list[Any]:
        complete = self._data[: self._data.rfind(b"\n") + 1]
        return [json.loads(line) for line in complete.splitlines()]


@contextlib.contextmanager
def _input(text: str) -> Iterator[int]:
    """Standard input as a sealed file in memory."""
    descriptor = os.memfd_create("input", os.MFD_ALLOW_SEALING)
    data = text.encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _close_all_but(stdin: int | None, out: int, keep: tuple[int, ...]) -> None:
    """Makes the input (or nothing) descriptor 0 and the output 1 and 2; closes all others except ``keep``."""
    if stdin is None:
        empty, end = os.pipe()
        os.close(end)
        stdin = empty
    os.dup2(stdin, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    low = 3
    for descriptor in (*sorted(keep), resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        os.closerange(low, descriptor)
        low = descriptor + 1
