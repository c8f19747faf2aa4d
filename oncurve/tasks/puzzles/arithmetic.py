"""The task `arithmetic`: sums with the carries written out, which a tiny model learns in minutes.

    347+085=<think>75:12,48:13,30:04</think><answer>432</answer>

Each step has one digit of both numbers, from the right, then a colon, the carry and the result digit: 4 + 8 and the carry 1
make 13. Differences (`-`, larger number first) have the same form, with a borrow instead of a carry. Both numbers are padded
to the digits of the larger one and all steps have the same width, so that a tiny model need not count. The hard part, which a
few demonstrations do not teach, is to find each column's digits in longer numbers, and to use a carry that is not written
again. The difficulty is the number of digits of the larger number, which is also the number of steps. The number of carries is
a column.
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
"""An operation and the index of an unordered pair: the same for a+b and b+a, so that neither leaks the other."""


class ArithmeticOptions(Section):
    """Sums and differences, with the carries written out."""

    digits: Digits = 3
    """Maximum digits of the larger number."""
    min_digits: Digits = 1
    """Minimum digits of the larger number."""
    operations: Annotated[tuple[Literal["+", "-"], ...], Field(min_length=1)] = ("+",)
    """Sums `+`, differences `-` (never below 0), or both, equally often."""
    weights: tuple[float, ...] | None = None
    """How often each number of digits occurs, fewest digits first. Unset: each level twice as often as the one below."""
    example_weights: tuple[float, ...] | None = None
    """How often each number of digits occurs among the demonstrations. Unset: as in `weights`."""
    examples: Count = 250
    """Demonstrations, all of different problems (fewer if the task has fewer problems). A few hundred teach the lengths that
    they show, not longer ones."""


class ArithmeticProblem(NamedTuple):
    """``first`` operation ``second``, in the order of the prompt.

    Example: ``ArithmeticProblem("+", 347, 85).text`` is ``"347+085"``
    """

    operation: str
    first: int
    second: int

    @property
    def text(self) -> str:
        """Both numbers padded to the digits of the larger one."""
        width = len(str(max(self.first, self.second)))
        return f"{self.first:0{width}}{self.operation}{self.second:0{width}}"

    @property
    def answer(self) -> int:
        return self.first + self.second if self.operation == "+" else self.first - self.second


class Arithmetic:
    """An endless task. Held-out problems are never training prompts, neither as a+b nor as b+a."""

    train_size = None
    default_rewards = (sections.Reward(type="answer"),)

    def __init__(self, config: sections.Task, options: ArithmeticOptions) -> None:
        self._seed, self._options = config.seed, options
        self._operations = tuple(dict.fromkeys(options.operations))
        self._levels = Levels.of(options.min_digits, options.digits, options.weights, "digits")
        weights = options.example_weights or options.weights
        self._example_levels = Levels.of(options.min_digits, options.digits, weights, "digits", "task.example_weights")
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
        capacity = {level: self._size(level) - self._count(level, taken) for level in self._level_numbers}
        keys = self._choose("examples", self._example_levels.quotas(self._options.examples, capacity), taken)
        return tuple(Example(_prompt(p), solution_text(p)) for p in self._in_random_order("examples", keys))

    def train_prompt(self, index: int) -> Prompt:
        """Problem ``index`` of an endless stream that skips held-out problems."""
        rng = philox_generator(self._seed, "arithmetic/train", index)
        level = self._levels.sample(rng)
        while (key := self._sample_key(rng, level)) in self._heldout_set:
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
        """Holds out at most half of a level: there are only 55 sums of two single digits, and training needs some."""
        quotas = self._levels.quotas(count, {level: self._size(level) // 2 for level in self._level_numbers})
        if sum(quotas.values()) < count:
            raise RecipeError(
                "task.heldout",
                count,
                because=f"half of the task's problems are {sum(quotas.values())}, and the other half is for training",
                fix="hold out fewer, or raise task.digits",
            )
        return self._choose("heldout", quotas, set())

    def _choose(self, purpose: str, quotas: dict[int, int], taken: set[Key]) -> list[Key]:
        """Different problems, as many of each level as its quota, none of them in ``taken``."""
        chosen: dict[Key, None] = {}
        for level, quota in quotas.items():
            rng, start = philox_generator(self._seed, f"arithmetic/{purpose}", level), len(chosen)
            while len(chosen) < start + quota:
                key = self._sample_key(rng, level)
                if key not in taken:
                    chosen[key] = None
        return list(chosen)

    def _sample_key(self, rng: np.random.Generator, level: int) -> Key:
        operation = self._operations[int(rng.integers(len(self._operations)))]
        return operation, int(rng.integers(_first_pair(level), pairs_below(10**level)))

    def _in_random_order(self, purpose: str, keys: Sequence[Key]) -> list[ArithmeticProblem]:
        """The problems of the keys, with mixed levels, so that the first n are a fair sample."""
        rng = philox_generator(self._seed, f"arithmetic/{purpose}/order")
        return [_problem(keys[int(i)], rng) for i in rng.permutation(len(keys))]


def _problem(key: Key, rng: np.random.Generator) -> ArithmeticProblem:
    """The problem of a key; which number of a sum comes first is random."""
    operation, index = key
    large, small = pair(index)
    swap = operation == "+" and bool(rng.integers(2))
    return ArithmeticProblem(operation, *((small, large) if swap else (large, small)))


def _prompt(problem: ArithmeticProblem) -> Prompt:
    digits = len(str(max(problem.first, problem.second)))
    columns = {
        "answer": str(problem.answer),
        "difficulty": f"{digits} digit" if digits == 1 else f"{digits} digits",
        "carries": sum(step.carry for step in steps(problem)),
    }
    return Prompt(id=f"arithmetic/{problem.text}", text=f"{problem.text}=", columns=columns)


def pairs_below(bound: int) -> int:
    """The number of unordered pairs of numbers from 0 to bound − 1, equal ones included."""
    return bound * (bound + 1) // 2


def pair(index: int) -> tuple[int, int]:
    """Unordered pair ``index`` as (larger, smaller), in the order 0,0; 1,0; 1,1; 2,0; …, so all below 10ᵈ come first."""
    large = (isqrt(8 * index + 1) - 1) // 2
    return large, index - pairs_below(large)


def _first_pair(level: int) -> int:
    return 0 if level == 1 else pairs_below(10 ** (level - 1))


class ColumnStep(NamedTuple):
    """One column of a written sum: its two digits, the carry (or borrow), and the result digit."""

    first: int
    second: int
    carry: int
    digit: int


def steps(problem: ArithmeticProblem) -> list[ColumnStep]:
    """The columns from the right, as many as the larger number has digits."""
    sign = 1 if problem.operation == "+" else -1
    first, second, carry = problem.first, problem.second, 0
    result: list[ColumnStep] = []
    while first or second or not result:
        (first, a), (second, b) = divmod(first, 10), divmod(second, 10)
        overflow, digit = divmod(a + sign * (b + carry), 10)
        carry = abs(overflow)
        result.append(ColumnStep(a, b, carry, digit))
    return result


def columns(problem: ArithmeticProblem) -> list[str]:
    """The steps as texts, such as `75:12`."""
    return [f"{step.first}{step.second}:{step.carry}{step.digit}" for step in steps(problem)]


def solution_text(problem: ArithmeticProblem) -> str:
    """The completion of a demonstration."""
    return f"<think>{','.join(columns(problem))}</think><answer>{problem.answer}</answer>"
