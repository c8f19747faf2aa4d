"""The interface of a task: training prompts, held-out prompts, and demonstrations for supervised training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Section
from oncurve.records import Example, Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
"""The tags of a demonstration, in order. The built-in tokenizer encodes each as one token."""


class Task(Protocol):
    """A source of prompts. Rewards decide whether an answer is correct; a prompt's columns hold what they need.

    It may have an attribute ``log_lines``, with lines for the run's log.

    Example: ``Arithmetic(config, ArithmeticOptions()).train_prompt(0).text`` is a problem such as ``"347+085="``
    """

    @property
    def train_size(self) -> int | None:
        """The number of training prompts; None if the task generates them without end."""

    @property
    def heldout(self) -> Sequence[Prompt]:
        """The held-out split, for evaluation: none of it is a training prompt or a demonstration. May be empty."""

    @property
    def examples(self) -> Sequence[Example]:
        """Demonstrations for supervised training. May be empty."""

    @property
    def alphabet(self) -> str | None:
        """Every character of prompts and demonstrations besides `TAGS`, for the built-in tokenizer; None if unknown."""

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        """The rewards of this task if a recipe has none; the first defines accuracy."""

    def train_prompt(self, index: int) -> Prompt:
        """Training prompt ``index``, always the same one: below `train_size`, or any number ≥ 0 of an endless task."""


@dataclass(frozen=True)
class TaskType:
    """One `type` of task that a recipe can name.

    ``options`` is the schema of its own keys; the first paragraph of its docstring says what the task asks, and is shown by
    `oncurve recipe explain task` and the docs. ``build`` takes (task section, options).

    Example: ``TaskType(ArithmeticOptions, Arithmetic)``
    """

    options: type[Section]
    build: Callable[[sections.Task, Any], Task]
