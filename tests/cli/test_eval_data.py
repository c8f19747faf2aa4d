"""`oncurve eval MODEL --data FILE`, and held-out prompts without training prompts. The number of rows is always shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oncurve.errors import DataError, OncurveError
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.sections import Task
from oncurve.tasks.registry import build_task
from oncurve.training.preflight import check_stage_data
from oncurve.training.start import rewards_for
from tests.cli.conftest import Oncurve


def write_rows(file: Path, count: int) -> Path:
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(count)))
    return file


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "bench.jsonl", 20)


def test_every_row_of_the_file_is_measured(oncurve: Oncurve, runs: Path, rows: Path) -> None:
    model = runs / "small-1" / "model"
    result = oncurve("eval", model, "--data", rows, "--runs", runs)
    assert result.code == 0, result.err
    assert "20 of 20 rows" in " ".join(result.out.split())
    result = oncurve("eval", model, "--data", rows, "--runs", runs, "--json")
    told = json.loads(result.out)
    assert (told["asked"], told["rows"]) == (20, 20)
    assert told["task"] == {"type": "file", "heldout": 20, "seed": 0, "heldout_path": str(rows)}


def test_a_run_is_measured_with_its_own_rewards(oncurve: Oncurve, runs: Path, rows: Path) -> None:
    result = oncurve("eval", "small-1", "--data", rows, "--runs", runs, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["asked"] == 20


def test_a_part_of_a_file_is_never_passed_off_as_all_of_it(oncurve: Oncurve, runs: Path, rows: Path) -> None:
    model = runs / "small-1" / "model"
    result = oncurve("eval", model, "--task", "file", "--set", f"task.path={rows}", "--runs", runs)
    assert "4 of 20 rows" in " ".join(result.out.split())
    assert "The file's other rows are for training" in " ".join(result.out.split())
    assert "all 20 rows" not in " ".join(result.out.split())
    result = oncurve(
        "eval", model, "--task", "file", "--set", f"task.path={rows}", "--set", "task.heldout_share=1", "--runs", runs
    )
    assert "20 of 20 rows" in " ".join(result.out.split())
    result = oncurve("eval", model, "--data", rows, "--set", "task.heldout=3", "--runs", runs)
    assert "3 of 20 rows" in " ".join(result.out.split())
    assert "To evaluate on all 20 rows: --set task.heldout=20" in " ".join(result.out.split())


@pytest.mark.parametrize("words", [["--task", "file"], ["--task", "RECIPE"]])
def test_a_held_out_file_needs_no_training_prompts(
    oncurve: Oncurve, runs: Path, rows: Path, tmp_path: Path, words: list[str]
) -> None:
    recipe = tmp_path / "bench.toml"
    recipe.write_text(
        'task = { type = "file", heldout = 200 }\nrewards = [{ type = "answer", take = "any" }]\n[[stages]]\ntype = "sft"\n'
    )
    task = [str(recipe) if word == "RECIPE" else word for word in words]
    result = oncurve("eval", runs / "small-1" / "model", *task, "--set", f"task.heldout_path={rows}", "--runs", runs)
    assert result.code == 0, result.err
    assert "20 of 20 rows" in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("gsm8k", {"question": "What is 1+1?", "answer": "1+1=2\n#### 2"}),
        (
            "humaneval",
            {
                "prompt": "def f():\n",
                "test": "def check(f): assert f() == 1",
                "entry_point": "f",
                "canonical_solution": "    return 1",
            },
        ),
        ("math", {"problem": "1+1", "answer": "2", "level": "Level 1", "solution": "2"}),
    ],
)
def test_public_data_sets_are_measured_in_full_too(tmp_path: Path, kind: str, row: dict[str, str]) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text((json.dumps(row) + "\n") * 7)
    task = build_task(Task.model_validate({"type": kind, "heldout_path": str(file), "heldout": 7}))
    assert (len(task.heldout), task.train_size, task.rows) == (7, 0, 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", [{"heldout_path": "ROWS"}, {"path": "ROWS", "heldout_share": 1.0}])
def test_a_stage_that_samples_needs_training_prompts(rows: Path, task: dict[str, object]) -> None:
    named = {key: str(rows) if value == "ROWS" else value for key, value in task.items()}
    recipe = parse_recipe(
        {
            "task": {"type": "file", **named},
            "rewards": [{"type": "answer"}],
            "stages": [{"type": "grpo"}],
        }
    )
    with pytest.raises(DataError, match="no training prompts"):
        check_stage_data(recipe.stages[0], build_task(recipe.task), rewards_for(recipe, recipe.stages[0]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "gone.jsonl"], "there is no such file"),
        (["--data", "gone.jsonl"], "give the file's path: --data FILE"),
        (["--data", "DIR"], "it is a folder"),
        (["--data", "EMPTY"], "no rows"),
        (["--data", "ROWS", "--task", "arithmetic"], "the task arithmetic generates its problems"),
        (["--data", "ROWS", "--task", "gsm8k"], "no column 'question'"),
        ([], "give --data FILE"),
    ],
)
def test_what_can_not_be_measured_is_one_message(
    oncurve: Oncurve, runs: Path, rows: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    names = {"DIR": str(tmp_path), "EMPTY": str(tmp_path / "empty.jsonl"), "ROWS": str(rows)}
    result = oncurve("eval", runs / "small-1" / "model", *(names.get(word, word) for word in words), "--runs", runs)
    assert result.code == 2
    assert message in " ".join(result.err.split())
    assert "Traceback" not in result.err


def test_a_task_without_any_file_says_which_key_is_missing() -> None:
    for kind in ("file", "gsm8k"):
        with pytest.raises(OncurveError, match=r"task\.path: missing"):
            build_task(Task.model_validate({"type": kind}))


TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["</answer>"], max_gen_toks: 8}}
metric_list:
  - metric: exact_match
"""


@pytest.mark.slow
def test_tasks_of_lm_eval(oncurve: Oncurve, runs: Path, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(TASK.format(data=rows))
    words = ("eval", "small-1", "--runs", runs, "--harness", "lm-eval", "--include", tmp_path)
    result = oncurve(*words, "--tasks", "sums", "--limit", 3, "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["model"] == "small-1"
    assert 0 <= told["results"]["sums"]["exact_match,none"] <= 1
    result = oncurve(*words, "--tasks", "sums", "--limit", 3)
    assert "exact_match,none" in result.out
    result = oncurve(*words, "--tasks", "summs")
    assert result.code == 2
    assert "did you mean 'sums'" in result.err


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--harness", "lm-eval"], "--tasks"),
        (["--tasks", "gsm8k"], "--tasks"),
        (["--limit", "3"], "--limit"),
        (["--harness", "lm-eval", "--tasks", "gsm8k", "--samples", "4"], "--samples"),
        (["--harness", "lm-eval", "--tasks", "gsm8k", "--include", "nowhere"], "--include nowhere"),
    ],
)
def test_options_that_would_be_ignored_are_refused(oncurve: Oncurve, runs: Path, words: list[str], where: str) -> None:
    result = oncurve("eval", "small-1", "--runs", runs, *words)
    assert result.code == 2
    assert where in result.err
