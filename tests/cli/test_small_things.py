"""Small things that got in the way of new users: each was wrong or misleading once."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from oncurve.recipe.load import builtin_recipes
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.terminal.text import shorten_all
from tests.cli.conftest import Oncurve


def test_a_report_is_not_written_over(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert oncurve("report", "small-1", "--runs", runs, "-o", file).code == 0
    before = file.read_bytes()
    result = oncurve("report", "small-1", "--runs", runs, "-o", file)
    assert (result.code, "already exists" in result.err) == (2, True)
    assert file.read_bytes() == before


def test_status_of_a_run_that_ended_does_not_read_as_if_it_ran(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "small-1", tmp_path / "small-1")
    run = RunFolder(tmp_path / "small-1")
    (run.database).unlink()
    run.set_status("failed")
    shown = oncurve("status", tmp_path / "small-1").out
    assert "small-1: failed, no step recorded\n" in shown
    assert "no process is running" in shown


def test_a_group_that_does_not_exist_is_answered_with_those_that_do(oncurve: Oncurve, runs: Path) -> None:
    result = oncurve("show", "small-1", "--step", 2, "--group", 99, "--runs", runs)
    assert result.code == 2
    assert "use 0 to 1" in result.err


def failing_recipe(recipe: Path, folder: Path, reward: str) -> Path:
    """The recipe's grpo stage alone, with a reward ``failing``."""
    (folder / "failing.py").write_text(reward)
    head, _, stages = recipe.read_text().partition("rewards = ")
    rewards = f'rewards = [{{ type = "python", name = "failing", function = "{folder}/failing.py:failing" }}]'
    file = folder / "failing.toml"
    file.write_text(f"{head}{rewards}\n\n[[stages]]{stages.rpartition('[[stages]]')[2]}")
    return file


def test_status_and_show_say_why_a_run_failed(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    reward = "def failing(completion):\n    raise ValueError('no such column')\n"
    run = tmp_path / "runs" / "close"
    assert oncurve("train", failing_recipe(recipe, tmp_path, reward), "--out", run).code == 2
    for command in ("status", "show"):
        shown = " ".join(oncurve(command, run).out.split())
        assert "8 of 8 completions of a step could not be rewarded" in shown
        assert "no such column" in shown
        assert "--accept-changes" in shown
        assert "oncurve eval" not in shown, "there is no checkpoint to evaluate"
    assert "no such column" in json.loads(oncurve("show", run, "--json").out)["reason"]
    assert "8 of 8 completions" in oncurve("runs", "--runs", tmp_path / "runs").out
    assert "reason" not in json.loads(oncurve("status", run, "--json").out)


def test_the_reason_of_an_earlier_failure_is_not_given(
    oncurve: Oncurve, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second error can't be recorded, as on a full disk."""
    failing = failing_recipe(recipe, tmp_path, "def failing(completion):\n    raise ValueError('no such column')\n")
    run = tmp_path / "runs" / "close"
    assert oncurve("train", failing, "--out", run).code == 2

    def refuse(store: RunWriter, kind: str, *arguments: Any, **data: Any) -> None:
        if kind == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        record(store, kind, *arguments, **data)

    record = RunWriter.record_event
    monkeypatch.setattr(RunWriter, "record_event", refuse)
    (tmp_path / "failing.py").write_text("def failing(completion):\n    raise KeyError('answer')\n")
    assert oncurve("train", run, "--resume", "--accept-changes").code == 2
    for command in ("status", "show", "runs"):
        shown = oncurve(command, *(["--runs", run.parent] if command == "runs" else [run])).out
        assert "failed" in shown
        assert "could not be rewarded" not in " ".join(shown.split())


def test_a_rare_failure_is_counted_in_the_summary(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    """One of 16: shares of long runs would be rounded to 0.0 %."""
    reward = "called = []\n\n\ndef failing(completion):\n    called.append(1)\n    assert len(called) != 3\n    return 1.0\n"
    trained = oncurve("train", failing_recipe(recipe, tmp_path, reward), "--out", tmp_path / "run")
    assert trained.code == 0, trained.err
    assert "grpo: 1 of 16 completions could not be rewarded (oncurve rewards audit" in " ".join(trained.out.split())


def test_failed_rewards_are_shown_while_training_and_afterwards(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    reward = "def failing(completions):\n    return [1.0] + [float('nan')] * (len(completions) - 1)\n"
    run = tmp_path / "run"
    trained = oncurve("train", failing_recipe(recipe, tmp_path, reward), "--out", run, "--set", "grpo.max_failure_share=1")
    assert trained.code == 0, trained.err
    shown = " ".join(trained.out.split())
    assert "failed 75 %" in shown
    assert shown.count("6 of 8 completions could not be rewarded") == 1, "one warning per stage"
    assert "The first error is: failing" in shown
    assert "grpo: 12 of 16 completions could not be rewarded (oncurve rewards audit" in shown
    assert "grpo: no group had a signal in any step, so the rewards did not change the policy (oncurve" in shown
    assert "failure_share" in oncurve("show", run).out


def test_a_run_whose_rewards_work_says_nothing_about_failures(
    oncurve: Oncurve, recipe: Path, runs: Path, tmp_path: Path
) -> None:
    assert "failure_share" not in oncurve("show", "small-1", "--runs", runs).out
    reward = "def failing(completion):\n    return float(sum(map(ord, completion)) % 7)\n"
    trained = oncurve("train", failing_recipe(recipe, tmp_path, reward), "--out", tmp_path / "run")
    assert trained.code == 0, trained.err
    assert "no group had a signal" not in trained.out
    assert "could not be rewarded" not in trained.out + trained.err


def test_recipe_list_names_every_built_in_recipe(oncurve: Oncurve) -> None:
    shown = oncurve("recipe", "list").out
    assert all(f"{name} " in shown for name in builtin_recipes())
    assert "Sums with a calculator tool" in shown


def test_recipe_show_and_rewards_try_take_a_run(oncurve: Oncurve, runs: Path) -> None:
    result = oncurve("recipe", "show", "small-1", "--runs", runs)
    assert result.out == (runs / "small-1" / "recipe.toml").read_text()
    result = oncurve("rewards", "try", "small-1", "--runs", runs, "--completion", "46")
    assert result.code == 0, result.err
    assert "short" in result.out


@pytest.mark.parametrize(
    ("words", "present", "absent"),
    [
        (["train", "nothere.toml"], "check the path", "did you mean"),
        (["train", "arithmetik"], "did you mean arithmetic", "nothing"),
        (["recipe", "explain", "learning_rate"], "explain grpo.optimiser.learning_rate", "critic"),
        (["recipe", "explain", "group_size"], "explain grpo.group_size", "nothing"),
        (["recipe", "explain", "grpo.grup_size"], "explain grpo.group_size", "nothing"),
    ],
)
def test_suggestions_are_sensible_or_left_out(oncurve: Oncurve, words: list[str], present: str, absent: str) -> None:
    result = oncurve(*words)
    assert result.code == 2
    shown = " ".join(result.err.split())
    assert present in shown
    assert absent not in shown


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("base.toml", 'name = "x"\n', "a TOML file"),
        ("one.yaml", "just words\n", "plain text"),
        ("one.yaml", "- 1\n- 2\n", "a list"),
        ("one.yaml", "", "an empty file"),
        ("one.yaml", "3\n", "a single value"),
    ],
)
def test_what_is_no_config_of_trl_is_said(oncurve: Oncurve, tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    result = oncurve("recipe", "from-trl", tmp_path / name)
    assert (result.code, message in " ".join(result.err.split())) == (2, True)


def test_older_names_of_trl_are_known(oncurve: Oncurve, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("torch_dtype: float32\nmax_prompt_length: 512\n")
    result = oncurve("recipe", "from-trl", tmp_path / "one.yaml")
    assert 'dtype = "float32"' in result.out
    notes = " ".join(result.err.split())
    assert "torch_dtype" not in notes
    assert "prompts are never truncated here" in notes


def test_prompts_of_a_step_are_shown_by_what_distinguishes_them() -> None:
    questions = [
        f"user: What is the capital of {country}? Answer in one word." for country in ("France", "Peru", "the United States")
    ]
    assert shorten_all(questions, 40) == ["…France?…", "…Peru?…", "…the United States?…"]
    assert shorten_all(questions, 100) == questions
    assert shorten_all(["1+2=", "3+4="], 40) == ["1+2=", "3+4="]
    same = ["a long prompt that is asked twice, in the same words"] * 2
    assert len(set(shorten_all(same, 20))) == 1
    assert shorten_all([], 20) == []
    long = [f"{'x' * 30}{n}{'y' * 30}" for n in range(3)]
    assert all(len(text) <= 20 for text in shorten_all(long, 20))
    assert shorten_all(["", "a text that is too long for the column"], 10)[0] == ""


def test_probe_says_how_its_time_adds_up(oncurve: Oncurve, recipe: Path) -> None:
    arguments = ["probe", recipe, "--prompts", 2, "--samples", 2]
    shown = " ".join(oncurve(*arguments).out.split())
    assert "s sampling + " in shown
    assert "for groups with a signal" in shown
    report = json.loads(oncurve(*arguments, "--json").out)
    expected = report["sample_s"] + (1 - report["no_signal"]) * report["update_s"]
    assert report["step_s"] == pytest.approx(expected)


def test_an_adapter_finds_its_base_from_any_folder(
    oncurve: Oncurve, recipe: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    changes = ["--set", "model.source=runs/small-1/model", "--set", "model.lora={rank=2}", "--set", "model.tiny="]
    result = oncurve("train", recipe, "--smoke", "--out", tmp_path / "run", *changes)
    assert result.code == 0, result.err
    monkeypatch.chdir("/")
    result = oncurve("eval", tmp_path / "run" / "adapter", "--task", recipe, "--set", "task.heldout=2", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["asked"] == 2


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_mistyped_run_is_named_before_the_hub_is_asked(oncurve: Oncurve, runs: Path, command: str) -> None:
    for typed in ("smal-1", "small1", "smal-1@best", runs / "smal-1"):
        result = oncurve(command, typed, "--runs", runs)
        assert result.code == 2
        message = " ".join(result.err.split())
        assert "no such run or model" in message
        assert "did you mean 'small-1'?" in message


def test_a_recipe_is_no_model(oncurve: Oncurve, runs: Path, recipe: Path) -> None:
    for target, advice in (
        ("arithmetic", "train it first: oncurve train arithmetic"),
        (recipe, "name a run of it, such as small-1"),
    ):
        assert advice in " ".join(oncurve("chat", target, "--runs", runs).err.split())
