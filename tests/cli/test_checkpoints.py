"""RUN@STAGE-STEP and RUN@best: the same checkpoint for every command that names a run, and where the best step is shown."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from oncurve import trust
from oncurve.cli.app import main
from oncurve.errors import RunError
from oncurve.recipe.load import load_recipe
from oncurve.runs.checkpoints.listing import best_of_run, find_target
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.terminal.live.summary import render_summary
from oncurve.training.start import fork
from tests.cli.conftest import Oncurve


@pytest.fixture(scope="module")
def evaluated(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small-1, whose recorded accuracy is 90 % at grpo step 1 and 40 % at step 2, as if step 2 had been worse."""
    folder = tmp_path_factory.mktemp("evaluated") / "runs"
    changes = ["--set", "grpo.eval_every=1", "--set", "rewards.short.weight=1"]
    assert main(["train", str(recipe), "--runs", str(folder), *changes]) == 0
    record(folder / "small-1", {1: 0.9, 2: 0.4})
    return folder


def record(run: Path, accuracies: dict[int, float]) -> None:
    with sqlite3.connect(run / "run.db") as database:
        for step, accuracy in accuracies.items():
            database.execute("UPDATE evals SET accuracy = ? WHERE stage = 'grpo' AND step = ?", (accuracy, step))
    database.close()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_best_is_the_checkpoint_with_the_best_held_out_result(evaluated: Path) -> None:
    target = find_target("small-1@best", evaluated)
    assert target is not None
    assert target.checkpoint is not None
    assert (target.name, target.checkpoint.path.name) == ("small-1@grpo-1", "grpo-000001")


def test_keep_best_names_the_metric(evaluated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small-1"
    shutil.copytree(evaluated / "small-1", folder)
    run = RunFolder(folder)
    with RunReader.open(folder) as store:
        losses = dict(store.metric("loss", "grpo"))
    run.write_recipe(run.recipe.read_text().replace('type = "grpo"', 'type = "grpo"\nkeep_best = "loss"'))
    best = best_of_run(run)
    assert best is not None
    assert (best.metric, best.value, best.step) == ("loss", min(losses.values()), min(losses, key=lambda n: (losses[n], n)))


def test_the_lowest_kl_is_the_best_and_a_length_is_never(evaluated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small-1"
    shutil.copytree(evaluated / "small-1", folder)
    run, recipe = RunFolder(folder), RunFolder(folder).recipe.read_text()
    with sqlite3.connect(run.database) as database:
        for step, value in ((1, 0.2), (2, 0.1)):
            database.execute("UPDATE metrics SET value = ? WHERE name = 'mismatch_max' AND step = ?", (value, step))
    database.close()
    run.write_recipe(recipe.replace('type = "grpo"', 'type = "grpo"\nkeep_best = "mismatch_max"'))
    best = best_of_run(run)
    assert best is not None
    assert (best.metric, best.value, best.step) == ("mismatch_max", 0.1, 2)
    run.write_recipe(recipe.replace('type = "grpo"', 'type = "grpo"\nkeep_best = "length_mean"'))
    best = best_of_run(run)
    assert best is not None
    assert best.metric == "held-out accuracy"


def test_a_best_step_without_a_checkpoint_is_not_passed_off_as_one(oncurve: Oncurve, evaluated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small-1"
    shutil.copytree(evaluated / "small-1", folder)
    shutil.rmtree(folder / "checkpoints" / "grpo-000001")
    best = best_of_run(RunFolder(folder))
    assert best is not None
    assert (best.step, best.entry) == (1, None)
    shown = oncurve("show", folder).out.replace("\n", "").replace(" ", "")
    assert "90.0%atgrpostep1,whosecheckpointwasnotkept;" in shown
    assert "small-1@bestisgrpostep2(40.0%)" in shown
    target = find_target(f"{folder}@best", tmp_path)
    assert target is not None
    assert target.name == "small-1@grpo-2"


def test_of_equal_results_the_best_is_the_earliest_step_with_a_checkpoint(
    oncurve: Oncurve, evaluated: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small-1"
    shutil.copytree(evaluated / "small-1", folder)
    record(folder, {1: 0.9, 2: 0.9})
    best = best_of_run(RunFolder(folder))
    assert best is not None
    assert best.step == 1
    shutil.rmtree(folder / "checkpoints" / "grpo-000001")
    best = best_of_run(RunFolder(folder))
    assert best is not None
    assert best.entry is not None
    assert best.step == best.entry.step == 2
    shown = oncurve("show", folder).out.replace("\n", "").replace(" ", "")
    assert f"90.0%atgrpostep2:{folder}@best" in shown
    assert "90.0 % at grpo 2" in oncurve("runs", "--runs", tmp_path).out
    assert "notkept" not in shown


def test_show_runs_and_the_summary_name_the_best_step(oncurve: Oncurve, evaluated: Path) -> None:
    line = f"best held-out accuracy  90.0 % at grpo step 1: {evaluated / 'small-1'}@best"
    assert line.replace(" ", "") in oncurve("show", "small-1", "--runs", evaluated).out.replace("\n", "").replace(" ", "")
    console = Console(width=200, file=io.StringIO())
    console.print(render_summary(RunFolder(evaluated / "small-1"), 1.0))
    assert line in console.file.getvalue()  # type: ignore[attr-defined]
    assert "90.0 % at grpo 1" in oncurve("runs", "--runs", evaluated).out


def test_export_writes_the_checkpoint_that_is_named(oncurve: Oncurve, evaluated: Path, tmp_path: Path) -> None:
    for name, folder in (
        ("small-1", "last"),
        ("small-1@grpo-2", "second"),
        ("small-1@grpo-1", "first"),
        ("small-1@best", "best"),
    ):
        result = oncurve("export", name, tmp_path / folder, "--runs", evaluated)
        assert result.code == 0, result.err
    assert "small-1@grpo-1" in result.out
    last, second, first, best = (weights(tmp_path / folder) for folder in ("last", "second", "first", "best"))
    assert all(torch.equal(last[name], second[name]) for name in last)
    assert all(torch.equal(first[name], best[name]) for name in first)
    assert not all(torch.equal(first[name], second[name]) for name in first)


def test_eval_shows_its_progress_in_a_terminal_only(oncurve: Oncurve, evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = oncurve("eval", "small-1", "--runs", evaluated, "--json")
    assert silent.err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal
    shown = oncurve("eval", "small-1", "--runs", evaluated, "--json")
    assert "evaluating, 100 %" in shown.err
    assert shown.out == silent.out


def test_eval_chat_and_probe_take_the_checkpoint(oncurve: Oncurve, evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = oncurve("eval", "small-1@best", "--runs", evaluated, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["model"] == "small-1@grpo-1"
    monkeypatch.setattr("sys.stdin", io.StringIO("12+30=\n"))
    assert oncurve("chat", "small-1@best", "--runs", evaluated, "--max-new-tokens", 2).code == 0
    result = oncurve("probe", "small-1@best", "--runs", evaluated, "--prompts", 1, "--samples", 2, "--json")
    assert result.code == 0, result.err


def test_show_takes_a_step_by_its_name(oncurve: Oncurve, evaluated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(evaluated, folder)
    shutil.rmtree(folder / "small-1" / "checkpoints" / "grpo-000002")  # a step can be shown without its checkpoint
    for words, step in ((["small-1@grpo-2"], 2), (["small-1@best"], 1), ([folder / "small-1@grpo-1", "--group", 0], 1)):
        result = oncurve("show", *words, "--runs", folder, "--json")
        assert result.code == 0, result.err
        shown = json.loads(result.out)
        assert (shown["stage"], shown["step"]) == ("grpo", step)
    for words, message in (
        (["small-1@grpo-9"], "grpo 1 to 2"),
        (["small-1@grop-1"], "did you mean 'grpo'?"),
        (["small-9@grpo-1"], "small-9: no such run"),
        (["small-1@grpo-1", "--step", 2], "already names a step"),
        (["small-1@grpo-1", "--timing"], "already names a step"),
    ):
        result = oncurve("show", *words, "--runs", folder)
        assert (result.code, message in " ".join(result.err.split())) == (2, True), result.err


def test_fork_takes_the_checkpoint_instead_of_a_step(oncurve: Oncurve, evaluated: Path, tmp_path: Path) -> None:
    result = oncurve("fork", "small-1@best", "--runs", evaluated, "--out", tmp_path / "fork")
    assert result.code == 0, result.err
    parent = RunFolder(tmp_path / "fork").state().parent
    assert parent is not None
    assert (parent.stage, parent.step) == ("grpo", 1)
    for words in (["small-1"], ["small-1@best", "--step", 1]):
        result = oncurve("fork", *words, "--runs", evaluated)
        assert (result.code, "a fork starts from one checkpoint" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("small-1@grpo-7", "the run has grpo-1, grpo-2, sft-2"),
        ("small-1@", "the run has grpo-1"),
        ("small-9@best", "small-9: no such run"),
        ("small-1@grpo-1@best", "no such run"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_one_message(
    oncurve: Oncurve, evaluated: Path, tmp_path: Path, name: str, message: str
) -> None:
    for command in (["export", name, tmp_path / "x"], ["fork", name]):
        result = oncurve(*command, "--runs", evaluated)
        assert result.code == 2
        assert message in result.err
    assert "Traceback" not in result.err


def test_best_of_a_run_without_evaluations_says_so(oncurve: Oncurve, evaluated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small-1"
    shutil.copytree(evaluated / "small-1", folder)
    with sqlite3.connect(folder / "run.db") as database:
        database.execute("DELETE FROM evals")
    database.close()
    with pytest.raises(RunError, match="name a checkpoint: grpo-1, grpo-2, sft-2"):
        find_target(f"{folder}@best", tmp_path)
    assert "best held-out" not in oncurve("show", folder).out


@pytest.mark.parametrize("change", ["grpo.kl.beta=0.02", "grpo.kl={beta=0.1,where='reward'}"])
def test_a_fork_may_turn_the_kl_term_on(evaluated: Path, tmp_path: Path, change: str) -> None:
    """The reference is the policy that the fork starts from: after the first update of step 2 it is no longer the policy."""
    parent = RunFolder(evaluated / "small-1")
    trust.grant(parent)
    run = fork(parent, 1, [change, "grpo.steps=3"], out=tmp_path / "fork")
    with RunReader.open(run.path) as store:
        kls = dict(store.metric("kl", "grpo"))
    assert kls[2] == 0
    assert kls[3] != 0
    assert load_recipe(run.recipe).stages[-1].kl.beta > 0  # type: ignore[union-attr]
