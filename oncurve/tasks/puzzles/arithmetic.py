"""Sums, with the carries written out: a task that a tiny model learns in minutes, and whose answers can be checked.

    347+085=<think>75:12,48:13,30:04</think><answer>432</answer>

Each step names one digit of both numbers, from the right, and after the colon what is carried on and what stays: 4 + 8 and
the 1 from before make 13. Differences (`-`, larger first) are written the same way, with what is borrowed in place of what is
carried. Numbers are written with as many digits as the larger, and steps have one width, so that a tiny model need not count;
the hard part, which a few examples do not teach, is to find each column's digits in longer numbers, and a carry that is not
written again. A level is the number of digits of the larger number: it sets how many steps there are, and reads at once in a
table. The number of carries is kept as a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import isqrt
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from oncurve.errors import RecipeError
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Count, Section
from oncurve.records import Example, Prompt
from oncurve.rng import philox_generator
from oncurve.tasks.puzzles.difficulty import Levels

Digits = Annotated[int, Field(ge=1, le=9)]
Key = tuple[str, int]
"""An operation and the number of an unordered pair: the same for a+b and b+a, so that neither leaks the other."""


class ArithmeticOptions(Section):
    """Options of the task `arithmetic`."""

    digits: Digits = 3
    """Digits of the larger number, at most."""
    min_digits: Digits = 1
    """Digits of the larger number, at least."""
    operations: Annotated[tuple[Literal["+", "-"], ...], Field(min_length=1)] = ("+",)
    """What is asked: sums `+`, differences `-` (never below 0), or both, equally often."""
    weights: tuple[float, ...] | None = None
    """How often each number of digits is asked, fewest digits first. Unset: each level twice as often as the one below."""
    example_weights: tuple[float, ...] | None = None
    """How often each number of digits is among the worked examples. Unset: as often as it is asked."""
    examples: Count = 250
    """Worked examples, all of different problems (fewer where the task has not so many). A few hundred teach the sums that they
    show, not the longer ones."""


class ArithmeticProblem(NamedTuple):
    """`first` operation `second`, as asked."""

    operation: str
    first: int
    second: int

    @property
    def text(self) -> str:
        """Both numbers with as many digits as the larger: columns stand under each other."""
        width = len(str(max(self.first, self.second)))
        return f"{self.first:0{width}}{self.operation}{self.second:0{width}}"

    @property
    def answer(self) -> int:
        return self.first + self.second if self.operation == "+" else self.first - self.second


class Arithmetic:
    """The task. Training prompts are drawn anew for each index; held-out problems are passed over, as a+b and as b+a."""

    train_size = None
    default_rewards = (sections.Reward(type="answer"),)

    def __init__(self, config: sections.Task, options: ArithmeticOptions) -> None:
        self._seed, self._options = config.seed, options
        self._operations = tuple(dict.fromkeys(options.operations))
        self._levels = Levels.of(options.min_digits, options.digits, options.weights, "digits")
        shown = options.example_weights or options.weights
        self._shown = Levels.of(options.min_digits, options.digits, shown, "digits", "task.example_weights")
        self._heldout_keys = self._choose_heldout(config.heldout)

    @property
    def alphabet(self) -> str:
        return "0123456789=:," + "".join(sorted(self._operations))

    @cached_property
    def heldout(self) -> Sequence[Prompt]:
        return tuple(_prompt(problem) for problem in self._in_random_order("heldout", self._heldout_keys))

    @cached_property
    def examples(self) -> Sequence[Example]:
        taken = set(self._heldout_keys)
        room = {level: self._size(level) - self._count(level, taken) for level in self._level_numbers}
        keys = self._choose("examples", self._shown.quotas(self._options.examples, room), taken)
        return tuple(Example(_prompt(p), solution_text(p)) for p in self._in_random_order("examples", keys))

    def train_prompt(self, index: int) -> Prompt:
        """The problem at place `index` of an endless stream that skips what is held out."""
        rng = philox_generator(self._seed, "arithmetic/train", index)
        level = self._levels.draw(rng)
        while (key := self._draw_key(rng, level)) in self._heldout_set:
            pass
        return _prompt(_problem(key, rng))

    @cached_property
    def _heldout_set(self) -> frozenset[Key]:
        return frozenset(self._heldout_keys)

    @property
    def _level_numbers(self) -> range:
        return range(self._options.min_digits, self._options.digits + 1)

    def _size(self, level: int) -> int:
        return len(self._operations) * (pairs_below(10**level) - _first_pair(level))

    def _count(self, level: int, keys: Iterable[Key]) -> int:
        return sum(_first_pair(level) <= number < pairs_below(10**level) for _, number in keys)

    def _choose_heldout(self, count: int) -> list[Key]:
        """At most half of a level is held out: there are only 55 sums of two single digits, and training needs some."""
        quotas = self._levels.quotas(count, {level: self._size(level) // 2 for level in self._level_numbers})
        if sum(quotas.values()) < count:
            raise RecipeError(
                "task.heldout",
                count,
                because=f"half of all problems of this task are {sum(quotas.values())}, and the rest is for training",
                fix="hold out fewer, or raise task.digits",
            )
        return self._choose("heldout", quotas, set())

    def _choose(self, purpose: str, quotas: dict[int, int], taken: set[Key]) -> list[Key]:
        """So many different problems of each level, none of them `taken`."""
        chosen: dict[Key, None] = {}
        for level, quota in quotas.items():
            rng, start = philox_generator(self._seed, f"arithmetic/{purpose}", level), len(chosen)
            while len(chosen) < start + quota:
                key = self._draw_key(rng, level)
                if key not in taken:
                    chosen[key] = None
        return list(chosen)

    def _draw_key(self, rng: np.random.Generator, level: int) -> Key:
        operation = self._operations[int(rng.integers(len(self._operations)))]
        return operation, int(rng.integers(_first_pair(level), pairs_below(10**level)))

    def _in_random_order(self, purpose: str, keys: Sequence[Key]) -> list[ArithmeticProblem]:
        """The first n of these are as good a sample as all: levels are mixed."""
        rng = philox_generator(self._seed, f"arithmetic/{purpose}/order")
        return [_problem(keys[int(i)], rng) for i in rng.permutation(len(keys))]


def _problem(key: Key, rng: np.random.Generator) -> ArithmeticProblem:
    """The problem of a key; which number of a sum comes first is drawn."""
    operation, number = key
    large, small = pair(number)
    swap = operation == "+" and bool(rng.integers(2))
    return ArithmeticProblem(operation, *((small, large) if swap else (large, small)))


def _prompt(problem: ArithmeticProblem) -> Prompt:
    digits = len(str(max(problem.first, problem.second)))
    columns = {
        "answer": str(problem.answer),
        "difficulty": f"{digits} digit" if digits == 1 else f"{digits} digits",
        "carries": sum(step.carried for step in steps(problem)),
    }
    return Prompt(id=f"arithmetic/{problem.text}", text=f"{problem.text}=", columns=columns)


def pairs_below(bound: int) -> int:
    """How many unordered pairs of numbers from 0 to bound − 1 there are, equal ones included."""
    return bound * (bound + 1) // 2


def pair(number: int) -> tuple[int, int]:
    """Unordered pair `number` as (larger, smaller): the pairs counted as 0,0; 1,0; 1,1; 2,0; …, so all below 10ᵈ come first."""
    large = (isqrt(8 * number + 1) - 1) // 2
    return large, number - pairs_below(large)


def _first_pair(level: int) -> int:
    return 0 if level == 1 else pairs_below(10 ** (level - 1))


class ColumnStep(NamedTuple):
    """One column of the written sum: its two digits, what is carried (or borrowed), and what stays."""

    first: int
    second: int
    carried: int
    stays: int


def steps(problem: ArithmeticProblem) -> list[ColumnStep]:
    """The columns from the right, as many as the larger number has digits."""
    sign = 1 if problem.operation == "+" else -1
    first, second, carried = problem.first, problem.second, 0
    done: list[ColumnStep] = []
    while first or second or not done:
        (first, a), (second, b) = divmod(first, 10), divmod(second, 10)
        over, stays = divmod(a + sign * (b + carried), 10)
        done.append(ColumnStep(a, b, abs(over), stays))
        carried = abs(over)
    return done


def columns(problem: ArithmeticProblem) -> list[str]:
    """The steps as they are written."""
    return [f"{step.first}{step.second}:{step.carried}{step.stays}" for step in steps(problem)]


def solution_text(problem: ArithmeticProblem) -> str:
    """The completion to imitate."""
    return f"<think>{','.join(columns(problem))}</think><answer>{problem.answer}</answer>"
