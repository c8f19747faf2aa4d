"""Preference pairs from what a run sampled: of each group the best rewarded completion against the worst."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oncurve.records import ScoredGroup
from oncurve.runs.database.reader import RunReader


def best_against_worst(store: RunReader, stage: str | None) -> Iterator[dict[str, Any]]:
    """A row for each group whose rewards differ, with the columns that `reward_model`, `dpo` and other trainers read.

    ``margin`` is the distance of their rewards. The same prompt may be asked in several steps: each gives a pair of its own.
    """
    for row in store.steps(stage):
        for graded in store.step(row.stage, row.step).groups:
            pair = pair_of(graded.scored)
            if pair is not None:
                yield pair


def pair_of(scored: ScoredGroup) -> dict[str, Any] | None:
    """The best and the worst of a group; None where rewards or texts are equal. Of equal rewards the first one counts."""
    rewarded = [(s.total, s.completion.text) for s in scored.scored if s.total is not None]
    if not rewarded:
        return None
    (most, better), (least, worse) = max(rewarded, key=lambda r: r[0]), min(rewarded, key=lambda r: r[0])
    if most == least or better.strip() == worse.strip() or not better.strip() or not worse.strip():
        return None
    return {"prompt": scored.group.prompt.written, "chosen": better, "rejected": worse, "margin": most - least}
