"""The task `calculator`: sums with a calculator as a tool. The policy writes an expression in brackets and reads the result.

    38+47-19=<think>[38+47]85[85-19]66</think><answer>66</answer>
                           ‾‾       ‾‾  written by the calculator: in the context, masked out of the loss

The policy learns to use the tool: which numbers to pass to it, and where to put the result. The difficulty is the number of
numbers in a sum.
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
    """Evaluates the expression between its two marks with our own parser; no text of a model is executed. The reply to an
    invalid expression is a question mark."""

    begin: str = "<calc>"
    end: str = "</calc>"

    @property
    def calls(self) -> tuple[str, ...]:
        return (self.end,)

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        """The exact value; None if the turn ended without a call."""
        before, end, _ = turns[-1].rpartition(self.end)
        if not end:
            return None
        _, begin, text = before.rpartition(self.begin)
        try:
            return str(parse(text).value) if begin else "?"
        except ExpressionError:
            return "?"


class CalculatorOptions(Section):
    """Sums with a calculator as a tool (several turns)."""

    numbers: Amount = 3
    """Maximum count of numbers in a sum."""
    min_numbers: Amount = 2
    """Minimum count of numbers in a sum."""
    max_number: Annotated[int, Field(ge=2, le=9999)] = 99
    """The largest number in a sum."""
    operations: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1)] = ("+", "-")
    """The operations of a sum. No intermediate result is below 0."""
    weights: tuple[float, ...] | None = None
    """How often each count of numbers occurs, fewest first. Unset: each level twice as often as the one below."""
    examples: Count = 100
    """Demonstrations, all of different sums; they show the tool and the format."""
    chat: bool = False
    """Ask in words, as a user message through the chat template."""


class Call(NamedTuple):
    """One call of the calculator, and its result."""

    text: str
    value: int


class Sum(NamedTuple):
    """A sum as a text, and its count of numbers."""

    text: str
    numbers: int

    @property
    def key(self) -> str:
        return self.text


class CalculatorTask(GeneratedTask[Sum]):
    """An endless task. Held-out sums are never training prompts."""

    name = "calculator"
    advice = "raise task.numbers or task.max_number"
    default_rewards = (sections.Reward(type="answer"),)
    alphabet = "0123456789=[]?+-*/"

    def __init__(self, config: sections.Task, options: CalculatorOptions) -> None:
        super().__init__(config, options.examples)
        self._options, self._environment = options, Calculator("[", "]")
        self._levels = Levels.of(options.min_numbers, options.numbers, options.weights, "numbers")

    def generate(self, rng: np.random.Generator) -> Sum | None:
        count, signs = self._levels.sample(rng), self._options.operations
        text = str(rng.integers(self._options.max_number + 1))
        for _ in range(count - 1):
            text += signs[int(rng.integers(len(signs)))] + str(rng.integers(self._options.max_number + 1))
        return Sum(text, count) if all(call.value >= 0 for call in calls(text)) else None

    def prompt(self, problem: Sum) -> Prompt:
        columns = {"answer": str(parse(problem.text).value), "difficulty": f"{problem.numbers} numbers"}
        question = f"{problem.text}="
        if self._options.chat:
            messages = ({"role": "user", "content": f"{RULES}\n{question}"},)
            return Prompt(f"calculator/{problem.text}", None, messages, columns, self._environment)
        return Prompt(f"calculator/{problem.text}", question, None, columns, self._environment)

    def example(self, problem: Sum) -> Example:
        needed_calls = calls(problem.text)
        turns = [part for call in needed_calls for part in (f"[{call.text}]", str(call.value))]
        turns[0] = f"<think>{turns[0]}"
        turns.append(f"</think><answer>{needed_calls[-1].value}</answer>")
        return Example(self.prompt(problem), "".join(turns), tuple(turns))


def calls(text: str) -> list[Call]:
    """The calls that evaluate a sum one operation at a time: products first, then from the left."""
    parts = _split(text)
    result: list[Call] = []
    while len(parts) > 1:
        index = parts.index("*") if "*" in parts else 1
        left, sign, right = parts[index - 1 : index + 2]
        value = int(OPERATIONS[sign](parse(left).value, parse(right).value)) if left[0] != "-" else -1
        result.append(Call(f"{left}{sign}{right}", value))
        parts[index - 1 : index + 2] = [str(value)]
    return result


def _split(text: str) -> list[str]:
    """`12+3` as 12, +, 3."""
    spaced = "".join(f" {letter} " if letter in OPERATIONS else letter for letter in text)
    return spaced.split()
