"""Uneven work over even ranks: a greedy partition that every rank finds by itself, the same on each."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank the places of its items, ascending. The dearest item goes first, each to the rank that has least.

    No rank then has more than 4/3 − 1/(3·ranks) times what the best partition would give it (Graham 1969). Where there are
    fewer items than ranks, some have none.
    """
    loads, places = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[int]]]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[lightest] += costs[item]
        places[lightest].append(item)
    return [sorted(of) for of in places]
