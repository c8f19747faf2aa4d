"""What a task is: prompts to train on, prompts to measure on, and worked examples to imitate first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Section
from oncurve.records import Example, Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
"""The tags of a worked completion, in order. The built-in tokenizer makes each of them one token."""


class Task(Protocol):
    """Something to be asked. Whether an answer is right is the rewards' business: the prompt's columns carry what they need."""

    @property
    def train_size(self) -> int | None:
        """How many training prompts there are; None where they never run out."""

    @property
    def heldout(self) -> Sequence[Prompt]:
        """Prompts for measuring; none of them is ever a training prompt or a worked example. May be empty."""

    @property
    def examples(self) -> Sequence[Example]:
        """Worked examples for supervised training. May be empty."""

    @property
    def alphabet(self) -> str | None:
        """Every character that prompts and worked completions are made of, `TAGS` aside; None where only the data can tell."""

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        """The rewards that grade this task where no recipe names any; the first decides what counts as solved."""

    def train_prompt(self, index: int) -> Prompt:
        """Training prompt number `index`, always the same: below `train_size`, or any number ≥ 0 of an endless task."""


@dataclass(frozen=True)
class TaskType:
    """A kind of task that a recipe can name: the schema of its own options, and how it is made from them."""

    options: type[Section]
    build: Callable[[sections.Task, Any], Task]
