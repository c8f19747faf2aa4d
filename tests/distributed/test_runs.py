"""Runs on several ranks: what they write, how they go on on other numbers of them, and what becomes of one without a rank."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from oncurve import trust
from oncurve.distributed.rank_status import read_statuses
from oncurve.runs.checkpoints.listing import checkpoint_path, list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.terminal.status import state_of, status_data
from tests.distributed.runs import GONE_S, Started, asked, distance, last_step, same_bits, until


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same run on 1, 2 and 4 ranks, never disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    started = {ranks: Started(asked(ranks), folder / str(ranks)) for ranks in (1, 2, 4)}
    for ranks, run in started.items():
        assert run.wait() == [0] * ranks, run.said
    return {ranks: folder / str(ranks) for ranks in started}


def has_checkpoint(path: Path) -> bool:
    return any(place.stage == "grpo" for place in list_checkpoints(path / "checkpoints"))


def test_the_first_rank_records_what_all_did(whole: dict[int, Path]) -> None:
    """Prompts, completions, rewards, per-token figures and measurements: nothing is missing and nothing is twice there."""
    kept = {}
    for ranks, path in whole.items():
        with RunReader.open(path) as store:
            steps = [store.step("grpo", n) for n in range(1, 13)]
            texts = [[[c.text for c in g.group.completions] for g in step.groups] for step in steps]
            seen = [sum(found is not None for row in step.stats for found in row) for step in steps]
            kept[ranks] = (texts, seen, [(e.stage, e.step, e.accuracy) for e in store.evals()])
    assert kept[1] == kept[2] == kept[4]


def test_weights_differ_by_rounding_alone(whole: dict[int, Path]) -> None:
    assert distance(whole[2], whole[1]) < 1e-4
    assert distance(whole[4], whole[1]) < 1e-4


def test_status_of_a_run_that_is_done(whole: dict[int, Path]) -> None:
    assert [(p.name, state_of(p)) for p in read_statuses(whole[4])] == [(f"rank-{i}", "done") for i in range(4)]
    assert not (whole[1] / "actors").exists()
    told = status_data(RunFolder(whole[2]))
    assert (told["status"], told["last"]) == ("finished", {"stage": "grpo", "step": 12})


def test_a_killed_rank_takes_all_with_it_and_the_run_goes_on_exactly(whole: dict[int, Path], tmp_path: Path) -> None:
    path = tmp_path / "killed"
    run = Started(asked(2), path)
    until(lambda: last_step(path) >= 5)
    killed = time.monotonic()
    os.kill(run.processes[1].pid or 0, signal.SIGKILL)
    codes = run.wait(GONE_S)
    assert time.monotonic() - killed < GONE_S
    assert codes == [2, -signal.SIGKILL]
    assert run.said.count("said:") == 1
    assert "0 said: rank 1 of 2: its process" in run.said
    assert "is gone" in run.said
    assert "oncurve train --resume" in run.said
    again = Started(asked(2), path, again=True)
    assert again.wait() == [0, 0], again.said
    assert same_bits(path, whole[2])


@pytest.mark.slow
def test_the_first_rank_killed(whole: dict[int, Path], tmp_path: Path) -> None:
    """Nobody is left to decide; another rank speaks."""
    path = tmp_path / "killed"
    run = Started(asked(2), path)
    until(lambda: last_step(path) >= 4)
    os.kill(run.processes[0].pid or 0, signal.SIGKILL)
    assert run.wait(GONE_S) == [-signal.SIGKILL, 2]
    assert "1 said: rank 0 of 2: its process" in run.said
    again = Started(asked(2), path, again=True)
    assert again.wait() == [0, 0], again.said
    assert same_bits(path, whole[2])


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_goes_on_on_two_and_on_one(whole: dict[int, Path], tmp_path: Path) -> None:
    for ranks in (2, 1):
        path = tmp_path / str(ranks)
        run = Started(asked(4), path)
        until(partial(has_checkpoint, path))
        os.kill(run.processes[3].pid or 0, signal.SIGKILL)
        run.wait(GONE_S)
        again = Started(asked(ranks), path, again=True, sets=[f"scale.ranks={ranks}"])
        assert again.wait() == [0] * ranks, again.said
        assert distance(path, whole[1]) < 1e-4


@pytest.mark.parametrize("shard", ["optimiser", "full"])
def test_what_four_ranks_wrote_in_pieces_goes_on_on_two_and_on_one(shard: str, tmp_path: Path) -> None:
    """Weights, moments and the reference: each rank has written its part of them, and any number of ranks reads it."""
    sets = [f"scale.shard={shard}", "grpo.kl.beta=0.04"]
    run = Started(asked(4, *sets), tmp_path / "4")
    until(partial(has_checkpoint, tmp_path / "4"))
    os.kill(run.processes[3].pid or 0, signal.SIGKILL)
    run.wait(GONE_S)
    last = max(p.step for p in list_checkpoints(tmp_path / "4" / "checkpoints") if p.stage == "grpo")
    assert last < 12
    files = sorted(f.name for f in checkpoint_path(tmp_path / "4" / "checkpoints", "grpo", last).iterdir())
    assert [f for f in files if f.startswith("pieces-")] == [f"pieces-0000{i}.safetensors" for i in range(4)]
    assert "pieces.json" in files
    plain = Started(asked(1, *sets), tmp_path / "plain")
    assert plain.wait() == [0], plain.said
    for ranks in (2, 1):
        path = tmp_path / str(ranks)
        shutil.copytree(tmp_path / "4", path)
        trust.grant(RunFolder(path))
        again = Started(asked(ranks, *sets), path, again=True, sets=[f"scale.ranks={ranks}"])
        assert again.wait() == [0] * ranks, again.said
        assert distance(path, tmp_path / "plain") < 1e-4


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hangs"
    run = Started(asked(2, "scale.timeout_s=8.0"), path)
    until(lambda: last_step(path) >= 2)
    os.kill(run.processes[1].pid or 0, signal.SIGSTOP)
    try:
        run.processes[0].join(25)
        assert run.processes[0].exitcode == 2
    finally:
        os.kill(run.processes[1].pid or 0, signal.SIGKILL)
    assert "waited 8 s in" in run.said
    assert "for rank 1" in run.said
    assert "rank 1 on" in run.said
    assert "raise scale.timeout_s" in run.said


def test_a_stop_of_the_first_rank_stops_all_in_good_order(whole: dict[int, Path], tmp_path: Path) -> None:
    """As Ctrl-C does: every rank gets the signal, and the first decides."""
    path = tmp_path / "stopped"
    run = Started(asked(2), path)
    until(lambda: last_step(path) >= 3)
    for child in run.processes:
        os.kill(child.pid or 0, signal.SIGINT)
    assert run.wait(30) == [130, 0]
    assert "stopped by you" in run.said
    assert RunFolder(path).state().current_status == "interrupted"
    again = Started(asked(2), path, again=True)
    assert again.wait() == [0, 0], again.said
    assert same_bits(path, whole[2])
