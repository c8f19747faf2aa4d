"""The zygote: a process that has loaded the standard library and forks a locked child for every program.

    zygote          waits for a job, but never reads one: no program, test or output ever enters its memory
    └ supervisor    one for each job: forks the program's process, and only then reads the job; watches it and replies
      ├ program     a fork of the supervisor before it read the job: knows its program, and nothing of the tests
      └ tests       runs the tests, if the job has any

It exchanges JSON lines with the trainer (`workers/pool.py`) and holds no secrets. Each child gets a scratch folder, limits and
the lock of `lockdown`. The supervisor bounds its time, output, threads and files, and removes its folder. The zygote runs
inside bubblewrap at that level, else as a plain process.
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
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from oncurve.rewards.sandbox import lockdown, program_child, tests_child

PRELOADED = (
    "ast bisect collections copy datetime decimal fractions functools heapq io itertools json math operator random re"
    " statistics string sys threading time typing"
)
MAX_RESULT_BYTES = 4 << 20
"""Verdicts of a tests' process."""
MAX_THREADS, MAX_FILES = 500, 1000
"""Threads that a program may start, and files and folders that it may create, in total."""


@dataclass(frozen=True)
class Settings:
    """How a zygote locks down its children, and what it imports for them. It gets them as JSON on its command line."""

    locked: bool
    need_landlock: bool
    readable: list[str]
    scratch: str
    stdin_file: str | None
    """A file for programs' input, to which /dev/stdin links; None: the input is a file in memory."""
    libraries: list[str]
    package: str | None
    """A package to import besides the standard library; ``libraries`` are the folders that it is in."""


@dataclass
class Stream:
    """A pipe that a child writes to, and what arrived so far."""

    source: int
    limit: int
    data: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Reads what is there; false at the end."""
        part = os.read(self.source, 1 << 16)
        self.data += part
        return bool(part)

    @property
    def is_full(self) -> bool:
        return len(self.data) > self.limit

    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass
class Child:
    """A child process, its output so far, and how it ended."""

    pid: int
    pidfd: int
    folder: str
    streams: list[Stream]
    """Standard output, standard error, and the results of tests."""
    control: socket.socket
    """The socket on which the child first sends the descriptor of its system-call reports, and then one byte when it is locked
    down."""
    counts: lockdown.Counts | None = None
    is_locked: bool = False
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
    os.write(answers, b"ready\n")
    poll = select.poll()
    poll.register(jobs, select.POLLIN)
    while poll.poll()[0][1] & select.POLLIN:
        pid = os.fork()
        if pid == 0:
            _supervise(settings, jobs, answers)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            os._exit(1)  # half a job may be left in the pipe: the trainer starts another zygote
    with contextlib.suppress(OSError):
        os.rmdir(settings.scratch)  # fails while another zygote uses it; the trainer removes the rest


def _supervise(settings: Settings, jobs: int, answers: int) -> NoReturn:
    code = 1
    try:
        lockdown.die_with_parent()
        supervisor = Supervisor(settings, jobs, answers)
        try:
            reply: dict[str, Any] = {"answer": supervisor.run()}
        except Exception as error:  # a bug of ours, or a child that could not be locked: the trainer reports it
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        data = json.dumps(reply).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]
        code = 0
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


class Supervisor:
    """Runs one job."""

    def __init__(self, settings: Settings, jobs: int, answers: int) -> None:
        self.settings, self._jobs, self._answers = settings, jobs, answers
        self.children: list[Child] = []

    def run(self) -> dict[str, Any]:
        started = time.monotonic()
        orders, to_orders = os.pipe()
        to_program, from_tests = os.pipe()
        to_tests, from_program = os.pipe()
        stdin, write_stdin = self._input()
        try:
            ends = (orders, to_program, from_program)
            program = self._fork(lambda: self._run_order(*ends), stdin, ends)
            for end in (*ends, stdin):
                os.close(end)
            job = self._read_job()
            write_stdin(job.get("stdin", ""))
            for stream in program.streams:
                stream.limit = job["output"]
            order = {name: job[name] for name in ("kind", "program", "cpu", "memory", "file_size", "open_files")}
            main = program if job["kind"] == "program" else self._fork_tests(job, from_tests, to_tests)
            for end in (from_tests, to_tests):
                os.close(end)
            with contextlib.suppress(BrokenPipeError), os.fdopen(to_orders, "wb") as lines:
                lines.write(json.dumps(order).encode() + b"\n")
            self._watch(main, started + job["seconds"])
        finally:
            self._finish()
        output, errors, *results = [stream.text() for stream in main.streams]
        if main is program:
            return {"ended": main.ended, "output": output, "errors": errors, "seconds": time.monotonic() - started}
        verdicts = results[0][: results[0].rfind("\n") + 1].splitlines()
        return {"ended": main.ended, "program": program.ended, "verdicts": [json.loads(line) for line in verdicts]}

    def _fork_tests(self, job: dict[str, Any], from_tests: int, to_tests: int) -> Child:
        results, to_results = os.pipe()
        empty, end = os.pipe()
        os.close(end)
        tests = self._fork(
            lambda: self._prepared(job, lambda: tests_child.run_tests(job, from_tests, to_tests, to_results)),
            empty,
            (from_tests, to_tests, to_results),
        )
        os.close(to_results)
        os.close(empty)
        tests.streams.append(Stream(results, MAX_RESULT_BYTES))
        return tests

    def _read_job(self) -> dict[str, Any]:
        line = bytearray()
        while not line.endswith(b"\n"):
            part = os.read(self._jobs, 1 << 20)
            if not part:
                raise SystemExit  # the trainer is gone
            line += part
        job: dict[str, Any] = json.loads(line)["job"]
        return job

    def _run_order(self, orders: int, requests: int, replies: int) -> int:
        """In the program's process: waits for the program, and runs it."""
        with os.fdopen(orders, "rb") as lines:
            job = json.loads(lines.readline())
        if job["kind"] == "program":
            os.close(requests)
            os.close(replies)
            return self._prepared(job, lambda: program_child.run_program(job["program"]))
        return self._prepared(job, lambda: program_child.serve_program(job["program"], requests, replies))

    def _prepared(self, job: dict[str, Any], body: Callable[[], int]) -> int:
        """Limits and locks this process, then runs the body."""
        lockdown.set_limits(job["cpu"], job["memory"], job["file_size"], job["open_files"])
        if self.settings.locked:
            readable = [*self.settings.readable, *([self.settings.stdin_file] if self.settings.stdin_file else [])]
            lockdown.lock(readable, os.getcwd(), self.settings.need_landlock, self._control)
        self._control.send(b"!")
        self._control.close()
        return body()

    def _fork(self, body: Callable[[], int], stdin: int, keep: tuple[int, ...]) -> Child:
        folder = tempfile.mkdtemp(prefix="oncurve-", dir=self.settings.scratch)
        pipes = [os.pipe(), os.pipe()]
        control, self._control = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._run_child(body, stdin, (pipes[0][1], pipes[1][1]), folder, (*keep, self._control.fileno()))
        self._control.close()
        for _, end in pipes:
            os.close(end)
        child = Child(pid, os.pidfd_open(pid), folder, [Stream(source, 1 << 20) for source, _ in pipes], control)
        self.children.append(child)
        return child

    def _run_child(
        self, body: Callable[[], int], stdin: int, outputs: tuple[int, int], folder: str, keep: tuple[int, ...]
    ) -> NoReturn:
        """The child from fork to exit: closes everything of the supervisor's, and runs the body."""
        code = 70
        try:
            os.setsid()
            lockdown.die_with_parent()
            _close_all_but(stdin, outputs, keep)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(PATH="", HOME=folder, TMPDIR=folder, LANG="C.UTF-8")
            tempfile.tempdir = folder
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            program_child.open_streams()
            code = body()
        except BaseException as error:
            with contextlib.suppress(Exception):
                os.write(2, f"{type(error).__name__}: {error}"[:500].encode())
        finally:
            os._exit(code & 0xFF)

    def _watch(self, main: Child, deadline: float) -> None:
        """Waits for the main child to end. If the trainer closes the pipe, this process and its children end."""
        poll = select.poll()
        poll.register(self._jobs, 0)
        for child in self.children:
            for descriptor in (child.pidfd, child.control.fileno(), *(stream.source for stream in child.streams)):
                poll.register(descriptor, select.POLLIN)
        while main.ended is None:
            left = deadline - time.monotonic()
            if left <= 0:
                main.ended = "time"
                return
            ready = dict(poll.poll(left * 1000))
            if self._jobs in ready:
                raise SystemExit  # the trainer is gone
            for child in self.children:
                _serve_child(child, ready, poll)

    def _finish(self) -> None:
        """Kills the children, the last one first: tests must not see their program killed. Then removes what they left."""
        for child in reversed(self.children):
            for kill in (os.killpg, os.kill):  # the group exists only once the child has created it
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        for child in self.children:
            for stream in child.streams:
                os.set_blocking(stream.source, False)
                with contextlib.suppress(BlockingIOError):
                    while not stream.is_full and stream.read():
                        pass
            child.control.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                child.is_locked = child.is_locked or b"!" in child.control.recv(16)
            remove_folder(child.folder)
        for child in self.children:
            if not child.is_locked and child.ended is not None:
                raise OSError(f"the child could not be locked: {child.streams[1].text()[-200:]}")

    def _input(self) -> tuple[int, Callable[[str], None]]:
        """Standard input as a file that the program can't change, and the function that fills it."""
        file = self.settings.stdin_file
        if file is None:
            reading = writing = os.memfd_create("input", os.MFD_ALLOW_SEALING)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
            writing = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
            reading = os.open(file, os.O_RDONLY)
        own = os.dup(writing)

        def write(text: str) -> None:
            data, position = text.encode("utf-8", "surrogatepass"), 0
            while position < len(data):
                position += os.pwrite(own, data[position:], position)
            if file is None:
                fcntl.fcntl(own, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            os.close(own)

        if writing != reading:
            os.close(writing)
        return reading, write


def _serve_child(child: Child, ready: dict[int, int], poll: select.poll) -> None:
    """Handles what arrived from a child. One that prints too much is killed."""
    control = child.control.fileno()
    if control in ready:
        message, descriptors, _, _ = socket.recv_fds(child.control, 16, 1)
        if descriptors:
            child.counts = lockdown.Counts(descriptors[0], MAX_THREADS, MAX_FILES)
            poll.register(descriptors[0], select.POLLIN)
        child.is_locked = child.is_locked or b"!" in message
        if not message:
            poll.unregister(control)
    if child.counts is not None and ready.get(child.counts.notices, 0):
        if ready[child.counts.notices] & select.POLLIN:
            child.counts.answer()
        else:
            poll.unregister(child.counts.notices)
    for stream in child.streams:
        if stream.source in ready and not (not stream.is_full and stream.read()):
            poll.unregister(stream.source)
        if stream.is_full and child.ended is None:
            child.ended = "output"
            os.kill(child.pid, signal.SIGKILL)
    if child.pidfd in ready:
        poll.unregister(child.pidfd)
        child.ended = child.ended or _exit_status(child)


def _exit_status(child: Child) -> str:
    result = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    if result.si_code == os.CLD_EXITED:
        return f"exit {result.si_status}"
    return f"signal {result.si_status}"


def _close_all_but(stdin: int, outputs: tuple[int, int], keep: tuple[int, ...]) -> None:
    """Makes the input descriptor 0 and the outputs 1 and 2; closes all others except ``keep``."""
    os.dup2(stdin, 0)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    low = 3
    for descriptor in (*sorted(keep), resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        os.closerange(low, descriptor)
        low = descriptor + 1


def remove_folder(path: str) -> None:
    """Removes a folder with everything in it, however deep it is and whatever modes its folders have.

    Folders inside are moved up until none is left, so nothing is recursive and no path is long. Only for a folder that no
    process uses any more.
    """
    prefix, number = os.urandom(8).hex(), 0
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        while folders := _remove_files(top):
            for name in folders:
                inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for inner in _remove_files(inside):
                        os.rename(inner, f"{prefix}-{number}", src_dir_fd=inside, dst_dir_fd=top)
                        number += 1
                finally:
                    os.close(inside)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _remove_files(folder: int) -> list[str]:
    """Removes the files of an open folder; makes its folders readable and returns their names."""
    folders: list[str] = []
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.name, 0o700, dir_fd=folder)
            folders.append(entry.name)
        else:
            os.unlink(entry.name, dir_fd=folder)
    return folders
