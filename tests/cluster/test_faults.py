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
from tests.cluster.started import Started, each_group_once, in_one_process, last_step, same_as, same_as_in_one_process
from tests.faults.cases import FORMAT, GRPO, HURRIED, recipe

pytestmark = pytest.mark.slow

STEPS = 80
STAGE = {**GRPO, "steps": STEPS, "save_every": 10, "eval_every": 25}
RUN = recipe(STAGE, rewards=[HURRIED, FORMAT], scale={"samplers": 2, "reward_workers": 1, "timeout_s": 120.0})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What RUN leaves in one process."""
    return in_one_process(RUN, tmp_path_factory.mktemp("plain") / "run")


def check_undisturbed(started: Started, undisturbed: dict[str, str]) -> str:
    """Checks that groups and bits are those of an undisturbed run; returns the run's events."""
    each_group_once(started.run, STEPS, 3)
    same_as(undisturbed, started.run)
    return " | ".join(started.events())


def test_a_reward_worker_and_then_the_learner_are_killed(cluster: Any, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    started.until(5)
    started.kill("reward-0")
    started.wait_for("its restart", lambda: any("reward-0 was restarted" in line for line in started.events()))
    started.until(last_step(started.run) + 15)
    started.kill("learner")
    output = started.end()
    events = check_undisturbed(started, undisturbed)
    assert "died while scoring" in events
    assert "reward-0 was restarted" in events
    assert "the learner died" in events
    assert "resumes from the last checkpoint" in output


def test_the_driver_is_interrupted_and_then_killed(cluster: Any, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """A signal saves and stops the run; after a kill it resumes from the last checkpoint."""
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    started.until(15)
    started.process.send_signal(signal.SIGINT)
    output = started.end(code=130)
    assert "the step was finished and saved" in " ".join(output.split())
    assert started.run.state().current_status == "interrupted"
    resumed = started.resume(cluster.address)
    resumed.until(last_step(started.run) + 15)
    learner = resumed.status("learner").pid
    resumed.process.kill()
    resumed.process.communicate()
    deadline = time.monotonic() + 300
    while Path(f"/proc/{learner}").exists():
        assert time.monotonic() < deadline, "the learner outlives its driver"
        time.sleep(0.1)
    assert last_step(started.run) < STEPS
    again = started.resume(cluster.address)
    again.end()
    check_undisturbed(again, undisturbed)


def test_a_sampler_that_hangs_is_left_out_and_comes_back(cluster: Any, tmp_path: Path) -> None:
    """Longer than the time limit of a call: the other sampler writes its groups, and it takes part again when it answers."""
    impatient = RUN.model_copy(update={"scale": RUN.scale.model_copy(update={"timeout_s": 12.0})})
    long = impatient.stages[0].model_copy(update={"steps": 100_000, "save_every": 500, "eval_every": 0})
    started = Started.begin(tmp_path / "ray", impatient.model_copy(update={"stages": (long,)}), cluster.address)
    started.until(5)
    pid = started.kill("sampler-1", signal.SIGSTOP)
    started.wait_for("the notice", lambda: any("has not answered the learner" in line for line in started.events()))
    started.until(last_step(started.run) + 5)
    steps_meanwhile = last_step(started.run)
    os.kill(pid, signal.SIGCONT)
    started.wait_for("its return", lambda: any("answers again" in line for line in started.events()))
    started.until(steps_meanwhile + 5)
    started.process.send_signal(signal.SIGINT)
    started.end(code=130)
    each_group_once(started.run, last_step(started.run), 3)
    assert any("sampler-1" in line and "has not answered the learner" in line for line in started.events())


def test_the_only_sampler_hangs_within_the_limit(cluster: Any, tmp_path: Path) -> None:
    alone = RUN.model_copy(update={"scale": RUN.scale.model_copy(update={"samplers": 1})})
    started = Started.begin(tmp_path / "ray", alone, cluster.address)
    started.until(5)
    pid = started.kill("sampler-0", signal.SIGSTOP)
    time.sleep(10)
    steps_meanwhile = last_step(started.run)
    os.kill(pid, signal.SIGCONT)
    started.end()
    assert steps_meanwhile < STEPS
    each_group_once(started.run, STEPS, 3)
    same_as_in_one_process(started.run, alone, tmp_path / "plain")


def test_nodes_are_killed(cluster: Any, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """A sampler's, then the learner's. Their actors are restarted on other nodes; a new node replaces each."""
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    for actor in ("sampler-0", "learner"):
        started.until(last_step(started.run) + 12)
        cluster.remove_node(node_of(cluster, started.status(actor).pid), allow_graceful=False)
        cluster.add_node(**SMALL)
        started.wait_for("the notice", lambda actor=actor: died(started, actor))  # type: ignore[misc]
    started.end()
    check_undisturbed(started, undisturbed)


def died(started: Started, actor: str) -> bool:
    return any(actor in line and "died" in line for line in started.events())


def node_of(cluster: Any, pid: int) -> Any:
    """The node whose raylet started a process."""
    for node in cluster.list_all_nodes():
        raylets = [p.process.pid for p in node.all_processes["raylet"]]
        if parent(pid) in raylets:
            return node
    raise AssertionError(f"process {pid} belongs to no node")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
