"""Ctrl-C or SIGTERM: the first finishes the step and saves, the second ends at once. Also leaks over a long run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oncurve.recipe.load import dump_recipe
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.start import begin
from tests.faults.cases import FORMAT, GRPO, HURRIED, recipe

ROOT = Path(__file__).parents[2]

SLOW_REWARD = """
import time
from pathlib import Path
def slow(completion):
    Path({mark!r}).touch()
    time.sleep(0.02 if not Path({mark!r} + "-hang").exists() else 3600)
    return float(len(completion))
"""


def start(tmp_path: Path, hang: bool) -> tuple[subprocess.Popen[str], Path]:
    """`oncurve train` in a separate process, once its first reward is computed; with `hang`, that reward never returns."""
    mark = tmp_path / "mark"
    (tmp_path / "slow.py").write_text(SLOW_REWARD.format(mark=str(mark)))
    if hang:
        (tmp_path / "mark-hang").touch()
    reward = {"type": "python", "name": "slow", "function": f"{tmp_path / 'slow.py'}:slow"}
    (tmp_path / "r.toml").write_text(
        dump_recipe(recipe({**GRPO, "steps": 5000, "save_every": 0, "eval_every": 0}, rewards=[reward]))
    )
    words = [sys.executable, "-m", "oncurve", "train", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not mark.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    return process, tmp_path / "run"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_finishes_the_step_and_saves(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process, path = start(tmp_path, hang=False)
    process.send_signal(number)
    _, error = process.communicate(timeout=600)
    assert process.returncode == code, error
    assert "Traceback" not in error
    run = RunFolder(path)
    assert run.state().current_status == "interrupted"
    with RunReader.open(path) as store:
        done = store.stages()[-1].done
    assert [p.step for p in list_checkpoints(run.checkpoints)] == [done]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_it_at_once(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """During a reward that hangs, so that the step could never finish."""
    process, _ = start(tmp_path, hang=True)
    process.send_signal(number)
    assert process.stdout is not None
    assert any("interrupt again to stop at once" in line for line in process.stdout), "the first one waits for the step"
    process.send_signal(number)
    _, error = process.communicate(timeout=600)
    assert process.returncode == code, error
    assert "Traceback" not in error


def measured() -> tuple[float, int, int]:
    """(MiB of memory, open files, child processes) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = sum(len(task.read_text().split()) for task in Path("/proc/self/task").glob("*/children"))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")), children


@pytest.mark.slow
def test_a_thousand_steps_with_failing_rewards_leave_nothing_behind(tmp_path: Path) -> None:
    """A function that raises, and one in workers that sometimes dies or is too slow: memory, files, processes stay."""
    from oncurve.records import StepReport
    from oncurve.training.listeners import Listener

    observed: dict[int, tuple[float, int, int]] = {}

    class Gauge(Listener):
        def on_step(self, report: StepReport) -> None:
            if report.step in (200, 600, 1000):
                observed[report.step] = measured()

    failing = {"type": "python", "name": "failing", "function": "tests.faults.grading:failing"}
    dying = {**HURRIED, "name": "dying", "function": "tests.faults.grading:dying", "seconds": 0.5, "weight": 0.5}
    stage = {
        **GRPO,
        "steps": 1000,
        "prompts_per_step": 2,
        "group_size": 2,
        "sampling": {"max_new_tokens": 4},
        "save_every": 100,
    }
    soak = recipe({**stage, "eval_every": 0, "max_failure_share": 1.0}, rewards=[failing, dying, FORMAT])
    run = begin(soak, out=tmp_path / "run", listeners=[Gauge()])
    with RunReader.open(run.path) as store:
        failures = dict(store.metric("failure_share", "grpo"))
    assert 0.02 < sum(failures.values()) / 1000 < 0.9
    (early, files, processes), (late, files_late, processes_late) = observed[200], observed[1000]
    assert late - early < 24, observed
    assert files_late <= files + 2, observed
    assert processes_late <= processes + 1, observed
