"""Update guard: NaN and spikes are skipped, the batch is saved, and a run that stays bad rolls back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oncurve.cli.app import main
from oncurve.engines.base import MAX_EARLIER, MAX_REMEMBERED
from oncurve.errors import RunError
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.sections import Guard as Settings
from oncurve.recipe.schema.stages import Stage
from oncurve.records import StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.bad_batches import bad_batches
from oncurve.runs.checkpoints.files import Checkpoint
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.collapse_watch import PATIENCE, CollapseWatch, learning_rate_warning
from oncurve.training.learner.optimiser import Optimiser, UpdateGuard
from oncurve.training.listeners import Listener
from oncurve.training.stages import trpo
from oncurve.training.stages.trpo import TrpoLearner
from oncurve.training.start import begin, fork, resume
from oncurve.training.trainer import Trainer
from tests.faults.cases import GRPO, TAKING, recipe
from tests.faults.sameness import everything
from tests.faults.test_exact import Die, DieAfter
from tests.training.builders import snapshot


def test_a_spike_is_far_from_the_median_by_the_usual_deviation() -> None:
    """Of 1.0, 1.1 … 1.9: median 1.45, deviations 0.05 … 0.45 with median 0.25, times 1.4826: 0.371; ten of them are 3.71."""
    guard = UpdateGuard(Settings(spike=10.0))
    for i in range(10):
        assert guard.rejection_reason({"loss": 1.0 + i / 10}) is None
    assert guard.rejection_reason({"loss": 1.45 + 3.70}) is None
    guard.history["loss"].pop()
    assert guard.rejection_reason({"loss": 1.45 + 3.71}) == "loss is 5.16, and was 1.45 ± 0.37 over the last 10 updates"
    assert guard.rejection_reason({"loss": 1.45 - 3.72}) is not None


def test_what_was_left_out_is_not_remembered() -> None:
    guard = UpdateGuard(Settings(spike=10.0))
    for _ in range(8):
        guard.rejection_reason({"grad_norm": 1.0, "loss": 0.0})
    for bad in (math.nan, math.inf, -math.inf, 1e6):
        assert guard.rejection_reason({"grad_norm": 1.0, "loss": bad}) is not None
    assert list(guard.history["grad_norm"]) == [1.0] * 8


def test_small_numbers_are_no_spikes() -> None:
    """A first solved problem lifts the mean reward from 0 to 1, and a loss near 0 has no scale: neither is a spike."""
    guard = UpdateGuard(Settings())
    for _ in range(20):
        assert guard.rejection_reason({"reward": 0.0, "loss": 1e-9, "kl": 0.0, "grad_norm": 1e-6}) is None
    assert guard.rejection_reason({"reward": 1.0, "loss": -0.5, "kl": 0.1, "grad_norm": 0.9}) is None
    assert UpdateGuard(Settings(spike=0.0)).rejection_reason({"loss": 1e30}) is None


def test_the_guard_is_part_of_a_checkpoint() -> None:
    model = torch.nn.Linear(2, 2)
    one = Optimiser(model, recipe(GRPO).stages[0].optimiser, 10)
    for i in range(9):
        one.guard.rejection_reason({"loss": float(i) / 7})
    other = Optimiser(model, recipe(GRPO).stages[0].optimiser, 10)
    other.load_state(one.state())
    assert other.guard.history == one.guard.history


def mix(function: Any) -> RewardMix:
    return RewardMix([FunctionReward(function, "wild")])


def wild_after(calls: int, until: float = math.inf) -> RewardMix:
    """Normal rewards, then absurdly large ones, as a broken reward gives."""
    count = [0]

    def wild(completion: str) -> float:
        count[0] += 1
        return float(len(completion)) + (1e9 if calls < count[0] <= until else 0.0)

    return mix(wild)


BARE = {**GRPO, "steps": 12, "eval_every": 0, "save_every": 4}


def test_a_wild_reward_moves_no_weight_and_its_batch_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 calls in a step; the tenth step's rewards are absurd. `show --bad` gives the reason and the samples."""
    run = begin(
        recipe(BARE, task={"type": "arithmetic", "digits": 1, "heldout": 6}), out=tmp_path / "run", rewards=wild_after(108, 120)
    )
    with RunReader.open(run.path) as store:
        skipped = dict(store.metric("skipped_updates", "grpo"))
        assert {n: v for n, v in skipped.items() if v} == {10: 1.0}
        assert [(e.kind, e.step) for e in store.events("bad")] == [("bad", 10)]
    (batch,) = bad_batches(run.path)
    assert (batch.stage, batch.step) == ("grpo", 10)
    assert "reward is 1e+09" in batch.why[0]
    assert all(c["reward"] > 1e8 for group in batch.groups for c in group["completions"])
    assert main(["show", str(run.path), "--bad"]) == 0
    output = capsys.readouterr().out
    assert "grpo step 10" in output
    assert "update skipped: reward is 1e+09" in " ".join(output.split())
    assert main(["show", str(run.path), "--bad", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["step"] == 10


class NanAt:
    """A learner whose gradient norm is NaN in chosen updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, updates: range) -> None:
        self.count, self.updates, real = 0, updates, torch.nn.utils.clip_grad_norm_

        def broken(parameters: Any, limit: float) -> torch.Tensor:
            self.count += 1
            norm = real(parameters, limit)
            return norm * math.nan if self.count in self.updates else norm

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)


class BrokenAt:
    """A function of trpo that returns NaN at one of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, nan: Callable[[Any], Any]) -> None:
        self.count, real = 0, getattr(owner, name)

        def broken(*arguments: Any) -> Any:
            self.count += 1
            result = real(*arguments)
            return nan(result) if self.count == call else result

        monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize(
    ("bad", "words"),
    [("reward", "reward is 1e+09"), ("gradient", "grad_norm is nan"), ("solution", "its natural gradient is not finite")],
)
def test_a_natural_gradient_is_guarded_too(bad: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trpo has no Adam: its guard checks the gradient before the solve and the solution after it. Other steps train."""
    config = recipe({**TAKING, "type": "trpo", "cg_iterations": 2, "steps": 12, "eval_every": 0, "save_every": 1})
    watcher = Weights()
    if bad == "gradient":
        BrokenAt(monkeypatch, TrpoLearner, "_compute_gradient", 10, watcher.break_gradient)
    elif bad == "solution":
        BrokenAt(monkeypatch, trpo, "conjugate_gradient", 10, lambda found: replace(found, x=found.x * math.nan))
    rewards = wild_after(108, 120) if bad == "reward" else mix(lambda text: float(len(text)))
    run = begin(config, out=tmp_path / "run", rewards=rewards, policy=watcher.policy, listeners=[watcher])
    with RunReader.open(run.path) as store:
        assert dict(store.metric("skipped_updates", "trpo"))[10] == 1.0
        assert [(e.kind, e.step) for e in store.events("bad")] == [("bad", 10)]
    assert words in bad_batches(run.path)[0].why[0]
    assert torch.equal(watcher.after[10], watcher.after[9])
    assert not torch.equal(watcher.after[9], watcher.after[8])
    assert bool(watcher.after[12].isfinite().all())


class Weights(Listener):
    """Records the policy's weights after each step."""

    def __init__(self) -> None:
        self.policy = load_policy(recipe(GRPO).model, alphabet="0123456789+=", seed=0)
        self.after: dict[int, torch.Tensor] = {}

    def break_gradient(self, batch: Any) -> Any:
        for p in self.policy.model.parameters():
            p.grad = torch.full_like(p, math.nan)
        return batch

    def on_step(self, report: StepReport) -> None:
        self.after[report.step] = snapshot(self.policy.model)


@pytest.mark.slow
def test_a_trpo_stage_goes_back_after_bad_updates_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = {"optimiser": {"guard": {"rollback_after": 1}}}
    config = recipe({**TAKING, **guard, "type": "trpo", "cg_iterations": 2, "steps": 8, "eval_every": 0, "save_every": 2})
    BrokenAt(monkeypatch, trpo, "conjugate_gradient", 5, lambda found: replace(found, x=found.x * math.nan))
    run = begin(config, out=tmp_path / "run", rewards=mix(lambda text: float(len(text))))
    with RunReader.open(run.path) as store:
        (event,) = store.events("rollback")
        assert (event.step, event.data) == (4, {"to": 4, "number": 1})
        assert {v for _, v in store.metric("skipped_updates", "trpo")} == {0.0}


def test_after_bad_updates_in_a_row_a_run_goes_back_and_on_with_other_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe({**BARE, "optimiser": {"learning_rate": 1e-3, "guard": {"rollback_after": 2}}})
    full = begin(config, out=tmp_path / "whole")
    NanAt(monkeypatch, range(6, 8))
    run = begin(config, out=tmp_path / "run")
    with RunReader.open(run.path) as store, RunReader.open(full.path) as plain:
        (event,) = store.events("rollback")
        assert (event.step, event.data) == (4, {"to": 4, "number": 1})
        assert [s.step for s in store.steps("grpo")] == list(range(1, 13)), "the steps were done again"
        assert {v for _, v in store.metric("skipped_updates", "grpo")} == {0.0}
        assert [g.prompt_id for g in store.groups("grpo", 4)] == [g.prompt_id for g in plain.groups("grpo", 4)]
        assert [g.prompt_id for g in store.groups("grpo", 6)] != [g.prompt_id for g in plain.groups("grpo", 6)]
    assert [b.step for b in bad_batches(run.path)] == [6, 7], "what was undone can still be looked at"


def test_a_run_killed_after_a_roll_back_resumes_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roll-back is recorded in the run: the steps after it draw the same other samples again."""
    config = recipe({**BARE, "optimiser": {"learning_rate": 1e-3, "guard": {"rollback_after": 2}}})
    NanAt(monkeypatch, range(6, 8))
    full = begin(config, out=tmp_path / "whole")
    NanAt(monkeypatch, range(6, 8))
    with pytest.raises(Die):
        begin(config, out=tmp_path / "cut", listeners=[DieSecond(6)])
    monkeypatch.undo()
    run = resume(RunFolder(tmp_path / "cut"))
    assert everything(run) == everything(full)


def test_after_a_roll_back_drafts_come_from_the_steps_that_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run that is killed then and resumed: with `carry_over` the drafts decide which group is complete first."""
    left: list[dict[str, list[list[int]]]] = []
    recorded: list[dict[str, list[list[int]]]] = []

    def roll_back(trainer: Trainer, stage: Stage) -> Checkpoint:
        start = real(trainer, stage)
        left.append(
            {
                name: [a.tolist() for a in answers]
                for name, answers in (trainer.engine.answers if trainer.engine else {}).items()
            }
        )
        answers = trainer.store.last_answers(MAX_EARLIER, MAX_REMEMBERED, start.stage, start.step)
        recorded.append({name: [a.tolist() for a in answers] for name, answers in answers.items()})
        return start

    real = Trainer._roll_back
    monkeypatch.setattr(Trainer, "_roll_back", roll_back)
    NanAt(monkeypatch, range(6, 8))
    begin(recipe({**BARE, "optimiser": {"learning_rate": 1e-3, "guard": {"rollback_after": 2}}}), out=tmp_path / "run")
    assert left == recorded
    assert len(left) == 1
    assert left[0]


def test_a_fork_from_before_a_roll_back_draws_the_same_samples_if_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent's roll-back to a later step is none of its own."""
    stage = {
        **BARE,
        "save_every": 2,
        "keep_checkpoints": 9,
        "optimiser": {"learning_rate": 1e-3, "guard": {"rollback_after": 2}},
    }
    NanAt(monkeypatch, range(6, 8))
    parent = begin(recipe(stage), out=tmp_path / "parent")
    monkeypatch.undo()
    with RunReader.open(parent.path) as store:
        assert [event.step for event in store.events("rollback")] == [6]
    full = fork(parent, 2, [], out=tmp_path / "whole")
    with pytest.raises(Die):
        fork(parent, 2, [], out=tmp_path / "cut", listeners=[DieAfter(9)])
    assert everything(resume(RunFolder(tmp_path / "cut"))) == everything(full)


class DieSecond(DieAfter):
    """Dies when a step is done for the second time."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.seen = 0

    def on_step(self, report: StepReport) -> None:
        self.seen += report.step == self.step
        if self.seen == 2:
            raise Die


def test_a_run_that_stays_bad_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe({**BARE, "optimiser": {"learning_rate": 1e-3, "guard": {"rollback_after": 2}}})
    NanAt(monkeypatch, range(6, 1000))
    with pytest.raises(RunError, match="keeps producing bad updates after 3 roll-backs to step 4"):
        begin(config, out=tmp_path / "run")
    NanAt(monkeypatch, range(2, 1000))
    with pytest.raises(RunError, match="no checkpoint to return to"):
        begin(config, out=tmp_path / "early")


def report(**metrics: float) -> StepReport:
    groups: Any = ["a group"]
    return StepReport(
        "grpo", 1, {"sampled_entropy": 1.0, "no_signal_share": 0.2, "accuracy": 0.0, "cut_share": 0.0, **metrics}, {}, groups
    )


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"sampled_entropy": 0.001}, ["entropy is 0.001", "kl.beta", "oncurve fork"]),
        ({"no_signal_share": 1.0}, ["0 % of completions are correct", "rewards try", "easier prompts", "group_size"]),
        ({"no_signal_share": 1.0, "accuracy": 1.0}, ["100 % of completions are correct", "harder ones", "rewards audit"]),
        ({"cut_share": 0.95}, ["95 % of completions are truncated", "max_new_tokens"]),
    ],
)
def test_a_collapse_is_reported_once_with_what_to_change(metrics: dict[str, float], words: list[str]) -> None:
    watch = CollapseWatch()
    lines = [line for _ in range(PATIENCE - 1) for line in watch.check(report(**metrics))]
    assert lines == []
    (line,) = watch.check(report(**metrics))
    assert all(word in line for word in words), line
    assert [line for _ in range(20) for line in watch.check(report(**metrics))] == []
    for _ in range(PATIENCE):
        assert watch.check(report()) == []
    assert [line for _ in range(PATIENCE) for line in watch.check(report(**metrics))], "once it had gone, it is told again"


def test_a_policy_that_is_nearly_always_right_may_be_sure() -> None:
    right = report(sampled_entropy=0.005, accuracy=0.95, no_signal_share=0.8)
    watch = CollapseWatch()
    assert [line for _ in range(2 * PATIENCE) for line in watch.check(right)] == []


def test_equal_rewards_without_a_verifiable_reward_are_reported_without_mentioning_accuracy() -> None:
    free = StepReport("grpo", 1, {"no_signal_share": 1.0}, {}, report().groups)
    watch = CollapseWatch()
    (line,) = [line for _ in range(PATIENCE) for line in watch.check(free)]
    assert "its rewards are all equal" in line
    assert "correct" not in line


def test_a_learning_rate_that_changes_nothing_is_warned_about(tmp_path: Path) -> None:
    still = {**BARE, "steps": 1, "optimiser": {"learning_rate": 1e-9}}
    run = begin(recipe(still), out=tmp_path / "still", rewards=mix(lambda completion: float(len(completion))))
    with RunReader.open(run.path) as store:
        (warning,) = store.events("warning")
    assert "optimiser.learning_rate = 1e-09 hardly changes the weights" in warning.message
    usual = recipe({**BARE, "optimiser": {"learning_rate": 1e-7}}).stages
    assert [learning_rate_warning(stage) for stage in usual] == [None] * len(usual)


def test_a_learning_rate_that_destroys_the_model_is_warned_about() -> None:
    (stage,) = recipe({**BARE, "optimiser": {"learning_rate": 1.0}}).stages
    warning = learning_rate_warning(stage)
    assert warning is not None
    assert "optimiser.learning_rate = 1 makes each update as large as the weights" in warning
    assert "The policy moves too far" in warning
    highest = stage.model_copy(update={"optimiser": stage.optimiser.model_copy(update={"learning_rate": 0.01})})
    assert learning_rate_warning(highest) is None


def test_a_collapsed_run_has_the_warning_in_its_log(tmp_path: Path) -> None:
    run = begin(recipe({**BARE, "steps": 6}), out=tmp_path / "run", rewards=mix(lambda completion: 1.0))
    with RunReader.open(run.path) as store:
        (warning,) = store.events("warning")
    assert "too easy now" in warning.message
