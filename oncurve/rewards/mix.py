"""The rewards of a stage together: each gives every completion one aspect, and a reward that fails never stops the run.

Asynchronous rewards (workers, sandbox, judges) run concurrently in threads, and can start on a group while others are still
being sampled (`prefetch`). The others run in the trainer's thread when `score` is called. A reward's result for a group depends
on that group only and results keep the order of the groups, so timing changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from oncurve.errors import RewardError
from oncurve.records import Aspect, Completion, Group, Prompt, ScoredCompletion, ScoredGroup
from oncurve.rewards.base import Reward, Score, result_or_error
from oncurve.rewards.models.step_spans import Decode
from oncurve.rewards.python_function import FunctionReward
from oncurve.rewards.reply_cache import ReplyCache, is_nondeterministic
from oncurve.runs.secrets import redact

_FAILURE_LENGTH = 300
"""Characters kept of a failure's message, which is stored with every completion."""

AT_ONCE = 8
"""Groups that asynchronous rewards score concurrently."""


class RewardMix:
    """Scores groups by all rewards. The total is the weighted sum of the aspects (`ScoredCompletion.total`)."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        accuracy_names: Collection[str] | None = None,
        task_of: Mapping[str, str] | None = None,
        tasks: Sequence[str] = (),
    ) -> None:
        """``accuracy_names``: names of the rewards for which 1 means correct. None: all rewards.

        If the stage has a mix of tasks: ``tasks`` are the names of the tasks. ``task_of`` maps the name of a reward that scores
        one task only to the name of that task.
        """
        self.rewards, self.accuracy_names, self.task_of, self.tasks = (
            tuple(rewards),
            accuracy_names,
            task_of or {},
            tuple(tasks),
        )
        self._cache: ReplyCache | None = None
        self._started: dict[int, tuple[Group, dict[str, Future[list[Aspect]]]]] = {}
        names = [reward.name for reward in self.rewards]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise RewardError(
                f"rewards.{duplicate}",
                "two rewards have this name",
                because="their aspects could not be told apart",
                fix="give one a `name`",
            )

    def check_columns(self, prompts: Iterable[Prompt]) -> None:
        """Raises RewardError for a reward that can score none of the prompts, because each lacks a column that it needs."""
        all_prompts = list(prompts)
        names = sorted({str(name) for prompt in all_prompts for name in prompt.columns})
        for reward in self.rewards:
            known = [prompt for prompt in all_prompts if self._applies(reward, prompt)]
            missing_columns = getattr(reward, "missing_columns", None)
            if not known or missing_columns is None or any(missing_columns(prompt) is None for prompt in known):
                continue
            raise RewardError(
                f"rewards.{reward.name}",
                f"no prompt has the columns that it needs: {missing_columns(known[0])}",
                because=f"the prompts' columns are: {', '.join(names) or 'none'}",
                fix="add the column to the data, or name the right one: in the task (task.answer), in the reward (column), or "
                "as the parameter of your function",
            )

    @property
    def accuracy_reward(self) -> str | None:
        """The reward that defines accuracy: the one named `answer`, else the first of weight above 0 whose 1 means correct;
        None if there is none. The tasks of a mix may each have their own: then it is one of them."""
        return next(iter(self.accuracy_rewards), None)

    @cached_property
    def accuracy_rewards(self) -> tuple[str, ...]:
        """The reward that defines accuracy for each task of a mix that has its own, then the one for all others."""
        of_tasks = (self._accuracy_reward_among([r for r in self.rewards if self.task_of.get(r.name) == t]) for t in self.tasks)
        others = self._accuracy_reward_among([r for r in self.rewards if r.name not in self.task_of])
        return tuple(name for name in (*of_tasks, others) if name is not None)

    def _accuracy_reward_among(self, rewards: Sequence[Reward]) -> str | None:
        if any(reward.name == "answer" for reward in rewards):
            return "answer"
        counted = [reward.name for reward in rewards if reward.weight > 0]
        return next((name for name in counted if self.accuracy_names is None or name in self.accuracy_names), None)

    def is_correct(self, scored: ScoredCompletion) -> bool:
        """Whether a completion is correct: its aspect of the accuracy reward is 1 or more. A failure is not correct."""
        aspects = {a.name: a for a in scored.aspects if a.value is not None or a.failure is not None}
        aspect = next((aspects[name] for name in self.accuracy_rewards if name in aspects), None)
        return aspect is not None and aspect.value is not None and aspect.value >= 1

    def accuracy_by_task(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """The fraction of correct completions of each task of a mix, as metrics."""
        metrics = {}
        for task in self.tasks if self.accuracy_reward is not None else ():
            correct = [self.is_correct(s) for g in groups if g.group.prompt.columns.get("task") == task for s in g.scored]
            if correct:
                metrics[f"accuracy/{task}"] = sum(correct) / len(correct)
        return metrics

    def _applies(self, reward: Reward, prompt: Prompt) -> bool:
        """Whether a reward scores a prompt: a reward of one task of a mix scores no others."""
        return reward.name not in self.task_of or prompt.columns.get("task") == self.task_of[reward.name]

    def prefetch(self, group: Group) -> None:
        """Starts the asynchronous rewards on a group that `score` will be called with (the engine's `on_group`). Call it from
        one thread only."""
        if self._async_rewards and id(group) not in self._started:
            applied = [reward for reward in self._async_rewards if self._applies(reward, group.prompt)]
            futures = {reward.name: self._threads.submit(self._aspects, reward, group) for reward in applied}
            self._started[id(group)] = (group, futures)  # keeping the group keeps its id from being reused

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Each group with its aspects. An exception or a non-finite number becomes an aspect with a `failure`, never 0."""
        for group in groups:
            self.prefetch(group)
        started, self._started = self._started, {}
        return [self._scored_group(group, started[id(group)][1] if self._async_rewards else {}) for group in groups]

    def bind(self, decode: Callable[[], Decode], run: Path | None = None) -> None:
        """Passes the policy's decode function to the rewards that read tokens, and the run's folder to the rewards that can use
        a reward model which a stage of the run trains."""
        token_rewards = [reward for reward in self.rewards if hasattr(reward, "set_decoder")]
        if token_rewards:
            decoder = decode()
            for reward in token_rewards:
                reward.set_decoder(decoder)
        for reward in self.rewards:
            if run is not None and hasattr(reward, "set_run_folder"):
                reward.set_run_folder(run)

    def use_cache(self, cache: ReplyCache) -> None:
        """Stores the results of nondeterministic rewards, and reads them when a step is repeated."""
        self._cache = cache

    @property
    def reads_environments(self) -> bool:
        """Whether a reward looks at the environments themselves, as reward functions of TRL may."""
        return any(getattr(reward, "reads_environments", False) for reward in self.rewards)

    @property
    def log_lines(self) -> list[str]:
        """Lines for the run's log about its rewards: the level of the sandbox, the endpoint of a judge."""
        return [line for reward in self.rewards for line in getattr(reward, "log_lines", ())]

    @cached_property
    def _async_rewards(self) -> tuple[Reward, ...]:
        """Rewards that spend their time outside of this process. Threads would only slow the others down."""
        return tuple(reward for reward in self.rewards if getattr(reward, "is_async", False))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="oncurve-rewards")

    def _aspects(self, reward: Reward, group: Group) -> list[Aspect]:
        if self._cache is None or not is_nondeterministic(reward):
            return aspects_of(reward, group)
        return self._cache.get_or_ask(reward, group, lambda: aspects_of(reward, group))

    def _scored_group(self, group: Group, started: Mapping[str, Future[list[Aspect]]]) -> ScoredGroup:
        applied = [reward for reward in self.rewards if self._applies(reward, group.prompt)]
        columns = [started[r.name].result() if r.name in started else self._aspects(r, group) for r in applied]
        scored = (
            ScoredCompletion(completion, tuple(column[index] for column in columns))
            for index, completion in enumerate(group.completions)
        )
        return ScoredGroup(group, tuple(scored))


def aspects_of(reward: Reward, group: Group) -> list[Aspect]:
    """One reward's aspects of a group, one per completion whatever the reward returns or raises."""
    results = _results(result_or_error(reward.score, group), len(group.completions))
    pairs = zip(results, group.completions, strict=True)
    return [_aspect(reward, result, completion) for result, completion in pairs]


def _results(returned: object, count: int) -> list[object]:
    """One result per completion; an error of the complete group becomes the result of each."""
    if isinstance(returned, BaseException):
        return [returned] * count
    if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__iter__"):
        return [TypeError(f"returned {_type_name(returned)} instead of {count} scores")] * count
    results = result_or_error(list, returned)
    if isinstance(results, BaseException):
        return [results] * count
    if len(results) != count:
        return [ValueError(f"returned {len(results)} scores for {count} completions")] * count
    return list(results)


def _aspect(reward: Reward, result: object, completion: Completion) -> Aspect:
    score = result if isinstance(result, Score) else Score(None)
    try:
        value = _value(result.value if isinstance(result, Score) else result)
        _check_steps(score, len(completion.token_ids))
    except _NoScoreError as error:
        place = reward.place_of(result) if isinstance(reward, FunctionReward) and isinstance(result, BaseException) else ""
        failure = redact(str(error))[:_FAILURE_LENGTH] + place
        return Aspect(reward.name, None, reward.weight, failure=failure, reason=_redact_reason(score.reason))
    return Aspect(reward.name, value, reward.weight, reason=_redact_reason(score.reason), steps=score.steps)


def _redact_reason(reason: str | None) -> str | None:
    """Reasons are stored in run.db, so API keys that a service echoed are removed from them."""
    return None if reason is None else redact(reason)


class _NoScoreError(Exception):
    """Why a result is not a score, for people to read."""


def _value(result: object) -> float | None:
    """A score as a finite float, from numbers, booleans and scalars of numpy and torch. None stays None."""
    if isinstance(result, BaseException):
        raise _NoScoreError(f"{type(result).__name__}: {result}")
    if result is None:
        return None
    item = getattr(result, "item", None)
    plain = result_or_error(item) if callable(item) else result
    if not isinstance(plain, int | float):
        raise _NoScoreError(f"returned {_type_name(result)} instead of a number")
    try:
        value = float(plain)
    except OverflowError:
        raise _NoScoreError("returned a number too large for a float") from None
    if not math.isfinite(value):
        raise _NoScoreError(f"returned {value}")
    return value


def _check_steps(score: Score, length: int) -> None:
    for token, value in score.steps or ():
        if not 0 <= token < length:
            raise _NoScoreError(f"a step ends at token {token}, and the completion has {length}")
        if not math.isfinite(value):
            raise _NoScoreError(f"returned {value} for a step")


def _type_name(value: object) -> str:
    return type(value).__name__
