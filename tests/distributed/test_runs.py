"""Runs on several ranks: what they record, how they resume on other numbers of ranks, and what happens if a rank dies."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from oncurve import trust
from oncurve.distributed.rank_status import read_statuses
from oncurve.runs.checkpoints.listing import checkpoint_path, list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.terminal.show import state_of, status_data
from tests.distributed.runs import GONE_S, Started, distance, last_step, run_recipe, same_bits, until


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same run on 1, 2 and 4 ranks, without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    started = {ranks: Started(run_recipe(ranks), folder / str(ranks)) for ranks in (1, 2, 4)}
    for ranks, run in started.items():
        assert run.wait() == [0] * ranks, run.log_text
    return {ranks: folder / str(ranks) for ranks in started}


def has_checkpoint(path: Path) -> bool:
    return any(entry.stage == "grpo" for entry in list_checkpoints(path / "checkpoints"))


def test_rank_zero_records_the_work_of_all_ranks(undisturbed: dict[int, Path]) -> None:
    """Prompts, completions, rewards, per-token statistics and evaluations: nothing is missing or recorded twice."""
    recorded = {}
    for ranks, path in undisturbed.items():
        with RunReader.open(path) as store:
            steps = [store.step("grpo", n) for n in range(1, 13)]
            texts = [[[c.text for c in g.group.completions] for g in step.groups] for step in steps]
            counts = [sum(stats is not None for row in step.stats for stats in row) for step in steps]
            recorded[ranks] = (texts, counts, [(e.stage, e.step, e.accuracy) for e in store.evals()])
    assert recorded[1] == recorded[2] == recorded[4]


def test_weights_differ_by_rounding_only(undisturbed: dict[int, Path]) -> None:
    assert distance(undisturbed[2], undisturbed[1]) < 1e-4
    assert distance(undisturbed[4], undisturbed[1]) < 1e-4


def test_status_of_a_finished_run(undisturbed: dict[int, Path]) -> None:
    assert [(p.name, state_of(p)) for p in read_statuses(undisturbed[4])] == [(f"rank-{i}", "done") for i in range(4)]
    assert not (undisturbed[1] / "actors").exists()
    status = status_data(RunFolder(undisturbed[2]))
    assert (status["status"], status["last"]) == ("finished", {"stage": "grpo", "step": 12})


def test_if_a_rank_is_killed_all_end_and_the_run_resumes_exactly(undisturbed: dict[int, Path], tmp_path: Path) -> None:
    path = tmp_path / "killed"
    run = Started(run_recipe(2), path)
    until(lambda: last_step(path) >= 5)
    os.kill(run.processes[1].pid or 0, signal.SIGKILL)
    codes = run.wait(GONE_S)
    assert codes == [2, -signal.SIGKILL]
    assert run.log_text.count("printed:") == 1
    assert "rank 0 printed: rank 1 of 2: its process" in run.log_text
    assert "is gone" in run.log_text
    assert "oncurve train --resume" in run.log_text
    again = Started(run_recipe(2), path, again=True)
    assert again.wait() == [0, 0], again.log_text
    assert same_bits(path, undisturbed[2])


@pytest.mark.slow
def test_rank_zero_is_killed(undisturbed: dict[int, Path], tmp_path: Path) -> None:
    """Another rank prints the error."""
    path = tmp_path / "killed"
    run = Started(run_recipe(2), path)
    until(lambda: last_step(path) >= 4)
    os.kill(run.processes[0].pid or 0, signal.SIGKILL)
    assert run.wait(GONE_S) == [-signal.SIGKILL, 2]
    assert "rank 1 printed: rank 0 of 2: its process" in run.log_text
    again = Started(run_recipe(2), path, again=True)
    assert again.wait() == [0, 0], again.log_text
    assert same_bits(path, undisturbed[2])


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_resumes_on_two_and_on_one(undisturbed: dict[int, Path], tmp_path: Path) -> None:
    for ranks in (2, 1):
        path = tmp_path / str(ranks)
        run = Started(run_recipe(4), path)
        until(partial(has_checkpoint, path))
        os.kill(run.processes[3].pid or 0, signal.SIGKILL)
        run.wait(GONE_S)
        again = Started(run_recipe(ranks), path, again=True, sets=[f"scale.ranks={ranks}"])
        assert again.wait() == [0] * ranks, again.log_text
        assert distance(path, undisturbed[1]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimiser", "full"])
def test_a_sharded_checkpoint_of_four_ranks_resumes_on_two_and_on_one(shard: str, tmp_path: Path) -> None:
    """Weights, moments and the reference: each rank has written its shard, and any number of ranks reads them."""
    sets = [f"scale.shard={shard}", "grpo.kl.beta=0.04"]
    run = Started(run_recipe(4, *sets), tmp_path / "4")
    until(partial(has_checkpoint, tmp_path / "4"))
    os.kill(run.processes[3].pid or 0, signal.SIGKILL)
    run.wait(GONE_S)
    last = max(p.step for p in list_checkpoints(tmp_path / "4" / "checkpoints") if p.stage == "grpo")
    assert last < 12
    files = sorted(f.name for f in checkpoint_path(tmp_path / "4" / "checkpoints", "grpo", last).iterdir())
    assert [f for f in files if f.startswith("pieces-")] == [f"pieces-0000{i}.safetensors" for i in range(4)]
    assert "pieces.json" in files
    plain = Started(run_recipe(1, *sets), tmp_path / "plain")
    assert plain.wait() == [0], plain.log_text
    for ranks in (2, 1):
        path = tmp_path / str(ranks)
        shutil.copytree(tmp_path / "4", path)
        trust.grant(RunFolder(path))
        again = Started(run_recipe(ranks, *sets), path, again=True, sets=[f"scale.ranks={ranks}"])
        assert again.wait() == [0] * ranks, again.log_text
        assert distance(path, tmp_path / "plain") < 1e-4


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hangs"
    run = Started(run_recipe(2, "scale.timeout_s=12.0"), path)
    until(lambda: last_step(path) >= 2)
    os.kill(run.processes[1].pid or 0, signal.SIGSTOP)
    try:
        run.processes[0].join(GONE_S)
        assert run.processes[0].exitcode == 2
    finally:
        os.kill(run.processes[1].pid or 0, signal.SIGKILL)
    assert "waited 12 s in" in run.log_text
    assert "for rank 1" in run.log_text
    assert "rank 1 on" in run.log_text
    assert "raise scale.timeout_s" in run.log_text


def test_ctrl_c_saves_and_stops_all_ranks(undisturbed: dict[int, Path], tmp_path: Path) -> None:
    """Every rank gets the signal, and rank 0 decides."""
    path = tmp_path / "stopped"
    run = Started(run_recipe(2), path)
    until(lambda: last_step(path) >= 3)
    for child in run.processes:
        os.kill(child.pid or 0, signal.SIGINT)
    assert run.wait(GONE_S) == [130, 0]
    assert "stopped by you" in run.log_text
    assert RunFolder(path).state().current_status == "interrupted"
    again = Started(run_recipe(2), path, again=True)
    assert again.wait() == [0, 0], again.log_text
    assert same_bits(path, undisturbed[2])
