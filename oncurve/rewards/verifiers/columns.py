"""The reward `columns`: partial credit for the task `arithmetic`, whose carries are written out column by column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, not_applicable, score_each
from oncurve.tasks.puzzles.arithmetic import ArithmeticProblem, columns

_PROBLEM = re.compile(r"([0-9]+)([-+])([0-9]+)=")
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class ColumnsOptions(Section):
    """The fraction of an arithmetic problem's columns that are written and right."""


@dataclass(frozen=True)
class ColumnsReward:
    """Right columns / max(columns written, columns of the problem)."""

    name: str
    weight: float
    options: ColumnsOptions = field(default_factory=ColumnsOptions)

    def score(self, group: Group) -> list[Result]:
        problem = _PROBLEM.fullmatch(group.prompt.text or "")
        if problem is None:
            return not_applicable(group, "the prompt is no sum or difference")
        right = columns(ArithmeticProblem(problem[2], int(problem[1]), int(problem[3])))
        return score_each(group, lambda completion: _score(completion, right))


def _score(completion: Completion, right: Sequence[str]) -> Score:
    thinking = _THINKING.search(completion.text)
    written = thinking[1].split(",") if thinking else []
    correct = sum(a == b for a, b in zip(written, right, strict=False))
    return Score(correct / max(len(written), len(right)), f"{correct} of {len(right)} columns are right")
