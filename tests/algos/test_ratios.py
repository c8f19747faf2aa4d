"""The four ratios by hand, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.ratios import (
    sequence_mean_ratio,
    sequence_product_ratio,
    sequence_token_ratio,
    token_ratio,
    truncated_weights,
)
from tests.algos.builders import double

# Token ratios 2, 4 in the first completion; 3, and 5 masked out, in the second; nothing left of the third.
RATIOS = [2.0, 4.0, 3.0, 5.0, 7.0]
ROWS = PackedRows.of(torch.tensor([0, 0, 1, 1, 2]), torch.tensor([True, True, True, False, False]), 3, torch.float64)


def log_ratios() -> Tensor:
    return ROWS.mask(double(RATIOS).log()).requires_grad_()


def test_each_ratio_by_hand() -> None:
    assert token_ratio(log_ratios(), ROWS).tolist() == pytest.approx([2, 4, 3, 1, 1])
    assert sequence_product_ratio(log_ratios(), ROWS).tolist() == pytest.approx([8, 8, 3, 3, 1])
    assert sequence_mean_ratio(log_ratios(), ROWS).tolist() == pytest.approx([8**0.5, 8**0.5, 3, 3, 1])
    assert sequence_token_ratio(log_ratios(), ROWS).tolist() == pytest.approx([8**0.5, 8**0.5, 3, 3, 1])


def test_gspo_token_has_a_gradient_at_its_own_token_alone() -> None:
    logs_M = log_ratios()
    sequence_token_ratio(logs_M, ROWS)[0].backward()  # type: ignore[no-untyped-call]
    assert logs_M.grad is not None
    assert logs_M.grad.tolist() == pytest.approx([8**0.5, 0, 0, 0, 0])
    logs_M = log_ratios()
    sequence_mean_ratio(logs_M, ROWS)[0].backward()  # type: ignore[no-untyped-call]
    assert logs_M.grad is not None
    assert logs_M.grad.tolist() == pytest.approx([8**0.5 / 2, 8**0.5 / 2, 0, 0, 0])


@pytest.mark.parametrize("ratio", [token_ratio, sequence_product_ratio, sequence_mean_ratio, sequence_token_ratio])
def test_an_unchanged_policy_has_ratio_one_exactly(ratio: object) -> None:
    assert callable(ratio)
    assert ratio(torch.zeros(5), ROWS).tolist() == [1.0] * 5


def test_a_runaway_ratio_stays_finite() -> None:
    logs_M = torch.full((5,), 500.0, requires_grad=True)
    sequence_product_ratio(logs_M, ROWS).clamp(max=1.2).sum().backward()  # type: ignore[no-untyped-call]
    assert logs_M.grad is not None
    assert bool(logs_M.grad.isfinite().all())
    assert token_ratio(logs_M, ROWS).max().item() == pytest.approx(math.exp(20), rel=1e-5)


def test_truncated_weights() -> None:
    weights_M = truncated_weights(double([0.0, -1.0, -1.0]), double([-2.0, -1.0, 0.0]), cap=2.0)
    assert weights_M.tolist() == pytest.approx([2.0, 1.0, math.exp(-1)])
