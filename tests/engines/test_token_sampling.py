"""Token sampling, on hand-made distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from oncurve.engines.token_sampling import SampledTokens, invert, sample_tokens, truncate
from oncurve.recipe.schema.sections import Sampling
from oncurve.rng import sampling_uniforms

SHARES = [0.1, 0.4, 0.2, 0.25, 0.05]
"""By likelihood: tokens 1, 3, 2, 0, 4."""


def logp(*shares: float) -> Tensor:
    return torch.tensor([shares or SHARES], dtype=torch.float64).log()


def kept(sampling: Sampling) -> set[int]:
    return set(torch.isfinite(truncate(logp(), sampling))[0].nonzero().flatten().tolist())


def sample(uniform: list[float], sampling: Sampling, banned: list[int] | None = None) -> SampledTokens:
    logits_SV = (logp() + 3.0).expand(len(uniform), -1)  # a constant changes no distribution
    bar_SV = None
    if banned is not None:
        bar_SV = torch.zeros(len(uniform), 5, dtype=torch.bool)
        bar_SV[:, banned] = True
    return sample_tokens(logits_SV, torch.tensor(uniform, dtype=torch.float64), sampling, bar_SV)


def test_the_uniform_is_inverted_in_token_order() -> None:
    """Boundaries at 0.1, 0.5, 0.7, 0.95; a boundary belongs to the token above it."""
    probability_SV = torch.tensor([[0.125, 0.375, 0.25, 0.25]]).expand(7, -1)
    uniform_S = torch.tensor([0.0, 0.1249, 0.125, 0.4999, 0.5, 0.75, 0.9999], dtype=torch.float64)
    assert invert(probability_SV, uniform_S).tolist() == [0, 0, 1, 1, 2, 3, 3]


@settings(deadline=None, max_examples=200)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-3, 0.3, 1.0]), min_size=1, max_size=12).filter(any),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(0.0), st.just(1 - 2.0**-53)),
)
def test_a_token_of_no_share_is_never_drawn(weights: list[float], uniform: float) -> None:
    token = int(invert(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0


def test_a_large_vocabulary_costs_no_accuracy() -> None:
    """100,000 equal shares: float32 sums would drift by more than a token."""
    probability_SV = torch.full((1, 100_000), 1e-5)
    for token in (0, 4_321, 99_999):
        assert int(invert(probability_SV, torch.tensor([(token + 0.5) * 1e-5], dtype=torch.float64))) == token


@pytest.mark.parametrize(
    ("k", "expected"), [(1, {1}), (2, {1, 3}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})]
)
def test_top_k_keeps_the_likeliest(k: int, expected: set[int]) -> None:
    assert kept(Sampling(top_k=k)) == expected


@pytest.mark.parametrize(("p", "expected"), [(0.01, {1}), (0.39, {1}), (0.41, {1, 3}), (0.66, {1, 2, 3}), (0.86, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_has_the_mass(p: float, expected: set[int]) -> None:
    assert kept(Sampling(top_p=p)) == expected


@pytest.mark.parametrize(
    ("share", "expected"), [(0.99, {1}), (0.6, {1, 3}), (0.45, {1, 2, 3}), (0.2, {0, 1, 2, 3}), (0.1, {0, 1, 2, 3, 4})]
)
def test_min_p_drops_what_is_less_than_a_share_of_the_likeliest(share: float, expected: set[int]) -> None:
    assert kept(Sampling(min_p=share)) == expected


def test_top_p_applies_to_what_top_k_leaves() -> None:
    """Top-3 leaves 0.4, 0.25 and 0.2. Of all tokens 0.4 + 0.25 is 0.65, of these three it is 0.76: enough for 0.7."""
    assert kept(Sampling(top_p=0.7)) == {1, 2, 3}
    assert kept(Sampling(top_k=3, top_p=0.7)) == {1, 3}
    assert kept(Sampling(top_k=2, top_p=0.9, min_p=0.2)) == {1, 3}
    assert kept(Sampling(top_k=2, top_p=0.6)) == {1}


def test_top_p_applies_to_what_a_ban_leaves() -> None:
    """Without token 1 there are 0.25, 0.2, 0.1 and 0.05 of 0.6: the first two are 0.75 of it."""
    for uniform, token in [(0.0, 2), (0.99, 3)]:
        got = sample([uniform], Sampling(top_p=0.7), banned=[1])
        assert got.token_S.tolist() == [token]
        assert float(got.sampled_logp_S.exp()) == pytest.approx({2: 0.2, 3: 0.25}[token] / 0.45)


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(2, 40),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.2, 0.6]),
    bans=st.integers(0, 1),
)
def test_the_same_tokens_as_transformers_keeps(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float, bans: int
) -> None:
    """Its processors in its order: bans, temperature, top-k, top-p, min-p; and the distribution that they leave."""
    logits_SV = 3 * torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    banned_SV = torch.zeros(3, size, dtype=torch.bool)
    banned_SV[:, :bans] = True
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    theirs_SV = TemperatureLogitsWarper(temperature)(torch.zeros(1, 1), logits_SV.masked_fill(banned_SV, -torch.inf))
    if top_k:
        theirs_SV = TopKLogitsWarper(top_k)(torch.zeros(1, 1), theirs_SV)
    if top_p < 1:
        theirs_SV = TopPLogitsWarper(top_p)(torch.zeros(1, 1), theirs_SV)
    if min_p:
        theirs_SV = MinPLogitsWarper(min_p)(torch.zeros(1, 1), theirs_SV)
    scaled_SV = (logits_SV / temperature).log_softmax(-1).masked_fill(banned_SV, -torch.inf)
    ours_SV = truncate(scaled_SV, sampling, is_complete=not bans)
    torch.testing.assert_close(ours_SV.log_softmax(-1), theirs_SV.log_softmax(-1))


def test_equal_tokens_are_cut_in_their_order() -> None:
    flat = truncate(logp(0.25, 0.25, 0.25, 0.25), Sampling(top_k=2))
    assert torch.isfinite(flat)[0].tolist() == [True, True, False, False]


def test_nothing_is_truncated_by_default() -> None:
    rows = logp()
    assert truncate(rows, Sampling()) is rows


def test_at_temperature_one_the_three_log_probs_are_one() -> None:
    got = sample([0.3], Sampling())
    assert got.token_S.tolist() == [1]
    for logps in (got.logp_S, got.sampled_logp_S, got.raw_logp_S):
        assert float(logps) == pytest.approx(math.log(0.4))


def test_temperature_scales_what_is_drawn_from() -> None:
    """At temperature 2 shares go as their square roots."""
    roots = [math.sqrt(p) for p in SHARES]
    got = sample([(roots[0] + 0.001) / sum(roots)], Sampling(temperature=2.0))
    assert got.token_S.tolist() == [1]
    assert float(got.logp_S) == pytest.approx(math.log(roots[1] / sum(roots)))
    assert float(got.sampled_logp_S) == float(got.logp_S)
    assert float(got.raw_logp_S) == pytest.approx(math.log(0.4))


def test_truncation_changes_only_the_log_prob_of_the_draw() -> None:
    """Top-2 leaves 0.4 and 0.25: 8/13 and 5/13 of what is drawn from, and the untruncated 0.25 for the ratio."""
    got = sample([0.5, 8 / 13 - 1e-6, 8 / 13 + 1e-6], Sampling(top_k=2))
    assert got.token_S.tolist() == [1, 1, 3]
    assert got.sampled_logp_S.exp().tolist() == pytest.approx([8 / 13, 8 / 13, 5 / 13])
    assert got.logp_S.exp().tolist() == pytest.approx([0.4, 0.4, 0.25])
    assert got.raw_logp_S.exp().tolist() == pytest.approx([0.4, 0.4, 0.25])


def test_a_barred_token_is_not_drawn_and_its_share_goes_to_the_others() -> None:
    got = sample([0.0, 0.16, 0.9999], Sampling(), banned=[1, 4])
    assert got.token_S.tolist() == [0, 0, 3]
    assert got.sampled_logp_S.exp().tolist() == pytest.approx([0.1 / 0.55, 0.1 / 0.55, 0.25 / 0.55])
    assert got.logp_S.exp().tolist() == pytest.approx([0.1, 0.1, 0.25])
    assert sample([0.5], Sampling(temperature=0.0), banned=[1]).token_S.tolist() == [3]
    assert sample([0.0, 0.9999], Sampling(top_k=1), banned=[1]).token_S.tolist() == [3, 3]


def test_greedy_takes_the_likeliest_whatever_the_uniform_and_is_certain_of_it() -> None:
    got = sample([0.0, 0.9999], Sampling(temperature=0.0))
    assert got.token_S.tolist() == [1, 1]
    assert got.sampled_logp_S.tolist() == [0.0, 0.0]
    assert got.logp_S.exp().tolist() == got.raw_logp_S.exp().tolist() == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), SHARES),
        (Sampling(temperature=0.5), [p * p / 0.275 for p in SHARES]),
        (Sampling(top_k=3), [0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0]),
        (Sampling(top_p=0.6), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(min_p=0.2), [0.1 / 0.95, 0.4 / 0.95, 0.2 / 0.95, 0.25 / 0.95, 0]),
    ],
)
def test_tokens_come_as_often_as_they_should(sampling: Sampling, expected: list[float]) -> None:
    """χ² of 20,000 draws with our own uniforms; at most 4 degrees of freedom, so below 23.5 but once in ten thousand tables."""
    uniform_S = np.concatenate([sampling_uniforms(0, 1, "p", s, 500) for s in range(40)])
    counts = torch.bincount(sample(uniform_S.tolist(), sampling).token_S, minlength=5).double().numpy()
    expected_counts = np.array(expected) * uniform_S.size
    assert expected_counts.sum() == pytest.approx(uniform_S.size)
    assert counts[expected_counts == 0].sum() == 0
    there = expected_counts > 0
    assert float(((counts - expected_counts)[there] ** 2 / expected_counts[there]).sum()) < 23.5
