"""`oncurve rewards`, from the command line."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from oncurve.cli.app import main
from oncurve.recipe.schema.sections import Reward
from oncurve.records import EvalReport, GradedGroup, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.registry import build_reward
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from tests.rewards.builders import group

RECIPE = """
name = "sums"
[task]
type = "arithmetic"
[[rewards]]
type = "answer"
[[rewards]]
type = "format"
weight = 0.5
[[rewards]]
type = "process"
weight = 0.0
[[stages]]
type = "grpo"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "sums.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def run(tmp_path: Path, recipe: Path) -> RunFolder:
    """A run of two steps whose completions are right and wrong in turn."""
    folder = RunFolder.create(tmp_path / "runs", "sums")
    folder.recipe.write_text(recipe.read_text())
    mix = RewardMix([build_reward(Reward(type="answer")), build_reward(Reward(type="format", weight=0.5))])
    with RunWriter.create(folder.path) as store:
        store.begin_stage("grpo", "grpo", 0, 2)
        for step in (1, 2):
            texts = [f"<think>{step}</think><answer>{n}</answer>" for n in (3, 4)]
            graded = [_graded(scored) for scored in mix.score([group(*texts, prompt=f"{n}+0=", answer="3") for n in range(2)])]
            store.record_step(StepReport("grpo", step, {"reward": 1.0}, {"sample": 1.0}, graded, [[None, None]] * 2))
    return folder


def _graded(scored: ScoredGroup) -> GradedGroup:
    zeros = tuple(np.zeros(len(c.token_ids), np.float32) for c in scored.group.completions)
    return GradedGroup(scored, zeros, (True,) * len(zeros))


def test_try(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "try", str(recipe), "--completion", "<think>1+1=2</think><answer>no</answer>"]) == 0
    shown = capsys.readouterr().out
    assert "answer" in shown
    assert "'no' is not" in shown
    assert "1 of 1 steps are good: 1 for the step that ends at character 39" in " ".join(shown.split())
    assert "rewards of single steps are not in the total" in " ".join(shown.split())
    (tmp_path / "text.txt").write_text("plain")
    assert main(["rewards", "try", str(recipe), "--completion", str(tmp_path / "text.txt")]) == 0
    assert "<think> occurs 0 times" in capsys.readouterr().out
    assert main(["rewards", "try", str(recipe), "--completion", "x", "--prompt", "100000"]) == 2


@pytest.mark.parametrize("path", ["./nofile", "nofile.txt", "../x/answer.md", "/no/such/answer.txt", "~/answer"])
def test_a_completion_file_that_is_not_there(recipe: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an error, and not scored as a text."""
    assert main(["rewards", "try", str(recipe), "--completion", path]) == 2
    assert "there is no such file" in capsys.readouterr().err
    for text in ("./a is a path", "<answer>a.txt</answer>", "3.14"):
        assert main(["rewards", "try", str(recipe), "--completion", text]) == 0


def test_a_failure_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def broken(completion):\n    raise ValueError('it is broken')\n")
    rewards = '[[rewards]]\ntype = "python"\nname = "own"\nfunction = "own.py:broken"\n'
    (tmp_path / "own.toml").write_text(f'[task]\ntype = "arithmetic"\n{rewards}[[stages]]\ntype = "grpo"\n')
    assert main(["rewards", "try", "own.toml", "--completion", "x"]) == 2
    shown = "".join(capsys.readouterr())
    assert shown.count("it is broken") == 1
    assert "none: a reward failed" in shown


def test_replay(run: RunFolder, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs", str(run.path.parent)]
    same = recipe.read_text().replace('[[rewards]]\ntype = "process"\nweight = 0.0\n', "")
    (tmp_path / "same.toml").write_text(same)
    assert main(["rewards", "replay", run.name, "--with", str(tmp_path / "same.toml"), *runs]) == 0
    shown = capsys.readouterr().out
    assert "100.0 %" in shown or "100.0%" in shown
    assert "8 in 4 groups" in shown
    (tmp_path / "other.toml").write_text(same.replace("weight = 0.5", "weight = 2.0"))
    assert main(["rewards", "replay", run.name, "--with", str(tmp_path / "other.toml"), *runs]) == 0
    assert "→" in capsys.readouterr().out


def test_a_run_that_never_ended_is_graded_again_too(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards of single reasoning steps need tokens. They use the run's tokenizer, which exists before the model does."""
    text = recipe.read_text().replace("weight = 0.0", "weight = 0.1")
    recipe.write_text(f"{text}steps = 1\nprompts_per_step = 2\ngroup_size = 4\nsampling = {{ max_new_tokens = 8 }}\n")
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    capsys.readouterr()
    assert main(["rewards", "replay", str(tmp_path / "run")]) == 0
    assert "8 in 2 groups" in capsys.readouterr().out


def test_audit(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "audit", run.name, "--runs", str(run.path.parent)]) == 0
    assert "No signs of reward hacking in 2 steps" in capsys.readouterr().out


def test_the_audit_measures_correctness_by_the_verifiable_reward_of_its_own_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Completions soon have the format, and maths improves: no drift. Held-out accuracy falls only in the stage before."""
    folder = RunFolder.create(tmp_path / "runs", "sums")
    stages = "[[stages]]\ntype = 'grpo'\nname = 'first'\n[[stages]]\ntype = 'grpo'\nname = 'second'\n"
    folder.recipe.write_text(f"[task]\ntype = 'arithmetic'\n[[rewards]]\ntype = 'format'\n[[rewards]]\ntype = 'math'\n{stages}")
    mix = RewardMix([build_reward(Reward(type="format")), build_reward(Reward(type="math"))])
    with RunWriter.create(folder.path) as store:
        for position, stage in enumerate(("first", "second")):
            store.begin_stage(stage, "grpo", position, 9)
        store.record_eval(EvalReport("first", 9, 0.9, 10, {}))
        for step in range(1, 10):
            answers = [(3 if n < step // 3 else 4, step < 3 and n > 0) for n in range(4)]
            tags = ["thank" if bare else "think" for _, bare in answers]
            texts = [f"<{tag}>{step}+{n}</{tag}><answer>{answers[n][0]}</answer>" for n, tag in enumerate(tags)]
            graded = [_graded(scored) for scored in mix.score([group(*texts, prompt="3+0=", answer="3")])]
            store.record_step(StepReport("second", step, {"reward": 1.0}, {"sample": 1.0}, graded, [[None] * 4]))
        for step, accuracy in ((1, 0.3), (9, 0.6)):
            store.record_eval(EvalReport("second", step, accuracy, 10, {}))
    assert main(["rewards", "audit", folder.name, "--runs", str(tmp_path / "runs")]) == 0
    assert "No signs of reward hacking in 9 steps" in capsys.readouterr().out


def test_runs_without_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "runs", "empty")
    folder.recipe.write_text(RECIPE)
    with RunWriter.create(folder.path) as store:
        store.begin_stage("sft", "sft", 0, 2)
    assert main(["rewards", "audit", folder.name, "--runs", str(tmp_path / "runs")]) == 2
    assert "no step of a stage that trained on samples" in " ".join(capsys.readouterr().err.split())


STEP = "steps = 1\nprompts_per_step = 2\ngroup_size = 4\nsampling = { max_new_tokens = 8 }\n"


def _replay(recipe: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What `rewards replay` prints of a run of this recipe."""
    path = folder / "recipe.toml"
    path.write_text(recipe)
    assert main(["train", str(path), "--out", str(folder / "run")]) == 0
    capsys.readouterr()
    assert main(["rewards", "replay", str(folder / "run"), *options]) == 0
    return capsys.readouterr().out


def test_a_replay_grades_by_the_overlong_reward_of_the_stage_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Untrained completions reach the length limit, so `overlong` is −1 in their totals."""
    shown = _replay(f"{RECIPE}{STEP}overlong = {{ buffer = 4 }}\n", tmp_path, capsys)
    assert "same reward                                100.0 %" in shown
    assert "→" not in shown


def test_a_replay_grades_the_steps_of_a_stage_by_the_rewards_of_that_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later stage with other rewards does not grade the steps of grpo, nor the other way round."""
    strict = '[[stages.rewards]]\ntype = "format"\nweight = 3.0\n[[stages.rewards]]\ntype = "length"\ntarget = 4\n'
    sampled = f'[[stages]]\ntype = "rejection_sample"\nat_least = 0.0\n{STEP}'
    assert "100.0 %" in _replay(f"{RECIPE}{STEP}{sampled}{strict}", tmp_path, capsys)
    assert main(["rewards", "replay", str(tmp_path / "run"), "--stage", "rejection_sample"]) == 0
    assert "100.0 %" in capsys.readouterr().out


def test_a_trial_shows_the_answer_that_training_watches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No reward of the recipe defines accuracy: the task's own is added, at weight 0."""
    path = tmp_path / "form.toml"
    path.write_text('[task]\ntype = "arithmetic"\n[[rewards]]\ntype = "format"\n[[stages]]\ntype = "grpo"\n')
    assert main(["rewards", "try", str(path), "--completion", "<think>1</think><answer>no</answer>"]) == 0
    shown = capsys.readouterr().out
    assert "'no' is not" in shown
    assert next(line.split()[:2] for line in shown.splitlines() if line.startswith("answer")) == ["answer", "0"]
