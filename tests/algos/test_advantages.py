"""Advantages by hand: outcome, leave-one-out, process, and the grading of groups."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.algos.advantages import gradable_mask, grade, outcome_advantages, process_advantages
from oncurve.errors import RewardError
from oncurve.objective_specs import AdvantageScale, Baseline
from oncurve.records import Aspect
from tests.algos.builders import group, right, scored

NAN = math.nan
TINY = 1e-12


def advantages(
    rewards: list[list[float]], baseline: Baseline = "mean", scale: AdvantageScale = "group", eps: float = 1e-4
) -> list[list[float]]:
    return outcome_advantages(torch.tensor(rewards, dtype=torch.float64), baseline, scale, eps).tolist()


def test_two_right_of_four() -> None:
    # mean 0.5, std sqrt(4 · 0.25 / 3) = 0.577350269189626, so ±0.5 / 0.577450269189626
    (row,) = advantages([[1, 0, 0, 1]])
    assert row == pytest.approx([0.8658754297607016, -0.8658754297607016, -0.8658754297607016, 0.8658754297607016], abs=TINY)


def test_each_scale_by_hand() -> None:
    rewards = [[1.0, 3.0], [0.0, 4.0]]
    # Group stds are sqrt(2) and sqrt(8); the batch's is sqrt((1 + 1 + 4 + 4) / 3) around its mean 2.
    eps, batch = 0.5, 1.8257418583505538
    assert advantages(rewards, scale="group", eps=eps)[1] == pytest.approx([-2 / (8**0.5 + eps), 2 / (8**0.5 + eps)])
    assert advantages(rewards, scale="batch", eps=eps)[0] == pytest.approx([-1 / (batch + eps), 1 / (batch + eps)])
    assert advantages(rewards, scale="none") == [[-1.0, 1.0], [-2.0, 2.0]]


def test_leave_one_out_by_hand() -> None:
    # The others' means are 4, 3.5 and 1.5.
    assert advantages([[1, 2, 6]], "leave_one_out", "none")[0] == pytest.approx([-3.0, -1.5, 4.5], abs=TINY)


def test_without_a_baseline_the_reward_is_the_advantage() -> None:
    assert advantages([[1, 2, NAN], [5, NAN, NAN]], "none", "none") == [[1, 2, 0], [5, 0, 0]]


def test_missing_rewards_leave_mean_and_std() -> None:
    # Among 0 and 2: mean 1, std sqrt(2).
    (row,) = advantages([[0, NAN, 2, NAN]], eps=1.0)
    assert row == pytest.approx([-1 / (2**0.5 + 1), 0, 1 / (2**0.5 + 1), 0], abs=TINY)
    assert advantages([[1, NAN, 6]], "leave_one_out", "none") == [[-5, 0, 5]]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.1 + 0.2, 0.3, 0.3], [1e9 / 3] * 7, [0.0, 0.0], [NAN, 0.7, 0.7]])
def test_equal_rewards_give_exactly_zero(baseline: Baseline, scale: AdvantageScale, rewards: list[float]) -> None:
    other = [0.0] * (len(rewards) - 1) + [1.0]
    assert advantages([rewards, other], baseline, scale)[0] == [0.0] * len(rewards)


def test_no_std_no_explosion() -> None:
    assert advantages([[2, 2]], "none", "group") == [[0, 0]]
    assert advantages([[2, 2], [2, 2]], "none", "batch") == [[0, 0], [0, 0]]


def test_one_reward_alone_is_graded_only_without_a_group() -> None:
    rewards_PG = torch.tensor([[1.0, NAN], [1.0, 2.0]])
    assert gradable_mask(rewards_PG, "mean", "none").tolist() == [[False, False], [True, True]]
    assert gradable_mask(rewards_PG, "none", "group").tolist() == [[False, False], [True, True]]
    assert gradable_mask(rewards_PG, "none", "none").tolist() == [[True, False], [True, True]]
    assert advantages([[1.0, NAN], [1.0, 2.0]], "mean", "none") == [[0, 0], [-0.5, 0.5]]


REWARDS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=9)


@settings(deadline=None)
@given(REWARDS, st.integers(-1000, 1000), st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["group", "none"]))
def test_a_constant_changes_nothing(rewards: list[float], constant: int, baseline: Baseline, scale: AdvantageScale) -> None:
    moved = advantages([[r + constant for r in rewards]], baseline, scale)[0]
    assert moved == pytest.approx(advantages([rewards], baseline, scale)[0], abs=1e-8)


@settings(deadline=None)
@given(REWARDS, st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["group", "batch", "none"]))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], baseline: Baseline, scale: AdvantageScale) -> None:
    first, second = advantages([rewards, rewards[::-1]], baseline, scale)
    assert sum(first) == pytest.approx(0, abs=1e-9)
    assert second == pytest.approx(first[::-1], abs=1e-9)


@settings(deadline=None)
@given(REWARDS, st.floats(0.01, 100))
def test_a_factor_cancels_if_rewards_are_divided_by_the_std(rewards: list[float], factor: float) -> None:
    scaled = advantages([[factor * r for r in rewards]], eps=1e-12)[0]
    assert scaled == pytest.approx(advantages([rewards], eps=1e-12)[0], abs=1e-8)


def test_process_advantages_by_hand() -> None:
    # R = {3, 0, 0}: mean 1, std sqrt((4 + 1 + 1) / 2) = sqrt(3); normalised 2, −1, −1 over sqrt(3).
    unit = 1 / 3**0.5
    first, second = process_advantages([[3.0, 0.0], [0.0]], [[1, 3], [0]], [4, 3], eps=0.0)
    assert first.tolist() == pytest.approx([unit, unit, -unit, -unit], abs=TINY)
    assert second.tolist() == pytest.approx([-unit, 0, 0], abs=TINY)


def test_process_advantages_of_equal_or_single_rewards() -> None:
    assert [a.tolist() for a in process_advantages([[0.1, 0.1], [0.1]], [[0, 1], [0]], [2, 1], 1e-4)] == [[0, 0], [0]]
    assert [a.tolist() for a in process_advantages([[7.0], []], [[1], []], [2, 1], 1e-4)] == [[0, 0], [0]]
    assert [a.tolist() for a in process_advantages([[], []], [[], []], [1, 0], 1e-4)] == [[0], []]


def test_grade_broadcasts_the_outcome_to_the_tokens_of_ragged_groups() -> None:
    pair = group(scored(right(1.0), length=2), scored(right(0.0), length=4))
    three = group(*(scored(right(r), length=1) for r in (1.0, 2.0, 6.0)))
    first, second = grade([pair, three], baseline="mean", scale="none", eps=1e-4, mask_cut=False)
    assert [a.tolist() for a in first.advantages] == [[0.5, 0.5], [-0.5] * 4]
    assert [a.tolist() for a in second.advantages] == [[-2.0], [-1.0], [3.0]]
    assert first.advantages[0].dtype == np.float32
    assert all(first.graded)
    assert first.has_signal


def test_grade_leaves_out_failures_and_single_rewards() -> None:
    failed = group(scored(right(1.0)), scored(right(None, "timed out")), scored(right(3.0)))
    alone = group(scored(right(1.0)), scored(right(None, "timed out")), scored(right(None)))
    first, second = grade([failed, alone], baseline="mean", scale="none", eps=1e-4, mask_cut=False)
    assert first.graded == (True, False, True)
    assert [a[0] for a in first.advantages] == [-1.0, 0.0, 1.0]
    assert second.graded == (False, False, False)
    assert not second.has_signal


def test_a_truncated_completion_counts_in_the_group_and_is_masked() -> None:
    truncated = group(scored(right(0.0), stop="length"), scored(right(1.0)), scored(right(2.0)))
    (graded,) = grade([truncated], baseline="mean", scale="none", eps=1e-4, mask_cut=True)
    assert graded.graded == (False, True, True)
    assert [a[0] for a in graded.advantages] == [0.0, 0.0, 1.0]
    (unmasked,) = grade([truncated], baseline="mean", scale="none", eps=1e-4, mask_cut=False)
    assert unmasked.graded == (True, True, True)
    assert unmasked.advantages[0][0] == -1.0


def steps(*pairs: tuple[int, float], weight: float = 1.0) -> Aspect:
    return Aspect("process", None, weight=weight, steps=pairs)


def test_grade_adds_outcome_and_process() -> None:
    both = group(scored(right(1.0), steps((1, 3.0), (3, 0.0)), length=4), scored(right(0.0), steps((0, 0.0)), length=3))
    (graded,) = grade([both], baseline="mean", scale="none", eps=1e-9, mask_cut=False)
    unit = 1 / 3**0.5
    assert graded.advantages[0].tolist() == pytest.approx([0.5 + unit, 0.5 + unit, 0.5 - unit, 0.5 - unit], abs=1e-6)
    assert graded.advantages[1].tolist() == pytest.approx([-0.5 - unit, -0.5, -0.5], abs=1e-6)


def test_process_alone_grades_and_weights_compare_aspects() -> None:
    watched = Aspect("watched", None, weight=0.0, steps=((0, 99.0),))
    members = (
        scored(steps((0, 1.0)), steps((2, 0.5), weight=2.0), watched),
        scored(steps((2, -2.0))),
        scored(right(None, "died")),
    )
    (graded,) = grade([group(*members)], baseline="mean", scale="group", eps=1e-9, mask_cut=False)
    # R = {1, 2 · 0.5, −2}: mean 0, std sqrt(3).
    assert graded.graded == (True, True, False)
    assert graded.advantages[0].tolist() == pytest.approx([2 / 3**0.5, 1 / 3**0.5, 1 / 3**0.5], abs=1e-6)
    assert graded.advantages[1].tolist() == pytest.approx([-2 / 3**0.5] * 3, abs=1e-6)
    assert graded.advantages[2].tolist() == [0, 0, 0]


@pytest.mark.parametrize("step", [(3, 1.0), (-1, 1.0), (0, NAN)])
def test_an_impossible_step_is_named(step: tuple[int, float]) -> None:
    with pytest.raises(RewardError, match="process"):
        grade([group(scored(steps(step)), scored(steps((0, 1.0))))], baseline="mean", scale="group", eps=1e-4, mask_cut=False)


def test_kl_inside_the_reward() -> None:
    pair = group(scored(right(1.0)), scored(right(1.0)))
    (graded,) = grade([pair], baseline="leave_one_out", scale="none", eps=1e-4, mask_cut=False, kl_sums=[[2.0, -1.0]], beta=0.5)
    # Rewards 1 − 1 = 0 and 1 + 0.5 = 1.5.
    assert [a[0] for a in graded.advantages] == [-1.5, 1.5]


def test_nothing_to_grade() -> None:
    assert grade([], baseline="mean", scale="group", eps=1e-4, mask_cut=False) == []


def test_float32_stays_float32() -> None:
    assert outcome_advantages(torch.tensor([[0.0, 1.0]]), "mean", "group", 1e-4).dtype == torch.float32


def test_whitening_is_over_every_token_of_the_step() -> None:
    """REINFORCE++: rewards 1 (1 token), 0 (3 tokens) and 2 (1 token): mean 3/5, and std √(Σ(a − 0.6)²/4) = √0.8."""
    groups = [group(scored(right(1.0), length=1), scored(right(0.0), length=3)), group(scored(right(2.0), length=1))]
    graded = grade(groups, baseline="none", scale="whiten", eps=1e-4, mask_cut=False)
    std = 0.8**0.5 + 1e-4
    results = [a.tolist() for g in graded for a in g.advantages]
    for result, expected in zip(results, ([0.4], [-0.6] * 3, [1.4]), strict=True):
        assert result == pytest.approx([e / std for e in expected], abs=1e-6)


def test_whitening_leaves_out_what_is_not_graded_and_gives_equal_rewards_nothing() -> None:
    failed = scored(right(None, failure="broke"))
    graded = grade(
        [group(scored(right(1.0)), scored(right(3.0)), failed)], baseline="none", scale="whiten", eps=1e-4, mask_cut=False
    )
    assert graded[0].graded == (True, True, False)
    assert not graded[0].advantages[2].any()
    assert graded[0].advantages[0] == pytest.approx(-graded[0].advantages[1])
    equal = grade([group(scored(right(0.1)), scored(right(0.1)))], baseline="none", scale="whiten", eps=1e-4, mask_cut=False)
    assert not equal[0].has_signal


@pytest.mark.parametrize(("n", "p"), [(2, 0.3), (4, 0.1), (5, 0.6)])
def test_maxrl_is_the_policy_gradient_of_the_truncated_log_likelihood(n: int, p: float) -> None:
    """No peer has it, so the reference is its theorem, by enumeration of all 2ⁿ outcomes in float64.

    With success rate p = σ(θ), the score of a success is 1 − p and that of a failure −p. log p = −Σ_k (1 − p)^k / k; groups of
    n estimate the gradient of its first n − 1 terms, Σ_{k<n} (1 − p)^(k−1) dp/dθ, without bias. (The paper's n terms become
    n − 1 because a group without a success is not graded.)
    """
    outcomes = list(itertools.product((0.0, 1.0), repeat=n))
    rewards_PG = torch.tensor(outcomes, dtype=torch.float64)
    advantages_PG = outcome_advantages(rewards_PG, "mean", "mean", 1e-4)
    chance_P = (p**rewards_PG * (1 - p) ** (1 - rewards_PG)).prod(1)
    score_PG = rewards_PG - p
    estimate = float((chance_P * (advantages_PG * score_PG).mean(1)).sum())
    expected = sum((1 - p) ** (k - 1) for k in range(1, n)) * p * (1 - p)
    assert estimate == pytest.approx(expected, rel=1e-12)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(RewardError, match="mean"):
        outcome_advantages(torch.tensor([[1.0, -1.0]]), "mean", "mean", 1e-4)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pass_at_k_advantages_by_enumeration_of_all_sets(k: int) -> None:
    rewards = [0.3, 1.0, -0.5, 0.3, 0.9]
    ours = outcome_advantages(torch.tensor([rewards], dtype=torch.float64), "best_of_others", "none", 1e-4, k=k)[0].tolist()
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        raised = [max(reward - max(subset), 0.0) for subset in itertools.combinations(others, k - 1)]
        assert ours[i] == pytest.approx(sum(raised) / len(raised), abs=1e-12)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_at_k_advantages_are_the_gradient_of_pass_at_k(k: int) -> None:
    """k · mean(A · score) over all outcomes of four samples is d/dθ of 1 − (1 − p)^k, p = σ(θ)."""
    p, rewards_PG = 0.3, torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)), dtype=torch.float64)
    advantages_PG = outcome_advantages(rewards_PG, "best_of_others", "none", 1e-4, k=k)
    chance_P = (p**rewards_PG * (1 - p) ** (1 - rewards_PG)).prod(1)
    estimate = k * float((chance_P * (advantages_PG * (rewards_PG - p)).mean(1)).sum())
    assert estimate == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p), rel=1e-12)


def test_pass_at_k_leaves_out_missing_rewards() -> None:
    ours = outcome_advantages(torch.tensor([[1.0, math.nan, 0.25, 0.0]]), "best_of_others", "none", 1e-4)
    assert ours.tolist() == [[0.75, 0.0, 0.0, 0.0]]


def test_the_length_weighted_baseline_has_the_least_variance() -> None:
    """OPO: if the squared norm of a completion's gradient is its length, no other baseline gives a smaller second moment."""
    rewards, lengths = torch.tensor([[1.0, 0.0, 0.0, 1.0]]).double(), torch.tensor([[3.0, 5.0, 2.0, 7.0]]).double()
    best = outcome_advantages(rewards, "length_weighted", "none", 1e-4, lengths_PG=lengths)
    moments = [float((lengths * (rewards - b).square()).sum()) for b in torch.linspace(0, 1, 101).double()]
    assert float((lengths * best.square()).sum()) <= min(moments)
