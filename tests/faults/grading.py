"""Rewards of the kinds that are killed."""

from __future__ import annotations

import asyncio


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
