"""What several answers to one problem are worth: pass@k and maj@k.

pass@k is the chance that k answers drawn without return from the n sampled hold a right one: 1 − C(n − c, k) / C(n, k) where
c of n are right, averaged over problems (Chen et al. 2021); unbiased, unlike 1 − (1 − c/n)^k. maj@k takes the answer that k
of them give most often (Wang et al. 2022), the earlier one where two are given equally often, averaged over the ⌊n/k⌋ blocks
of k. Answers are one where they are the same number or text; a completion without an answer has no vote, and a block without
votes is not right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from oncurve.records import ScoredGroup
from oncurve.rewards.answer import same
from oncurve.rewards.extract import answer_in


def pass_at(k: int, right: int, of: int) -> float:
    """The chance that k of the ``of`` answers, ``right`` of them right, hold a right one."""
    return 1.0 - comb(of - right, k) / comb(of, k)


def majority_is_right(answers: Sequence[str | None], marks: Sequence[bool]) -> bool:
    """Whether the answer given most often is right; it is right if the first completion that gave it is."""
    classes: list[tuple[str, int, bool]] = []
    for answer, mark in zip(answers, marks, strict=True):
        if answer is None:
            continue
        place = next((i for i, (known, _, _) in enumerate(classes) if same(known, answer)), None)
        if place is None:
            classes.append((answer, 1, mark))
        else:
            known, votes, first = classes[place]
            classes[place] = (known, votes + 1, first)
    return max(classes, key=lambda c: c[1])[2] if classes else False


def powers(most: int) -> list[int]:
    """1, 2, 4 … up to ``most``."""
    return [2**i for i in range(most.bit_length())]


def several(scored: Sequence[ScoredGroup], solved: Sequence[Sequence[bool]]) -> dict[str, float]:
    """pass@k for 1, 2, 4 … and all n samples, and maj@k for those above 2; nothing where a problem has one answer."""
    n = min((len(marks) for marks in solved), default=0)
    if n < 2:
        return {}
    sizes = sorted({*powers(n), n})
    metrics = {f"pass_at/{k}": float(np.mean([pass_at(k, sum(marks), len(marks)) for marks in solved])) for k in sizes}
    answers = [[answer_in(s.completion.text, "any") for s in group.scored] for group in scored]
    for k in (k for k in sizes if k > 2):
        blocks = [
            majority_is_right(said[start : start + k], marks[start : start + k])
            for said, marks in zip(answers, solved, strict=True)
            for start in range(0, len(marks) - k + 1, k)
        ]
        metrics[f"maj_at/{k}"] = float(np.mean(blocks))
    return metrics
