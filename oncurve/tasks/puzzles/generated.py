"""Base class of tasks with random problems: an endless training stream that skips the held-out split."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from oncurve.errors import RecipeError
from oncurve.recipe.schema import sections
from oncurve.records import Example, Prompt
from oncurve.rng import philox_generator

_MAX_TRIES = 20_000
"""After this many random problems without a new one, the recipe counts as having too few problems."""


class GeneratedProblem(Protocol):
    @property
    def key(self) -> Hashable:
        """Problems with equal keys are the same, however they are worded."""


P = TypeVar("P", bound=GeneratedProblem)


class GeneratedTask(Generic[P]):
    """Subclasses define how a problem is generated, its prompt, and its demonstration."""

    train_size = None
    name: str
    """Part of the key of its random numbers."""
    advice: str
    """How to get more problems, for the error of a recipe that has too few."""

    def __init__(self, config: sections.Task, examples: int) -> None:
        self._seed, self._heldout_size, self._example_count = config.seed, config.heldout, examples

    def generate(self, rng: np.random.Generator) -> P | None:
        """A random problem; None if the random numbers make no valid one."""
        raise NotImplementedError

    def prompt(self, problem: P) -> Prompt:
        raise NotImplementedError

    def example(self, problem: P) -> Example:
        raise NotImplementedError

    @cached_property
    def heldout(self) -> Sequence[Prompt]:
        return tuple(self.prompt(problem) for problem in self._heldout_problems)

    @cached_property
    def examples(self) -> Sequence[Example]:
        return tuple(self.example(p) for p in self._distinct("examples", self._example_count, self._heldout_keys))

    def train_prompt(self, index: int) -> Prompt:
        """Problem ``index`` of an endless stream that skips held-out problems."""
        return self.prompt(next(self._stream("train", index, self._heldout_keys)))

    @cached_property
    def _heldout_problems(self) -> list[P]:
        return self._distinct("heldout", self._heldout_size, frozenset())

    @cached_property
    def _heldout_keys(self) -> frozenset[Hashable]:
        keys = frozenset(problem.key for problem in self._heldout_problems)
        next(self._stream("train", 0, keys))  # raises here, not in the middle of a run, if nothing is left to train on
        return keys

    def _distinct(self, purpose: str, count: int, skip: frozenset[Hashable]) -> list[P]:
        problems: dict[Hashable, P] = {}
        for index in range(count):
            problem = next(self._stream(purpose, index, skip.union(problems)))
            problems[problem.key] = problem
        return list(problems.values())

    def _stream(self, purpose: str, index: int, skip: frozenset[Hashable]) -> Iterator[P]:
        """Random problems whose keys are not in ``skip``."""
        rng = philox_generator(self._seed, f"{self.name}/{purpose}", index)
        for _ in range(_MAX_TRIES):
            problem = self.generate(rng)
            if problem is not None and problem.key not in skip:
                yield problem
        raise RecipeError(
            "task.heldout" if purpose != "examples" else "task.examples",
            f"only {len(skip)} different problems",
            because=f"no further problem of this task was found in {_MAX_TRIES:,} tries",
            fix=f"use fewer, or {self.advice}",
        )
