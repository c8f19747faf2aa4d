"""The task `guess`: a multi-turn game of guessing a number, which binary search wins.

    1-15:4?>12?<8?          the range, a guess, `>` (it is larger), a guess, `<` (it is smaller), the number

The policy samples a number and a question mark; the environment replies, and ends the game if the number is found or the
guesses are used up. Demonstrations only follow the rules, with random guesses in the remaining range; that binary search is
better is learned from the rewards. The difficulty is the number of guesses that binary search needs.
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
    """Replies to a guess, by the prompt's columns `secret` and `guesses`."""

    calls: tuple[str, ...] = ("?",)

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        """`<`, `>`, or `!` for an invalid guess; None if the number is found, the guesses are used up or there is no guess."""
        secret, last = int(prompt.columns["secret"]), guesses_in(turns[-1])
        if "?" not in turns[-1] or last[-1:] == [secret] or len(turns[::2]) == int(prompt.columns["guesses"]):
            return None
        return "!" if not last else compare(secret, last[-1])


def compare(secret: int, guess: int) -> str:
    return "<" if secret < guess else ">"


def guesses_in(text: str) -> list[int]:
    """The guesses in a text: numbers that are followed by a question mark."""
    return [int(number) for number in _GUESS.findall(text)]


def halvings(size: int) -> int:
    """Guesses with which binary search finds any of ``size`` numbers: ⌈log₂(size + 1)⌉."""
    return size.bit_length()


class GuessOptions(Section):
    """Guess a number with `<` and `>` as replies (several turns)."""

    largest: Annotated[int, Field(ge=2, le=999)] = 40
    """The largest secret number; the smallest is 1."""
    min_size: Annotated[int, Field(ge=2)] = 6
    """Minimum count of numbers in the range."""
    max_size: Annotated[int, Field(ge=2)] = 15
    """Maximum count of numbers in the range."""
    guesses: PositiveInt | None = None
    """Guesses that are allowed; unset: as many as binary search needs."""
    examples: Count = 100
    """Demonstrations: games won by random guesses in the remaining range."""
    chat: bool = False
    """State the rules in words, as a user message through the chat template."""


class Secret(NamedTuple):
    """The range in the prompt, and the secret number."""

    low: int
    high: int
    secret: int

    @property
    def key(self) -> tuple[int, int]:
        """Complete ranges are held out. If single numbers were, the policy would learn never to guess them."""
        return self.low, self.high


class GuessTask(GeneratedTask[Secret]):
    """An endless task. A held-out range is never a training prompt."""

    name = "guess"
    advice = "raise task.largest or task.max_size"
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
        prompt_id = f"guess/{low}-{high}/{secret}"
        if self._options.chat:
            rules = RULES.format(low=low, high=high, guesses=guesses)
            return Prompt(prompt_id, None, ({"role": "user", "content": rules},), columns, GuessEnvironment())
        return Prompt(prompt_id, f"{low}-{high}:", None, columns, GuessEnvironment())

    def example(self, problem: Secret) -> Example:
        prompt = self.prompt(problem)
        rng = philox_generator(self._seed, f"guess/play/{prompt.id}")
        turns = None
        while turns is None:
            turns = play(problem, int(prompt.columns["guesses"]), rng)
        return Example(prompt, "".join(turns), turns)


def play(problem: Secret, guesses: int, rng: np.random.Generator) -> tuple[str, ...] | None:
    """The turns of a game with random guesses in the remaining range; None if it is lost."""
    low, high, secret = problem
    turns: list[str] = []
    for _ in range(guesses):
        guess = int(rng.integers(low, high + 1))
        turns.append(f"{guess}?")
        if guess == secret:
            return tuple(turns)
        turns.append(compare(secret, guess))
        low, high = (low, guess - 1) if secret < guess else (guess + 1, high)
    return None
