"""What a reward is, and how it says that it failed.

A reward looks at a whole group, so that one which ranks completions against each other fits; most look at each completion by
itself and go through `each`. A failure is an exception, returned or raised: never a number.

Texts graded without a model: no tokenizer is at hand to say what their tokens would be, so every letter is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oncurve.recipe.schema.sections import Section
from oncurve.records import Completion, Group, Ints


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward says of one completion: None where it does not apply, and a reason for people to read.

    ``steps`` holds step rewards as (token index of the step's last token, reward).
    """

    value: float | None
    reason: str | None = None
    steps: tuple[tuple[int, float], ...] | None = None


Result = Score | BaseException


class Reward(Protocol):
    """Grades completions. `score` gives one result per completion, in order; what it raises fails the whole group.

    Some attributes are optional: `waits`, true where a reward waits for something outside this process, so that groups are
    scored side by side in threads and while others are sampled; `outside`, true where it may answer otherwise when asked again,
    so that its answers are kept with the run (what waits is outside too); `remarks`, lines for the run's log; and two methods,
    `decode_with` and `find_in`, by which it hears of the policy's tokenizer and of the run's folder before it is first asked.
    """

    @property
    def name(self) -> str:
        """What its aspect is called."""

    @property
    def weight(self) -> float:
        """Its weight in the total; 0 where it only watches."""

    def score(self, group: Group) -> Sequence[Result]:
        """One result per completion of the group."""


@dataclass(frozen=True)
class RewardType:
    """A kind of reward that a recipe can name: the schema of its options, and how it is made of (name, weight, options)."""

    options: type[Section]
    build: Callable[[str, float, Any], Reward]
    is_verifiable: bool = False
    """Whether a score of 1 says that the answer is right."""


def not_applicable(group: Group, why: str) -> list[Result]:
    """For a reward that does not apply to a group, whatever its completions say."""
    return [Score(None, why)] * len(group.completions)


def score_each(group: Group, score: Callable[[Completion], Score]) -> list[Result]:
    """Scores each completion by itself: where one can't be scored, the others still are."""
    return [result_or_error(score, completion) for completion in group.completions]


def score_concurrently(group: Group, score: Callable[[Completion], Score], count: int) -> list[Result]:
    """As `each`, with up to `count` completions scored at the same time: for rewards that wait for other processes."""
    if len(group.completions) == 1 or count == 1:
        return score_each(group, score)
    with ThreadPoolExecutor(min(count, len(group.completions)), thread_name_prefix="oncurve-reward") as pool:
        return list(pool.map(lambda completion: result_or_error(score, completion), group.completions))


def result_or_error(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What the function returns, or what it raises. A reward that calls `exit()` has failed too; Ctrl-C goes through."""
    try:
        return function(*arguments, **named)
    except (Exception, SystemExit) as error:  # whatever a reward raises is its result
        return error


def completion_by_letters(text: str) -> Completion:
    """A text as a completion of one token per letter."""
    ids = np.array([ord(letter) for letter in text], dtype=np.int64)
    zeros = np.zeros(len(ids), np.float32)
    return Completion(ids, text, "end", zeros, zeros, zeros, np.ones(len(ids), np.bool_))


def from_letters(ids: Ints) -> str:
    return "".join(map(chr, ids.tolist()))
