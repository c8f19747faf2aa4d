"""Reductions: how the token losses of a step become one number.

A reduction returns each token's factor (its share) in the sum; the loss is Σ share · token loss. It divides by the totals of
the *step*, never of a micro-batch, so the sum over micro-batches is the step's loss however the step is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from oncurve.algos.packed_rows import PackedRows
from oncurve.objective_specs import ReductionName
from oncurve.records import GradedGroup


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """What reductions divide by: the step's graded completions, their loss tokens, and Dr. GRPO's constant length."""

    completions: int
    tokens: int
    length_budget: int


def loss_denominators(groups: Iterable[GradedGroup], length_budget: int) -> LossDenominators:
    """Totals over graded completions. Groups without signal and empty completions count; failed or masked ones do not."""
    lengths = [
        scored.completion.length
        for group in groups
        for scored, graded in zip(group.scored.scored, group.graded, strict=True)
        if graded
    ]
    return LossDenominators(len(lengths), sum(lengths), length_budget)


Reduction = Callable[[PackedRows, LossDenominators], Tensor | float]
"""(rows, totals) → each token's share, or one share for all tokens."""


def mean_of_completion_means(rows: PackedRows, totals: LossDenominators) -> Tensor | float:
    """1 / (B |o_i|): every completion has the same weight, so tokens of long ones have less (GRPO, DeepSeekMath)."""
    return rows.broadcast((rows.length_R.clamp(min=1) * max(totals.completions, 1)).reciprocal())


def mean_over_step_tokens(rows: PackedRows, totals: LossDenominators) -> Tensor | float:
    """1 / Σ_i |o_i|: every token of the step has the same weight (DAPO, arXiv 2503.14476; BNPO with the step as its batch)."""
    return 1.0 / max(totals.tokens, 1)


def mean_over_length_budget(rows: PackedRows, totals: LossDenominators) -> Tensor | float:
    """1 / (B L) with a constant L: no length bias (Dr. GRPO, arXiv 2503.20783)."""
    return 1.0 / max(totals.completions * totals.length_budget, 1)


def mean_of_completion_sums(rows: PackedRows, totals: LossDenominators) -> Tensor | float:
    """1 / B: the mean of sequence sums, as in the policy gradient itself (REINFORCE; LUSPO with a sequence ratio)."""
    return 1.0 / max(totals.completions, 1)


REDUCTIONS: Mapping[ReductionName, Reduction] = {
    "mean_of_completion_means": mean_of_completion_means,
    "mean_over_step_tokens": mean_over_step_tokens,
    "mean_over_length_budget": mean_over_length_budget,
    "mean_of_completion_sums": mean_of_completion_sums,
}
