"""The reward `guess`: 1 for finding the number of the task `guess`, and more for finding it early."""

from __future__ import annotations

from dataclasses import dataclass, field

from oncurve.recipe.schema.base import NonNegative, Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, not_applicable, score_each
from oncurve.tasks.puzzles.guess import guesses_in


class GuessRewardOptions(Section):
    """1 for a game that is won, and more for few guesses."""

    early: NonNegative = 0.5
    """Added to the 1 of a game that is won, times the fraction of guesses that were not needed."""


@dataclass(frozen=True)
class GuessReward:
    """1 + early · (guesses left) / (guesses allowed) if the number was found, else 0.

    Reads the columns `secret` and `guesses`, and does not apply to prompts without them. Every question mark is the policy's:
    the environment writes none, and replies to each before the policy continues.
    """

    name: str
    weight: float
    options: GuessRewardOptions = field(default_factory=GuessRewardOptions)

    def score(self, group: Group) -> list[Result]:
        columns = group.prompt.columns
        if "secret" not in columns or "guesses" not in columns:
            return not_applicable(group, "the prompt has no columns 'secret' and 'guesses'")
        return score_each(group, lambda completion: self._score(completion, int(columns["secret"]), int(columns["guesses"])))

    def _score(self, completion: Completion, secret: int, allowed: int) -> Score:
        guesses, used = guesses_in(completion.text), completion.text.count("?")
        if secret not in guesses[:allowed]:
            return Score(0.0, f"{secret} is not among its {used} guesses")
        left = max(0, allowed - used) / allowed
        return Score(1 + self.options.early * left, f"found {secret} with guess {used} of {allowed}")
