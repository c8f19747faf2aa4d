"""Rewards of the runs that are killed."""

from __future__ import annotations

import asyncio
import os
import time


def short(completion: str) -> float:
    """Differs within most groups, and not within all: dynamic sampling has something to do."""
    return float(len(completion) < 8) + 0.5 * ("1" in completion)


async def patient(completion: str) -> float:
    """Waits for something outside, as a judge does."""
    await asyncio.sleep(0.001)
    return short(completion)


def hurried(completion: str) -> float:
    """Runs in a worker process."""
    return short(completion)


def pairs(text: str) -> list[tuple[int, int]]:
    """Every two characters are a step."""
    return [(i, min(i + 2, len(text))) for i in range(0, len(text), 2)]


def by_step(steps: list[str]) -> list[float]:
    return [float(any(c.isdigit() for c in step)) for step in steps]


def failing(completion: str) -> float:
    """Raises for some completions, as a parser does."""
    if completion.endswith("1"):
        raise ValueError("nothing to parse")
    return short(completion)


def dying(completion: str) -> float:
    """Ends its process for some completions, and hangs for a few."""
    if completion.startswith("77"):
        time.sleep(60)
    if completion.startswith("7"):
        os._exit(3)
    return short(completion)


is_broken = False
"""Whether `breakable` fails for about half of the completions, as an overloaded service does."""


def breakable(completion: str) -> float:
    if is_broken and sum(map(ord, completion)) % 2:
        raise RuntimeError("out of order")
    return short(completion)
