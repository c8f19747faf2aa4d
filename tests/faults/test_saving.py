"""Checkpoints written in the background, the best one kept, and disk errors."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from oncurve.errors import DiskError, RecipeError, RunError
from oncurve.runs import atomic_files
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.files import load
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database import connection
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training import checkpoint_writer
from oncurve.training.checkpoint_writer import CheckpointRequest, CheckpointWriter, copy_to_host
from oncurve.training.start import begin, resume
from oncurve.training.trainer import TimeUp
from tests.faults import children
from tests.faults.cases import CASES, GRPO, SFT, recipe
from tests.faults.sameness import everything
from tests.faults.test_exact import Die, DieAfter

ROOT = Path(__file__).parents[2]
WILD = {"learning_rate": 5.0, "schedule": "constant"}
"""A rate at which every step makes things worse."""
SHORT_SFT = {**SFT, "steps": 4, "save_every": 1, "eval_every": 0}


def test_a_checkpoint_holds_the_state_at_the_time_of_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues, and changes the same tensors, while the disk is slow."""
    monkeypatch.setattr(checkpoint_writer, "BACKGROUND_FROM", 0)
    real, gate = files.save, threading.Event()
    monkeypatch.setattr(files, "save", lambda *a: gate.wait(60) and real(*a))
    weight = torch.ones(1000, 100)
    saver = CheckpointWriter(tmp_path)
    assert saver.save(CheckpointRequest("grpo", 1, {}, keep=3), {"model": {"w": weight, "tied": weight}}) == []
    weight.zero_()
    assert saver.completed() == []
    gate.set()
    (saved,) = saver.wait()
    saver.close()
    result = load(saved.path).tensors["model"]
    assert bool((result["w"] == 1).all())
    assert result["tied"] is result["w"]


def test_copies_share_no_memory_and_ties_stay(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    copies = copy_to_host({"a": {"x": base, "again": base, "part": base[:3]}, "b": {"x": base}})
    base.zero_()
    assert copies["a"]["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert copies["a"]["again"] is copies["a"]["x"] is copies["b"]["x"]
    assert copies["a"]["part"].tolist() == [0.0, 1.0, 2.0]


def test_what_the_disk_refused_in_the_background_is_raised_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "BACKGROUND_FROM", 0)
    monkeypatch.setattr(files, "free_bytes", lambda path: 10)
    saver = CheckpointWriter(tmp_path)
    saver.save(CheckpointRequest("grpo", 1, {}, keep=3), {"model": {"w": torch.ones(100)}})
    with pytest.raises(DiskError, match="no space left"):
        saver.wait()
    saver.close()


def test_saving_in_the_background_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = recipe({**GRPO, "steps": 5, "save_every": 1, "keep_checkpoints": 9})
    front = everything(begin(small, out=tmp_path / "front"))
    monkeypatch.setattr(checkpoint_writer, "BACKGROUND_FROM", 0)
    behind = begin(small, out=tmp_path / "behind")
    assert everything(behind) == front
    with RunReader.open(behind.path) as store:
        assert [e.step for e in store.events("checkpoint")] == [1, 2, 3, 4, 5]


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    """By loss (lower is better), in an sft stage that gets worse with every step."""
    config = recipe({**SHORT_SFT, "steps": 6, "keep_checkpoints": 1, "keep_best": "loss", "optimiser": WILD})
    run = begin(config, out=tmp_path / "run")
    with RunReader.open(run.path) as store:
        losses = dict(store.metric("loss", "sft"))
    best = min(losses, key=lambda step: losses[step])
    assert best < 6
    assert {p.step for p in list_checkpoints(run.checkpoints)} == {best, 6}


def test_best_by_held_out_accuracy_is_the_earliest_of_equals(tmp_path: Path) -> None:
    config = recipe({**SHORT_SFT, "eval_every": 1, "keep_checkpoints": 1, "keep_best": "heldout_accuracy"})
    run = begin(config, out=tmp_path / "run")
    with RunReader.open(run.path) as store:
        measured = {e.step: e.accuracy or 0.0 for e in store.evals()}
    best = min(step for step, value in measured.items() if value == max(measured.values()))
    assert {p.step for p in list_checkpoints(run.checkpoints)} == {best, 4}


def test_a_metric_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"sft.keep_best: rewrad \(did you mean 'reward'\?\)"):
        begin(recipe({**SHORT_SFT, "keep_best": "rewrad"}), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_metric_of_which_no_value_is_the_best_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"sft.keep_best: length_mean\n  because neither a high nor a low"):
        begin(recipe({**SHORT_SFT, "keep_best": "length_mean"}), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody, and root may write anywhere")
def test_permission_lost_is_reported_and_the_run_stays_as_it_was(tmp_path: Path) -> None:
    """The run can still be read, but not written."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        path = cut_off(Path(name))
        before = sorted(p.name for p in path.rglob("*"))
        output = children.resume_as_nobody(path)
        assert output.startswith("DiskError"), output
        assert "not allowed" in output
        assert sorted(p.name for p in path.rglob("*") if not p.name.endswith(("-wal", "-shm"))) == before
        resume(RunFolder(path))


def test_checkpoints_that_may_not_be_read_are_no_reason_to_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cut_off(tmp_path)
    real = atomic_files.read_file

    def refused(file: Path) -> bytes:
        if file.name == "manifest.json":
            raise PermissionError(13, "Permission denied", str(file))
        return real(file)

    monkeypatch.setattr(files, "read_file", refused)
    with pytest.raises(DiskError, match="not allowed"):
        resume(RunFolder(path))
    monkeypatch.undo()
    with RunReader.open(path) as store:
        assert len(store.steps()) == 3, "nothing was forgotten"


def cut_off(tmp_path: Path) -> Path:
    """A run that crashed after step 3 of 4, with a checkpoint of step 2."""
    path = tmp_path / "run"
    with pytest.raises(Die):
        begin(recipe({**SHORT_SFT, "save_every": 2}), out=path, listeners=[DieAfter(3)])
    return path


def test_a_database_locked_by_another_program_is_reported_and_the_run_resumes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOCK_TIMEOUT_S", 0.05)
    path = cut_off(tmp_path)
    with closing(sqlite3.connect(path / "run.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RunError, match="locked"):
            resume(RunFolder(path))
    run = resume(RunFolder(path))
    assert everything(run) == everything(begin(recipe({**SHORT_SFT, "save_every": 2}), out=tmp_path / "whole"))


def test_a_clock_that_jumps_changes_nothing_but_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day back in the middle, as by a wrong time server: order comes from step numbers, not from times."""
    full = begin(recipe(SHORT_SFT), out=tmp_path / "whole")
    real, calls = time.time, [0]

    def jumping() -> float:
        calls[0] += 1
        return real() - (86400.0 if calls[0] > 6 else 0.0)

    monkeypatch.setattr(time, "time", jumping)
    path = tmp_path / "jumped"
    with pytest.raises(Die):
        begin(recipe(SHORT_SFT), out=path, listeners=[DieAfter(3)])
    run = resume(RunFolder(path))
    monkeypatch.undo()
    assert everything(run) == everything(full)


def test_a_read_only_checkpoint_folder_ends_the_run_with_its_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = atomic_files.write_durably

    def refuse(path: Path, content: bytes) -> None:
        if "000003" in str(path):
            raise OSError(30, "Read-only file system", str(path))
        real(path, content)

    monkeypatch.setattr(files, "write_durably", refuse)
    with pytest.raises(DiskError, match="read-only"):
        begin(recipe(SHORT_SFT), out=tmp_path / "run")
    monkeypatch.undo()
    run = RunFolder(tmp_path / "run")
    assert [p.step for p in list_checkpoints(run.checkpoints)] == [1, 2]
    assert everything(resume(run)) == everything(begin(recipe(SHORT_SFT), out=tmp_path / "whole"))


def test_nothing_is_pickled() -> None:
    """Nothing in the package writes or reads pickle: weights are safetensors, all else is JSON, TOML or SQLite."""
    words = ("import pickle", "torch.load(", "torch.save(", "allow_pickle", "import joblib", "import dill", "import shelve")
    for path in (ROOT / "oncurve").rglob("*.py"):
        text = path.read_text()
        assert not [word for word in words if word in text], path


def test_a_run_written_in_the_background_and_killed_is_still_exact(tmp_path: Path) -> None:
    assert children.run(tmp_path / "run", CASES["sft"], "amid a checkpoint's file", 2, behind=True) == -9
    assert children.run(tmp_path / "run", CASES["sft"], behind=True) == 0
    assert everything(RunFolder(tmp_path / "run")) == everything(begin(CASES["sft"], out=tmp_path / "whole"))


HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def test_a_run_that_another_process_trains_keeps_its_recipe(tmp_path: Path) -> None:
    """The other process may be on another machine, or have started at the same time: only the lock decides."""
    with pytest.raises(TimeUp):
        begin(recipe({**SFT, "steps": 2}), out=tmp_path / "run", minutes=0)
    run = RunFolder(tmp_path / "run")
    before = run.recipe.read_text()
    command = [sys.executable, "-c", HOLD_LOCK, str(run.path / "run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunError, match="in use"):
            resume(run, sets=["engine.slots=3"])
        other.communicate()
    assert run.recipe.read_text() == before
    resume(run, sets=["engine.slots=3"])
    assert "slots = 3" in run.recipe.read_text()
