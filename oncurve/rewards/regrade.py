"""Grading what was sampled again, by the same rewards or others, and what that would have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oncurve.records import ScoredCompletion, ScoredGroup

SAME = 1e-6
"""Totals closer than this are the same: stored ones were rounded once."""


@dataclass(frozen=True)
class Difference:
    """One completion that is graded otherwise now."""

    prompt: str
    text: str
    before: ScoredCompletion
    after: ScoredCompletion

    @property
    def size(self) -> float:
        """How far apart the totals are; a failure on one side only is as far as can be."""
        before, after = self.before.total, self.after.total
        if before is None or after is None:
            return 0.0 if before is after else float("inf")
        return abs(after - before)


@dataclass(frozen=True)
class ReplayReport:
    """What changed. ``correlation`` is Spearman's, within groups, the mean over those that have an order on both sides."""

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
        """The share of completions with the same total, or failed on both sides."""
        return self.same / self.completions if self.completions else 1.0


def compare(before: Sequence[ScoredGroup], after: Sequence[ScoredGroup], most: int = 5) -> ReplayReport:
    """The same groups graded twice. A group is *turned* where a completion's advantage changes sign."""
    pairs = [(b, a) for old, new in zip(before, after, strict=True) for b, a in zip(old.scored, new.scored, strict=True)]
    differences = [
        Difference(old.group.prompt.shown, b.completion.text, b, a)
        for old, new in zip(before, after, strict=True)
        for b, a in zip(old.scored, new.scored, strict=True)
    ]
    changed = sorted((d for d in differences if d.size > SAME), key=lambda d: -d.size)
    orders = [_correlation(old, new) for old, new in zip(before, after, strict=True)]
    known = [order for order in orders if order is not None]
    return ReplayReport(
        groups=len(before),
        completions=len(pairs),
        same=len(pairs) - len(changed),
        failed_before=sum(b.failure is not None for b, _ in pairs),
        failed_after=sum(a.failure is not None for _, a in pairs),
        correlation=float(np.mean(known)) if known else None,
        ranked_groups=len(known),
        turned_groups=sum(_turned(old, new) for old, new in zip(before, after, strict=True)),
        differences=tuple(changed[:most]),
    )


def _both(old: ScoredGroup, new: ScoredGroup) -> tuple[list[float], list[float]]:
    kept = [(b, a) for b, a in zip(old.totals, new.totals, strict=True) if b is not None and a is not None]
    return [b for b, _ in kept], [a for _, a in kept]


def _correlation(old: ScoredGroup, new: ScoredGroup) -> float | None:
    before, after = (ranks(values) for values in _both(old, new))
    if len(before) < 2 or np.ptp(before) == 0 or np.ptp(after) == 0:
        return None
    return float(np.corrcoef(before, after)[0, 1])


def ranks(values: Sequence[float]) -> list[float]:
    """Places from 0, equal values sharing the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def _turned(old: ScoredGroup, new: ScoredGroup) -> bool:
    before, after = (np.asarray(values) for values in _both(old, new))
    if len(before) < 2:
        return False
    signs = [np.sign(np.where(abs(v - v.mean()) > SAME, v - v.mean(), 0.0)) for v in (before, after)]
    return bool(np.any(signs[0] * signs[1] < 0))
