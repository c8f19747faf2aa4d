"""The rewards `overlong`, `length` and `cosine`, which depend on a completion's length (tokens that the policy sampled), and
`repetition`, which depends on its repeated n-grams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, score_each
from oncurve.rewards.verifiers.answer import AnswerOptions, AnswerReward
from oncurve.rewards.verifiers.answer_extraction import Take


class OverlongOptions(Section):
    """Below 0 for a completion close to or at the length limit (DAPO)."""

    limit: PositiveInt
    """L_max: the length at which the penalty is −1; unset in a recipe: the stage's `sampling.max_new_tokens`."""
    buffer: PositiveInt
    """L_cache: tokens before the limit over which the penalty grows linearly."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongOptions:
        if self.buffer > self.limit:
            raise ValueError(f"buffer ({self.buffer}) is above the limit ({self.limit})")
        return self


@dataclass(frozen=True)
class OverlongReward:
    """DAPO's soft overlong punishment (Yu et al. 2025, equation 13) of a completion of length |y|:

    0 for |y| ≤ L_max − L_cache;  ((L_max − L_cache) − |y|) / L_cache up to L_max;  −1 beyond.
    """

    name: str
    weight: float
    options: OverlongOptions

    def score(self, group: Group) -> list[Result]:
        return score_each(group, self._score)

    def _score(self, completion: Completion) -> Score:
        over = completion.length - (self.options.limit - self.options.buffer)
        return Score(-min(1.0, max(0, over) / self.options.buffer) if over > 0 else 0.0, f"{completion.length} tokens")


class LengthOptions(Section):
    """1 at a target length, falling linearly to 0 around it."""

    target: PositiveInt
    """The target length in tokens."""
    tolerance: PositiveInt | None = None
    """The distance from the target at which the reward is 0; unset: the target itself."""


@dataclass(frozen=True)
class LengthReward:
    """1 at the target length, falling linearly to 0: max(0, 1 − | |y| − target | / tolerance)."""

    name: str
    weight: float
    options: LengthOptions

    def score(self, group: Group) -> list[Result]:
        return score_each(group, self._score)

    def _score(self, completion: Completion) -> Score:
        distance = abs(completion.length - self.options.target)
        value = max(0.0, 1 - distance / (self.options.tolerance or self.options.target))
        return Score(value, f"{completion.length} tokens")


class CosineOptions(Section):
    """Rewards short right answers and long wrong ones, along a cosine of the length."""

    limit: PositiveInt
    """L_max: the length that counts as too long; unset in a recipe: the stage's `sampling.max_new_tokens`."""
    right: tuple[float, float] = (2.0, 1.0)
    """Reward of a right answer at length 0 and at the limit: short is better."""
    wrong: tuple[float, float] = (-10.0, 0.0)
    """Reward of a wrong answer at length 0 and at the limit: thinking longer is better."""
    exceeded: float = -10.0
    """Reward of a completion that reaches the limit, right or wrong."""
    take: Take = "any"
    """Where the answer is read from, as for the reward `answer`."""
    column: str = "answer"
    """Column of the right answer."""


@dataclass(frozen=True)
class CosineReward:
    """The cosine length reward (Demystifying Long Chain-of-Thought, arXiv 2502.03373, appendix C.1), for |y| < L_max:

    a + (b − a) · (1 − cos(π |y| / L_max)) / 2, from a at length 0 to b at the limit; (a, b) is `right` or `wrong`.

    The reward `answer` decides whether it is right.
    """

    name: str
    weight: float
    options: CosineOptions

    def score(self, group: Group) -> list[Result]:
        answer = AnswerReward(self.name, 1.0, AnswerOptions(take=self.options.take, column=self.options.column))
        return [self._score(c, verdict) for c, verdict in zip(group.completions, answer.score(group), strict=True)]

    def _score(self, completion: Completion, verdict: Result) -> Result:
        if isinstance(verdict, BaseException) or verdict.value is None:
            return verdict
        if completion.length >= self.options.limit:
            return Score(self.options.exceeded, f"{completion.length} tokens: at the limit")
        begin, end = self.options.right if verdict.value == 1 else self.options.wrong
        progress = (1 - math.cos(math.pi * completion.length / self.options.limit)) / 2
        return Score(begin + (end - begin) * progress, f"{verdict.reason}; {completion.length} tokens")


class RepetitionOptions(Section):
    """Below 0 for repeated n-grams."""

    size: PositiveInt = 3
    """n: tokens in an n-gram."""
    penalty: Annotated[float, Field(le=0.0)] = -1.0
    """The score that a completion of nothing but repeats approaches."""


@dataclass(frozen=True)
class RepetitionReward:
    """penalty · (1 − different n-grams / n-grams), over the tokens (arXiv 2502.03373, appendix C.2); 0 below n tokens."""

    name: str
    weight: float
    options: RepetitionOptions = field(default_factory=RepetitionOptions)

    def score(self, group: Group) -> list[Result]:
        return score_each(group, self._score)

    def _score(self, completion: Completion) -> Score:
        tokens = completion.token_ids[completion.loss_mask].tolist()
        share = repeated_share(tokens, self.options.size)
        value = share * self.options.penalty if share else 0.0
        return Score(value, f"{100 * share:.0f} % of its {self.options.size}-grams are repeats")


def repeated_share(items: Sequence[object], size: int) -> float:
    """The fraction of n-grams that occurred before."""
    grams = list(zip(*(items[start:] for start in range(size)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
