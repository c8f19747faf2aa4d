"""What is refused before a model is loaded or a folder is made."""

import json
from pathlib import Path

import pytest

from oncurve.errors import OncurveError, RecipeError, RewardError
from oncurve.recipe.load import parse_recipe
from oncurve.training.start import begin, build_tasks_and_rewards
from tests.faults.cases import GRPO, recipe

ROWS = [{"question": f"{n}+1=", "label": str(n + 1), "level": n % 2} for n in range(10)]


@pytest.mark.parametrize(
    ("task", "reward", "message"),
    [
        ({}, {"type": "answer"}, "rewards.answer: no prompt has the columns that it needs: 'answer'"),
        ({}, {"type": "math", "column": "gold"}, "needs: 'gold'"),
        ({}, {"type": "code"}, "'tests' or 'test_code'"),
        ({}, {"type": "python", "name": "own", "function": "own.py:exact"}, "rewards.own: no prompt has the columns"),
        ({"answer": "lbl"}, {"type": "answer"}, "no row has a column 'lbl'"),
        ({"difficulty": "lvl"}, {"type": "length", "target": 3}, "no column 'lvl'"),
    ],
)
def test_a_column_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: dict[str, str], reward: dict[str, str], message: str
) -> None:
    """One error with the columns that there are; never a traceback, and never a run that can't learn."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    Path("own.py").write_text("def exact(completion, expected):\n    return 0.0\n")
    section = {"type": "file", "path": "rows.jsonl", "prompt": "question", **task}
    config = parse_recipe({"name": "x", "task": section, "rewards": [reward], "stages": [{"type": "grpo", "steps": 1}]})
    with pytest.raises(OncurveError) as caught:
        build_tasks_and_rewards(config)
    assert message in str(caught.value)
    assert "label" in caught.value.because


def test_the_prompt_s_own_column_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    Path("named.py").write_text("def exact(completion, question, label):\n    return float(label in completion)\n")
    config = parse_recipe(
        {
            "name": "x",
            "task": {"type": "file", "path": "rows.jsonl", "prompt": "question"},
            "rewards": [{"type": "python", "name": "own", "function": "named.py:exact"}],
            "stages": [{"type": "grpo", "steps": 1}],
        }
    )
    try:
        build_tasks_and_rewards(config)
    except RewardError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize(
    ("scale", "fix"),
    [
        ({"samplers": 2}, "--set scale.samplers=0"),
        ({"reward_workers": 1}, "--set scale.reward_workers=0"),
        ({"samplers": 1, "max_staleness": 2}, "--set scale.samplers=0 --set scale.max_staleness=0"),
    ],
)
def test_processes_of_a_cluster_are_refused_without_one(tmp_path: Path, scale: dict[str, int], fix: str) -> None:
    with pytest.raises(RecipeError, match="no cluster was named") as caught:
        begin(recipe({**GRPO, "steps": 1}, scale=scale), out=tmp_path / "run")
    assert caught.value.fix == f"add --ray auto to oncurve train, or train without them: {fix}"
    assert list(tmp_path.iterdir()) == []
