"""A user error prints one message with a fix, exits with 2, shows no traceback, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Oncurve, Result


def assert_refused(result: Result, *words: str) -> None:
    assert result.code == 2, result
    message = " ".join(result.err.split())
    assert message.startswith("error ")
    assert "because" in message
    assert "fix" in message
    assert "Traceback" not in result.err + result.out
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("grpo.group_sise=8", ["grpo.group_sise", "did you mean 'group_size'"]),
        ("gropo.steps=8", ["gropo"]),
        ("grpo.group_size=many", ["grpo.group_size", "many"]),
        ("grpo.steps=2.5", ["grpo.steps"]),
        ("grpo.group_size=1", ["grpo.group_size", "own mean"]),
        ("grpo.sampling.temperature=0", ["grpo.sampling.temperature", "greedy"]),
        ("grpo.sampling.max_new_tokens=500", ["128 positions"]),
        ("grpo.minibatches=9", ["grpo.minibatches"]),
        ("grpo.optimiser.warmup_steps=99", ["grpo.optimiser.warmup_steps"]),
        ("task.type=arithmetics", ["did you mean 'arithmetic'"]),
        ("task.digit=2", ["did you mean 'digits'"]),
        ("task.min_digits=3", ["task.min_digits"]),
        ("rewards.short.function=nowhere.py:f", ["rewards.short.function", "nowhere.py"]),
        ("model.source=./nowhere", ["./nowhere", "no such folder"]),
        ("model.tiny.kv_heads=3", ["kv_heads"]),
        ("nonsense", ["--set", "KEY=VALUE"]),
    ],
)
def test_what_a_recipe_can_not_say(oncurve: Oncurve, recipe: Path, tmp_path: Path, change: str, words: list[str]) -> None:
    assert_refused(oncurve("train", recipe, "--set", change, "--runs", tmp_path / "runs"), *words)
    assert not list(tmp_path.glob("runs/*"))


def test_recipes_that_are_not_there_or_not_toml(oncurve: Oncurve, tmp_path: Path) -> None:
    assert_refused(oncurve("train", tmp_path / "gone.toml"), "no such file")
    assert_refused(oncurve("train", "arithmetik"), "did you mean arithmetic")
    (tmp_path / "bad.toml").write_text("name = small\n")
    assert_refused(oncurve("train", tmp_path / "bad.toml"), "bad.toml:1:", 'name = "small"')


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no such file"]),
        ("", ["no rows"]),
        ("{nonsense\n", ["data.jsonl:1", "not valid JSON"]),
        ('{"question": "1+1="}\n', ["data.jsonl:1", "prompt"]),
        ('{"prompt": "1+1="}\n{"prompt": "' + "1" * 200 + '"}\n', ["a prompt of 200 tokens", "128 positions"]),
    ],
)
def test_data_that_gives_nothing_usable(
    oncurve: Oncurve, recipe: Path, tmp_path: Path, content: str | None, words: list[str]
) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    small = recipe.read_text().replace('type = "arithmetic", digits = 2, heldout = 8', f'type = "file", path = "{data}"')
    only_grpo = small.replace('type = "sft"\nsteps = 2\nbatch_size = 4\n\n[[stages]]\n', "")
    (tmp_path / "file.toml").write_text(only_grpo)
    assert_refused(oncurve("train", tmp_path / "file.toml", "--runs", tmp_path / "runs"), *words)
    assert not list(tmp_path.glob("runs/*"))


def test_a_model_folder_that_is_none(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("not a model")
    result = oncurve("train", recipe, "--set", f"model.source={tmp_path / 'model'}", "--runs", tmp_path / "runs")
    assert_refused(result, "config.json", "notes.txt")
    assert not list(tmp_path.glob("runs/*"))
    (tmp_path / "model" / "config.json").write_text("{}")
    broken = oncurve("train", recipe, "--set", f"model.source={tmp_path / 'model'}", "--runs", tmp_path / "runs")
    assert_refused(broken, "can't be loaded")
    assert not list(tmp_path.glob("runs/*"))
    assert_refused(oncurve("eval", tmp_path / "model", "--task", "arithmetic"), "can't be loaded")


def test_an_out_that_exists(oncurve: Oncurve, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert_refused(oncurve("train", recipe, "--out", tmp_path / "mine"), "already exists", "choose another name")
    assert not list((tmp_path / "mine").iterdir())


def test_a_run_made_by_a_newer_version(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    state = folder / "small-1" / "run.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99, "oncurve": "9.0"}))
    before = sorted(folder.rglob("*"))
    for words in (["train", "--resume"], ["show"], ["eval"], ["chat"], ["probe"], ["fork", "--step", "1"]):
        assert_refused(oncurve(words[0], "small-1", *words[1:], "--runs", folder), "newer version", "upgrade")
    assert "broken" in oncurve("runs", "--runs", folder).out
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", ["show", "eval", "chat", "export"])
def test_no_such_run_or_model(oncurve: Oncurve, runs: Path, tmp_path: Path, command: str) -> None:
    needed: dict[str, list[object]] = {"export": [tmp_path / "out"], "eval": ["--task", "arithmetic"]}
    assert_refused(oncurve(command, "./small-9", *needed.get(command, []), "--runs", runs), "small-9")
    assert not (tmp_path / "out").exists()


def test_eval_of_a_model_needs_a_task(oncurve: Oncurve, tmp_path: Path) -> None:
    assert_refused(oncurve("eval", tmp_path), "--task", "arithmetic, countdown, calculator")
    assert_refused(oncurve("eval", "mistyped-1"), "mistyped-1 is not a run", "`oncurve runs`")


def test_words_that_the_command_line_does_not_know(oncurve: Oncurve) -> None:
    for words in (["trian"], ["train"], ["train", "arithmetic", "--nonsense"], ["show", "x", "--step", "one"]):
        result = oncurve(*words)
        assert result.code == 2
        assert "Traceback" not in result.err


def test_a_full_disk_is_a_message_wherever_it_shows(oncurve: Oncurve, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/model.safetensors")

    monkeypatch.setattr("oncurve.cli.inspect.list_runs", full)
    assert_refused(oncurve("runs"), "no space left", "/somewhere/model.safetensors", "free some space")


def test_a_bug_keeps_its_traceback_after_a_word_of_apology(
    oncurve: Oncurve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("oncurve.cli.inspect.list_runs", broken)
    with pytest.raises(ZeroDivisionError):
        oncurve("runs")
    assert "a bug in Oncurve" in capsys.readouterr().err


def test_errors_are_complete_at_any_width(oncurve: Oncurve, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (40, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        result = oncurve("train", recipe, "--set", "grpo.group_size=1")
        assert max(len(line.rstrip()) for line in result.err.splitlines()) <= width
        assert_refused(result, "own mean", "8 to 64 is usual")


@pytest.mark.parametrize("columns", [40, 80])
def test_lines_fit_the_window_and_words_are_not_split(oncurve: Oncurve, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A path that is wider than the terminal is not broken, so that it can be copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    path = "/nowhere/" + "deep/" * 30 + "small.toml"
    lines = oncurve("train", path).err.splitlines()
    assert lines[0] == f"error {path}:"
    assert all(len(line) < columns or path.removesuffix("/small.toml") in line for line in lines), lines
