"""The probe's estimates by hand, what it recommends, and that it does not change the model."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oncurve.errors import RecipeError
from oncurve.models.loading.load import load_policy
from oncurve.operations.probe import (
    AtTemperature,
    choose_group_size,
    choose_length,
    choose_temperature,
    constant_total,
    probe,
    signal_at,
)
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import Aspect, ScoredCompletion, ScoredGroup
from oncurve.runs.step_notes import watch_progress
from oncurve.terminal.evaluation import render_probe
from tests.faults import grading
from tests.rewards.builders import group


def small(tmp_path: Path, *stages: dict[str, object]) -> Recipe:
    (tmp_path / "short.py").write_text("def short(completion):\n    return float(len(completion) < 6)\n")
    tiny = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_width": 64, "context": 64}
    grpo = {"type": "grpo", "prompts_per_step": 2, "group_size": 4, "sampling": {"max_new_tokens": 12}}
    return parse_recipe(
        {
            "threads": 1,
            "model": {"tiny": tiny},
            "task": {"type": "arithmetic", "digits": 1, "heldout": 4},
            "rewards": [{"type": "python", "name": "short", "function": f"{tmp_path / 'short.py'}:short"}],
            "stages": [*stages, grpo],
        }
    )


@given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=2, max_size=8), st.integers(2, 8))
def test_signal_is_the_share_of_subgroups_that_differ(totals: list[float], size: int) -> None:
    if size > len(totals):
        return
    groups = list(itertools.combinations(totals, size))
    assert signal_at(totals, size) == pytest.approx(sum(len(set(group)) > 1 for group in groups) / len(groups))


@given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=20))
def test_signal_never_falls_with_the_group_size(totals: list[float]) -> None:
    shares = [signal_at(totals, size) for size in (2, 4, 8, 16, 32, 64)]
    assert shares == sorted(shares)
    assert all(-1e-12 <= share <= 1 for share in shares)


def test_group_size_stops_once_doubling_gains_little() -> None:
    signal = {4: 0.3, 8: 0.5, 16: 0.7, 32: 0.72, 64: 0.73}
    assert choose_group_size(8, signal, 0.4).chosen == 16
    assert choose_group_size(8, {4: 0.1, 8: 0.2, 16: 0.3, 32: 0.4, 64: 0.5}, 0.01).chosen == 64
    hopeless = choose_group_size(8, dict.fromkeys((4, 8, 16, 32, 64), 0.0), 0.0)
    assert hopeless.chosen is None
    assert "easier prompts" in hopeless.reason
    assert "harder prompts" in choose_group_size(8, dict.fromkeys((4, 8, 16, 32, 64), 0.0), 1.0).reason


def scored(*values: float, steps: tuple[tuple[int, float], ...] | None = None, weight: float = 1.0) -> ScoredGroup:
    """A group whose completions have these rewards, and a reward of single steps with these ``steps``."""
    built = group(*("abc" for _ in values))
    by_step = Aspect("process", None, weight=weight, steps=steps)
    rows = zip(built.completions, values, strict=True)
    return ScoredGroup(built, tuple(ScoredCompletion(c, (Aspect("answer", value), by_step)) for c, value in rows))


def test_equal_totals_are_no_constant_reward_if_single_steps_are_rewarded() -> None:
    steps = ((1, 1.0), (2, 0.0))
    assert constant_total([scored(0.0, 0.0, steps=steps)]) is None
    assert constant_total([scored(0.0, 0.0, steps=steps, weight=0.0)]) == 0.0


def test_a_probe_counts_rewards_of_single_steps_as_signal(tmp_path: Path) -> None:
    functions = {"function": f"{grading.__file__}:by_step", "splitter": f"{grading.__file__}:pairs"}
    recipe = small(tmp_path).model_dump(exclude_none=True)
    recipe["rewards"] = [{"type": "process", "source": "python", **functions}]
    report = probe(parse_recipe(recipe), 2, samples=8)
    assert report.failure_share < 1, "an empty completion has no step"
    assert report.no_signal < 1
    assert "the same" not in report.choices[0].reason


def test_a_reward_that_is_always_the_same_is_blamed_before_the_prompts() -> None:
    no_signal = dict.fromkeys((4, 8, 16, 32, 64), 0.0)
    assert constant_total([scored(0.5, 0.5), scored(), scored(0.5)]) == 0.5
    assert constant_total([scored(0.5, 0.5), scored(0.0, 0.0)]) is None
    assert constant_total([scored(0.5), scored()]) is None
    always = choose_group_size(8, no_signal, 0.0, constant=0.5)
    assert always.chosen is None
    assert "the same value, 0.5. Check with `oncurve rewards try`" in always.reason
    assert "prompts" not in always.reason
    assert "rewards try" in choose_group_size(8, no_signal, None, constant=0.0).reason
    assert "easier prompts" in choose_group_size(8, no_signal, 0.0, constant=0.0).reason
    assert "harder prompts" in choose_group_size(8, no_signal, 1.0, constant=1.0).reason


def test_a_probe_of_a_constant_reward_names_the_reward(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    (tmp_path / "short.py").write_text("def short(completion):\n    return 0.5\n")
    group_size = probe(recipe, 2, samples=4).choices[0]
    assert "the reward gave every completion the same value, 0.5" in group_size.reason


def test_length_has_room_for_nearly_all_that_end() -> None:
    assert choose_length(256, 30.0, 0.0).chosen == 40  # 37.5, up to a multiple of 8
    assert choose_length(48, 47.0, 0.2).chosen == 96
    assert choose_length(48, None, 1.0).chosen is None


def test_temperature_stays_1_unless_another_is_clearly_better_and_as_right() -> None:
    cold, plain = AtTemperature(0.7, 0.5, 0.4, 0.0), AtTemperature(1.0, 0.5, 0.6, 0.0)
    assert choose_temperature(1.0, [cold, plain, AtTemperature(1.3, 0.5, 0.62, 0.0)], 8).chosen == 1.0
    assert choose_temperature(1.0, [cold, plain, AtTemperature(1.3, 0.48, 0.8, 0.0)], 8).chosen == 1.3
    assert choose_temperature(1.0, [cold, plain, AtTemperature(1.3, 0.1, 0.9, 0.0)], 8).chosen == 1.0


def test_a_temperature_that_only_makes_answers_worse_is_not_called_one_without_signal() -> None:
    cold, plain = AtTemperature(0.7, 1.0, 0.0, 0.0), AtTemperature(1.0, 0.98, 0.09, 0.0)
    worse = choose_temperature(1.0, [cold, plain, AtTemperature(1.3, 0.84, 0.48, 0.0)], 4)
    assert worse.chosen is None
    assert worse.reason == "rewards of a group hardly differ, and temperature 1.3, at which they do, makes answers worse"
    hopeless = choose_temperature(1.0, [cold, plain, AtTemperature(1.3, 0.84, 0.0, 0.0)], 4)
    assert hopeless.reason == "rewards of a group hardly differ at any temperature"


def test_without_a_verifiable_reward_a_temperature_must_not_cost_reward() -> None:
    cold, plain = AtTemperature(0.7, None, 0.4, 0.0, -1.0), AtTemperature(1.0, None, 0.6, 0.0, -1.5)
    assert choose_temperature(1.0, [cold, plain, AtTemperature(1.3, None, 0.8, 0.0, -1.4)], 8).chosen == 1.3
    assert choose_temperature(1.0, [cold, plain, AtTemperature(1.3, None, 0.8, 0.0, -1.6)], 8).chosen == 1.0
    hopeless = choose_group_size(8, dict.fromkeys((4, 8, 16, 32, 64), 0.0), None)
    assert "right" not in hopeless.reason
    assert "other prompts" in hopeless.reason


def test_a_probe_of_a_reward_without_a_verifiable_reward_reports_no_accuracy(tmp_path: Path) -> None:
    """The repetition reward defines no correct answer, and prompts without answers have no verifiable reward."""
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(8)))
    grpo = {"type": "grpo", "prompts_per_step": 2, "group_size": 4, "sampling": {"max_new_tokens": 12}}
    tiny = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_width": 64, "context": 64}
    data = {"threads": 1, "model": {"tiny": tiny}, "task": {"type": "file", "path": str(tmp_path / "asked.jsonl")}}
    report = probe(parse_recipe({**data, "rewards": [{"type": "repetition"}], "stages": [grpo]}), 4, samples=8)
    assert report.pass_at == {}
    assert report.all_right is None
    assert all(one.pass_1 is None for one in report.temperatures)
    out = io.StringIO()
    Console(file=out, width=80).print(render_probe(report))
    assert "pass@k" not in out.getvalue()
    assert "right" not in out.getvalue()
    assert "reward" in out.getvalue()


def test_a_probe_measures_and_leaves_the_weights_alone(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    policy = load_policy(recipe.model, alphabet="0123456789+=", seed=0)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    report = probe(recipe, 4, samples=8, policy=policy)
    for name, p in policy.model.named_parameters():
        assert torch.equal(before[name], p), name
        assert p.grad is None
    assert report.note is None
    assert list(report.pass_at) == [1, 2, 4, 8]
    assert list(report.pass_at.values()) == sorted(report.pass_at.values())
    assert 0 < report.pass_at[1] < 1
    assert report.no_signal == pytest.approx(1 - report.signal_at[4])
    assert report.step_s <= report.sample_s + report.update_s
    assert {t.temperature for t in report.temperatures} == {0.7, 1.0, 1.3}
    assert probe(recipe, 4, samples=8, policy=policy).pass_at == report.pass_at


def test_a_probe_says_when_this_is_not_the_model_that_would_start(tmp_path: Path) -> None:
    assert "random weights" in (probe(small(tmp_path), 2, samples=4).note or "")
    warm = small(tmp_path, {"type": "sft", "steps": 1})
    assert "before sft" in (probe(warm, 2, samples=4).note or "")


def test_a_probe_needs_a_grpo_stage(tmp_path: Path) -> None:
    recipe = small(tmp_path, {"type": "sft", "steps": 1})
    with pytest.raises(RecipeError, match="no grpo stage"):
        probe(recipe.model_copy(update={"stages": recipe.stages[:1]}), 2, samples=4)


def test_progress_is_reported_up_to_the_timed_step(tmp_path: Path) -> None:
    shares: list[float] = []
    with watch_progress(shares.append):
        probe(small(tmp_path), 4, samples=2)
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert len(shares) == 1 + 4 + 3 * 4  # a start, a batch, and three temperatures
    assert 0.8 < shares[-1] < 1.0  # the timed step has 2 prompts
