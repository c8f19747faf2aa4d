"""The rewards of the built-in puzzles: `countdown`, `columns` (task `arithmetic`) and `guess`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from pydantic import model_validator

from oncurve.recipe.schema.base import NonNegative, Section
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Result, Score, missing_column, not_applicable, score_each
from oncurve.rewards.verifiers.answer_extraction import answer_in
from oncurve.tasks.puzzles.arithmetic import ArithmeticProblem, columns
from oncurve.tasks.puzzles.expression import Expression, ExpressionError, parse
from oncurve.tasks.puzzles.guess import guesses_in

_PROBLEM = re.compile(r"([0-9]+)([-+])([0-9]+)=")
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class CountdownRewardOptions(Section):
    """1 for an expression that makes the target, partial credit for others."""

    form: NonNegative = 0.1
    """For a well-formed expression."""
    numbers: NonNegative = 0.1
    """Partial credit for an expression that uses only given numbers, each at most as often as it is given."""
    closeness: NonNegative = 0.3
    """For being close to the target: in full at the target, falling linearly to 0 at a distance equal to the target."""

    @model_validator(mode="after")
    def _below_one(self) -> CountdownRewardOptions:
        total = self.form + self.numbers + self.closeness
        if total >= 1:
            raise ValueError(f"form + numbers + closeness is {total:g}; it must stay below 1, which only a correct answer gets")
        return self


@dataclass(frozen=True)
class CountdownReward:
    """1 for an expression that reaches the target, and partial credit for one that comes close.

        r = 1                                         exactly the target, from given numbers, each at most as often as given
          = form + numbers + closeness · max(0, 1 − |v − target| / target)    other expressions of given numbers, of value v
          = form                                      other well-formed expressions
          = 0                                         no answer, or not an expression

    Closeness counts only for given numbers: otherwise writing the target itself would be rewarded. Reads the columns `numbers`
    and `target`; does not apply to prompts without them.
    """

    name: str
    weight: float
    options: CountdownRewardOptions = field(default_factory=CountdownRewardOptions)

    def missing_columns(self, prompt: Prompt) -> str | None:
        return missing_column(prompt, "numbers", "target")

    def score(self, group: Group) -> list[Result]:
        columns = group.prompt.columns
        if "numbers" not in columns or "target" not in columns:
            return not_applicable(group, "the prompt has no columns 'numbers' and 'target'")
        given, target = Counter(int(n) for n in columns["numbers"]), Fraction(columns["target"])
        return score_each(group, lambda completion: self._score(completion, given, target))

    def _score(self, completion: Completion, given: Counter[int], target: Fraction) -> Score:
        answer = answer_in(completion.text, "tag")
        if answer is None:
            return Score(0.0, "no answer found")
        try:
            return self._grade(parse(answer), given, target)
        except ExpressionError as error:
            return Score(0.0, f"not an expression: {error}")

    def _grade(self, expression: Expression, given: Counter[int], target: Fraction) -> Score:
        foreign = Counter(expression.numbers) - given
        if foreign:
            return Score(self.options.form, f"{next(iter(foreign))} is not given, or is used too often")
        if expression.value == target:
            return Score(1.0, f"it makes {target}")
        distance = abs(expression.value - target) / abs(target) if target else Fraction(1)
        near = float(max(Fraction(0), 1 - distance))
        reward = self.options.form + self.options.numbers + self.options.closeness * near
        return Score(reward, f"it makes {float(expression.value):g}, not {target}")


class ColumnsOptions(Section):
    """The fraction of an arithmetic problem's columns that are written and right."""


@dataclass(frozen=True)
class ColumnsReward:
    """Right columns / max(columns written, columns of the problem): partial credit for the carries of the task `arithmetic`."""

    name: str
    weight: float
    options: ColumnsOptions = field(default_factory=ColumnsOptions)

    def score(self, group: Group) -> list[Result]:
        problem = _PROBLEM.fullmatch(group.prompt.text or "")
        if problem is None:
            return not_applicable(group, "the prompt is no sum or difference")
        right = columns(ArithmeticProblem(problem[2], int(problem[1]), int(problem[3])))
        return score_each(group, lambda completion: _score_columns(completion, right))


def _score_columns(completion: Completion, right: Sequence[str]) -> Score:
    thinking = _THINKING.search(completion.text)
    written = thinking[1].split(",") if thinking else []
    correct = sum(a == b for a, b in zip(written, right, strict=False))
    return Score(correct / max(len(written), len(right)), f"{correct} of {len(right)} columns are right")


class GuessRewardOptions(Section):
    """1 for a game that is won, and more for few guesses."""

    early: NonNegative = 0.5
    """Bonus for a game that is won: this number times the fraction of guesses that were not needed, added to the 1."""


@dataclass(frozen=True)
class GuessReward:
    """1 + early · (guesses left) / (guesses allowed) if the number was found, else 0.

    Reads the columns `secret` and `guesses`, and does not apply to prompts without them. Every question mark
    counts as a guess: only the policy writes them, and the environment replies to each before the policy continues.
    """

    name: str
    weight: float
    options: GuessRewardOptions = field(default_factory=GuessRewardOptions)

    def missing_columns(self, prompt: Prompt) -> str | None:
        return missing_column(prompt, "secret", "guesses")

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
