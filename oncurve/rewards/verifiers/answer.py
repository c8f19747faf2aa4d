"""The reward `answer`: 1 if the completion's answer equals the gold answer as a number or text, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Result, Score, missing_column, score_each
from oncurve.rewards.verifiers.answer_extraction import Take, answer_in, extract_boxed, extract_hashed

_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?")
_LONGEST_NUMBER = 100
"""Longer digit strings are compared as texts: Python refuses to convert the longest ones."""


class AnswerOptions(Section):
    """1 for the right number or text, else 0."""

    take: Take = "tag"
    """Where the answer is read from: `tag` (the last `<answer>…</answer>`), `boxed` (the last `\\boxed{}`), `hashes` (after
    the last `####`), `number` (the last number), or `any` (the first of these that is present). Text inside think tags never
    counts."""
    column: str = "answer"
    """Column of the right answer, or of a list of right answers. The reward does not apply to prompts without it."""


@dataclass(frozen=True)
class AnswerReward:
    """Compares as numbers if both are (`+007`, `7.0` and `7` are equal; `1,000` is 1000), else as texts."""

    name: str
    weight: float
    options: AnswerOptions = field(default_factory=AnswerOptions)

    def missing_columns(self, prompt: Prompt) -> str | None:
        return missing_column(prompt, self.options.column)

    def score(self, group: Group) -> list[Result]:
        golds = gold_texts(group.prompt.columns.get(self.options.column))
        return score_each(group, lambda completion: self._score(completion, golds))

    def _score(self, completion: Completion, golds: Sequence[str]) -> Score:
        if not golds:
            return Score(None, f"the prompt has no column '{self.options.column}'")
        answer = answer_in(completion.text, self.options.take)
        if answer is None:
            return Score(0.0, "no answer found")
        if any(answers_equal(answer, gold_answer(gold)) for gold in golds):
            return Score(1.0, f"{short(answer)} is right")
        return Score(0.0, f"{short(answer)} is not {short(gold_answer(golds[0]))}")


def gold_texts(gold: object) -> list[str]:
    """The texts of a gold column, which may be a list; none for None and NaN, which is what tables write for a missing number.
    A float is written out: 0.00001, not 1e-05."""
    golds = gold if isinstance(gold, list | tuple) else [gold]
    present = [g for g in golds if g is not None and g == g]
    return [f"{Decimal(repr(g)):f}" if isinstance(g, float) else str(g) for g in present]


def gold_answer(gold: str) -> str:
    """The final answer of a gold column, which may hold a complete solution that ends in `#### 18` or in a box."""
    for extract in (extract_hashed, extract_boxed):
        answer = extract(gold)
        if answer is not None:
            return answer
    return gold


def answers_equal(one: str, other: str) -> bool:
    """Whether two answers are the same number, or the same text; white space is normalised."""
    one, other = " ".join(one.split()), " ".join(other.split())
    left, right = as_number(one), as_number(other)
    if left is not None and right is not None:
        return left == right
    return one == other and one != ""


def as_number(text: str) -> Fraction | None:
    """The exact value of a decimal number in ASCII digits (`−` counts as a minus sign); None for digits of other scripts."""
    text = text.replace("−", "-")
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text) or not any(c.isdigit() for c in text):
        return None
    return Fraction(text.replace(",", ""))


def short(answer: str) -> str:
    """An answer quoted for a reason, at most 60 characters of it."""
    return repr(answer if len(answer) <= 60 else f"{answer[:57]}...")
