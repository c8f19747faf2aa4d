"""The game `guess`: 1 for finding the number, and more for finding it early."""

from __future__ import annotations

from dataclasses import dataclass, field

from oncurve.recipe.schema.sections import NonNegative, Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, not_applicable, score_each
from oncurve.tasks.puzzles.guess import guesses_in


class GuessRewardOptions(Section):
    """Options of the reward `guess`."""

    early: NonNegative = 0.5
    """Added to the 1 of a game that is won, times the share of its guesses that were left over."""


@dataclass(frozen=True)
class GuessReward:
    """1 + early · (guesses left) / (guesses allowed) where the number was found, else 0.

    Reads the columns `secret` and `guesses`; does not apply to prompts without them. Every question mark is the policy's own:
    the game writes none, and answers each before the policy can go on.
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
