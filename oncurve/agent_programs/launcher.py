"""The process that starts agents, watches them, and leaves none behind.

    python -m oncurve.agent_programs.launcher

Jobs come in as JSON lines, results go out as JSON lines. The launcher is a separate process, so that no process is forked from
the trainer with its threads and its memory, and so that agents end with the trainer, even if that is killed: the launcher's
pipe closes, and it kills everything that it has started.

An agent is a command, or a function that a forked child of this process calls. Each is the leader of its own session. At its
end, or after its time limit, everything that is left of it is killed: its process group, and every process that has its key in
its environment, whatever session that process has moved to.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

TAIL_BYTES = 65_536
"""How much is kept of the end of what an agent prints."""
KEY = "OPENAI_API_KEY"
DRAIN_S = 0.2
"""How long output is still read after an agent has ended and everything of it was killed."""


@dataclass(eq=False)
class Agent:
    """A running agent: its process, the ends of its output, and when it must have ended."""

    number: int
    pid: int
    key: str
    deadline: float
    outputs: dict[int, str]
    """The open pipes, by file descriptor: "stdout" and "stderr"."""
    process: subprocess.Popen[bytes] | None
    """Set for a command, and kept: a Popen object that is dropped takes the exit status of its process with it."""
    tails: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b""})
    code: int | None = None
    is_late: bool = False


class Launcher:
    """Runs jobs until standard input closes."""

    def __init__(self, results: int) -> None:
        self.results, self.agents = results, dict[int, Agent]()
        self.selector = selectors.DefaultSelector()
        self._unread = b""

    def run(self) -> None:
        wake_up, wake_up_write = os.pipe()
        for descriptor in (wake_up, wake_up_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_up_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(0, selectors.EVENT_READ)
        self.selector.register(wake_up, selectors.EVENT_READ)
        try:
            while True:
                deadlines = [agent.deadline for agent in self.agents.values()]
                timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
                for ready, _ in self.selector.select(timeout):
                    if ready.fd == 0:
                        if not self._read_jobs():
                            return
                    elif ready.fd == wake_up:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_up, 4096)
                    else:
                        self._read_output(ready.data, ready.fd)
                self._end_agents()
        finally:
            for agent in list(self.agents.values()):
                kill_tree(agent.pid, agent.key)

    # Jobs.

    def _read_jobs(self) -> bool:
        """Reads and starts the trainer's jobs. Returns False once the trainer is gone."""
        data = os.read(0, 1 << 20)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            job = json.loads(line)
            if "stop" in job:
                for agent in [a for a in self.agents.values() if a.number == job["stop"]]:
                    agent.deadline = 0.0
            else:
                self._start(job)
        return bool(data)

    def _start(self, job: dict[str, Any]) -> None:
        environment = {**os.environ, **job["environment"]}
        stdin = tempfile.TemporaryFile()  # noqa: SIM115
        stdin.write(json.dumps(job["row"]).encode() + b"\n")
        stdin.seek(0)
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        ends = (stdin.fileno(), pipes["stdout"][1], pipes["stderr"][1])
        process = None
        try:
            if job.get("function") is not None:
                preload(job["function"])
                pid = self._fork(job["function"], job["row"], environment, ends)
            else:
                command = [*job["wrapper"], *job["command"]]
                process = subprocess.Popen(
                    command, stdin=ends[0], stdout=ends[1], stderr=ends[2], env=environment, start_new_session=True
                )
                pid = process.pid
        except OSError as error:
            for read, write in pipes.values():
                os.close(read)
                os.close(write)
            self._report({"ended": job["number"], "code": 127, "stdout": "", "stderr": str(error), "is_late": False})
            return
        finally:
            stdin.close()
        outputs = {}
        for name, (read, write) in pipes.items():
            os.close(write)
            outputs[read] = name
        key, deadline = environment[KEY], time.monotonic() + job["timeout_s"]
        self.agents[pid] = agent = Agent(job["number"], pid, key, deadline, outputs, process)
        for descriptor in outputs:
            self.selector.register(descriptor, selectors.EVENT_READ, agent)

    def _fork(self, function: str, row: Any, environment: dict[str, str], ends: tuple[int, int, int]) -> int:
        """A child that calls a function. It has nothing of this process but its modules."""
        pid = os.fork()
        if not pid:
            self._become_agent(environment, ends)
            call_function(function, row)
        return pid

    def _become_agent(self, environment: dict[str, str], ends: tuple[int, int, int]) -> None:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number, end in enumerate(ends):
                os.dup2(end, number)
            os.closerange(3, 4096)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environment)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        except BaseException:
            os._exit(126)

    # Ends.

    def _read_output(self, agent: Agent, descriptor: int) -> None:
        data = os.read(descriptor, 1 << 16)
        name = agent.outputs[descriptor]
        agent.tails[name] = (agent.tails[name] + data)[-TAIL_BYTES:]
        if not data:
            self._close(agent, descriptor)

    def _close(self, agent: Agent, descriptor: int) -> None:
        self.selector.unregister(descriptor)
        os.close(descriptor)
        del agent.outputs[descriptor]

    def _end_agents(self) -> None:
        """Reports agents that have ended, and kills those that are late."""
        now = time.monotonic()
        for agent in list(self.agents.values()):
            if now >= agent.deadline and agent.code is None:
                agent.is_late = True
                kill_tree(agent.pid, agent.key)
            ended, status = os.waitpid(agent.pid, 0 if agent.is_late else os.WNOHANG)
            if ended:
                self._finish(agent, os.waitstatus_to_exitcode(status))

    def _finish(self, agent: Agent, code: int) -> None:
        kill_tree(agent.pid, agent.key)
        until = time.monotonic() + DRAIN_S
        while agent.outputs and time.monotonic() < until:  # every writer is dead: the rest is in the pipes
            for descriptor in list(agent.outputs):
                self._read_output(agent, descriptor) if _is_readable(descriptor) else time.sleep(0.001)
        for descriptor in list(agent.outputs):
            self._close(agent, descriptor)
        del self.agents[agent.pid]
        tails = {name: tail.decode("utf-8", "replace") for name, tail in agent.tails.items()}
        self._report({"ended": agent.number, "code": code, "is_late": agent.is_late, **tails})

    def _report(self, result: dict[str, Any]) -> None:
        data = memoryview(json.dumps(result).encode() + b"\n")
        while data:
            data = data[os.write(self.results, data) :]


def _is_readable(descriptor: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))


def kill_tree(pid: int, key: str) -> None:
    """Kills an agent's process group, and every other process that has its key in its environment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    kill_marked(key)


def kill_marked(key: str) -> None:
    """Kills every process that has this key in its environment."""
    own, marker = str(os.getpid()), f"{KEY}={key}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == own:
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if marker in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


# Functions.


def preload(reference: str) -> None:
    """Imports the packages that a function's file imports, once, so that each of its calls starts in milliseconds.

    The file itself is run by every call: it may read the environment, which differs from call to call.
    """
    source = Path(reference.rpartition(":")[0])
    if source in _PRELOADED or not source.is_file():
        return
    _PRELOADED.add(source)
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # the call reports it
        for node in ast.parse(source.read_text("utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                own = source.parent / name.partition(".")[0]  # the user's own module or package, which is run by every call too
                if not own.with_suffix(".py").exists() and not own.is_dir():
                    with contextlib.suppress(Exception, SystemExit):  # the call reports it
                        importlib.import_module(name)


_PRELOADED: set[Path] = set()


def call_function(reference: str, row: Any) -> NoReturn:
    """Calls a function with the row, prints what it returns as the last line, and ends the process."""
    code = 1
    try:
        from oncurve.plugins import load_function

        returned = load_function(reference, "task.function")(row)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await(returned))
        if returned is not None:
            line = json.dumps(returned if isinstance(returned, dict) else {"reward": returned}, default=_plain)
            print(f"\n{line}", flush=True)  # a line of its own, whatever the function has printed
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _plain(value: Any) -> Any:
    """A number of numpy or torch as Python's; anything else as a text."""
    return value.item() if callable(getattr(value, "item", None)) else str(value)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def main() -> None:
    results = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no result
    os.set_inheritable(results, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    Launcher(results).run()


if __name__ == "__main__":
    main()
