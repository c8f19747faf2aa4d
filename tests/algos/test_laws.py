"""Laws that every objective obeys: a step's gradient does not move when it is split, reordered or padded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossSettings
from oncurve.algos.reductions import LossDenominators
from tests.algos.builders import micro_batch

SETTINGS = LossSettings(beta=0.04, kl_estimator="k3", ratio_weighted_kl=True, entropy_bonus=0.01)
PER_TOKEN = ("logp_new_N", "logp_old_N", "advantage_N", "mask_N", "logp_ref_N", "entropy_N", "weight_N")
LENGTHS = st.lists(st.integers(1, 6), min_size=2, max_size=6)


def step(lengths: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> LossInputs:
    """A whole step as one micro-batch: random log-probs, some tokens masked, rows with nothing left among them."""
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(sum(lengths), generator=generator, dtype=torch.float64).to(dtype) for _ in range(6)]
    logp_N = -noise[0].abs()
    mask_N = torch.rand(sum(lengths), generator=generator) < 0.7
    return micro_batch(
        lengths,
        totals=LossDenominators(len(lengths) + 1, int(mask_N.sum()) + 3, 8),
        logp_new_N=logp_N,
        logp_old_N=logp_N + 0.2 * noise[1],
        advantage_N=noise[2],
        mask_N=mask_N,
        logp_ref_N=logp_N + 0.2 * noise[3],
        entropy_N=noise[4].abs(),
        weight_N=noise[5].abs(),
    )


def rows_of(inputs: LossInputs, rows: Sequence[int]) -> tuple[LossInputs, Tensor]:
    """A micro-batch of these rows alone, in this order, and where its tokens stood."""
    at_N = torch.cat([torch.nonzero(inputs.row_N == row).flatten() for row in rows])
    row_N = torch.cat([torch.full((int((inputs.row_N == row).sum()),), i) for i, row in enumerate(rows)])
    tokens = {name: getattr(inputs, name)[at_N] for name in PER_TOKEN}
    return replace(inputs, row_N=row_N, rows=len(rows), **tokens), at_N


def gradient(name: str, inputs: LossInputs) -> Tensor:
    """In the new log-probs and the entropies together: all that the model is differentiated through."""
    assert inputs.entropy_N is not None
    leaves = inputs.logp_new_N.clone().requires_grad_(), inputs.entropy_N.clone().requires_grad_()
    loss = OBJECTIVES[name].loss(replace(inputs, logp_new_N=leaves[0], entropy_N=leaves[1]), SETTINGS).loss
    return torch.stack(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**31), data=st.data())
def test_splitting_and_reordering(name: str, lengths: list[int], seed: int, data: st.DataObject) -> None:
    inputs = step(lengths, seed)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    summed = torch.zeros(2, sum(lengths))
    total = 0.0
    for rows in (order[:cut], order[cut:]):
        part, at_N = rows_of(inputs, rows)
        summed[:, at_N] = gradient(name, part)
        total += OBJECTIVES[name].loss(part, SETTINGS).loss.item()
    torch.testing.assert_close(summed, gradient(name, inputs), atol=1e-5, rtol=1e-5)
    assert total == pytest.approx(OBJECTIVES[name].loss(inputs, SETTINGS).loss.item(), abs=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**31), garbage=st.sampled_from([1e30, -1e30, 300.0, math.inf, math.nan]))
def test_what_is_masked_is_never_read(name: str, lengths: list[int], seed: int, garbage: float) -> None:
    inputs = step(lengths, seed)
    dirty = {key: getattr(inputs, key).masked_fill(~inputs.mask_N, garbage) for key in PER_TOKEN if key != "mask_N"}
    expected, found = gradient(name, inputs), gradient(name, replace(inputs, **dirty))
    assert torch.equal(expected, found)
    assert not found[:, ~inputs.mask_N].any()


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=10, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**31))
def test_float32_follows_float64(name: str, lengths: list[int], seed: int) -> None:
    single, exact = step(lengths, seed), step(lengths, seed, torch.float64)
    # Where a ratio lies within rounding of a bound, single and double may fall on either side of it.
    out = OBJECTIVES[name].loss(exact, SETTINGS)
    if torch.equal(out.clipped_N, OBJECTIVES[name].loss(single, SETTINGS).clipped_N):
        torch.testing.assert_close(gradient(name, single).double(), gradient(name, exact), atol=1e-5, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**31))
def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage(lengths: list[int], seed: int) -> None:
    inputs = step(lengths, seed, torch.float64)
    even = replace(inputs, advantage_N=inputs.row_N.double() - 1.5, weight_N=None)
    plain = LossSettings(beta=0.0, kl_estimator="k3", ratio_weighted_kl=False, entropy_bonus=0.0)
    both = []
    for name in ("gspo", "gspo_token"):
        leaf_N = even.logp_new_N.clone().requires_grad_()
        loss = OBJECTIVES[name].loss(replace(even, logp_new_N=leaf_N), plain).loss
        both.append((loss.detach(), *torch.autograd.grad(loss, leaf_N)))
    torch.testing.assert_close(both[0], both[1])
