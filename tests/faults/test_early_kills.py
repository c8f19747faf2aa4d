"""Signals in a run's or fork's first moments: at every file operation from the first to the first step.

A run is complete or absent afterwards. The same command again, as a job that restarts gives it, ends with the same bits.
"""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from oncurve import trust
from oncurve.errors import RunError
from oncurve.runs.checkpoints.listing import checkpoint_path
from oncurve.runs.folder import Parent, RunFolder, list_runs
from oncurve.training.start import begin, fork, resume
from tests.faults import children
from tests.faults.cases import GRPO, recipe
from tests.faults.sameness import everything

SMALL = recipe({**GRPO, "steps": 3, "save_every": 1, "eval_every": 0, "prompts_per_step": 2, "group_size": 2})
"""With a Python reward, so that a resumed run must be trusted too."""
CHANGE = ["grpo.optimiser.learning_rate=0.002"]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return begin(SMALL, out=tmp_path_factory.mktemp("parent") / "parent")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, parent: RunFolder) -> dict[Path | None, dict[str, str]]:
    """What an uninterrupted run and an uninterrupted fork have, by their parent."""
    folder = tmp_path_factory.mktemp("whole")
    forked = fork(parent, children.FORK_STEP, CHANGE, out=folder / "fork")
    return {None: everything(parent), parent.path: everything(forked)}


def signalled(folder: Path, origin: Path | None, call: int, number: int, expected: dict[str, str]) -> None:
    path = folder / f"run-{call}"
    code = children.run_early(path, SMALL, origin, call, number)
    assert code in (-number, 128 + number), f"file operation {call}: {code}"
    for entry in list_runs(folder):
        assert entry.status in ("interrupted", "finished"), f"file operation {call}: {entry}"
    assert children.run_early(path, SMALL, origin) == 0, f"file operation {call}"
    assert everything(RunFolder(path)) == expected, f"file operation {call}"
    assert not list(folder.glob(".*/run.json")), f"file operation {call}: a leftover"
    shutil.rmtree(path)


def test_two_kills_in_the_first_moments(tmp_path: Path, parent: RunFolder, whole: dict[Path | None, dict[str, str]]) -> None:
    signalled(tmp_path, None, 9, signal.SIGKILL, whole[None])
    signalled(tmp_path, parent.path, 12, signal.SIGKILL, whole[parent.path])


@pytest.mark.slow
@pytest.mark.parametrize("calls", [range(1, 14), range(14, 28), range(28, 42)], ids=str)
@pytest.mark.parametrize("forked", [False, True], ids=["begin", "fork"])
def test_kills_at_each_of_the_first_file_operations(
    calls: range, forked: bool, tmp_path: Path, parent: RunFolder, whole: dict[Path | None, dict[str, str]]
) -> None:
    origin = parent.path if forked else None
    for call in calls:
        signalled(tmp_path, origin, call, signal.SIGKILL, whole[origin])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signals_at_the_first_file_operations(
    number: int, tmp_path: Path, parent: RunFolder, whole: dict[Path | None, dict[str, str]]
) -> None:
    for call in (1, 2, 4, 6, 8, 10, 12, 16, 20, 24):
        signalled(tmp_path, None, call, number, whole[None])
        signalled(tmp_path, parent.path, call, number, whole[parent.path])


def half_made_fork(path: Path, parent: RunFolder) -> RunFolder:
    """A fork as a kill left it when runs were made in place: run.json and recipe.toml, nothing else."""

    def fill(new: RunFolder, _: Path) -> None:
        new.write_recipe(parent.recipe.read_text())

    run = RunFolder.create_at(path, parent=Parent(parent.name, "grpo", 2), fill=fill)
    run.set_status("interrupted")
    trust.grant(run)
    return run


@pytest.mark.parametrize("left", ["nothing", "part of a checkpoint", "a checkpoint", "a checkpoint and an empty database"])
def test_a_half_made_fork_never_trains_from_nothing(left: str, tmp_path: Path, parent: RunFolder) -> None:
    run = half_made_fork(tmp_path / "fork", parent)
    copied = checkpoint_path(run.checkpoints, "grpo", 2)
    if left != "nothing":
        shutil.copytree(checkpoint_path(parent.checkpoints, "grpo", 2), copied)
    if left == "part of a checkpoint":
        (copied / "manifest.json").unlink()
    if left.endswith("empty database"):
        run.database.touch()
    with pytest.raises(RunError, match=r"incomplete fork(.|\n)*fork again: oncurve fork parent --stage grpo --step 2"):
        resume(run)
    assert run.state().status == "failed"


@pytest.mark.parametrize("left", ["none", "empty", "without tables"])
def test_a_run_without_a_database_is_completed(
    left: str, tmp_path: Path, parent: RunFolder, whole: dict[Path | None, dict[str, str]]
) -> None:
    """As version 1 left a run that was killed before its database was there."""

    def fill(new: RunFolder, _: Path) -> None:
        new.write_recipe(parent.recipe.read_text())

    run = RunFolder.create_at(tmp_path / "run", fill=fill)
    run.set_status("interrupted")
    trust.grant(run)
    if left == "empty":
        run.database.touch()
    elif left == "without tables":
        with closing(sqlite3.connect(run.database)) as store:
            store.execute("PRAGMA journal_mode = WAL")
    expected = {name: content for name, content in whole[None].items() if name != "inputs.json"}  # version 1 has none
    assert everything(resume(run)) == expected


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    living, dead = RunFolder.create(tmp_path, "x").path, RunFolder.create(tmp_path, "x").path
    state = dead / "run.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"pid_started": 0}))
    living.rename(tmp_path / ".new-living")
    dead.rename(tmp_path / ".new-dead")
    (tmp_path / ".new-starting").mkdir()
    assert RunFolder.create(tmp_path, "x").name == "x-1"
    assert {path.name for path in tmp_path.iterdir()} == {"x-1", ".new-living", ".new-starting"}
