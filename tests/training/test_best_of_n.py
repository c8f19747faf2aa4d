"""pass@k and maj@k by hand, and pass@k against enumeration."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncurve.records import Completion, Group, Prompt, ScoredCompletion, ScoredGroup
from oncurve.training.evaluate import best_of_k_metrics, is_majority_correct, pass_at


def group(*texts: str) -> ScoredGroup:
    empty = np.zeros(1, np.float32)
    rows = tuple(Completion(np.zeros(1, np.int64), t, "end", empty, empty, empty, np.ones(1, bool)) for t in texts)
    return ScoredGroup(
        Group(Prompt(id="p", text="?"), np.zeros(1, np.int64), rows), tuple(ScoredCompletion(r, ()) for r in rows)
    )


def test_pass_at_by_hand() -> None:
    """2 of 4 right: k = 1 gives 1/2; of the 6 pairs one holds no right answer; any 3 hold one."""
    assert [pass_at(k, 2, 4) for k in (1, 2, 3)] == pytest.approx([0.5, 5 / 6, 1.0])
    assert pass_at(8, 0, 8) == 0.0


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_is_the_share_of_subsets_with_a_right_answer(marks: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(marks)))
    counted = [any(chosen) for chosen in combinations(marks, k)]
    assert pass_at(k, sum(marks), len(marks)) == pytest.approx(sum(counted) / len(counted))


def test_the_majority_by_hand() -> None:
    assert is_majority_correct(["7", "8", "7.0", None], [True, False, True, False])
    assert not is_majority_correct(["7", "8", "8"], [True, False, False])
    assert is_majority_correct(["7", "8"], [True, False])  # equally often: the earlier one
    assert not is_majority_correct([None, None], [False, False])


def test_several_answers_of_two_problems() -> None:
    """Problem 1: 5 5 6 6 with 5 right; problem 2: 1 2 2 2 with 2 right. pass@1 = (2 + 3)/8; maj@4 takes 5 and 2."""
    groups = [group("#### 5", "#### 5", "#### 6", "#### 6"), group("#### 1", "#### 2", "#### 2", "so 2")]
    metrics = best_of_k_metrics(groups, [[True, True, False, False], [False, True, True, True]])
    assert metrics == pytest.approx({"pass_at/1": 5 / 8, "pass_at/2": (5 / 6 + 1) / 2, "pass_at/4": 1.0, "maj_at/4": 1.0})
    assert best_of_k_metrics(groups, [[True], [False]]) == {}
