"""The interface of a reward, and what rewards share.

A reward scores a complete group at once, so that it can rank completions against each other. Most score each completion by
itself (`score_each`). A failure is an exception, returned for one completion or raised for the group: never a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group, Ints, Prompt


@dataclass(frozen=True, slots=True)
class Score:
    """A reward's result for one completion: None if it does not apply, with a reason for people to read.

    ``steps`` holds step rewards as (token index of the step's last token, reward).

    Example: ``Score(0.0, "'47' is not '46'")``
    """

    value: float | None
    reason: str | None = None
    steps: tuple[tuple[int, float], ...] | None = None


Result = Score | BaseException


class Reward(Protocol):
    """Scores completions. `score` returns one result per completion, in order; if it raises, the complete group has failed.

    Optional attributes:

        is_async               true if it waits for something outside of this process (a worker, a sandbox, an endpoint): groups
                               are then scored concurrently in threads, and while others are still being sampled
        is_nondeterministic    true if it may return something else next time: its results are then stored with the run, and a
                               repeated step reads them (an asynchronous reward always counts as such)
        log_lines              lines for the run's log
        set_decoder(decode)    is called with the policy's function from token ids to text before the first `score`
        set_run_folder(path)   is called with the run's folder before the first `score`
        missing_columns(prompt)  which columns it needs and the prompt lacks, as a text for people; None if it has them all. A
                               reward that no prompt has the columns for is refused before training
    """

    @property
    def name(self) -> str:
        """The name of its aspect."""

    @property
    def weight(self) -> float:
        """Its weight in the total; 0 if it is only recorded."""

    def score(self, group: Group) -> Sequence[Result]:
        """One result per completion of the group."""


@dataclass(frozen=True)
class RewardType:
    """One `type` of reward that a recipe can name.

    ``options`` is the schema of its own keys; the first paragraph of its docstring says what the reward scores, and is shown
    by `oncurve recipe explain rewards` and the docs. ``build`` takes (name, weight, options).

    Example: ``RewardType(AnswerOptions, AnswerReward, is_verifiable=True)``
    """

    options: type[Section]
    build: Callable[[str, float, Any], Reward]
    is_verifiable: bool = False
    """A score of 1 means that the answer is correct."""
    is_user_code: bool = False
    """The reward runs the user's own function. A score of 1 counts as correct if the reward's weight is above 0."""
    length_limit_option: str | None = None
    """The option that is the stage's `sampling.max_new_tokens` unless the recipe sets it."""


def missing_column(prompt: Prompt, *names: str) -> str | None:
    """The first of these columns that a prompt lacks, for `missing_columns`."""
    return next((f"'{name}'" for name in names if prompt.columns.get(name) is None), None)


def not_applicable(group: Group, reason: str) -> list[Result]:
    """The results of a reward that does not apply to a group, whatever its completions are."""
    return [Score(None, reason)] * len(group.completions)


def score_each(group: Group, score: Callable[[Completion], Score]) -> list[Result]:
    """Scores each completion by itself. An exception fails that completion only."""
    return [result_or_error(score, completion) for completion in group.completions]


def score_concurrently(group: Group, score: Callable[[Completion], Score], count: int) -> list[Result]:
    """`score_each` with up to ``count`` threads, for rewards that wait for other processes."""
    if len(group.completions) == 1 or count == 1:
        return score_each(group, score)
    with ThreadPoolExecutor(min(count, len(group.completions)), thread_name_prefix="oncurve-reward") as pool:
        return list(pool.map(lambda completion: result_or_error(score, completion), group.completions))


def result_or_error(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What the function returns, or the exception that it raises, also one that is no `Exception`: `exit()`, a panic of a Rust
    library. Ctrl-C is raised."""
    try:
        return function(*arguments, **named)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a reward raises is its result
        return error


def completion_by_letters(text: str) -> Completion:
    """Makes a completion of a text, with one token per character, to score texts without a tokenizer."""
    ids = np.array([ord(letter) for letter in text], dtype=np.int64)
    zeros = np.zeros(len(ids), np.float32)
    return Completion(ids, text, "end", zeros, zeros, zeros, np.ones(len(ids), np.bool_))


def from_letters(ids: Ints) -> str:
    """The text of token ids that `completion_by_letters` made."""
    return "".join(map(chr, ids.tolist()))
