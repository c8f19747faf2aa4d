"""Runs that are killed and resumed end with the same bits as one that never stopped."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.start import begin
from tests.training.builders import recipe
from tests.training.test_trainer import fingerprint

ROOT = Path(__file__).parents[2]
SETS = [
    "sft.steps=12", "sft.save_every=5", "grpo.steps=24", "grpo.save_every=4", "grpo.eval_every=6", "grpo.kl.beta=0.02",
    "grpo.kl.refresh_every=7", "grpo.updates_per_step=2",
]  # fmt: skip


def start(path: Path, sets: list[str] = SETS, wait_at: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.e2e.script", str(path), str(wait_at), *sets]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def wait_for(process: subprocess.Popen[str], lines: int) -> None:
    """Waits until the process has printed this many steps."""
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(lines):
        if not process.stdout.readline():
            pytest.fail(f"it ended early: {process.stderr.read()}")


def finish(process: subprocess.Popen[str]) -> int:
    _, err = process.communicate(timeout=600)
    assert "Traceback" not in err, err
    return process.returncode


def kill_and_resume(path: Path, moments: list[tuple[int, float]], sets: list[str] = SETS) -> RunFolder:
    """Kills each process of the run at its moment (steps printed, seconds after), and lets the last one finish."""
    for steps, seconds in moments:
        process = start(path, sets, wait_at=steps + 3)
        wait_for(process, steps)
        time.sleep(seconds)
        process.kill()
        process.communicate(timeout=600)
        assert RunFolder(path).state().current_status == "interrupted"
    assert finish(start(path, sets)) == 0
    return RunFolder(path)


@pytest.mark.slow
def test_a_run_killed_three_times_ends_in_the_same_bits(tmp_path: Path) -> None:
    """In sft, early in grpo and late in it; the exact point in a step is random."""
    rng = random.Random()
    moments = [
        (rng.randint(2, 10), rng.random() * 0.05),
        (rng.randint(4, 9), rng.random() * 0.05),
        (rng.randint(2, 5), 0.0),
    ]
    killed = kill_and_resume(tmp_path / "killed", moments)
    full = begin(recipe(*SETS), out=tmp_path / "whole")
    assert fingerprint(killed) == fingerprint(full), moments
    assert killed.state().current_status == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_many_times_at_any_moment_ends_in_the_same_bits(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    moments = [(rng.randint(1, 6), rng.random() * 0.2) for _ in range(5)]
    sets = [*SETS, "grpo.steps=40"]
    killed = kill_and_resume(tmp_path / "killed", moments, sets)
    assert fingerprint(killed) == fingerprint(begin(recipe(*sets), out=tmp_path / "whole")), moments


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_saves(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Ctrl-C in the middle of grpo: the step is complete, it has a checkpoint, and the run resumes from there."""
    path = tmp_path / "stopped"
    sets = [s for s in SETS if "save_every" not in s]
    process = start(path, sets, wait_at=12 + 8)
    wait_for(process, 12 + 5)
    process.send_signal(number)
    assert finish(process) == code
    run = RunFolder(path)
    assert run.state().current_status == "interrupted"
    with RunReader.open(path) as store:
        done = {s.name: s.done for s in store.stages()}
    assert 5 <= done["grpo"] <= 9
    assert ("grpo", done["grpo"]) in [(p.stage, p.step) for p in list_checkpoints(run.checkpoints)]
    again = start(path)
    wait_for(again, 1)
    assert finish(again) == 0
    with RunReader.open(path) as store:
        assert [s.done for s in store.stages()] == [12, 24]
    assert fingerprint(run) == fingerprint(begin(recipe(*sets), out=tmp_path / "whole"))
