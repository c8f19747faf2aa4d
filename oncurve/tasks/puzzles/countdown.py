"""Countdown: reach a target from given numbers, each used at most once. Many answers are right, and a wrong one can be near.

    32 from 3,5,7:<think>5*7=35,35-3=32</think><answer>5*7-3</answer>

A target is made by combining all of the given numbers at random, so each problem has a solution; shorter ones count too. On the
way there every result is a whole number above 0. A level is how many numbers are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, PositiveInt

from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Count, Section
from oncurve.records import Example, Prompt
from oncurve.tasks.puzzles.difficulty import Levels
from oncurve.tasks.puzzles.generated import GeneratedTask

Amount = Annotated[int, Field(ge=2, le=6)]


class CountdownOptions(Section):
    """Options of the task `countdown`."""

    numbers: Amount = 3
    """How many numbers are given, at most."""
    min_numbers: Amount = 2
    """How many numbers are given, at least."""
    max_number: Annotated[int, Field(ge=2, le=1000)] = 20
    """The largest number given; the smallest is 1."""
    max_target: PositiveInt = 100
    """The largest target; the smallest is 1."""
    operations: Annotated[tuple[Literal["+", "-", "*", "/"], ...], Field(min_length=1)] = ("+", "-", "*")
    """What problems are made with, and worked examples solved with. An answer may use all four."""
    weights: tuple[float, ...] | None = None
    """How often each amount of numbers is asked, fewest first. Unset: each level twice as often as the one below."""
    examples: Count = 1000
    """Worked examples, all of different problems, solved by search."""


class CountdownProblem(NamedTuple):
    """The numbers as shown, and the target. Two problems are the same if they differ in the order of the numbers alone."""

    numbers: tuple[int, ...]
    target: int

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        return tuple(sorted(self.numbers)), self.target

    @property
    def text(self) -> str:
        return f"{self.target} from {','.join(map(str, self.numbers))}"


class Countdown(GeneratedTask[CountdownProblem]):
    """The task. A held-out problem is passed over in training, whatever the order of its numbers."""

    name = "countdown"
    more = "raise task.numbers, task.max_number or task.max_target"
    default_rewards = (sections.Reward(type="countdown"),)

    def __init__(self, config: sections.Task, options: CountdownOptions) -> None:
        super().__init__(config, options.examples)
        self._options = options
        self._levels = Levels.of(options.min_numbers, options.numbers, options.weights, "numbers")

    @property
    def alphabet(self) -> str:
        return "0123456789,:= from()" + "".join(sorted(set(self._options.operations)))

    def generate(self, rng: np.random.Generator) -> CountdownProblem | None:
        return generate_problem(rng, self._levels.draw(rng), self._options)

    def prompt(self, problem: CountdownProblem) -> Prompt:
        columns = {
            "numbers": list(problem.numbers),
            "target": problem.target,
            "difficulty": f"{len(problem.numbers)} numbers",
        }
        return Prompt(id=f"countdown/{problem.text}", text=f"{problem.text}:", columns=columns)

    def example(self, problem: CountdownProblem) -> Example:
        return Example(self.prompt(problem), solution_text(problem, self._options.operations))


def generate_problem(rng: np.random.Generator, amount: int, options: CountdownOptions) -> CountdownProblem | None:
    """A problem made by combining numbers at random until one is left: the target. None where that one won't do."""
    numbers = tuple(int(n) for n in rng.integers(1, options.max_number + 1, amount))
    left = list(numbers)
    while len(left) > 1:
        a, b = (left.pop(int(rng.integers(len(left)))) for _ in range(2))
        results = [value for sign in options.operations if (value := combine(max(a, b), min(a, b), sign)) is not None]
        if not results:
            return None
        left.append(results[int(rng.integers(len(results)))])
    return CountdownProblem(numbers, left[0]) if left[0] <= options.max_target and left[0] not in numbers else None


def combine(large: int, small: int, sign: str) -> int | None:
    """The result where it is a whole number above 0 and not merely one of the two again."""
    if sign == "+":
        return large + small
    if sign == "-":
        return large - small if large > small else None
    if small == 1:
        return None
    if sign == "*":
        return large * small
    return large // small if large % small == 0 else None


class Term(NamedTuple):
    """A value on the way to the target: how it is written, its outermost operation, and the steps that made it."""

    value: int
    text: str
    sign: str = ""
    steps: tuple[str, ...] = ()


def solve(problem: CountdownProblem, operations: Sequence[str]) -> Term | None:
    """A solution with the fewest steps; the first in a fixed order of search, so that examples are the same each time."""
    given = tuple(Term(n, str(n)) for n in problem.numbers)
    for depth in range(1, len(given)):
        found = _search(given, problem.target, depth, operations)
        if found is not None:
            return found
    return None


def _search(terms: tuple[Term, ...], target: int, depth: int, operations: Sequence[str]) -> Term | None:
    for i, j in combinations(range(len(terms)), 2):
        rest = tuple(term for place, term in enumerate(terms) if place not in (i, j))
        for term in _combinations(terms[i], terms[j], operations):
            if depth == 1 and term.value == target:
                return term
            found = _search((*rest, term), target, depth - 1, operations) if depth > 1 else None
            if found is not None:
                return found
    return None


def _combinations(one: Term, other: Term, operations: Sequence[str]) -> Iterator[Term]:
    large, small = (one, other) if one.value >= other.value else (other, one)
    for sign in operations:
        value = combine(large.value, small.value, sign)
        if value is not None:
            step = f"{large.value}{sign}{small.value}={value}"
            yield Term(value, _written(large, sign, small), sign, (*large.steps, *small.steps, step))


def _written(left: Term, sign: str, right: Term) -> str:
    """`left sign right` with no more brackets than needed."""
    loose_left = sign in "*/" and left.sign in ("+", "-")
    loose_right = right.sign != "" if sign == "/" else right.sign in ("+", "-") and sign in "*-"
    left_text = f"({left.text})" if loose_left else left.text
    right_text = f"({right.text})" if loose_right else right.text
    return f"{left_text}{sign}{right_text}"


def solution_text(problem: CountdownProblem, operations: Sequence[str]) -> str:
    """The completion to imitate: the steps of a solution, then the solution as one expression."""
    solution = solve(problem, operations)
    assert solution is not None, f"{problem} was made from these operations and must have a solution"
    return f"<think>{','.join(solution.steps)}</think><answer>{solution.text}</answer>"
