"""Faults on a real cluster: processes and nodes are killed, a process hangs. Each time the run ends with the bits of a
single-process run, no group is lost or counted twice, and the run's events say what happened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SMALL
from tests.cluster.started import Started, each_group_once, last_step, same_as_in_one_process
from tests.faults.cases import FORMAT, GRPO, HURRIED, recipe

pytestmark = pytest.mark.slow

STEPS = 80
STAGE = {**GRPO, "steps": STEPS, "save_every": 10, "eval_every": 25}
RUN = recipe(STAGE, rewards=[HURRIED, FORMAT], scale={"samplers": 2, "reward_workers": 1, "timeout_s": 120.0})


def check_undisturbed(started: Started, tmp_path: Path) -> str:
    """Checks that groups and bits are those of an undisturbed run; returns the run's events."""
    each_group_once(started.run, STEPS, 3)
    same_as_in_one_process(started.run, RUN, tmp_path / "plain")
    return " | ".join(started.events())


def test_a_reward_worker_is_killed(cluster: Any, tmp_path: Path) -> None:
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    started.until(5)
    started.kill("reward-0")
    started.end()
    events = check_undisturbed(started, tmp_path)
    assert "reward-0" in events
    assert "died while scoring" in events
    assert "reward-0 was restarted" in events


def test_the_learner_is_killed(cluster: Any, tmp_path: Path) -> None:
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    started.until(25)
    started.kill("learner")
    output = started.end()
    events = check_undisturbed(started, tmp_path)
    assert "the learner died" in events
    assert "resumes from the last checkpoint" in output


def test_the_driver_is_killed_and_the_run_is_resumed(cluster: Any, tmp_path: Path) -> None:
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    started.until(25)
    learner = started.status("learner").pid
    started.process.kill()
    started.process.communicate()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{learner}").exists():
        assert time.monotonic() < deadline, "the learner outlives its driver"
        time.sleep(0.1)
    assert last_step(started.run) < STEPS
    again = started.resume(cluster.address)
    again.end()
    check_undisturbed(again, tmp_path)


def test_a_signal_to_the_driver_saves_and_stops_the_run(cluster: Any, tmp_path: Path) -> None:
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    started.until(15)
    started.process.send_signal(signal.SIGINT)
    output = started.end(code=130)
    assert "the step was finished and saved" in " ".join(output.split())
    assert started.run.state().current_status == "interrupted"
    again = started.resume(cluster.address)
    again.end()
    check_undisturbed(again, tmp_path)


def test_a_sampler_hangs_for_half_a_minute_and_comes_back(cluster: Any, tmp_path: Path) -> None:
    """Longer than the time limit of a call: the other sampler writes its groups, and it takes part again when it answers."""
    impatient = RUN.model_copy(update={"scale": RUN.scale.model_copy(update={"timeout_s": 12.0})})
    long = impatient.stages[0].model_copy(update={"steps": 100_000, "save_every": 500, "eval_every": 0})
    started = Started.begin(tmp_path / "ray", impatient.model_copy(update={"stages": (long,)}), cluster.address)
    started.until(5)
    pid = started.kill("sampler-1", signal.SIGSTOP)
    time.sleep(30)
    steps_meanwhile = last_step(started.run)
    os.kill(pid, signal.SIGCONT)
    started.wait_for("its return", lambda: any("answers again" in line for line in started.events()))
    started.until(steps_meanwhile + 5)
    started.process.send_signal(signal.SIGINT)
    started.end(code=130)
    assert steps_meanwhile > 5
    each_group_once(started.run, last_step(started.run), 3)
    assert any("sampler-1" in line and "has not answered the learner" in line for line in started.events())


def test_the_only_sampler_hangs_for_half_a_minute_within_the_limit(cluster: Any, tmp_path: Path) -> None:
    alone = RUN.model_copy(update={"scale": RUN.scale.model_copy(update={"samplers": 1})})
    started = Started.begin(tmp_path / "ray", alone, cluster.address)
    started.until(5)
    pid = started.kill("sampler-0", signal.SIGSTOP)
    time.sleep(30)
    steps_meanwhile = last_step(started.run)
    os.kill(pid, signal.SIGCONT)
    started.end()
    assert steps_meanwhile < STEPS
    each_group_once(started.run, STEPS, 3)
    same_as_in_one_process(started.run, alone, tmp_path / "plain")


@pytest.mark.parametrize("of", ["sampler-0", "learner"])
def test_a_node_is_killed(cluster: Any, tmp_path: Path, of: str) -> None:
    """Its actors are restarted on other nodes; a new node replaces it for the following tests."""
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    started.until(25)
    cluster.remove_node(node_of(cluster, started.status(of).pid), allow_graceful=False)
    cluster.add_node(**SMALL)
    started.end()
    assert "died" in check_undisturbed(started, tmp_path)


def node_of(cluster: Any, pid: int) -> Any:
    """The node whose raylet started a process."""
    for node in cluster.list_all_nodes():
        raylets = [p.process.pid for p in node.all_processes["raylet"]]
        if parent(pid) in raylets:
            return node
    raise AssertionError(f"process {pid} belongs to no node")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
