"""Puzzles whose problems are drawn at random: an endless stream to train on that passes over what is held out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from oncurve.errors import RecipeError
from oncurve.recipe.schema import sections
from oncurve.records import Example, Prompt
from oncurve.rng import philox_generator

_TRIES = 20_000
"""Draws without a new problem after which a recipe is said to have too few."""


class GeneratedProblem(Protocol):
    @property
    def key(self) -> Hashable:
        """Two problems of one key are the same, however they are put."""


P = TypeVar("P", bound=GeneratedProblem)


class GeneratedTask(Generic[P]):
    """What such tasks have in common. Each says how a problem is drawn, asked and worked out."""

    train_size = None
    name: str
    """Keys the random numbers."""
    more: str
    """What a recipe with too few problems should do."""

    def __init__(self, config: sections.Task, examples: int) -> None:
        self._seed, self._heldout_size, self._example_count = config.seed, config.heldout, examples

    def generate(self, rng: np.random.Generator) -> P | None:
        """A problem; None where what was drawn makes none."""
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
        """The problem at place `index` of an endless stream that skips what is held out."""
        return self.prompt(next(self._stream("train", index, self._heldout_keys)))

    @cached_property
    def _heldout_problems(self) -> list[P]:
        return self._distinct("heldout", self._heldout_size, frozenset())

    @cached_property
    def _heldout_keys(self) -> frozenset[Hashable]:
        keys = frozenset(problem.key for problem in self._heldout_problems)
        next(self._stream("train", 0, keys))  # a recipe that leaves nothing to train on is told so here, not in mid-run
        return keys

    def _distinct(self, purpose: str, count: int, skip: frozenset[Hashable]) -> list[P]:
        found: dict[Hashable, P] = {}
        for index in range(count):
            problem = next(self._stream(purpose, index, skip.union(found)))
            found[problem.key] = problem
        return list(found.values())

    def _stream(self, purpose: str, index: int, skip: frozenset[Hashable]) -> Iterator[P]:
        """Problems drawn at random that are not to be skipped."""
        rng = philox_generator(self._seed, f"{self.name}/{purpose}", index)
        for _ in range(_TRIES):
            problem = self.generate(rng)
            if problem is not None and problem.key not in skip:
                yield problem
        raise RecipeError(
            "task.heldout" if purpose != "examples" else "task.examples",
            len(skip),
            because=f"no other problem of this task was found in {_TRIES} tries",
            fix=f"ask for fewer, or {self.more}",
        )
