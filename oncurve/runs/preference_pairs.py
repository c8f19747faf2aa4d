"""Preference pairs from what a run sampled: the best-rewarded completion of each group against the worst."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oncurve.records import ScoredGroup
from oncurve.runs.database.reader import RunReader


def best_against_worst(store: RunReader, stage: str | None) -> Iterator[dict[str, Any]]:
    """One row for each training group whose rewards differ, with the columns that `reward_model` and `dpo` stages read.

    ``margin`` is the difference of the two rewards. A prompt that was sampled in several steps gives one pair for each.
    """
    for row in store.steps(stage):
        for graded in store.step(row.stage, row.step).groups:
            pair = pair_of(graded.scored)
            if pair is not None:
                yield pair


def pair_of(scored: ScoredGroup) -> dict[str, Any] | None:
    """The best and the worst completion of a group, the first of equals; None if rewards or texts are equal."""
    rewarded = [(s.total, s.completion.text) for s in scored.scored if s.total is not None]
    if not rewarded:
        return None
    (highest, chosen), (lowest, rejected) = max(rewarded, key=lambda r: r[0]), min(rewarded, key=lambda r: r[0])
    if highest == lowest or not is_comparable(chosen, rejected):
        return None
    return {"prompt": scored.group.prompt.written, "chosen": chosen, "rejected": rejected, "margin": highest - lowest}


def is_comparable(chosen: str, rejected: str) -> bool:
    """Whether two texts make a pair: neither is blank, and they differ by more than surrounding whitespace.

    Stages that read pairs from a file leave out the others (`oncurve.tasks.data.preference_pairs`).
    """
    return bool(chosen.strip()) and bool(rejected.strip()) and chosen.strip() != rejected.strip()
