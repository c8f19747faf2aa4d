"""How long a completion is, in tokens that the policy wrote."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveInt, model_validator

from oncurve.recipe.schema import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, each


class OverlongOptions(Section):
    """Options of the reward `overlong`."""

    limit: PositiveInt
    """L_max: the length at which the punishment is full; unset in a recipe: the stage's `sampling.max_new_tokens`."""
    buffer: PositiveInt
    """L_cache: tokens before the limit over which the punishment grows."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongOptions:
        if self.buffer > self.limit:
            raise ValueError(f"buffer ({self.buffer}) is above the limit ({self.limit})")
        return self


@dataclass(frozen=True)
class OverlongReward:
    """DAPO's soft overlong punishment (Yu et al. 2025, equation 13), of a completion of length |y|:

    0 for |y| ≤ L_max − L_cache;  ((L_max − L_cache) − |y|) / L_cache up to L_max;  −1 beyond.
    """

    name: str
    weight: float
    options: OverlongOptions

    def score(self, group: Group) -> list[Result]:
        return each(group, self._score)

    def _score(self, completion: Completion) -> Score:
        over = completion.length - (self.options.limit - self.options.buffer)
        return Score(-min(1.0, max(0, over) / self.options.buffer) if over > 0 else 0.0, f"{completion.length} tokens")


class LengthOptions(Section):
    """Options of the reward `length`."""

    target: PositiveInt
    """The wanted length."""
    tolerance: PositiveInt | None = None
    """The distance from the target at which nothing is left of the reward; unset: the target's own size."""


@dataclass(frozen=True)
class LengthReward:
    """1 at the target length, falling linearly to 0: max(0, 1 − | |y| − target | / tolerance)."""

    name: str
    weight: float
    options: LengthOptions

    def score(self, group: Group) -> list[Result]:
        return each(group, self._score)

    def _score(self, completion: Completion) -> Score:
        distance = abs(completion.length - self.options.target)
        value = max(0.0, 1 - distance / (self.options.tolerance or self.options.target))
        return Score(value, f"{completion.length} tokens")
