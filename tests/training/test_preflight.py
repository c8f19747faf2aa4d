"""What is refused before a model is loaded or a folder is made."""

import json
from pathlib import Path

import pytest

from oncurve.errors import OncurveError, RewardError
from oncurve.recipe.load import parse_recipe
from oncurve.training.start import build_tasks_and_rewards

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
    recipe = parse_recipe({"name": "x", "task": section, "rewards": [reward], "stages": [{"type": "grpo", "steps": 1}]})
    with pytest.raises(OncurveError) as caught:
        build_tasks_and_rewards(recipe)
    assert message in str(caught.value)
    assert "label" in caught.value.because


def test_the_prompt_s_own_column_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    Path("named.py").write_text("def exact(completion, question, label):\n    return float(label in completion)\n")
    recipe = parse_recipe(
        {
            "name": "x",
            "task": {"type": "file", "path": "rows.jsonl", "prompt": "question"},
            "rewards": [{"type": "python", "name": "own", "function": "named.py:exact"}],
            "stages": [{"type": "grpo", "steps": 1}],
        }
    )
    try:
        build_tasks_and_rewards(recipe)
    except RewardError as error:
        pytest.fail(str(error))
