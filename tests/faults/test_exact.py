"""The same recipe, seed and machine give the same bits; replies from outside are stored and reused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from oncurve.operations.replay import replay
from oncurve.records import StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.listeners import Listener
from oncurve.training.start import begin, fork, resume
from tests.faults.cases import CASES, GRPO, SFT, recipe
from tests.faults.sameness import everything


@pytest.mark.parametrize(
    "case", ["sft then grpo", "dynamic sampling", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES)]
)
def test_two_runs_are_the_same_bits(case: str, tmp_path: Path) -> None:
    """Weights, optimiser, reference, and every row except times, memory and events."""
    one, two = (everything(begin(CASES[case], out=tmp_path / name)) for name in ("one", "two"))
    assert one == two
    assert {name for name in one if "optimiser" in name}
    assert {"groups", "completions", "tokens", "aspects", "metrics", "replies"} <= one.keys()


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    small = recipe({**SFT, "steps": 2, "save_every": 0, "eval_every": 0})
    one, two = (everything(begin(small.model_copy(update={"seed": s}), out=tmp_path / str(s))) for s in (0, 1))
    assert one["metrics"] != two["metrics"]


class Die(Exception):
    """Ends a run without a message, as a crash would."""


class DieAfter(Listener):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            raise Die


def moody() -> RewardMix:
    """A reward that never returns the same value twice and sometimes fails, like a judge or a slow worker."""
    count = itertools.count()

    def mood(completion: str) -> float:
        number = next(count)
        if number % 7 == 3:
            raise TimeoutError(f"call {number} was late")
        return float(number % 5)

    return RewardMix([FunctionReward(mood, "mood")])


@pytest.mark.parametrize("options", [{}, {"no_signal": "resample", "max_resample_rounds": 2}], ids=["plain", "resampled"])
def test_a_step_done_again_gets_the_replies_it_had(options: dict[str, object], tmp_path: Path) -> None:
    """The steps after the last checkpoint were recorded with their replies; done again, they are the same."""
    config = recipe({**GRPO, "steps": 5, "save_every": 2, "eval_every": 2, **options})
    path = tmp_path / "crashed"
    rewards = moody()
    with pytest.raises(Die):
        begin(config, out=path, rewards=rewards, listeners=[DieAfter(3)])
    with RunReader.open(path) as store:
        before = store.step("grpo", 3)
    resume(RunFolder(path), rewards=rewards)
    with RunReader.open(path) as store:
        after = store.step("grpo", 3)
        assert store.step("grpo", 5).groups
    assert [g.scored.totals for g in after.groups] == [g.scored.totals for g in before.groups]
    output = [[s.failure for g in report.groups for s in g.scored.scored] for report in (before, after)]
    assert output[0] == output[1]
    assert any("was late" in failure for failure in output[0] if failure)
    assert after.metrics["loss"] == before.metrics["loss"]


def test_a_curriculum_is_replayed_and_forked_with_the_same_prompts(tmp_path: Path) -> None:
    """Pass rates are part of a checkpoint: a step replayed from one, and a fork of one, sample what the run sampled."""
    stage = {**GRPO, "steps": 5, "save_every": 2, "eval_every": 0, "curriculum": {"unseen": 0.4, "first_samples": 2}}
    run = begin(recipe(stage, task={"type": "arithmetic", "digits": 2, "heldout": 6}), out=tmp_path / "run")
    assert replay(run, "grpo", 4, 1).differences == []
    forked = fork(run, 2, [], out=tmp_path / "fork")
    prompts = []
    for path in (run.path, forked.path):
        with RunReader.open(path) as store:
            report = store.step("grpo", 5)
        prompts.append([(g.group.prompt.id, [c.token_ids.tolist() for c in g.group.completions]) for g in report.groups])
    assert prompts[0] == prompts[1]
