"""Commands that inspect and use runs: runs, show, eval, chat, export, probe, recipe, version."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oncurve as package
from oncurve.recipe.load import load_recipe
from oncurve.runs.folder import RunFolder
from tests.cli.conftest import Oncurve


def test_runs_lists_them_and_broken_ones_too(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    listed = oncurve("runs", "--runs", runs)
    assert listed.code == 0
    assert listed.out.splitlines()[1].split()[:4] == ["small-1", "finished", "grpo", "2/2"]
    (tmp_path / "odd").mkdir()
    assert "broken" in oncurve("runs", "--runs", tmp_path).out
    assert "oncurve train arithmetic" in oncurve("runs", "--runs", tmp_path / "none").out


def test_a_narrow_list_of_runs_has_all_names_and_remarks(
    oncurve: Oncurve, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "a-run-with-a-longer-name").symlink_to(runs / "small-1")
    (tmp_path / "odd").mkdir()
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "request.json").touch()
    shown = oncurve("runs", "--runs", tmp_path).out
    assert "…" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    for words in ("a-run-with-a-longer-name  finished", "held-out", "odd  not a run: it has no run.json"):
        assert words in shown
    assert "comparison" not in shown


def test_show_a_run_a_step_and_a_group(oncurve: Oncurve, runs: Path) -> None:
    run = oncurve("show", "small-1", "--runs", runs).out
    assert "reward" in run
    assert "after grpo" in run
    step = oncurve("show", "small-1", "--step", 2, "--runs", runs).out
    assert "small-1  grpo step 2" in step
    assert [line.split()[0] for line in step.splitlines() if "+" in line] == ["0", "1"]
    group = oncurve("show", "small-1", "--step", 2, "--group", 1, "--runs", runs).out
    for words in ("grpo step 2  group 1", "advantage", "short", "format", "tokens", "1. ", "4. "):
        assert words in group


def test_in_a_narrow_terminal_only_the_prompts_of_a_step_are_shortened(
    oncurve: Oncurve, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (60, 43):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = oncurve("show", "small-1", "--step", 2, "--runs", runs).out.splitlines()
        (head,) = (number for number, line in enumerate(lines) if "best first" in line)
        assert lines[head].split()[:5] == ["group", "rewards,", "best", "first", "tokens"]
        assert all(len(line) <= columns for line in lines[head : head + 3])
    assert lines[head + 1].rstrip().endswith("…")


def test_show_prints_the_same_as_json(oncurve: Oncurve, runs: Path) -> None:
    run = json.loads(oncurve("show", "small-1", "--runs", runs, "--json").out)
    assert [stage["name"] for stage in run["stages"]] == ["sft", "grpo"]
    assert run["evals"][-1]["asked"] == 8
    step = json.loads(oncurve("show", "small-1", "--runs", runs, "--step", 1, "--stage", "grpo", "--json").out)
    assert len(step["groups"]) == 2
    group = json.loads(oncurve("show", "small-1", "--runs", runs, "--step", 1, "--group", 0, "--json").out)
    advantages = [completion["advantage"] for completion in group["completions"]]
    assert advantages == sorted(advantages, reverse=True)
    assert [aspect["name"] for aspect in group["completions"][0]["aspects"]] == ["short", "format"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--step", "9"], "grpo 1 to 2"),
        (["--step", "1", "--group", "5"], "2 groups were recorded there"),
        (["--group", "1"], "add --step"),
        (["--step", "1", "--stage", "grop"], "did you mean 'grpo'?"),
    ],
)
def test_show_says_what_there_is(oncurve: Oncurve, runs: Path, options: list[str], expected: str) -> None:
    result = oncurve("show", "small-1", "--runs", runs, *options)
    assert result.code == 2
    assert expected in " ".join(result.err.split())


def test_eval_a_run_and_a_model(oncurve: Oncurve, runs: Path) -> None:
    shown = oncurve("eval", "small-1", "--runs", runs)
    assert shown.code == 0
    assert "95 % interval" in shown.out
    assert "2 digits" in shown.out
    sets = ["--set", "task.heldout=6", "--set", "threads=1"]
    report = oncurve("eval", runs / "small-1" / "model", "--task", "arithmetic", *sets, "--json")
    assert report.code == 0, report.err
    data = json.loads(report.out)
    assert data["asked"] == 6
    assert data["interval"][0] <= data["accuracy"] <= data["interval"][1]
    assert sum(level["asked"] for level in data["by_difficulty"].values()) == 6


def test_eval_takes_a_recipe_as_task_and_its_own_settings(oncurve: Oncurve, recipe: Path, runs: Path) -> None:
    words = ["--task", recipe, "--samples", 2, "--temperature", 1, "--json", "--runs", runs]
    data = json.loads(oncurve("eval", "small-1", *words).out)
    assert data["samples"] == 2
    assert data["temperature"] == 1
    assert sum(level["asked"] for level in data["by_difficulty"].values()) == 16


def test_an_unfinished_run_is_measured_by_its_last_checkpoint(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "half"
    run.mkdir()
    for name in ("run.json", "recipe.toml", "run.db"):
        (run / name).write_bytes((runs / "small-1" / name).read_bytes())
    empty = oncurve("eval", run, "--trust")
    assert empty.code == 2
    assert "has no model yet" in empty.err
    (run / "checkpoints").symlink_to(runs / "small-1" / "checkpoints")
    assert json.loads(oncurve("eval", run, "--json").out) == json.loads(
        oncurve("eval", "small-1", "--runs", runs, "--json").out
    ) | {"model": "half"}


def test_chat_answers_each_line_of_a_pipe(oncurve: Oncurve, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+2=\n\n34+5=\n"))
    result = oncurve("chat", "small-1", "--runs", runs, "--max-new-tokens", 4)
    assert result.code == 0, result.err
    assert result.out.count("\n") == 2


def test_chat_says_when_a_prompt_leaves_no_room(oncurve: Oncurve, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1" * 200 + "\n"))
    result = oncurve("chat", "small-1", "--runs", runs)
    assert result.code == 2
    assert "128 positions" in result.err


def test_export_writes_a_model_that_transformers_loads(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert oncurve("export", "small-1", tmp_path / "model", "--runs", runs).code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.hidden_size == 32
    again = oncurve("export", "small-1", tmp_path / "model", "--runs", runs)
    assert again.code == 2
    assert "already exists" in again.err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_export_of_an_unfinished_run_takes_its_checkpoint(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "half"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "recipe.toml"):
        (run / name).write_bytes((runs / "small-1" / name).read_bytes())
    (run / "checkpoints" / "grpo-000001").symlink_to(runs / "small-1" / "checkpoints" / "grpo-000001")
    assert oncurve("export", run, tmp_path / "out").code == 0
    assert (tmp_path / "out" / "config.json").is_file()


def test_probe_a_recipe_and_a_run(oncurve: Oncurve, recipe: Path, runs: Path) -> None:
    shown = oncurve("probe", recipe, "--prompts", 2, "--samples", 4)
    assert shown.code == 0, shown.err
    assert "before sft" in shown.out
    assert "--from RUN" in shown.out
    for words in (["small-1"], [recipe, "--from", "small-1"]):
        report = json.loads(oncurve("probe", *words, "--prompts", 2, "--samples", 4, "--runs", runs, "--json").out)
        assert report["note"] is None
        assert set(report["pass_at"]) == {"1", "2", "4"}
        assert [choice["key"] for choice in report["choices"]] == [
            "group_size",
            "sampling.max_new_tokens",
            "sampling.temperature",
        ]


def test_recipe_commands(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    assert "group_size" in oncurve("recipe", "explain", "grpo.group_size").out
    assert "digits" in oncurve("recipe", "explain", "task.arithmetic").out
    shown = oncurve("recipe", "show", recipe, "--set", "seed=3").out
    (tmp_path / "again.toml").write_text(shown)
    assert load_recipe(tmp_path / "again.toml") == load_recipe(recipe, ["seed=3"])


def test_from_trl_writes_a_recipe_and_never_over_one(oncurve: Oncurve, tmp_path: Path) -> None:
    config = tmp_path / "trl.yaml"
    config.write_text("num_generations: 4\nbeta: 0.04\n")
    assert "group_size = 4" in oncurve("recipe", "from-trl", config).out
    assert oncurve("recipe", "from-trl", config, "-o", tmp_path / "mine.toml").code == 0
    again = oncurve("recipe", "from-trl", config, "-o", tmp_path / "mine.toml")
    assert again.code == 2
    assert "already exists" in again.err


def test_every_command_shows_an_example(oncurve: Oncurve) -> None:
    commands = ["train", "eval", "chat", "runs", "show", "export", "probe", "fork", "version"]
    for words in [*([name] for name in commands), *(["recipe", name] for name in ("explain", "show", "from-trl"))]:
        assert f"Example: {'oncurve ' + ' '.join(words) if words[0] != 'chat' else 'echo'}" in oncurve(*words, "--help").out


@pytest.mark.parametrize("words", [["train"], ["show"], ["show", "small-1", "--step", "a"], ["rewards", "try", "arithmetic"]])
def test_a_usage_error_shows_the_example(oncurve: Oncurve, words: list[str]) -> None:
    command = " ".join(words[:2]) if words[0] == "rewards" else words[0]
    result = oncurve(*words)
    assert result.code == 2
    assert f"Example: oncurve {command} " in result.err


def test_version(oncurve: Oncurve) -> None:
    assert oncurve("version").out.strip() == package.__version__
    assert oncurve("--version").out.strip() == package.__version__
    for words in (("--version", "--json"), ("--json", "--version")):
        versions = json.loads(oncurve(*words).out)
        assert versions["oncurve"] == package.__version__
        assert {"python", "torch", "transformers"} <= versions.keys()


@pytest.mark.parametrize(("words", "found"), [("oncurve publ", "publish"), ("oncurve train --sm", "--smoke")])
def test_the_shell_completes_commands_and_options(words: str, found: str) -> None:
    environment = {**os.environ, "_ONCURVE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "oncurve"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [found], done.stderr


def test_a_run_from_python_is_named_for_what_it_is(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "by-hand"
    run.mkdir()
    (run / "run.json").write_bytes((runs / "small-1" / "run.json").read_bytes())
    written = (runs / "small-1" / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(written.replace('type = "arithmetic"', 'type = "python"').replace("digits = 2\n", ""))
    RunFolder(run).set_status("interrupted")
    for words in (["train", "--resume", run], ["probe", run]):
        result = oncurve(*words)
        assert result.code == 2
        assert "passed from Python" in result.err


def test_show_timing(oncurve: Oncurve, runs: Path) -> None:
    """The phases of each stage, the parts of the update below it, and speed and memory; the same as JSON."""
    shown = oncurve("show", "small-1", "--timing", "--runs", runs)
    assert shown.code == 0
    for words in (
        "sft",
        "grpo",
        "sample",
        "score",
        "update",
        "forward",
        "backward",
        "optimiser",
        "idle",
        "step  ",
        "TFLOP/s",
        "GiB",
    ):
        assert words in shown.out, words
    report = json.loads(oncurve("show", "small-1", "--timing", "--runs", runs, "--json").out)
    assert report["grpo"]["seconds/update/forward"] > 0
    assert report["grpo"]["seconds/update/forward"] < report["grpo"]["seconds/update"]
