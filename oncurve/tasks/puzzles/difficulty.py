"""Difficulty levels: how a puzzle distributes its problems over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oncurve.errors import RecipeError


@dataclass(frozen=True)
class Levels:
    """Levels from ``lowest`` up, each sampled in proportion to its weight.

    Example: ``Levels(1, (1.0, 2.0, 4.0))`` samples level 3 four times as often as level 1
    """

    lowest: int
    weights: tuple[float, ...]

    @classmethod
    def of(cls, lowest: int, highest: int, weights: tuple[float, ...] | None, unit: str, key: str = "task.weights") -> Levels:
        """Levels from a recipe's options. Without weights, each level has twice the weight of the one below, so hard ones
        dominate."""
        count = highest - lowest + 1
        if count < 1:
            raise RecipeError(
                f"task.min_{unit}", lowest, because=f"it is above {unit} = {highest}", fix=f"use {highest} or less"
            )
        weights = weights if weights is not None else tuple(2.0**i for i in range(count))
        if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise RecipeError(
                key,
                list(weights),
                because=f"each level from {lowest} to {highest} {unit} needs a weight, none below 0, not all 0",
                fix=f"give {count} numbers, easiest level first",
            )
        return cls(lowest, weights)

    def sample(self, rng: np.random.Generator) -> int:
        """A level, with a probability in proportion to its weight."""
        bounds = np.cumsum(self.weights)
        return self.lowest + int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right"))

    def quotas(self, count: int, capacity: dict[int, int]) -> dict[int, int]:
        """How many of ``count`` problems come from each level: by weight, at most ``capacity[level]``.

        What a full level can't take goes up to the next one, and what the highest can't take goes down again. The quotas sum to
        ``count``, or to the total capacity.
        """
        bounds = np.floor(np.cumsum(self.weights) / sum(self.weights) * count + 0.5).astype(int)
        targets = np.diff(bounds, prepend=0)
        levels = range(self.lowest, self.lowest + len(self.weights))
        quotas, left = {}, 0
        for level, target in zip(levels, targets, strict=True):
            quotas[level] = min(int(target) + left, capacity[level] if self.weights[level - self.lowest] else 0)
            left += int(target) - quotas[level]
        for level in reversed(levels):
            extra = min(left, capacity[level] - quotas[level]) if self.weights[level - self.lowest] else 0
            quotas[level] += extra
            left -= extra
        return quotas
