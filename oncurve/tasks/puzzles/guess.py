"""Guess the number: a game of several turns. Where the answer lies is told after each guess; halving wins.

    1-15:4?>12?<8?          the range, a guess, `>` (it is larger), a guess, `<` (it is smaller), the number

The policy writes a number and a question mark; the game answers in its place, and ends when the number is found or the guesses
are used up. Worked examples play by the rules and no more: guesses anywhere in what is left. That halving is better is for
the rewards to teach. A level is how many guesses halving needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, PositiveInt

from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Count, Section
from oncurve.records import Example, Prompt
from oncurve.rng import philox_generator
from oncurve.tasks.puzzles.generated import GeneratedTask

_GUESS = re.compile(r"([0-9]{1,9})\s*\?")
RULES = (
    "I think of a whole number from {low} to {high}. You have {guesses} guesses: write a number and a question mark, as 5? and "
    "I say < where my number is smaller and > where it is larger."
)


@dataclass(frozen=True)
class GuessEnvironment:
    """Answers a guess, from the prompt's columns `secret` and `guesses`."""

    calls: tuple[str, ...] = ("?",)

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        """`<`, `>`, `!` for what is no guess; None where the number is found, the guesses are used up or none was made."""
        secret, last = int(prompt.columns["secret"]), guesses_in(turns[-1])
        if "?" not in turns[-1] or last[-1:] == [secret] or len(turns[::2]) == int(prompt.columns["guesses"]):
            return None
        return "!" if not last else answer(secret, last[-1])


def answer(secret: int, guess: int) -> str:
    return "<" if secret < guess else ">"


def guesses_in(text: str) -> list[int]:
    """The numbers that stand before question marks."""
    return [int(found) for found in _GUESS.findall(text)]


def halvings(size: int) -> int:
    """Guesses that find any of so many numbers: ⌈log₂(size + 1)⌉."""
    return size.bit_length()


class GuessOptions(Section):
    """Options of the task `guess`."""

    largest: Annotated[int, Field(ge=2, le=999)] = 40
    """The largest number that may be thought of; the smallest is 1."""
    min_size: Annotated[int, Field(ge=2)] = 6
    """Numbers in the range that is told, at least."""
    max_size: Annotated[int, Field(ge=2)] = 15
    """Numbers in the range that is told, at most."""
    guesses: PositiveInt | None = None
    """Guesses that are allowed; unset: as many as halving needs."""
    examples: Count = 100
    """Worked examples: games that were won by guessing at random in what was left."""
    chat: bool = False
    """Tell the rules in words, as a user's message through the chat template."""


class Secret(NamedTuple):
    """The range that is told, and the number that is not."""

    low: int
    high: int
    secret: int

    @property
    def key(self) -> tuple[int, int]:
        """Whole ranges are held out. Were it single numbers, training would teach never to guess them."""
        return self.low, self.high


class GuessTask(GeneratedTask[Secret]):
    """The task. A range that is held out is never played in training."""

    name = "guess"
    more = "raise task.largest or task.max_size"
    default_rewards = (sections.Reward(type="guess"),)
    alphabet = "0123456789-:?<>!"

    def __init__(self, config: sections.Task, options: GuessOptions) -> None:
        super().__init__(config, options.examples)
        self._options = options

    def generate(self, rng: np.random.Generator) -> Secret | None:
        size = int(rng.integers(self._options.min_size, max(self._options.min_size, self._options.max_size) + 1))
        low = int(rng.integers(1, self._options.largest + 1))
        high = low + size - 1
        return Secret(low, high, int(rng.integers(low, high + 1))) if high <= self._options.largest else None

    def prompt(self, problem: Secret) -> Prompt:
        low, high, secret = problem
        needed = halvings(high - low + 1)
        guesses = self._options.guesses or needed
        columns = {"secret": secret, "guesses": guesses, "difficulty": f"{needed} halvings"}
        name = f"guess/{low}-{high}/{secret}"
        if self._options.chat:
            told = RULES.format(low=low, high=high, guesses=guesses)
            return Prompt(name, None, ({"role": "user", "content": told},), columns, GuessEnvironment())
        return Prompt(name, f"{low}-{high}:", None, columns, GuessEnvironment())

    def example(self, problem: Secret) -> Example:
        prompt = self.prompt(problem)
        rng = philox_generator(self._seed, f"guess/play/{prompt.id}")
        turns = None
        while turns is None:
            turns = play(problem, int(prompt.columns["guesses"]), rng)
        return Example(prompt, "".join(turns), turns)


def play(problem: Secret, guesses: int, rng: np.random.Generator) -> tuple[str, ...] | None:
    """A game of guesses at random in what is left: the turns of one that is won, else None."""
    low, high, secret = problem
    turns: list[str] = []
    for _ in range(guesses):
        guess = int(rng.integers(low, high + 1))
        turns.append(f"{guess}?")
        if guess == secret:
            return tuple(turns)
        turns.append(answer(secret, guess))
        low, high = (low, guess - 1) if secret < guess else (guess + 1, high)
    return None
