"""A reward of a recipe's own file, named by a path relative to the folder that the run starts in."""

from __future__ import annotations


def digits(completion: str) -> float:
    """The share of characters that are digits: random weights get many different values of it."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
