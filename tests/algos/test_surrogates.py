"""Each surrogate by hand, on both sides of its clip."""

from __future__ import annotations

import pytest
import torch

from oncurve.algos.surrogates import Cispo, Clipped, LogLikelihood, Sapo, Surrogate, Unclipped
from oncurve.errors import RecipeError
from tests.algos.builders import double

# A ratio below, inside and above the range, for a good and for a bad completion.
RATIO_M = [0.5, 1.1, 4.0, 0.5, 1.1, 4.0]
ADVANTAGE_M = [2.0, 2.0, 2.0, -1.0, -1.0, -1.0]


def at(surrogate: Surrogate) -> tuple[list[float], list[float], list[bool], list[bool]]:
    """Value, slope in the ratio, and the tokens clipped at each bound."""
    ratio_M = double(RATIO_M).requires_grad_()
    tokens = surrogate(ratio_M, double(ADVANTAGE_M), double([-3.0] * 6))
    (slope_M,) = torch.autograd.grad(tokens.value_M.sum() + 0 * ratio_M.sum(), ratio_M)
    return tokens.value_M.tolist(), slope_M.tolist(), tokens.clipped_low_M.tolist(), tokens.clipped_high_M.tolist()


def test_clipped() -> None:
    value, slope, low, high = at(Clipped(0.2, 0.3))
    assert value == pytest.approx([1.0, 2.2, 2.6, -0.8, -1.1, -4.0])
    assert slope == pytest.approx([2, 2, 0, 0, -1, -1])
    assert low == [False, False, False, True, False, False]
    assert high == [False, False, True, False, False, False]


def test_dual_clip_bounds_the_bad_side_too() -> None:
    value, slope, low, high = at(Clipped(0.2, 0.3, dual=3.0))
    assert low == [False, False, False, True, False, False]
    assert value == pytest.approx([1.0, 2.2, 2.6, -0.8, -1.1, -3.0])
    assert slope == pytest.approx([2, 2, 0, 0, -1, 0])
    assert high == [False, False, True, False, False, True]


def test_cispo_weighs_the_log_prob_and_keeps_every_token() -> None:
    value, slope, low, high = at(Cispo(1.0, 2.0))
    assert value == pytest.approx([0.5 * 2 * -3, 1.1 * 2 * -3, 3 * 2 * -3, 0.5 * 3, 1.1 * 3, 3 * 3])
    assert slope == [0] * 6
    assert not any(low)
    assert high == [False, False, True, False, False, True]
    assert at(Cispo(0.2, 2.0))[0][0] == pytest.approx(0.8 * 2 * -3)


def test_sapo_gates_softly() -> None:
    value, slope, low, high = at(Sapo(1.0, 2.0))
    # 4 σ(3) · 2 = 7.6205930 and (4/2) σ(2 · 0.1) · −1 = −1.0996680
    assert value[2] == pytest.approx(7.620593014579466)
    assert value[4] == pytest.approx(-1.0996679946249558)
    # (4/τ) τ σ' A: 4 σ(3)(1 − σ(3)) · 2 = 0.3614132 and −4 σ(0.2)(1 − σ(0.2)) = −0.9900663
    assert slope[2] == pytest.approx(0.36141327784729706)
    assert slope[4] == pytest.approx(-0.9900662908474398)
    assert not any(low)
    assert not any(high)


def test_the_two_without_a_bound() -> None:
    assert at(Unclipped())[0] == pytest.approx([1.0, 2.2, 8.0, -0.5, -1.1, -4.0])
    assert at(Unclipped())[1] == ADVANTAGE_M
    assert at(LogLikelihood())[0] == [-6, -6, -6, 3, 3, 3]
    assert at(LogLikelihood())[1] == [0] * 6


def test_a_range_replaces_a_range() -> None:
    assert Clipped(0.2, 0.2).with_range(0.1, 0.3, 2.0) == Clipped(0.1, 0.3, 2.0)
    assert Cispo(1.0, 4.0).with_range(0.5, 2.0, None) == Cispo(0.5, 2.0)


@pytest.mark.parametrize("surrogate", [Sapo(), Unclipped(), LogLikelihood()])
def test_a_clip_range_is_refused_if_nothing_is_clipped(surrogate: Surrogate) -> None:
    with pytest.raises(RecipeError, match="clips nothing"):
        surrogate.with_range(0.2, 0.2, None)


@pytest.mark.parametrize("surrogate", [Clipped(0.2, 0.2), Cispo(1.0, 4.0)])
def test_an_impossible_dual_clip_is_refused(surrogate: Surrogate) -> None:
    with pytest.raises(RecipeError, match=r"clip\.dual"):
        surrogate.with_range(0.2, 0.2, 1.1)
