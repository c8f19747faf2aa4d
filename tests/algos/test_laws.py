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
PER_TOKEN = ("logp_new_M", "logp_old_M", "advantage_M", "mask_M", "logp_ref_M", "entropy_M", "weight_M")
LENGTHS = st.lists(st.integers(1, 6), min_size=2, max_size=6)


def step(lengths: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> LossInputs:
    """A complete step as one micro-batch: random log-probs, some tokens masked, some rows without any token left."""
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(sum(lengths), generator=generator, dtype=torch.float64).to(dtype) for _ in range(6)]
    logp_M = -noise[0].abs()
    mask_M = torch.rand(sum(lengths), generator=generator) < 0.7
    return micro_batch(
        lengths,
        totals=LossDenominators(len(lengths) + 1, int(mask_M.sum()) + 3, 8),
        logp_new_M=logp_M,
        logp_old_M=logp_M + 0.2 * noise[1],
        advantage_M=noise[2],
        mask_M=mask_M,
        logp_ref_M=logp_M + 0.2 * noise[3],
        entropy_M=noise[4].abs(),
        weight_M=noise[5].abs(),
    )


def rows_of(inputs: LossInputs, rows: Sequence[int]) -> tuple[LossInputs, Tensor]:
    """A micro-batch of only these rows, in this order, and the indices of its tokens."""
    at_M = torch.cat([torch.nonzero(inputs.row_M == row).flatten() for row in rows])
    row_M = torch.cat([torch.full((int((inputs.row_M == row).sum()),), i) for i, row in enumerate(rows)])
    tokens = {name: getattr(inputs, name)[at_M] for name in PER_TOKEN}
    return replace(inputs, row_M=row_M, rows=len(rows), **tokens), at_M


def gradient(name: str, inputs: LossInputs) -> Tensor:
    """In the new log-probs and the entropies together: all that the model is differentiated through."""
    assert inputs.entropy_M is not None
    leaves = inputs.logp_new_M.clone().requires_grad_(), inputs.entropy_M.clone().requires_grad_()
    loss = OBJECTIVES[name].loss(replace(inputs, logp_new_M=leaves[0], entropy_M=leaves[1]), SETTINGS).loss
    return torch.stack(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**31), data=st.data())
def test_splitting_and_reordering(name: str, lengths: list[int], seed: int, data: st.DataObject) -> None:
    inputs = step(lengths, seed)
    order = data.draw(st.permutations(range(len(lengths))))
    split = data.draw(st.integers(1, len(lengths) - 1))
    summed = torch.zeros(2, sum(lengths))
    total = 0.0
    for rows in (order[:split], order[split:]):
        part, at_M = rows_of(inputs, rows)
        summed[:, at_M] = gradient(name, part)
        total += OBJECTIVES[name].loss(part, SETTINGS).loss.item()
    torch.testing.assert_close(summed, gradient(name, inputs), atol=1e-5, rtol=1e-5)
    assert total == pytest.approx(OBJECTIVES[name].loss(inputs, SETTINGS).loss.item(), abs=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**31), garbage=st.sampled_from([1e30, -1e30, 300.0, math.inf, math.nan]))
def test_what_is_masked_is_never_read(name: str, lengths: list[int], seed: int, garbage: float) -> None:
    inputs = step(lengths, seed)
    dirty = {key: getattr(inputs, key).masked_fill(~inputs.mask_M, garbage) for key in PER_TOKEN if key != "mask_M"}
    expected, result = gradient(name, inputs), gradient(name, replace(inputs, **dirty))
    assert torch.equal(expected, result)
    assert not result[:, ~inputs.mask_M].any()


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=10, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**31))
def test_float32_follows_float64(name: str, lengths: list[int], seed: int) -> None:
    single, exact = step(lengths, seed), step(lengths, seed, torch.float64)
    # Where a ratio lies within rounding of a bound, single and double may fall on either side of it.
    out = OBJECTIVES[name].loss(exact, SETTINGS)
    if torch.equal(out.clipped_M, OBJECTIVES[name].loss(single, SETTINGS).clipped_M):
        torch.testing.assert_close(gradient(name, single).double(), gradient(name, exact), atol=1e-5, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**31))
def test_gspo_token_is_gspo_if_a_sequence_has_one_advantage(lengths: list[int], seed: int) -> None:
    inputs = step(lengths, seed, torch.float64)
    even = replace(inputs, advantage_M=inputs.row_M.double() - 1.5, weight_M=None)
    plain = LossSettings(beta=0.0, kl_estimator="k3", ratio_weighted_kl=False, entropy_bonus=0.0)
    both = []
    for name in ("gspo", "gspo_token"):
        leaf_M = even.logp_new_M.clone().requires_grad_()
        loss = OBJECTIVES[name].loss(replace(even, logp_new_M=leaf_M), plain).loss
        both.append((loss.detach(), *torch.autograd.grad(loss, leaf_M)))
    torch.testing.assert_close(both[0], both[1])
