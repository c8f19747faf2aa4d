"""Runs through every distributed stage type: equal to a single process, and resumed exactly after a kill."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from oncurve import trust
from oncurve.errors import RecipeError
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.checkpoints.files import newest_valid
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.rank_commands import check_scale
from tests.distributed.runs import GONE_S, Started, distance, every_stage, last_step, same_bits, until

STAGES = ["reward_model", "rejection_sample", "grpo", "dpo", "ppo", "trpo"]


def run_all(recipe: Recipe, path: Path) -> Path:
    run = Started(recipe, path)
    assert run.wait() == [0] * recipe.scale.ranks, run.log_text
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    return run_all(every_stage(1, folder), folder / "one")


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    return run_all(every_stage(2, folder), folder / "two")


def recorded(path: Path) -> dict[str, object]:
    """What does not hang on rounding: texts, and what was kept and compared."""
    with RunReader.open(path) as store:
        steps = [store.step(stage, row.step) for stage in STAGES for row in store.steps(stage)]
    texts = [(s.stage, s.step, [[c.text for c in g.group.completions] for g in s.groups]) for s in steps]
    return {"texts": texts} | {file.name: file.read_text().count("\n") for file in path.rglob("*.jsonl")}


def test_two_ranks_run_every_stage_as_one_does(one: Path, two: Path) -> None:
    assert recorded(two) == recorded(one)
    assert distance(two, one) < 1e-4
    assert distance(two, one, "reward_models/grpo") < 1e-4


def test_sharded_weights_are_refused_if_a_stage_needs_all_of_them(folder: Path) -> None:
    recipe, refused = every_stage(2, folder, "scale.shard=full"), {}
    for stage in recipe.stages:
        try:
            check_scale(recipe.model_copy(update={"stages": [stage]}))
        except RecipeError as error:
            refused[stage.label] = str(error)
    assert list(refused) == ["reward_model", "grpo", "ppo", "trpo"]
    assert "stage 'ppo' (ppo) trains a second model next to the policy" in refused["ppo"]
    assert 'use scale.shard = "optimiser"' in refused["ppo"]


def kill_last_rank(recipe: Recipe, path: Path, stage: str, step: int) -> None:
    """Starts a run and kills its last rank in the stage, after ``step`` of its steps."""
    run = Started(recipe, path)
    until(lambda: last_step(path, stage) >= step)
    os.kill(run.processes[-1].pid or 0, signal.SIGKILL)
    assert run.wait(GONE_S)[-1] == -signal.SIGKILL
    assert "is gone" in run.log_text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "step"),
    [("reward_model", 1), ("rejection_sample", 1), ("grpo", 2), ("dpo", 2), ("ppo", 2), ("ppo", 4), ("trpo", 1)],
)
def test_a_run_killed_in_any_stage_resumes_exactly(folder: Path, two: Path, tmp_path: Path, stage: str, step: int) -> None:
    kill_last_rank(every_stage(2, folder), tmp_path / "cut", stage, step)
    again = Started(every_stage(2, folder), tmp_path / "cut", again=True)
    assert again.wait() == [0, 0], again.log_text
    assert same_bits(tmp_path / "cut", two)
    assert recorded(tmp_path / "cut") == recorded(two)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "optimiser"])
@pytest.mark.parametrize("stage", ["dpo", "ppo"])
def test_a_checkpoint_of_four_ranks_resumes_in_any_stage(
    folder: Path, one: Path, tmp_path: Path, stage: str, shard: str
) -> None:
    """The moments of policy and critic, the critic itself, the reference's log-probs of pairs."""
    sets = [f"scale.shard={shard}"]
    kill_last_rank(every_stage(4, folder, *sets), tmp_path / "4", stage, 3)
    last = newest_valid(tmp_path / "4" / "checkpoints", lambda path, why: None)
    assert last is not None
    assert last.stage == stage
    for ranks in (2, 1):
        path = tmp_path / str(ranks)
        shutil.copytree(tmp_path / "4", path)
        trust.grant(RunFolder(path))
        again = Started(every_stage(ranks, folder, *sets), path, again=True, sets=[f"scale.ranks={ranks}"])
        assert again.wait() == [0] * ranks, again.log_text
        assert distance(path, one) < 1e-4
