"""The reward `format`: whether a completion has the required form, whatever it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import regex  # type: ignore[import-untyped]
from pydantic import PositiveFloat

from oncurve.errors import RecipeError
from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, score_each
from oncurve.tasks.base import TAGS


class FormatOptions(Section):
    """1 for the `<think>` and `<answer>` tags in order, or for a match of a regular expression."""

    style: Literal["strict", "soft"] = "strict"
    """`strict`: 1 for `<think>…</think><answer>…</answer>` and nothing else, neither empty; `soft`: 0.2 for each of the four
    tags that occurs exactly once, and 0.2 more for the strict form."""
    think_opened: bool = False
    """The chat template ends with `<think>`, so completions begin inside of it."""
    pattern: str | None = None
    """A regular expression instead: 1 if it matches the complete text, else 0. `.` matches newlines too."""
    seconds: PositiveFloat = 0.2
    """Time limit of `pattern` on one completion; if it is exceeded, the reward has failed for that completion."""


@dataclass(frozen=True)
class FormatReward:
    """1 for the required form, else 0; in between only if `soft`."""

    name: str
    weight: float
    options: FormatOptions = field(default_factory=FormatOptions)

    def __post_init__(self) -> None:
        _ = self._pattern  # an invalid pattern raises when the reward is built, not on the first completion

    def score(self, group: Group) -> list[Result]:
        return score_each(group, self._score)

    def _score(self, completion: Completion) -> Score:
        text = f"<think>{completion.text}" if self.options.think_opened else completion.text
        if self._pattern is not None:
            return self._match(self._pattern, text)
        fault = form_fault(text)
        if self.options.style == "strict" or fault is None:
            return Score(float(fault is None), fault)
        return Score(sum(text.count(tag) == 1 for tag in TAGS) / 5, fault)

    def _match(self, pattern: regex.Pattern[str], text: str) -> Score:
        try:
            match = pattern.fullmatch(text, timeout=self.options.seconds)
        except TimeoutError:
            raise TimeoutError(f"the pattern took more than {self.options.seconds} s on this completion") from None
        return Score(1.0) if match else Score(0.0, "the pattern does not match")

    @cached_property
    def _pattern(self) -> regex.Pattern[str] | None:
        if self.options.pattern is None:
            return None
        try:
            return regex.compile(self.options.pattern, regex.DOTALL)
        except regex.error as error:
            raise RecipeError(
                f"rewards.{self.name}.pattern",
                self.options.pattern,
                because=f"it is not a valid regular expression: {error}",
                fix="correct the pattern",
            ) from None


def form_fault(text: str) -> str | None:
    """Why a text is not `<think>…</think><answer>…</answer>`, or None if it is. White space around the two is allowed."""
    for tag in TAGS:
        if text.count(tag) != 1:
            return f"{tag} occurs {text.count(tag)} times"
    think, think_end, answer, answer_end = (text.index(tag) for tag in TAGS)
    if not think < think_end < answer < answer_end:
        return "the tags are out of order"
    outside = text[:think] + text[think_end + len(TAGS[1]) : answer] + text[answer_end + len(TAGS[3]) :]
    if outside.strip():
        return "there is text outside the tags"
    think_text, answer_text = text[think + len(TAGS[0]) : think_end], text[answer + len(TAGS[2]) : answer_end]
    if not think_text.strip() or not answer_text.strip():
        return "there is nothing between the tags"
    return None
