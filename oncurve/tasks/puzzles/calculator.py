"""Sums with a calculator at hand: the policy writes what it wants to know between brackets, and reads the answer.

    38+47-19=<think>[38+47]85[85-19]66</think><answer>66</answer>
                           ‾‾       ‾‾  written by the calculator: in the context, out of the loss

What is to be learned is the use of the tool: which numbers to hand over, and where to put what comes back. A level is how many
numbers a sum has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Count, Section
from oncurve.records import Example, Prompt
from oncurve.tasks.puzzles.difficulty import Levels
from oncurve.tasks.puzzles.expression import OPERATIONS, ExpressionError, parse
from oncurve.tasks.puzzles.generated import GeneratedTask

Amount = Annotated[int, Field(ge=2, le=6)]
RULES = "You have a calculator: write [12+34] and it adds the result. Think first, then give the result in <answer></answer>."


@dataclass(frozen=True)
class Calculator:
    """Works out what stands between its two marks, by our own parser: no text of a model is ever executed. An expression that
    it can't read gets a question mark."""

    begin: str = "<calc>"
    end: str = "</calc>"

    @property
    def calls(self) -> tuple[str, ...]:
        return (self.end,)

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        """The value, exact; None where the policy did not ask and has ended."""
        before, asked, _ = turns[-1].rpartition(self.end)
        if not asked:
            return None
        _, opened, text = before.rpartition(self.begin)
        try:
            return str(parse(text).value) if opened else "?"
        except ExpressionError:
            return "?"


class CalculatorOptions(Section):
    """Options of the task `calculator`."""

    numbers: Amount = 3
    """Numbers of a sum, at most."""
    min_numbers: Amount = 2
    """Numbers of a sum, at least."""
    max_number: Annotated[int, Field(ge=2, le=9999)] = 99
    """The largest number of a sum."""
    operations: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1)] = ("+", "-")
    """What is asked. No result on the way is below 0."""
    weights: tuple[float, ...] | None = None
    """How often each amount of numbers is asked, fewest first. Unset: each level twice as often as the one below."""
    examples: Count = 100
    """Worked examples, all of different sums: they show the tool and the form."""
    chat: bool = False
    """Ask in words, as a user's message through the chat template."""


class Call(NamedTuple):
    """One question to the calculator, and its answer."""

    text: str
    value: int


class Sum(NamedTuple):
    """A sum as it is written."""

    text: str
    numbers: int

    @property
    def key(self) -> str:
        return self.text


class CalculatorTask(GeneratedTask[Sum]):
    """The task. Held-out sums are never asked in training."""

    name = "calculator"
    more = "raise task.numbers or task.max_number"
    default_rewards = (sections.Reward(type="answer"),)
    alphabet = "0123456789=[]?+-*/"

    def __init__(self, config: sections.Task, options: CalculatorOptions) -> None:
        super().__init__(config, options.examples)
        self._options, self._environment = options, Calculator("[", "]")
        self._levels = Levels.of(options.min_numbers, options.numbers, options.weights, "numbers")

    def generate(self, rng: np.random.Generator) -> Sum | None:
        count, signs = self._levels.draw(rng), self._options.operations
        text = str(rng.integers(self._options.max_number + 1))
        for _ in range(count - 1):
            text += signs[int(rng.integers(len(signs)))] + str(rng.integers(self._options.max_number + 1))
        return Sum(text, count) if all(call.value >= 0 for call in calls(text)) else None

    def prompt(self, problem: Sum) -> Prompt:
        columns = {"answer": str(parse(problem.text).value), "difficulty": f"{problem.numbers} numbers"}
        asked = f"{problem.text}="
        if self._options.chat:
            messages = ({"role": "user", "content": f"{RULES}\n{asked}"},)
            return Prompt(f"calculator/{problem.text}", None, messages, columns, self._environment)
        return Prompt(f"calculator/{problem.text}", asked, None, columns, self._environment)

    def example(self, problem: Sum) -> Example:
        asked = calls(problem.text)
        turns = [part for call in asked for part in (f"[{call.text}]", str(call.value))]
        turns[0] = f"<think>{turns[0]}"
        turns.append(f"</think><answer>{asked[-1].value}</answer>")
        return Example(self.prompt(problem), "".join(turns), tuple(turns))


def calls(text: str) -> list[Call]:
    """A sum worked out one operation at a time: products first, then from the left."""
    parts = _split(text)
    made: list[Call] = []
    while len(parts) > 1:
        place = parts.index("*") if "*" in parts else 1
        left, sign, right = parts[place - 1 : place + 2]
        value = int(OPERATIONS[sign](parse(left).value, parse(right).value)) if left[0] != "-" else -1
        made.append(Call(f"{left}{sign}{right}", value))
        parts[place - 1 : place + 2] = [str(value)]
    return made


def _split(text: str) -> list[str]:
    """`12+3` as 12, +, 3."""
    spaced = "".join(f" {letter} " if letter in OPERATIONS else letter for letter in text)
    return spaced.split()
