"""Compares stored rewards with those that the same completions get now, from the same or from other rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oncurve.records import ScoredCompletion, ScoredGroup

SAME = 1e-6
"""Totals closer than this are equal: stored ones were rounded once."""


@dataclass(frozen=True)
class Difference:
    """One completion with its rewards before and after."""

    prompt: str
    text: str
    before: ScoredCompletion
    after: ScoredCompletion

    @property
    def size(self) -> float:
        """The difference of the totals; infinite if only one of them failed."""
        before, after = self.before.total, self.after.total
        if before is None or after is None:
            return 0.0 if before is after else float("inf")
        return abs(after - before)


@dataclass(frozen=True)
class ReplayReport:
    """What changed.

    ``correlation`` is Spearman's within a group, averaged over the ``ranked_groups``, whose completions have different rewards
    both before and after. In ``turned_groups`` at least one completion's advantage changes sign.
    """

    groups: int
    completions: int
    same: int
    failed_before: int
    failed_after: int
    correlation: float | None
    ranked_groups: int
    turned_groups: int
    differences: tuple[Difference, ...]

    @property
    def agreement(self) -> float:
        """The fraction of completions with an equal total, or with a failure on both sides."""
        return self.same / self.completions if self.completions else 1.0


def compare(before: Sequence[ScoredGroup], after: Sequence[ScoredGroup], max_differences: int = 5) -> ReplayReport:
    """Compares two scorings of the same groups; the report lists the largest differences."""
    pairs = [(b, a) for old, new in zip(before, after, strict=True) for b, a in zip(old.scored, new.scored, strict=True)]
    differences = [
        Difference(old.group.prompt.shown, b.completion.text, b, a)
        for old, new in zip(before, after, strict=True)
        for b, a in zip(old.scored, new.scored, strict=True)
    ]
    changed = sorted((d for d in differences if d.size > SAME), key=lambda d: -d.size)
    all_correlations = [_correlation(old, new) for old, new in zip(before, after, strict=True)]
    correlations = [value for value in all_correlations if value is not None]
    return ReplayReport(
        groups=len(before),
        completions=len(pairs),
        same=len(pairs) - len(changed),
        failed_before=sum(b.failure is not None for b, _ in pairs),
        failed_after=sum(a.failure is not None for _, a in pairs),
        correlation=float(np.mean(correlations)) if correlations else None,
        ranked_groups=len(correlations),
        turned_groups=sum(_changes_a_sign(old, new) for old, new in zip(before, after, strict=True)),
        differences=tuple(changed[:max_differences]),
    )


def _common_totals(old: ScoredGroup, new: ScoredGroup) -> tuple[list[float], list[float]]:
    """The totals before and after of completions that failed neither time."""
    pairs = [(b, a) for b, a in zip(old.totals, new.totals, strict=True) if b is not None and a is not None]
    return [b for b, _ in pairs], [a for _, a in pairs]


def _correlation(old: ScoredGroup, new: ScoredGroup) -> float | None:
    before, after = (ranks(values) for values in _common_totals(old, new))
    if len(before) < 2 or np.ptp(before) == 0 or np.ptp(after) == 0:
        return None
    return float(np.corrcoef(before, after)[0, 1])


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share their mean rank."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def _changes_a_sign(old: ScoredGroup, new: ScoredGroup) -> bool:
    before, after = (np.asarray(values) for values in _common_totals(old, new))
    if len(before) < 2:
        return False
    signs = [np.sign(np.where(abs(v - v.mean()) > SAME, v - v.mean(), 0.0)) for v in (before, after)]
    return bool(np.any(signs[0] * signs[1] < 0))
