"""Agents' processes: what they get, how they end, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.agent_programs.agent_processes import AgentProcesses, AgentResult
from oncurve.records import AgentProgram
from oncurve.workers.processes import is_alive

ENVIRONMENT = {"OPENAI_API_KEY": "oncurve-test-key-123", "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}
DAEMON = """
import os, sys, time
is_there, closed_by_exec = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
    os._exit(0)
os.wait()
os.close(closed_by_exec)
os.read(is_there, 1)
time.sleep(0 if len(sys.argv) > 1 else 600)
"""
"""A program that leaves a process behind, in a session of its own whose parent has ended."""


@pytest.fixture
def processes() -> Iterator[AgentProcesses]:
    started = AgentProcesses()
    yield started
    started.close()


def run(processes: AgentProcesses, program: AgentProgram, row: dict[str, object] | None = None) -> AgentResult:
    results: queue.SimpleQueue[AgentResult] = queue.SimpleQueue()
    processes.start(program, row or {}, ENVIRONMENT, results.put)
    return results.get(timeout=300)


def script(folder: Path, text: str, name: str = "agent.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def command(folder: Path, text: str, *arguments: str) -> str:
    return " ".join([sys.executable, script(folder, text), *arguments])


def test_a_command_gets_its_row_and_its_endpoint_and_its_last_line_counts(processes: AgentProcesses, tmp_path: Path) -> None:
    text = "import json, os, sys\nprint('noise ' * 50000)\nrow = json.load(sys.stdin)\nprint(os.environ['OPENAI_BASE_URL'])\n"
    text += "print(json.dumps({'reward': row['x']}))\nprint()\n"
    result = run(processes, AgentProgram(command(tmp_path, text)), {"x": 0.5})
    assert (result.code, result.is_late, result.last_line) == (0, False, '{"reward": 0.5}')
    assert ENVIRONMENT["OPENAI_BASE_URL"] in result.stdout


def test_a_function_runs_in_a_process_of_its_own_sync_or_async(processes: AgentProcesses, tmp_path: Path) -> None:
    text = """
import asyncio, os, sys
SEEN = os.environ["OPENAI_API_KEY"]
def plain(row): print(SEEN); return {"reward": row["x"], "pid": os.getpid()}
async def slow(row): await asyncio.sleep(0.01); return row["x"]
def nothing(row): return None
def broken(row): raise ValueError("no " + row["x"])
def leave(row): sys.exit(3)
"""
    file = script(tmp_path, text)
    results = {
        name: run(processes, AgentProgram(function=f"{file}:{name}"), {"x": "1"})
        for name in ("plain", "slow", "nothing", "broken", "leave")
    }
    assert [result.code for result in results.values()] == [0, 0, 0, 1, 3]
    assert results["plain"].stdout.startswith(ENVIRONMENT["OPENAI_API_KEY"])
    assert results["slow"].last_line == '{"reward": "1"}'
    assert results["nothing"].stdout == ""
    assert results["broken"].stderr.splitlines()[-1] == "ValueError: no 1"


def test_what_a_function_returns_is_a_line_of_its_own(processes: AgentProcesses, tmp_path: Path) -> None:
    text = """
import numpy
def unfinished(row): print("thinking", end=""); return 0.5
def number(row): return {"reward": numpy.float32(0.5)}
def separator(row): print('{"reward": 1, "text": "a' + chr(0x2028) + 'b"}')
"""
    file = script(tmp_path, text)
    lines = [
        run(processes, AgentProgram(function=f"{file}:{name}")).last_line for name in ("unfinished", "number", "separator")
    ]
    assert [json.loads(line)["reward"] for line in lines] == [0.5, 0.5, 1]


def test_a_package_of_the_users_own_sees_the_agents_environment(
    processes: AgentProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may create its client when it is imported: with another key that would be another model."""
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import os\nKEY = os.environ['OPENAI_API_KEY']\n")
    script(tmp_path, "import mine\ndef f(row): return {'reward': 1, 'key': mine.KEY}\n")
    result = run(processes, AgentProgram(function="agent.py:f"))
    assert json.loads(result.last_line)["key"] == ENVIRONMENT["OPENAI_API_KEY"], result.stderr


def test_agents_that_end_at_once_have_their_exit_code(processes: AgentProcesses) -> None:
    assert [run(processes, AgentProgram(name)).code for name in ("true", "false") * 40] == [0, 1] * 40


def test_a_killed_launcher_is_replaced_and_its_agents_are_lost(processes: AgentProcesses, tmp_path: Path) -> None:
    text = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    hangs = AgentProgram(command(tmp_path, text.replace("'pid'", repr(str(tmp_path / "pid")))))
    for attempt in range(4):
        results: queue.SimpleQueue[AgentResult] = queue.SimpleQueue()
        processes.start(hangs, {}, {**ENVIRONMENT, "OPENAI_API_KEY": f"oncurve-{attempt}"}, results.put)
        pid_file = tmp_path / "pid"
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.01)
        pid = int(pid_file.read_text())
        pid_file.unlink()
        assert processes._launcher is not None
        os.kill(processes._launcher.pid, signal.SIGKILL)
        assert run(processes, AgentProgram("true")).code in (0, -9), "it was started, or lost with the launcher"
        assert results.get(timeout=60).code == -9
        deadline = time.monotonic() + 30
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(pid), "nothing of it is left"
    assert run(processes, AgentProgram("true")).code == 0


@pytest.mark.parametrize("hangs", [True, False])
def test_nothing_is_left_of_an_agent_that_hangs_or_ends(processes: AgentProcesses, tmp_path: Path, hangs: bool) -> None:
    """Not even a daemon, which has another session and another parent."""
    result = run(processes, AgentProgram(command(tmp_path, DAEMON, *([] if hangs else ["ends"])), timeout_s=5.0))
    assert result.is_late == hangs
    assert not is_alive(int(result.stdout.split()[0]))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_in_the_sandbox_an_agent_reads_files_and_writes_only_to_its_own_tmp(processes: AgentProcesses) -> None:
    text = """
import json, os, sys
print(json.load(sys.stdin)["x"], os.environ["OPENAI_API_KEY"], len([p for p in os.listdir("/proc") if p.isdigit()]) < 5)
open("/tmp/mine", "w").write("x")
try:
    open(os.environ["FOLDER"] + "/theirs", "w")
except OSError as error:
    print(type(error).__name__)
"""
    home = Path.home() / f".oncurve-test-{os.getpid()}"  # not below /tmp, which the sandbox hides
    home.mkdir()
    try:
        results: queue.SimpleQueue[AgentResult] = queue.SimpleQueue()
        program = AgentProgram(f"{Path(sys.executable).resolve()} {script(home, text)}", sandbox=True)
        processes.start(program, {"x": 1}, {**ENVIRONMENT, "FOLDER": str(home)}, results.put)
        result = results.get(timeout=300)
        assert result.stdout.split() == ["1", ENVIRONMENT["OPENAI_API_KEY"], "True", "OSError"], result.stderr
        assert not (home / "theirs").exists()
        assert not Path("/tmp/mine").exists()
    finally:
        shutil.rmtree(home)


def test_a_program_that_does_not_exist_is_a_result_too(processes: AgentProcesses) -> None:
    result = run(processes, AgentProgram("no-such-program-here"))
    assert result.code == 127
    assert "no-such-program-here" in result.stderr


def test_agents_end_with_the_trainer_even_if_it_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    agent = script(tmp_path, f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    trainer = f"""
from oncurve.agent_programs.agent_processes import AgentProcesses
from oncurve.records import AgentProgram
import time
AgentProcesses().start(AgentProgram({sys.executable!r} + " " + {agent!r}), {{}}, {ENVIRONMENT!r}, print)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", trainer])
    wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_alive(int(pid_file.read_text())))


def wait_until(condition: object, seconds: float = 300.0) -> None:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
