"""The reward `python`: any Python function. Functions written for TRL run unchanged.

A function with a parameter `completions`, `prompts`, `completion_ids` or `environments` is called once per group, like TRL's:
with lists, by keyword.

    f(prompts, completions, completion_ids, **columns) -> list of numbers

Any other function is called for each completion. Its first parameter, whatever its name, is the completion's text; `prompt` is
the prompt, and the others are columns.

    f(completion, prompt, answer) -> number

Only arguments in the signature are passed, or all if it ends in `**columns`. For a chat, the prompt is its list of messages,
and TRL-style completions are lists with one assistant message; with tools, the messages of the complete conversation. A
parameter `environments` gets the environments that the completions have used. The function may be async. None means that the
reward does not apply. What the function passes to `log_extra` becomes the reason of each score. Differences from TRL: TRL calls
a function once per batch, not once per group, and treats NaN as None; here NaN is a failure. What is passed to `log_metric` is
not recorded, which the run's log says. `trainer_state` can't be read, because a score depends on the completions alone.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.errors import RewardError
from oncurve.plugins import load_function, place_of_error
from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Result, Reward, Score, result_or_error
from oncurve.workers.event_loop import shared_loop
from oncurve.workers.pool import WorkerFailedError, Workers, python_workers, shared

Function = Callable[..., Any]

_GROUP_PARAMETERS = frozenset({"prompts", "completions", "completion_ids", "environments"})


class PythonOptions(Section):
    """Any function; those written for TRL run unchanged."""

    function: str
    """`module:function` or `path/to/file.py:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to every call by keyword; they take precedence over columns of the same name."""
    seconds: PositiveFloat | None = None
    """Time limit of a call. If set, calls run in worker processes, which are killed and replaced if they exceed it, and only
    JSON values reach the function. Unset: calls run in the trainer's process and can't be stopped."""
    workers: PositiveInt = 2
    """Number of worker processes, if `seconds` is set."""


@dataclass(frozen=True)
class FunctionReward:
    """A function with a name and a weight."""

    function: Function
    name: str
    weight: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__)

    @property
    def is_nondeterministic(self) -> bool:
        """Always true: a function may read a clock, a file or a server, so its results are stored with the run."""
        return True

    @property
    def reads_environments(self) -> bool:
        return "environments" in self._parameters

    @property
    def log_lines(self) -> tuple[str, ...]:
        """A line if the function uses TRL's `log_metric`."""
        code = getattr(self.function, "__code__", None)
        if not self._per_group or "log_metric" not in (*self._parameters, *(code.co_consts if code is not None else ())):
            return ()
        return (f"reward {self.name}: log_metric is not recorded; to record a number, return it from a reward with weight 0",)

    def score(self, group: Group) -> Sequence[Result]:
        """What the function returns; `RewardMix` validates it."""
        if self._per_group:
            extra: dict[str, list[Any]] = {}
            (scores,) = run_coroutine([result_or_error(self._call, (), _group_values(group, extra))])
            if isinstance(scores, BaseException):
                raise scores
            return _with_reasons(scores, extra) if extra else scores  # type: ignore[no-any-return]
        values = ({**_copy(group.prompt.columns), "prompt": group.prompt.written} for _ in group.completions)
        pairs = zip(group.completions, values, strict=True)
        return run_coroutine([result_or_error(self._call, (completion.text,), columns) for completion, columns in pairs])

    def place_of(self, error: BaseException) -> str:
        """The place in the user's file at which the function has raised this error, such as ` (rewards.py:4)`."""
        return error.place if isinstance(error, WorkerFailedError) else place_of_error(error, self.function)

    def missing_columns(self, prompt: Prompt) -> str | None:
        if self._per_group:
            values = {**prompt.columns, **dict.fromkeys((*_GROUP_PARAMETERS, "log_extra", "log_metric", "trainer_state"))}
        else:
            values = {**prompt.columns, "prompt": None}
        missing = self._missing(self._named_parameters(0 if self._per_group else 1), {**values, **self.arguments})
        return f"'{missing[0]}'" if missing else None

    def _named_parameters(self, first: int) -> list[inspect.Parameter]:
        """The parameters that are passed by name, after the first ones."""
        parameters = list(self._parameters.values())[first:]
        return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def _missing(self, named: Sequence[inspect.Parameter], available: Mapping[str, Any]) -> list[str]:
        return [p.name for p in named if p.default is p.empty and p.name not in available]

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def _per_group(self) -> bool:
        return not _GROUP_PARAMETERS.isdisjoint(self._parameters)

    def call(self, first: Any, values: Mapping[str, Any]) -> Any:
        """Calls the function with a first argument and the values in its signature, and awaits it if it is async."""
        (result,) = run_coroutine([result_or_error(self._call, (first,), values)])
        if isinstance(result, BaseException):
            raise result
        return result

    def _call(self, first: tuple[Any, ...], values: Mapping[str, Any]) -> Any:
        available = {**values, **self.arguments}
        parameters, named = list(self._parameters.values()), self._named_parameters(len(first))
        missing = self._missing(named, available)
        if missing:
            raise TypeError(f"the function needs '{missing[0]}', and the prompt's columns are: {', '.join(values) or 'none'}")
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            positional = {p.name for p in parameters[: len(first)]}
            return self.function(*first, **{name: value for name, value in available.items() if name not in positional})
        return self.function(*first, **{p.name: available[p.name] for p in named if p.name in available})


def _copy(value: Any) -> Any:
    """A value with its own lists and dicts, so that a function that changes them changes no later score."""
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list) else value


class _NoTrainerState:
    """TRL's `trainer_state`. Reading it fails: a default in its place would change the reward without a word."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"trainer_state.{name} can't be read: a score depends on the completions alone, not on the step; to change rewards "
            "during a run, use several stages, each with its own rewards"
        )


def _group_values(group: Group, extra: dict[str, list[Any]]) -> dict[str, Any]:
    """Everything that TRL passes by keyword. ``extra`` gets what the function logs for each completion; `log_metric` does
    nothing."""
    size = len(group.completions)

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != size:
            raise ValueError(f"log_extra got {len(values)} values of '{column}' for {size} completions")
        extra[column] = list(values)

    columns = {name: [_copy(value) for _ in range(size)] for name, value in group.prompt.columns.items()}
    return {
        **columns,
        "prompts": [group.prompt.written for _ in range(size)],
        "completions": [_trl_completion(group.prompt, completion) for completion in group.completions],
        "completion_ids": [completion.token_ids.tolist() for completion in group.completions],
        **_environments(group),
        "log_extra": log_extra,
        "log_metric": _ignore,
        "trainer_state": _NoTrainerState(),
    }


def _with_reasons(scores: Any, extra: Mapping[str, Sequence[Any]]) -> Any:
    """Scores with what was logged for each completion as its reason; unchanged if there is not one for each."""
    returned = list(scores) if isinstance(scores, Iterable) else []
    reasons = [
        ", ".join(f"{name} {value}" for name, value in zip(extra, row, strict=True))
        for row in zip(*extra.values(), strict=True)
    ]
    return [Score(s, r) for s, r in zip(returned, reasons, strict=True)] if len(returned) == len(reasons) else scores


def _environments(group: Group) -> dict[str, list[Any]]:
    """The instances of stateful environments, if there are any."""
    episodes = [completion.episode for completion in group.completions]
    instances = [None if episode is None else episode.outcome.instance for episode in episodes]
    return {"environments": instances} if any(instance is not None for instance in instances) else {}


def _trl_completion(prompt: Prompt, completion: Completion) -> str | list[dict[str, Any]]:
    if prompt.text is not None:
        return completion.text
    if completion.episode is not None:
        return [dict(message) for message in completion.episode.messages]
    return [{"role": "assistant", "content": completion.text}]


def _ignore(name: str, value: object) -> None:
    pass


def run_coroutine(results: Sequence[Any]) -> list[Any]:
    """Awaits every awaitable among the results concurrently; an exception replaces its own result only."""
    awaitable = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
    if not awaitable:
        return list(results)
    gathered = asyncio.run_coroutine_threadsafe(_gather([results[index] for index in awaitable]), shared_loop()).result()
    awaited = dict(zip(awaitable, gathered, strict=True))
    return [awaited.get(index, result) for index, result in enumerate(results)]


async def _gather(awaitables: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def as_reward(reward: Reward | Function) -> Reward:
    """A reward unchanged, or a function as a reward with its own name and weight 1."""
    if isinstance(getattr(reward, "name", None), str) and callable(getattr(reward, "score", None)):
        return reward  # type: ignore[return-value]
    if not callable(reward):
        raise RewardError(
            "rewards",
            repr(reward),
            because="a reward is a function, or an object with name, weight and score",
            fix="pass one of these",
        )
    return FunctionReward(reward, name=getattr(reward, "__name__", type(reward).__name__))


def python_reward(name: str, weight: float, options: PythonOptions) -> FunctionReward:
    """The reward `python` of a recipe."""
    function = load_function(options.function, f"rewards.{name}.function")
    if options.seconds is None:
        return FunctionReward(function, name, weight, options.arguments)
    source, _, rest = options.function.rpartition(":")
    reference = f"{Path(source).resolve()}:{rest}" if source.endswith(".py") else options.function
    workers = _function_workers(reference, options.workers)
    limited = WorkerReward(inspect.signature(function), options.seconds, workers)
    return FunctionReward(limited, name, weight, options.arguments)


class WorkerReward:
    """A function that runs in worker processes, with a time limit on every call. Calling it returns an awaitable."""

    def __init__(self, signature: inspect.Signature, seconds: float, workers: Workers) -> None:
        self.__signature__ = signature
        self._seconds, self._workers = seconds, workers

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        plain = {name: value for name, value in named.items() if not callable(value) and not isinstance(value, _NoTrainerState)}
        job = {"arguments": arguments, "named": plain}
        return await asyncio.to_thread(self._workers.ask, job, self._seconds)


@shared
def _function_workers(reference: str, count: int) -> Workers:
    return python_workers("oncurve.rewards.python_function_worker", count, reference)
