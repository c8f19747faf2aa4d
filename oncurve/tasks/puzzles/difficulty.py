"""Levels of difficulty: how a puzzle spreads its problems over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oncurve.errors import RecipeError


@dataclass(frozen=True)
class Levels:
    """Levels `lowest` to `highest`, each drawn in proportion to its weight."""

    lowest: int
    weights: tuple[float, ...]

    @classmethod
    def of(cls, lowest: int, highest: int, weights: tuple[float, ...] | None, unit: str, key: str = "task.weights") -> Levels:
        """Levels from a recipe's options; without weights each level weighs twice the one below, so that hard ones dominate."""
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

    def draw(self, rng: np.random.Generator) -> int:
        """A level, with a chance in proportion to its weight."""
        bounds = np.cumsum(self.weights)
        return self.lowest + int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right"))

    def quotas(self, count: int, room: dict[int, int]) -> dict[int, int]:
        """How many of `count` problems come from each level: by weight, at most `room[level]`.

        What a full level can't take goes up to the next, and what the highest can't take comes down again. The quotas sum to
        `count`, or to all the room there is.
        """
        shares = np.floor(np.cumsum(self.weights) / sum(self.weights) * count + 0.5).astype(int)
        wanted = np.diff(shares, prepend=0)
        levels = range(self.lowest, self.lowest + len(self.weights))
        quotas, left = {}, 0
        for level, want in zip(levels, wanted, strict=True):
            quotas[level] = min(int(want) + left, room[level] if self.weights[level - self.lowest] else 0)
            left += int(want) - quotas[level]
        for level in reversed(levels):
            more = min(left, room[level] - quotas[level]) if self.weights[level - self.lowest] else 0
            quotas[level] += more
            left -= more
        return quotas
