"""`oncurve train`, `--resume` and `oncurve fork`."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from oncurve import trust
from oncurve.cli.train import choose_target
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from tests.cli.conftest import Oncurve


@pytest.fixture
def stopped(runs: Path, tmp_path: Path) -> Path:
    """A folder with small-1 as it was when grpo step 1 had been saved."""
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    run = RunFolder(folder / "small-1")
    shutil.rmtree(run.checkpoints / "grpo-000002")
    shutil.rmtree(run.model)
    run.set_status("interrupted")
    trust.grant(run)
    return folder


def test_a_run_ends_with_what_it_learned_and_what_to_type_next(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    result = oncurve("train", recipe, "--runs", tmp_path / "runs")
    assert result.code == 0
    for words in ("after sft", "after grpo", "2 digits", "advantage", "oncurve show", "oncurve chat", "oncurve eval"):
        assert words in result.out
    run = tmp_path / "runs" / "small-1"
    assert {"recipe.toml", "run.json", "run.db", "checkpoints", "model"} <= {path.name for path in run.iterdir()}
    assert (run / "model" / "config.json").is_file()


def test_sets_change_the_recipe_and_out_names_the_folder(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "mine"
    result = oncurve("train", recipe, "--set", "grpo.steps=1", "--set", "seed=7", "--out", out)
    assert result.code == 0
    written = (out / "recipe.toml").read_text()
    assert "seed = 7" in written
    assert not (tmp_path / "runs").exists()


def test_steps_are_profiled(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = oncurve("train", recipe, "--out", out, "--set", "grpo.steps=3", "--profile", "2")
    assert result.code == 0, result.err
    assert "2 steps of grpo, from step 2" in result.out
    table = (out / "profile" / "table.txt").read_text()
    assert all(phase in table for phase in ("sample", "update/forward", "step  ", "aten::"))
    trace = json.loads(gzip.decompress((out / "profile" / "trace.json.gz").read_bytes()))
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])
    result = oncurve("train", recipe, "--out", tmp_path / "short", "--set", "grpo.steps=1", "--profile", "2")
    assert "no step was profiled" in result.out
    assert oncurve("train", recipe, "--ray", "auto", "--profile", "2").code == 2


@pytest.mark.parametrize("words", [["RUN", "--resume"], ["--resume", "RUN"], ["--resume", "small-1"], ["RECIPE", "--resume"]])
def test_a_stopped_run_resumes_however_it_is_named(
    oncurve: Oncurve, recipe: Path, runs: Path, stopped: Path, words: list[str]
) -> None:
    names = {"RUN": str(stopped / "small-1"), "RECIPE": str(recipe)}
    result = oncurve("train", *(names.get(word, word) for word in words), "--runs", stopped)
    assert result.code == 0, result.err
    assert "resuming from grpo step 1" in result.out
    assert [path.name for path in stopped.iterdir()] == ["small-1"]
    with RunReader.open(stopped / "small-1") as mine, RunReader.open(runs / "small-1") as uninterrupted:
        assert mine.fingerprint() == uninterrupted.fingerprint()


def test_out_and_resume_begin_or_go_on(oncurve: Oncurve, recipe: Path, stopped: Path, tmp_path: Path) -> None:
    assert oncurve("train", recipe, "--out", tmp_path / "new", "--resume").code == 0
    result = oncurve("train", recipe, "--out", stopped / "small-1", "--resume", "--runs", tmp_path / "none")
    assert result.code == 0
    assert "resuming from grpo step 1" in result.out


def test_an_unfinished_run_of_the_same_recipe_is_named_and_a_new_one_begins(
    oncurve: Oncurve, recipe: Path, stopped: Path
) -> None:
    result = oncurve("train", recipe, "--runs", stopped)
    assert result.code == 0
    assert f"oncurve train --resume {stopped / 'small-1'}" in " ".join(result.err.split())
    assert (stopped / "small-2").is_dir()


def test_resume_refuses_what_it_would_ignore(oncurve: Oncurve, recipe: Path, stopped: Path) -> None:
    with_set = oncurve("train", stopped / "small-1", "--resume", "--set", "seed=1")
    assert with_set.code == 2
    assert "oncurve fork" in with_set.err
    other = oncurve("train", recipe, "--set", "seed=1", "--resume", "--runs", stopped)
    assert other.code == 2
    assert "keeps its recipe" in " ".join(other.err.split())
    assert f"oncurve fork {stopped / 'small-1'} --step N --set seed=1" in " ".join(other.err.split())


def test_a_recipe_resumes_with_other_settings_of_the_machine(oncurve: Oncurve, recipe: Path, stopped: Path) -> None:
    result = oncurve("train", recipe, "--set", "grpo.tokens_per_pack=512", "--out", stopped / "small-1", "--resume")
    assert result.code == 0, result.err
    assert "resuming from grpo step 1" in result.out
    assert "differs" not in result.err


def test_resume_with_nothing_to_resume(oncurve: Oncurve, recipe: Path, runs: Path) -> None:
    nothing = oncurve("train", recipe, "--resume", "--runs", runs)
    assert nothing.code == 2
    assert "nothing to resume" in " ".join(nothing.err.split())
    finished = oncurve("train", "--resume", runs / "small-1")
    assert finished.code == 2
    assert "already finished" in " ".join(finished.err.split())
    assert "--set STAGE.steps=M" in " ".join(finished.err.split())


def test_a_run_without_resume_is_not_a_recipe(oncurve: Oncurve, runs: Path) -> None:
    result = oncurve("train", runs / "small-1")
    assert result.code == 2
    assert "a run (finished), not a recipe" in " ".join(result.err.split())
    assert f"{runs / 'small-1' / 'recipe.toml'}" in result.err.split()


def test_a_new_run_of_a_built_in_recipe_starts_although_a_run_has_its_name(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs / "small-1", folder / "backwards")
    started = choose_target("backwards", (), None, folder, resume=False)
    assert started.run is None
    assert started.recipe is not None
    assert started.recipe.name == "backwards"
    trust.grant(RunFolder(folder / "backwards"))
    continued = choose_target("backwards", (), None, folder, resume=True)
    assert continued.run is not None
    assert continued.run.path == folder / "backwards"


def test_a_built_in_recipe_that_starts_next_to_an_unfinished_run_of_its_name_says_so(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs / "small-1", folder / "backwards")
    assert choose_target("backwards", (), None, folder, resume=False).advice is None
    RunFolder(folder / "backwards").set_status("interrupted")
    advice = choose_target("backwards", (), None, folder, resume=False).advice
    assert advice is not None
    assert f"oncurve train --resume {folder / 'backwards'}" in advice
    (folder / "backwards" / "run.json").write_text("{")
    assert choose_target("backwards", (), None, folder, resume=False).recipe is not None


def test_all_commands_take_a_built_in_recipe_before_a_run_of_its_name(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs / "small-1", folder / "arithmetic")
    shown = oncurve("recipe", "show", "arithmetic", "--runs", folder).out
    assert 'name = "arithmetic"' in shown
    assert 'name = "small"' in oncurve("recipe", "show", folder / "arithmetic").out
    tried = oncurve("rewards", "try", "arithmetic", "--completion", "<answer>1</answer>", "--runs", folder)
    assert "answer" in tried.out, "the run's reward is called short"
    assert "short" not in tried.out
    probed = oncurve("probe", "arithmetic", "--runs", folder, "--set", "grpo.steps=0")
    assert "not trusted" not in probed.err, "the run in a copied folder would be"
    assert "grpo.steps" in probed.err


def test_a_fork_and_its_parent_know_each_other(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    forked = oncurve("fork", "small-1", "--step", "1", "--set", "grpo.group_size=8", "--runs", folder, "--trust")
    assert forked.code == 0, forked.err
    child = oncurve("show", "small-2", "--runs", folder).out
    assert "forked from small-1 at grpo step 1" in child
    assert ["grpo.group_size", "4", "8"] in [line.split() for line in child.splitlines()]
    assert "at the end of grpo" in child
    assert "forked at grpo step 1 into small-2: grpo.group_size = 8" in oncurve("show", "small-1", "--runs", folder).out
    listed = json.loads(oncurve("runs", "--runs", folder, "--json").out)
    assert listed[0]["parent"] == {"run": "small-1", "stage": "grpo", "step": 1}
    assert listed[0]["changes"] == {"grpo.group_size": 8}


def test_a_fork_names_the_checkpoints_there_are(oncurve: Oncurve, runs: Path) -> None:
    result = oncurve("fork", "small-1", "--step", "7", "--runs", runs)
    assert result.code == 2
    assert "grpo 1, grpo 2, sft 2" in result.err
    assert len(list_checkpoints(runs / "small-1" / "checkpoints")) == 3
    assert not (runs / "small-2").exists()
