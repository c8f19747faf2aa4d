"""Written sums of the task `arithmetic`, checked column by column: a wrong sum may be right for the most part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from oncurve.recipe.schema.sections import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, not_applicable, score_each
from oncurve.tasks.puzzles.arithmetic import ArithmeticProblem, columns

_ASKED = re.compile(r"([0-9]+)([-+])([0-9]+)=")
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class ColumnsOptions(Section):
    """Options of the reward `columns`: it has none."""


@dataclass(frozen=True)
class ColumnsReward:
    """The share of columns that are written and right, of those that are written or should be."""

    name: str
    weight: float
    options: ColumnsOptions = field(default_factory=ColumnsOptions)

    def score(self, group: Group) -> list[Result]:
        asked = _ASKED.fullmatch(group.prompt.text or "")
        if asked is None:
            return not_applicable(group, "the prompt asks no sum")
        right = columns(ArithmeticProblem(asked[2], int(asked[1]), int(asked[3])))
        return score_each(group, lambda completion: _score(completion, right))


def _score(completion: Completion, right: Sequence[str]) -> Score:
    thought = _THOUGHT.search(completion.text)
    written = thought[1].split(",") if thought else []
    good = sum(a == b for a, b in zip(written, right, strict=False))
    return Score(good / max(len(written), len(right)), f"{good} of {len(right)} columns are right")
