"""`oncurve train --smoke`, and a recipe converted from TRL that runs as it is."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oncurve.recipe.load import builtin_recipes, load_recipe, smoke_sets
from oncurve.runs.database.reader import RunReader
from tests.cli.conftest import Oncurve, write_recipe
from tests.cli.test_process import ENVIRONMENT


def test_a_smoke_test_trains_evaluates_and_saves_twice_in_every_stage(oncurve: Oncurve, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 2\n", "steps = 50\noptimiser = { warmup_steps = 10 }\n"))
    refused = oncurve("train", recipe, "--runs", tmp_path / "runs", "--set", "sft.steps=4")
    assert refused.code == 2
    assert "--smoke" in refused.err
    result = oncurve("train", recipe, "--runs", tmp_path / "runs", "--smoke", "--set", "grpo.group_size=2")
    assert result.code == 0, result.err
    run = tmp_path / "runs" / "small-smoke-1"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"{stage}-00000{step}" for stage in ("grpo", "sft") for step in (1, 2)
    ]
    with RunReader.open(run) as store:
        assert [(stage.name, stage.done) for stage in store.stages()] == [("sft", 2), ("grpo", 2)]
        assert [(report.stage, report.step) for report in store.evals()] == [("sft", 1), ("sft", 2), ("grpo", 1), ("grpo", 2)]
    assert load_recipe(run / "recipe.toml").stages[-1].group_size == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_built_in_recipe_has_a_smoke_test(name: str) -> None:
    recipe = load_recipe(name, smoke_sets(name))
    assert {stage.steps for stage in recipe.stages} == {2}
    assert recipe.task.heldout <= 8


@pytest.mark.parametrize(
    "stage",
    [
        'type = "ppo"\ncritic = { warmup_steps = 20 }',
        'type = "trpo"',
        'type = "grpo"\nkl = { beta = 0.1, refresh_every = 10 }\npatience = 3\neval_every = 10',
        'type = "grpo"\noptimiser = { warmup_steps = 90 }\ntask = { type = "countdown", heldout = 100 }',
    ],
)
def test_every_limit_of_a_stage_is_lowered_with_its_steps(tmp_path: Path, stage: str) -> None:
    file = tmp_path / "one.toml"
    file.write_text(f'task = {{ type = "arithmetic" }}\nrewards = [{{ type = "answer" }}]\n[[stages]]\n{stage}\nsteps = 100\n')
    assert load_recipe(file).stages[0].steps == 100
    recipe = load_recipe(file, smoke_sets(file))
    assert (recipe.stages[0].steps, recipe.stages[0].save_every) == (2, 1)


def test_a_smoke_test_is_not_resumed(oncurve: Oncurve, recipe: Path) -> None:
    result = oncurve("train", recipe, "--smoke", "--resume")
    assert (result.code, "--smoke" in result.err) == (2, True)


TRL = """
model_name_or_path: MODEL
dataset_name: train.jsonl
reward_funcs: [FUNCTION]
learning_rate: 1.0e-3
num_generations: 4
per_device_train_batch_size: 8
max_completion_length: 8
max_steps: 2
beta: 0.0
dtype: float32
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "file"), [("rewards.accuracy", "rewards.py"), ("my_rewards.maths.accuracy", "my_rewards/maths.py")]
)
def test_a_converted_recipe_runs_where_the_reward_module_is(runs: Path, tmp_path: Path, function: str, file: str) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(10)))
    (tmp_path / "grpo.yaml").write_text(TRL.replace("MODEL", str(runs / "small-1" / "model")).replace("FUNCTION", function))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("def accuracy(completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n")
    program = "import sys; from oncurve.cli.app import main; sys.exit(main(sys.argv[1:]))"
    environment = {**ENVIRONMENT, "PYTHONSAFEPATH": "1"}  # as for the installed command: the current folder is not on the path
    for words in (["recipe", "from-trl", "grpo.yaml", "-o", "mine.toml"], ["train", "mine.toml"]):
        command = [sys.executable, "-P", "-c", program, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs").iterdir())


def test_a_module_of_the_current_folder_does_not_hide_an_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oncurve.plugins import load_function

    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_function("json:dumps", "rewards.x.function")([1]) == "[1]"
    assert str(tmp_path) not in sys.path


def test_chat_says_that_it_does_not_run_the_environment(
    oncurve: Oncurve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--set", "model.tiny={layers=1,width=32,heads=2,kv_heads=1,head_size=16,mlp_width=64,context=256}"]
    small += [
        "--set",
        "threads=1",
        "--set",
        "sft.batch_size=2",
        "--set",
        "grpo.prompts_per_step=1",
        "--set",
        "grpo.group_size=2",
    ]
    small += ["--set", "grpo.sampling.max_new_tokens=16", "--set", "task.heldout=2"]
    result = oncurve("train", "calculator", "--smoke", "--out", tmp_path / "run", *small)
    assert result.code == 0, result.err
    shown = oncurve("show", tmp_path / "run", "--step", 1, "--group", 0)
    assert shown.code == 0, shown.err
    monkeypatch.setattr("sys.stdin", io.StringIO("12+30=\n"))
    result = oncurve("chat", tmp_path / "run", "--max-new-tokens", 4)
    assert result.code == 0
    assert "environment 'calculator', which does not run here" in " ".join(result.err.split())


def test_chat_with_any_other_run_says_nothing_of_it(oncurve: Oncurve, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("12+30=\n"))
    result = oncurve("chat", "small-1", "--runs", runs, "--max-new-tokens", 2)
    assert (result.code, result.err) == (0, "")
    assert os.linesep in result.out
