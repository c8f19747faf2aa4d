"""Comparison of two scorings of the same completions."""

import pytest

from oncurve.records import Aspect, ScoredCompletion, ScoredGroup
from oncurve.rewards.regrade import compare, ranks
from tests.rewards.builders import group


def graded(*totals: float | None) -> ScoredGroup:
    sampled = group(*(f"text {i}" for i in range(len(totals))))
    aspects = [Aspect("r", t, failure=None if t is not None else "ValueError: no") for t in totals]
    return ScoredGroup(sampled, tuple(ScoredCompletion(c, (a,)) for c, a in zip(sampled.completions, aspects, strict=True)))


def test_nothing_changes() -> None:
    before = [graded(1.0, 0.0, None), graded(0.5, 0.5)]
    report = compare(before, before)
    assert (report.agreement, report.turned_groups, report.differences) == (1.0, 0, ())
    assert report.correlation == pytest.approx(1.0)
    assert (report.groups, report.completions, report.failed_before, report.ranked_groups) == (2, 5, 1, 1)


def test_changes_are_reported() -> None:
    before, after = [graded(1.0, 0.0, 0.0), graded(1.0, 0.0)], [graded(0.0, 1.0, 0.0), graded(3.0, None)]
    report = compare(before, after)
    assert report.agreement == pytest.approx(1 / 5)
    assert report.correlation == pytest.approx(-0.5)
    assert (report.turned_groups, report.failed_after) == (1, 1)
    assert [d.size for d in report.differences] == [float("inf"), 2.0, 1.0, 1.0]
    assert report.differences[0].text == "text 1"


def test_ranks_share_ties() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]
