"""The trainer's side of agent processes: a launcher process starts them, and each returns a result when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from oncurve.agent_programs.launcher import KEY, kill_marked
from oncurve.records import AgentProgram


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How an agent ended: its exit code (negative: a signal), the ends of its output, and whether its time was up."""

    code: int
    stdout: str
    stderr: str
    is_late: bool

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.stdout.split("\n")) if line.strip()), "")


BUBBLEWRAP = (
    *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
    *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent"),
)
"""The prefix of a sandboxed agent's command: a read-only file system and its own namespaces; only the network is shared."""
OnEnd = Callable[[AgentResult], None]


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """An agent that has not ended: the launcher that started it, its key, and who waits for its end."""

    launcher: subprocess.Popen[bytes]
    key: str
    on_end: OnEnd


class AgentProcesses:
    """Starts agents through a launcher process of its own, which is started with the first agent."""

    def __init__(self) -> None:
        self._numbers = count()
        self._running: dict[int, RunningAgent] = {}
        self._lock = threading.Lock()
        self._launcher: subprocess.Popen[bytes] | None = None

    def start(self, program: AgentProgram, row: Mapping[str, Any], environment: Mapping[str, str], on_end: OnEnd) -> int:
        """Starts an agent and returns its number. When the agent has ended, ``on_end`` is called in another thread."""
        number = next(self._numbers)
        job = {
            "number": number,
            "function": program.function,
            "command": shlex.split(program.command or ""),
            "wrapper": [*BUBBLEWRAP, "--ro-bind", os.getcwd(), os.getcwd()] if program.sandbox else [],
            "row": row,
            "environment": dict(environment),
            "timeout_s": program.timeout_s,
        }
        with self._lock:
            is_sent = False
            while not is_sent:  # again if the launcher has just been killed
                launcher = self._live_launcher()
                self._running[number] = RunningAgent(launcher, environment[KEY], on_end)
                is_sent = _send(launcher, job)
        return number

    def stop(self, number: int) -> None:
        """Kills an agent, if it still runs. Its ``on_end`` is not called."""
        with self._lock:
            agent = self._running.pop(number, None)
        if agent is not None and not _send(agent.launcher, {"stop": number}):
            kill_marked(agent.key)

    def close(self) -> None:
        """Kills every agent that runs, and waits for the launcher."""
        with self._lock:
            launcher, self._launcher, self._running = self._launcher, None, {}
        if launcher is not None:
            assert launcher.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                launcher.stdin.close()
            launcher.wait()

    def _live_launcher(self) -> subprocess.Popen[bytes]:
        if self._launcher is None or self._launcher.poll() is not None:
            command = [sys.executable, "-m", "oncurve.agent_programs.launcher"]
            self._launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            threading.Thread(target=self._read_results, args=(self._launcher,), name="agents", daemon=True).start()
        return self._launcher

    def _read_results(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            result = json.loads(line)
            with self._lock:
                agent = self._running.pop(result.pop("ended"), None)
            if agent is not None:
                agent.on_end(AgentResult(**result))
        with self._lock:
            if self._launcher is launcher:
                self._launcher = None  # while it ends, its pipe may still accept jobs that nobody reads
            lost = [number for number, agent in self._running.items() if agent.launcher is launcher]
            agents = [self._running.pop(number) for number in lost]
        for agent in agents:
            kill_marked(agent.key)
            agent.on_end(AgentResult(-9, "", "the process that starts agents was killed", False))
        launcher.wait()


def _send(launcher: subprocess.Popen[bytes], job: Mapping[str, Any]) -> bool:
    """Sends a job. Returns False if the launcher has been killed; the agents that it ran are then reported as lost."""
    assert launcher.stdin is not None
    try:
        launcher.stdin.write(json.dumps(job, default=str).encode() + b"\n")
        launcher.stdin.flush()
    except (BrokenPipeError, ValueError):  # ValueError: its pipe was closed for that reason before
        with contextlib.suppress(BrokenPipeError):
            launcher.stdin.close()
        launcher.wait()
        return False
    return True
