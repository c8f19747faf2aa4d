"""Preference pairs from groups: the best against the worst, and none if there is no difference."""

from __future__ import annotations

import numpy as np

from oncurve.records import Aspect, Completion, Group, Prompt, ScoredCompletion, ScoredGroup
from oncurve.runs.preference_pairs import pair_of

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "hi"},))


def scored(*rewarded: tuple[str, float | None]) -> ScoredGroup:
    empty = np.zeros(1, np.float32)
    rows = [
        ScoredCompletion(
            Completion(np.zeros(1, np.int64), text, "end", empty, empty, empty, np.ones(1, bool)),
            (Aspect("r", value, failure="broke" if value is None else None),),
        )
        for text, value in rewarded
    ]
    return ScoredGroup(Group(PROMPT, np.zeros(1, np.int64), tuple(r.completion for r in rows)), tuple(rows))


def test_the_best_stands_against_the_worst_and_a_failure_takes_no_part() -> None:
    pair = pair_of(scored(("a", 0.5), ("b", 2.0), ("c", None), ("d", -1.0), ("e", 2.0)))
    messages = [{"role": "user", "content": "hi"}]
    assert pair == {"prompt": messages, "chosen": "b", "rejected": "d", "margin": 3.0}


def test_no_pair_if_nothing_is_preferred() -> None:
    assert pair_of(scored(("a", 1.0), ("b", 1.0))) is None
    assert pair_of(scored(("a", 1.0), ("a ", 0.0))) is None
    assert pair_of(scored(("a", None), ("b", None))) is None
    assert pair_of(scored(("a", 1.0), (" ", 0.0))) is None
