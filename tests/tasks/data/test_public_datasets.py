"""Public data sets in their published formats, with a few records of each."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import DataError
from oncurve.recipe.schema.sections import Task
from oncurve.rewards.mix import aspects_of
from oncurve.rewards.registry import build_reward
from oncurve.tasks.registry import build_task
from tests.rewards.builders import group

GSM8K = {"question": "Ann has 48 clips and sells half. How many?", "answer": "She sells 48/2 = <<48/2=24>>24.\n#### 24"}
MATH = {"problem": "Find $1/2+1/3$.", "solution": "It is $\\boxed{\\frac56}$.", "answer": "\\frac56", "level": "Level 2"}
MBPP = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n  return 2 * x",
    "task_id": 1,
    "test_setup_code": "",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
}
SANITISED = {
    "prompt": "Write a function for the area of a circle.",
    "code": "import math\ndef area(r):\n  return math.pi * r * r",
    "test_imports": ["import math"],
    "test_list": ["assert abs(area(1) - math.pi) < 1e-9"],
}
HUMANEVAL = {
    "task_id": "HumanEval/x",
    "prompt": 'def double(x: int) -> int:\n    """ Twice x. """\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}


def task(tmp_path: Path, kind: str, *rows: dict[str, Any], suffix: str = ".jsonl", **options: Any) -> Any:
    path = tmp_path / f"data{suffix}"
    lines = "\n".join(json.dumps(row) for row in rows)
    text = json.dumps(list(rows), indent=1) if suffix.startswith(".json.") or suffix == ".json" else lines
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    return build_task(Task.model_validate({"type": kind, "path": str(path), "heldout_share": 0.0, **options}))


def test_gsm8k(tmp_path: Path) -> None:
    dataset = task(tmp_path, "gsm8k", GSM8K)
    (prompt,) = dataset.train
    assert prompt.messages[-1]["content"].startswith("Ann has 48 clips and sells half. How many?\nThink step by step")
    assert prompt.columns["answer"] == "24"
    assert dataset.examples[0].completion == "She sells 48/2 = 24.\n\\boxed{24}"
    assert dataset.default_rewards[0].type == "math"


def test_math_as_one_json_list(tmp_path: Path) -> None:
    dataset = task(
        tmp_path, "math", MATH, {**MATH, "problem": "Other?", "difficulty": 5.0}, suffix=".json", chat=False, instruction=""
    )
    assert dataset.train[0].text == "Find $1/2+1/3$."
    assert (dataset.train[0].columns["answer"], dataset.train[0].difficulty) == ("\\frac56", "level 2")


@pytest.mark.parametrize(
    ("kind", "row", "suffix"), [("mbpp", MBPP, ".jsonl"), ("mbpp", SANITISED, ".json"), ("humaneval", HUMANEVAL, ".jsonl.gz")]
)
def test_reference_solutions_pass_their_own_tests(tmp_path: Path, kind: str, row: dict[str, Any], suffix: str) -> None:
    dataset = task(tmp_path, kind, row, suffix=suffix)
    reward = build_reward(dataset.default_rewards[0])
    right, wrong = aspects_of(reward, group(dataset.examples[0].completion, "    return None", **dataset.train[0].columns))
    assert (right.value, wrong.value) == (1.0, 0.0)


def test_mbpp_shows_one_test(tmp_path: Path) -> None:
    (prompt,) = task(tmp_path, "mbpp", MBPP, chat=False).train
    assert prompt.text == (
        "Write a function to double a number.\nIt must pass: assert double(2) == 4\nWrite the program in a ```python block."
    )


def test_files_of_another_shape(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'question'") as caught:
        task(tmp_path, "gsm8k", {"prompt": "?"})
    assert "this has prompt" in caught.value.because
    (tmp_path / "bad.json").write_text("[{]")
    with pytest.raises(DataError, match="not valid JSON"):
        build_task(Task.model_validate({"type": "math", "path": str(tmp_path / "bad.json")}))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(GSM8K).encode())[:-9])
    with pytest.raises(DataError, match="not a complete gzip file"):
        build_task(Task.model_validate({"type": "gsm8k", "path": str(tmp_path / "cut.jsonl.gz")}))
