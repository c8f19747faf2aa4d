"""A run notices that its reward functions, environments or data files have changed since it began."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import RunError
from oncurve.operations.replay import replay
from oncurve.operations.verify import verify
from oncurve.recipe.load import load_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.terminal.group import replay_data
from oncurve.training.inputs import changed_inputs
from oncurve.training.start import begin, fork, resume
from oncurve.training.trainer import TimeUp
from tests.training.builders import digits
from tests.training.builders import recipe as small_recipe

REWARD = "def short(completion):\n    return -float(len(completion))\n"
LONG = REWARD.replace("-float", "float")
ENVIRONMENT = """
class Echo:
    def calls(self, text):
        return []
    def reply(self, call, dice):
        return ""
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def recipe(function: str = "reward.py:short", **task: Any) -> Recipe:
    whole = small_recipe("grpo.steps=2", "grpo.save_every=1").model_dump(mode="json", exclude_none=True)
    whole["task"] = {"type": "file", "path": "data.jsonl", "heldout": 2, **task}
    whole["rewards"] = [{"type": "python", "name": "short", "function": function}]
    return parse_recipe(whole | {"stages": whole["stages"][1:]})


def stopped(recipe: Recipe, **parts: Any) -> RunFolder:
    with pytest.raises(TimeUp):
        begin(recipe, out=Path("run"), minutes=1e-9, **parts)
    return RunFolder(Path("run"))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "reward": (lambda here: (here / "reward.py").write_text(LONG), "rewards.short.function (reward.py)"),
    "data": (lambda here: (here / "data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n' * 9), "task.path (data.jsonl)"),
}


def test_a_new_run_records_hashes_and_keeps_the_reward(here: Path) -> None:
    run = stopped(recipe())
    record = json.loads((run.path / "inputs.json").read_text())
    assert [(entry["key"], entry["origin"]) for entry in record] == [
        ("task.path", "data.jsonl"),
        ("rewards.short.function", "reward.py"),
    ]
    assert (run.path / record[1]["source"]).read_text() == REWARD
    assert record[0]["source"] is None, "data may be large"
    assert resume(run).state().current_status == "finished"


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_stops_a_resume_until_it_is_accepted(here: Path, change: str) -> None:
    run = stopped(recipe())
    make, shown = CHANGES[change]
    make(here)
    with pytest.raises(RunError, match="changed since the run began") as refused:
        resume(run)
    assert shown in str(refused.value)
    assert "--accept-changes" in refused.value.fix
    (check,) = [check for check in verify(run) if check.name == "inputs"]
    assert (check.mark, shown in check.message) == ("note", True)
    resume(run, accept_changes=True)
    assert changed_inputs(run, load_recipe(run.recipe)) == [], "the record is renewed"
    with RunReader.open(run.path) as store:
        (event,) = store.events("inputs")
    assert shown in event.message
    (check,) = [check for check in verify(run) if check.name == "inputs"]
    assert (check.mark, shown in check.message) == ("note", True), "verify does not forget it"


def test_a_removed_input_is_noticed(here: Path) -> None:
    run = stopped(recipe())
    (here / "reward.py").unlink()
    assert changed_inputs(run, load_recipe(run.recipe)) == ["rewards.short.function (reward.py is missing)"]


def test_replay_says_that_a_reward_has_changed(here: Path) -> None:
    run = begin(recipe(), out=Path("run"))
    assert "changed_inputs" not in replay_data(replay(run, "grpo", 2, 0))
    (here / "reward.py").write_text(LONG)
    result = replay(run, "grpo", 2, 0)
    assert result.changed_inputs == ("rewards.short.function (reward.py)",)
    assert replay_data(result)["changed_inputs"] == ["rewards.short.function (reward.py)"]


def test_modules_environments_and_arguments_count(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a module is found without importing it."""
    monkeypatch.syspath_prepend(str(here))
    (here / "my_package").mkdir()
    (here / "my_package" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (here / "my_package" / "grading.py").write_text(REWARD)
    (here / "world.py").write_text(ENVIRONMENT)
    whole = recipe("my_package.grading:short", environment="world.py:Echo")
    run = RunFolder.create_at(here / "run", fill=lambda new, path: None)
    from oncurve.training.inputs import record_inputs

    record_inputs(run, whole)
    assert "my_package" not in sys.modules
    (here / "my_package" / "grading.py").write_text(LONG)
    (here / "world.py").write_text(ENVIRONMENT + "# another\n")
    assert changed_inputs(run, whole) == [
        "task.environment (world.py)",
        "rewards.short.function (my_package.grading)",
    ]


def test_a_fork_is_a_run_of_its_own(here: Path) -> None:
    parent = begin(recipe(), out=Path("run"))
    (here / "reward.py").write_text(LONG)
    child = fork(parent, 1, [], out=Path("fork"))
    assert changed_inputs(child, load_recipe(child.recipe)) == []
    assert changed_inputs(parent, load_recipe(parent.recipe)) != []


def other_digits(text: str) -> float:
    return -digits(text)


def test_functions_given_from_python_count_where_they_are_given_again(here: Path) -> None:
    mixes = [RewardMix([FunctionReward(function, "digits")]) for function in (digits, other_digits)]
    run = stopped(recipe(), rewards=mixes[0])
    assert any("def digits" in file.read_text() for file in (run.path / "sources").iterdir())
    with pytest.raises(RunError, match=r"rewards\.digits"):
        resume(run, rewards=mixes[1])
    assert [c.mark for c in verify(run) if c.name == "inputs"] == ["ok"], "there is nothing to compare it with"
    resume(run, rewards=mixes[0])


def test_a_run_without_a_record_is_not_checked(here: Path) -> None:
    run = stopped(recipe())
    (run.path / "inputs.json").unlink()
    (here / "reward.py").write_text(LONG)
    assert [c for c in verify(run) if c.name == "inputs"] == []
    resume(run)


def test_a_damaged_record_is_one_error(here: Path) -> None:
    run = stopped(recipe())
    (run.path / "inputs.json").write_text("[{]")
    with pytest.raises(RunError, match=r"inputs\.json: unreadable"):
        resume(run)
    assert [c.mark for c in verify(run) if c.name == "inputs"] == ["wrong"]
