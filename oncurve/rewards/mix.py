"""The rewards of a run together: every completion gets one aspect from each, and none of them can stop the run.

Rewards which wait (for a worker, a sandbox, a judge) wait together, in threads, and may begin with a group while others are
still being sampled (`begin`); those which compute do so in the trainer's own thread, when `score` is called. What a reward says
of a group depends on that group alone, and results come in the order that `score` is given: order and time change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from oncurve.errors import RewardError
from oncurve.records import Aspect, Completion, Group, ScoredCompletion, ScoredGroup
from oncurve.rewards.base import Reward, Score, result_or_error
from oncurve.rewards.models.step_spans import Decode
from oncurve.rewards.reply_cache import ReplyCache, is_nondeterministic
from oncurve.runs.secrets import redact

_FAILURE_LENGTH = 300
"""Characters kept of a failure's message: it is stored with every completion."""

AT_ONCE = 8
"""Groups that one waiting reward looks at side by side."""


class RewardMix:
    """Scores groups by all rewards. The total is the weighted sum of the aspects (`ScoredCompletion.total`)."""

    def __init__(self, rewards: Sequence[Reward], rules: Collection[str] | None = None) -> None:
        """``rules`` names the rewards whose 1 says that an answer is right; unset: all, as of functions from Python."""
        self.rewards, self.rules = tuple(rewards), rules
        self._memory: ReplyCache | None = None
        self._begun: dict[int, tuple[Group, dict[str, Future[list[Aspect]]]]] = {}
        names = [reward.name for reward in self.rewards]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RewardError(
                f"rewards.{twice}",
                "two rewards have this name",
                because="their aspects could not be told apart",
                fix="give one a `name`",
            )

    @property
    def accuracy_reward(self) -> str | None:
        """The reward that decides what counts as solved: the one named `answer`, else the first rule of weight above 0; None
        where nothing says what is right."""
        if any(reward.name == "answer" for reward in self.rewards):
            return "answer"
        counted = [reward.name for reward in self.rewards if reward.weight > 0]
        return next((name for name in counted if self.rules is None or name in self.rules), None)

    def is_correct(self, scored: ScoredCompletion) -> bool:
        """Whether a completion counts as right: its deciding aspect is 1 or more. A failure is not a solution."""
        return any(a.name == self.accuracy_reward and a.value is not None and a.value >= 1 for a in scored.aspects)

    def prefetch(self, group: Group) -> None:
        """Starts the rewards that wait on a group that `score` will be asked about; the engine's `on_group` calls it. Not from
        two threads."""
        if self._waiting and id(group) not in self._begun:
            started = {reward.name: self._threads.submit(self._aspects, reward, group) for reward in self._waiting}
            self._begun[id(group)] = (group, started)  # the group is kept, so that no other gets its id

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Each group with its aspects. What raises, or is no finite number, becomes an aspect with a `failure`: never 0."""
        for group in groups:
            self.prefetch(group)
        begun, self._begun = self._begun, {}
        return [self._scored(group, begun[id(group)][1] if self._waiting else {}) for group in groups]

    def bind(self, decode: Callable[[], Decode], run: Path | None = None) -> None:
        """Tells rewards whose completions they grade: the policy's tokenizer, asked for only where a reward reads tokens, and
        the folder of the run, whose stages may train a model that a reward uses."""
        reading = [reward for reward in self.rewards if hasattr(reward, "decode_with")]
        if reading:
            own = decode()
            for reward in reading:
                reward.decode_with(own)
        for reward in self.rewards:
            if run is not None and hasattr(reward, "find_in"):
                reward.find_in(run)

    def use_cache(self, memory: ReplyCache) -> None:
        """Keeps what comes from outside, and gives it again where the same step is done again."""
        self._memory = memory

    @property
    def log_lines(self) -> list[str]:
        """What a run's log should say of its rewards: the sandbox they found, the endpoint they ask."""
        return [remark for reward in self.rewards for remark in getattr(reward, "remarks", ())]

    @cached_property
    def _waiting(self) -> tuple[Reward, ...]:
        """The rewards that spend their time outside this process: threads would only slow the others down."""
        return tuple(reward for reward in self.rewards if getattr(reward, "waits", False))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="oncurve-rewards")

    def _aspects(self, reward: Reward, group: Group) -> list[Aspect]:
        if self._memory is None or not is_nondeterministic(reward):
            return aspects_of(reward, group)
        return self._memory.get_or_ask(reward, group, lambda: aspects_of(reward, group))

    def _scored(self, group: Group, begun: Mapping[str, Future[list[Aspect]]]) -> ScoredGroup:
        columns = [begun[r.name].result() if r.name in begun else self._aspects(r, group) for r in self.rewards]
        scored = (
            ScoredCompletion(completion, tuple(column[place] for column in columns))
            for place, completion in enumerate(group.completions)
        )
        return ScoredGroup(group, tuple(scored))


def aspects_of(reward: Reward, group: Group) -> list[Aspect]:
    """What one reward says of a group, one aspect per completion whatever the reward does."""
    results = _results(result_or_error(reward.score, group), len(group.completions))
    pairs = zip(results, group.completions, strict=True)
    return [_aspect(reward, result, completion) for result, completion in pairs]


def _results(returned: object, count: int) -> list[object]:
    """One result per completion; an error of the whole group stands for each of them."""
    if isinstance(returned, BaseException):
        return [returned] * count
    if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__iter__"):
        return [TypeError(f"returned {_kind(returned)} instead of {count} scores")] * count
    listed = result_or_error(list, returned)
    if isinstance(listed, BaseException):
        return [listed] * count
    if len(listed) != count:
        return [ValueError(f"returned {len(listed)} scores for {count} completions")] * count
    return list(listed)


def _aspect(reward: Reward, result: object, completion: Completion) -> Aspect:
    score = result if isinstance(result, Score) else Score(None)
    try:
        value = _value(result.value if isinstance(result, Score) else result)
        _check_steps(score, len(completion.token_ids))
    except _NoScoreError as failure:
        said = redact(str(failure))[:_FAILURE_LENGTH]
        return Aspect(reward.name, None, reward.weight, failure=said, reason=_redacted_reason(score.reason))
    return Aspect(reward.name, value, reward.weight, reason=_redacted_reason(score.reason), steps=score.steps)


def _redacted_reason(reason: str | None) -> str | None:
    """A reason goes into the run's files; a key that a service repeated in it must not."""
    return None if reason is None else redact(reason)


class _NoScoreError(Exception):
    """Why a result is not a score, in words for a person."""


def _value(result: object) -> float | None:
    """A score as a finite float: numbers, truth values, and the scalars of numpy and torch. None stays None."""
    if isinstance(result, BaseException):
        raise _NoScoreError(f"{type(result).__name__}: {result}")
    if result is None:
        return None
    item = getattr(result, "item", None)
    plain = result_or_error(item) if callable(item) else result
    if not isinstance(plain, int | float):
        raise _NoScoreError(f"returned {_kind(result)} instead of a number")
    try:
        value = float(plain)
    except OverflowError:
        raise _NoScoreError("returned a number too large for a float") from None
    if not math.isfinite(value):
        raise _NoScoreError(f"returned {value}")
    return value


def _check_steps(score: Score, length: int) -> None:
    for place, value in score.steps or ():
        if not 0 <= place < length:
            raise _NoScoreError(f"a step ends at token {place}, and the completion has {length}")
        if not math.isfinite(value):
            raise _NoScoreError(f"returned {value} for a step")


def _kind(value: object) -> str:
    return type(value).__name__
