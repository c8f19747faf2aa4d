"""Each reduction by hand, on a step of three graded completions, one of them empty, and a micro-batch of two."""

from __future__ import annotations

import pytest
import torch

from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.reductions import (
    LossDenominators,
    Reduction,
    loss_denominators,
    mean_of_completion_means,
    mean_of_completion_sums,
    mean_over_length_budget,
    mean_over_step_tokens,
)
from oncurve.records import GradedGroup, ScoredCompletion
from tests.algos.builders import completion, double, group, right

TOTALS = LossDenominators(completions=3, tokens=6, length_budget=10)
# Tokens 1, 2, 3 of the first completion and 10 of the second, whose other token the environment wrote.
VALUES_M = double([1.0, 2.0, 3.0, 10.0, 0.0])
ROWS = PackedRows.of(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([True, True, True, True, False]), 2, torch.float64)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (mean_of_completion_means, (2.0 + 10.0) / 3),
        (mean_over_step_tokens, 16.0 / 6),
        (mean_over_length_budget, 16.0 / 30),
        (mean_of_completion_sums, (6.0 + 10.0) / 3),
    ],
)
def test_by_hand(reduction: Reduction, expected: float) -> None:
    assert (reduction(ROWS, TOTALS) * VALUES_M).sum().item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "reduction", [mean_of_completion_means, mean_over_step_tokens, mean_over_length_budget, mean_of_completion_sums]
)
def test_a_step_without_anything_divides_by_nothing(reduction: Reduction) -> None:
    empty = PackedRows.of(torch.zeros(2, dtype=torch.int64), torch.tensor([False, False]), 1, torch.float64)
    assert (reduction(empty, LossDenominators(0, 0, 10)) * double([0.0, 0.0])).sum().item() == 0.0


def test_totals_count_graded_completions_and_their_own_tokens() -> None:
    members = [
        ScoredCompletion(completion(3), (right(1.0),)),
        ScoredCompletion(completion(4, loss_mask=[True, False, False, True]), (right(1.0),)),
        ScoredCompletion(completion(5), (right(None, "failed"),)),
        ScoredCompletion(completion(2, loss_mask=[False, False]), (right(1.0),)),
    ]
    flat = tuple(m.completion.logps * 0 for m in members)
    graded = GradedGroup(group(*members), flat, (True, True, False, True))
    assert loss_denominators([graded, graded], length_budget=7) == LossDenominators(completions=6, tokens=10, length_budget=7)
