"""Any Python function as a reward. Functions written for TRL run unchanged.

A function with a parameter `completions`, `prompts` or `completion_ids` is called once per group, as TRL calls it, with lists
and by keyword:

    f(prompts, completions, completion_ids, **columns) -> list of numbers

Any other is called for each completion: its first parameter, whatever its name, is the completion's text, `prompt` the prompt,
and others are columns:

    f(completion, prompt, answer) -> number

Only what the signature names is passed, unless it ends in `**columns`. For a chat the prompt is its list of messages and
TRL-style completions are lists with one assistant message. Sync or async; None says 'does not apply'. TRL calls once per batch
and not per group, and NaN means None to it; here NaN is a failure.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.errors import RewardError
from oncurve.plugins import load_function
from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Result, Reward, result_or_error
from oncurve.workers.pool import Workers, python_workers, shared

Function = Callable[..., Any]

_GROUP_NAMES = frozenset({"prompts", "completions", "completion_ids"})


class PythonOptions(Section):
    """Options of the reward `python`."""

    function: str
    """`module:function` or `path/to/file.py:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to every call by keyword, over columns of the same name."""
    seconds: PositiveFloat | None = None
    """Time limit of a call. With one, calls run in worker processes, which are killed and replaced when it is used up: only
    what JSON can write reaches the function. Unset: calls run in the trainer's process and nothing can stop them."""
    workers: PositiveInt = 2
    """With `seconds`: worker processes."""


@dataclass(frozen=True)
class FunctionReward:
    """A function with a name and a weight."""

    function: Function
    name: str
    weight: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        """Whether it is asynchronous: then its work is done in other threads, or elsewhere."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__)

    @property
    def is_nondeterministic(self) -> bool:
        """A function may look at anything: a clock, a file, a server. What it said is kept with the run."""
        return True

    def score(self, group: Group) -> Sequence[Result]:
        """What the function returns; the mix checks it."""
        if self._per_group:
            (scores,) = run_coroutine([result_or_error(self._call, (), _group_values(group))])
            if isinstance(scores, BaseException):
                raise scores
            return scores  # type: ignore[no-any-return]
        values = {**group.prompt.columns, "prompt": group.prompt.written}
        return run_coroutine([result_or_error(self._call, (completion.text,), values) for completion in group.completions])

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def _per_group(self) -> bool:
        return not _GROUP_NAMES.isdisjoint(self._parameters)

    def call(self, first: Any, values: Mapping[str, Any]) -> Any:
        """One call with a first argument and, of the values, those that the signature asks for; awaited where it must be."""
        (result,) = run_coroutine([result_or_error(self._call, (first,), values)])
        if isinstance(result, BaseException):
            raise result
        return result

    def _call(self, first: tuple[Any, ...], values: Mapping[str, Any]) -> Any:
        """Calls with those of the values that the signature asks for."""
        offered = {**values, **self.arguments}
        parameters = list(self._parameters.values())
        named = [p for p in parameters[len(first) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        missing = [p.name for p in named if p.default is p.empty and p.name not in offered]
        if missing:
            raise TypeError(f"the function needs '{missing[0]}', and the prompt's columns are: {', '.join(values) or 'none'}")
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            taken = {p.name for p in parameters[: len(first)]}
            return self.function(*first, **{name: value for name, value in offered.items() if name not in taken})
        return self.function(*first, **{p.name: offered[p.name] for p in named if p.name in offered})


def _group_values(group: Group) -> dict[str, Any]:
    """Everything TRL passes by keyword. Its two loggers are there to be called, and keep nothing."""
    size = len(group.completions)
    columns = {name: [value] * size for name, value in group.prompt.columns.items()}
    return {
        **columns,
        "prompts": [group.prompt.written for _ in range(size)],
        "completions": [_answered(group.prompt, completion) for completion in group.completions],
        "completion_ids": [completion.token_ids.tolist() for completion in group.completions],
        "log_extra": _keep_nothing,
        "log_metric": _keep_nothing,
    }


def _answered(prompt: Prompt, completion: Completion) -> str | list[dict[str, str]]:
    return completion.text if prompt.text is not None else [{"role": "assistant", "content": completion.text}]


def _keep_nothing(name: str, value: object) -> None:
    pass


def run_coroutine(results: Sequence[Any]) -> list[Any]:
    """The results with those that are awaitable awaited, all at once; an error takes the place of its own result alone."""
    waiting = [place for place, result in enumerate(results) if inspect.isawaitable(result)]
    if not waiting:
        return list(results)
    gathered = asyncio.run_coroutine_threadsafe(_gather([results[place] for place in waiting]), _loop()).result()
    answers = dict(zip(waiting, gathered, strict=True))
    return [answers.get(place, result) for place, result in enumerate(results)]


async def _gather(awaitables: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop in a thread of its own: a notebook's is busy, and clients stay tied to the loop they first ran in."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="oncurve-rewards", daemon=True).start()
    return loop


def as_reward(reward: Reward | Function) -> Reward:
    """A reward as it is, or a plain function under its own name with weight 1."""
    if isinstance(getattr(reward, "name", None), str) and callable(getattr(reward, "score", None)):
        return reward  # type: ignore[return-value]
    if not callable(reward):
        raise RewardError(
            "rewards",
            repr(reward),
            because="a reward is a function, or an object with name, weight and score",
            fix="give one of these",
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
    """A function that runs in worker processes, with a time limit on every call. Called, it gives something to be awaited."""

    def __init__(self, signature: inspect.Signature, seconds: float, workers: Workers) -> None:
        self.__signature__ = signature
        self._seconds, self._workers = seconds, workers

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        sent = {name: value for name, value in named.items() if not callable(value)}
        job = {"arguments": arguments, "named": sent}
        return await asyncio.to_thread(self._workers.ask, job, self._seconds)


@shared
def _function_workers(reference: str, count: int) -> Workers:
    return python_workers("oncurve.rewards.python_function_worker", count, reference)
