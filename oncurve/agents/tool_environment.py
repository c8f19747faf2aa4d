"""Episodes with tools. The tools are functions and the methods of a stateful environment, and run in parallel with the sampler.

Each episode has a thread of its own, so the calls of one environment instance never overlap. `async` functions run in one event
loop, which all episodes share. If a call takes too long, its completion ends; its thread can't be stopped and is abandoned. A
function that fails because it sets a signal handler is called again in the main thread, because Python allows signal handlers
only there.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, SupportsIndex, TypeVar, get_args

from oncurve.agents.tool_calls import ParsedCall, parse_turn
from oncurve.agents.tools import ToolFunction, check_names, describe_methods, describe_tool
from oncurve.errors import RecipeError
from oncurve.records import EpisodeRecord, History, Observation, Outcome, Rollout, ToolCall, Turn
from oncurve.rng import derive_seed
from oncurve.workers.event_loop import replace_if_blocked, shared_loop

SYNTAX, UNKNOWN, ARGUMENTS, EXCEPTION, TIMEOUT = "syntax", "unknown tool", "arguments", "exception", "timeout"
FAILURES = (SYNTAX, UNKNOWN, ARGUMENTS, EXCEPTION, TIMEOUT)
"""How a tool call can fail: `ToolCall.failure`."""
TOOL_TIMEOUT_S = 10.0
"""Seconds that a call may take by default."""
EnvironmentFactory = Callable[[], Any]
T = TypeVar("T")


class ToolEnvironment:
    """Tools for the policy: functions that all completions share, and the methods of an instance per completion.

    ``factory``, usually a class, creates an instance by TRL's contract: `reset(**columns)` begins an episode and may return a
    text for the end of the prompt, public methods are tools, and `get_reward()`, if there is one, scores the episode.
    ``get_turn_reward()``, if there is one, scores each turn after its calls. `get_reward` may have a parameter `messages`: the
    conversation after the prompt. Every method may be `async`.
    """

    def __init__(
        self,
        functions: Sequence[object] = (),
        factory: EnvironmentFactory | None = None,
        *,
        max_turns: int | None = None,
        timeout_s: float = TOOL_TIMEOUT_S,
        history: History = "tokens",
        where: str = "tools",
        factory_where: str = "environment_factory",
    ) -> None:
        self.factory, self.max_turns, self.timeout_s, self.history = factory, max_turns, timeout_s, history
        self.sent_as: tuple[Callable[..., object], tuple[object, ...]] | None = None
        """What another process calls to get its own environment like this one, instead of a copy; None: it is copied."""
        if history not in get_args(History):
            because = "a turn follows the tokens as they were sampled, or what the chat template writes"
            raise RecipeError("history", repr(history), because=because, fix="use 'tokens' or 'template'")
        described = [describe_tool(function, f"{where}[{index}]") for index, function in enumerate(functions)]
        self.functions = {tool.name: tool for tool in described}
        self.kind = None if factory is None else _environment_class(factory, factory_where)
        methods = [] if self.kind is None else describe_methods(self.kind, factory_where)
        check_names([*described, *methods], where if described else factory_where)
        self.methods = {tool.name: tool for tool in methods}
        self.tools: tuple[Mapping[str, Any], ...] = tuple(tool.schema for tool in (*described, *methods))

    @property
    def reward_name(self) -> str | None:
        """The name of its reward: the class's. None if it scores nothing."""
        has_reward = any(hasattr(self.kind, method) for method in ("get_reward", "get_turn_reward"))
        return self.kind.__name__ if self.kind is not None and has_reward else None

    def begin(self, rollout: Rollout) -> ToolEpisode:
        return ToolEpisode(self, rollout)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.sent_as or super().__reduce_ex__(protocol)


def _environment_class(factory: EnvironmentFactory, where: str) -> type:
    """The class of a factory's instances."""
    if isinstance(factory, type):
        kind = factory
    elif callable(factory):
        try:
            kind = type(factory())
        except Exception as error:  # creating one runs the user's code
            because = f"creating an instance failed: {type(error).__name__}: {error}"
            raise RecipeError(where, repr(factory), because=because, fix="give a class that takes no arguments") from error
    else:
        because = "each completion gets an instance of its own"
        raise RecipeError(where, f"{factory!r:.80} is not a class", because=because, fix="name a class with a method `reset`")
    if not callable(getattr(kind, "reset", None)):
        because = "`reset(**columns)` begins each episode; the other public methods are the tools"
        raise RecipeError(where, f"{kind.__name__} has no method `reset`", because=because, fix="add it; it may return None")
    return kind


def missing_columns(environment: object, columns: Mapping[str, Any]) -> list[str]:
    """The columns that an environment's `reset` requires and that are missing."""
    if not isinstance(environment, ToolEnvironment) or environment.kind is None:
        return []
    kind: Any = environment.kind
    parameters = list(inspect.signature(kind.reset).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in needed if name not in columns and name not in ("seed", "prompt")]


class _HungError(Exception):
    """A call took too long; its job has been answered already."""


NOT_IN_MAIN_THREAD = "signal only works in main thread"
"""How the error of `signal.signal` in another thread begins."""


class EpisodeFuture(Future[Any]):
    """The result of an episode's job, parts of which may have to run in the main thread.

    `done` and `result` run such a part if they are called in the main thread. Done callbacks are also called when there is a
    new part, so that a main thread that waits calls `done`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._part: Callable[[], None] | None = None
        self._wakers: list[Callable[[Future[Any]], object]] = []
        self._progress = threading.Event()
        self.add_done_callback(lambda _: self._progress.set())

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        super().add_done_callback(fn)
        self._wakers.append(fn)
        if self._part is not None:
            fn(self)

    def done(self) -> bool:
        part = self._part
        if part is not None and threading.current_thread() is threading.main_thread():
            self._part = None
            part()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        while not self.done() and threading.current_thread() is threading.main_thread():
            if not self._progress.wait(timeout):
                break
            self._progress.clear()
        return super().result(timeout)

    def run_in_main_thread(self, function: Callable[[], Any]) -> Any:
        """Has the main thread run the function, and returns its result. Called in the episode's thread, which waits for it.

        Raises _HungError if the job gets its answer first, because a call took too long.
        """
        outcome: Future[Any] = Future()
        self.add_done_callback(lambda _: _settle(outcome, error=_HungError()) if Future.done(self) else None)

        def part() -> None:
            try:
                _settle(outcome, function())
            except (Exception, SystemExit) as error:  # the user's code may raise anything; here Ctrl-C ends the run
                _settle(outcome, error=error)

        self._part = part
        for waker in list(self._wakers):
            waker(self)
        return outcome.result()


class ToolEpisode:
    """One completion's conversation: reads its turns, runs its calls, and answers with their results as tool messages."""

    def __init__(self, environment: ToolEnvironment, rollout: Rollout) -> None:
        self.environment, self.rollout = environment, rollout
        self.instance: Any = None
        self._failure: str | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], EpisodeFuture] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_hung = self._is_broken = False
        self._is_asked_in_main_thread = threading.current_thread() is threading.main_thread()
        self._observations: list[Observation] = []

    # The interface of an episode.

    def start(self) -> Future[str | None] | None:
        return None if self.environment.factory is None else self._submit(self._reset)

    def answer(self, turn: Turn) -> Future[Observation]:
        if self._is_hung:  # in `reset`: its thread will not answer
            return _done(self._observe(turn))
        return self._submit(self._answer, turn)

    def finish(self) -> Future[Outcome]:
        if self._is_hung:  # its instance can't be asked for a reward; if it has none, the other rewards score the completion
            is_failure = self._is_broken or self.environment.reward_name is not None
            return _done(Outcome(failure=self._failure if is_failure else None))
        return self._submit(self._finish)

    def close(self) -> None:
        self._jobs.put(None)

    # In the episode's thread.

    def _submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = EpisodeFuture()
        self._jobs.put((job, arguments, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="oncurve-episode", daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, arguments, self._future = item
            try:
                result = job(*arguments)
            except _HungError:
                return
            except BaseException as error:  # a mistake of ours: the scheduler raises it
                _settle(self._future, error=error)
            else:
                _settle(self._future, result)

    def _reset(self) -> str | None:
        environment, rollout = self.environment, self.rollout
        assert environment.factory is not None
        self.instance = self._run("__init__", environment.factory, {}, lambda: None)
        if self._failure is not None:
            return None
        purpose = f"episode/{rollout.step}/{rollout.prompt.id}"
        is_shared = getattr(environment.kind, "has_group_seed", False)
        seed = derive_seed(rollout.seed, purpose if is_shared else f"{purpose}/{rollout.sample}")
        values = {**rollout.prompt.columns, "prompt": rollout.prompt.written}
        arguments = _reset_arguments(self.instance.reset, values, seed)
        text: str | None = self._run("reset", self.instance.reset, arguments, lambda: None, _optional_text)
        return text

    def _run(
        self,
        name: str,
        function: ToolFunction,
        arguments: Mapping[str, Any],
        on_hang: Callable[[], Any],
        convert: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """The result of a call that the episode can't do without; None if it fails, with the reason in `_failure`."""

        def hang() -> Any:
            self._is_broken = True
            return on_hang()

        try:
            return convert(self._call(function, arguments, lambda: self._hang(name, hang)))
        except _HungError:
            raise
        except BaseException as error:  # the user's code may raise anything, `exit()` included
            self._is_broken, self._failure = True, f"{name}: {type(error).__name__}: {_error_text(error)}"
            return None

    def _hang(self, name: str, result: Callable[[], Any]) -> Any:
        self._is_hung, self._failure = True, f"{name} took more than {self.environment.timeout_s:g} s"
        return result()

    def _call(self, function: ToolFunction, arguments: Mapping[str, Any], on_hang: Callable[[], Any]) -> Any:
        """The result of a function. If it takes too long, the current job's future gets the result of ``on_hang``."""
        future, seconds, lock, is_over = self._future, self.environment.timeout_s, threading.Lock(), False

        def expire() -> None:
            nonlocal is_over
            with lock:
                if is_over:
                    return
                is_over = True
                _settle(future, on_hang())
            if loop is not None:
                replace_if_blocked(loop)

        loop: asyncio.AbstractEventLoop | None = None
        timer = threading.Timer(seconds, expire)  # not in the event loop, which a function may block
        timer.daemon = True
        timer.start()
        try:
            try:
                result = function(**arguments)
            except ValueError as error:
                if not str(error).startswith(NOT_IN_MAIN_THREAD) or not self._is_asked_in_main_thread:
                    raise
                result = future.run_in_main_thread(partial(function, **arguments))
            if inspect.isawaitable(result):
                loop = shared_loop()
                result = asyncio.run_coroutine_threadsafe(_awaited(result, seconds), loop).result()
        finally:
            with lock:
                is_late, is_over = is_over, True
            timer.cancel()
            if is_late:
                raise _HungError
        return result

    def _answer(self, turn: Turn) -> Observation:
        self._observations.append(self._observe(turn))
        return self._observations[-1]

    def _observe(self, turn: Turn) -> Observation:
        environment, rollout = self.environment, self.rollout
        message, calls = parse_turn(rollout.tokenizer, turn, environment.tools)
        is_last = turn.is_last or (environment.max_turns is not None and turn.index + 1 >= environment.max_turns)
        if self._failure is not None:
            return Observation(None, message, failure=self._failure)
        if is_last or not calls:
            return Observation(None, message, reward=self._turn_reward(message, ()))
        done: list[ToolCall] = []
        for call in calls:
            done.append(self._run_call(call, message, tuple(done)))
        replies = tuple({"role": "tool", "name": call.name, "content": call.result} for call in done)
        return Observation(replies, message, tuple(done), reward=self._turn_reward(message, tuple(done)))

    def _turn_reward(self, message: Mapping[str, Any], done: tuple[ToolCall, ...]) -> float | None:
        function = getattr(self.instance, "get_turn_reward", None)
        if function is None:
            return None
        return self._reward("get_turn_reward", function, lambda: Observation(None, message, done, failure=self._failure))

    def _reward(
        self, name: str, function: ToolFunction, on_hang: Callable[[], Any], arguments: Mapping[str, Any] | None = None
    ) -> float | None:
        number: float | None = self._run(name, function, arguments or {}, on_hang, _optional_number)
        return number

    def _run_call(self, call: ParsedCall, message: Mapping[str, Any], done: tuple[ToolCall, ...]) -> ToolCall:
        """A call with its result, or with what went wrong as an answer that the policy can read, in TRL's words."""
        environment = self.environment
        tool = environment.functions.get(call.name) or environment.methods.get(call.name)
        if call.fault is not None:
            return ToolCall(call.name, call.arguments, _error(call.fault), SYNTAX)
        assert not isinstance(call.arguments, str)
        if tool is None:
            return ToolCall(call.name, call.arguments, _error(f"Tool {call.name} not found."), UNKNOWN)
        fault = tool.argument_fault(call.arguments)
        if fault is not None:
            return ToolCall(call.name, call.arguments, _error(fault), ARGUMENTS)
        function = tool.function if call.name in environment.functions else getattr(self.instance, call.name)
        began = time.perf_counter()

        def hang() -> Observation:
            hung = ToolCall(call.name, call.arguments, "", TIMEOUT, time.perf_counter() - began)
            return Observation(None, message, (*done, hung), failure=self._failure)

        try:
            # A copy: what the policy wrote stays as it is, whatever the tool does to its arguments.
            result = self._call(function, copy.deepcopy(call.arguments), lambda: self._hang(call.name, hang))
            text, value = _text(result), _list_value(result) if isinstance(result, list) else None
        except _HungError:
            raise
        except BaseException as error:  # the user's code may raise anything, `exit()` included: its text is the answer
            failure = EXCEPTION if _accepts(function, call.arguments) else ARGUMENTS
            answer = _error(_error_text(error) or type(error).__name__)
            return ToolCall(call.name, call.arguments, answer, failure, time.perf_counter() - began)
        return ToolCall(call.name, call.arguments, text, None, time.perf_counter() - began, value)

    def _finish(self) -> Outcome:
        function = getattr(self.instance, "get_reward", None)
        if self._failure is not None or function is None:
            return Outcome(failure=self._failure, instance=self.instance)
        turns = tuple((0, 0, observation) for observation in self._observations)
        arguments = {"messages": EpisodeRecord(turns, Outcome()).messages} if _accepts(function, {"messages": ()}) else {}
        value = self._reward("get_reward", function, lambda: Outcome(failure=self._failure), arguments)
        return Outcome(value, self._failure, self.instance)


def _settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Complete a future unless it is already."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


async def _awaited(result: Any, seconds: float) -> Any:
    """Await a result, and cancel it a moment after its time limit, so that it does not run on."""
    return await asyncio.wait_for(result, seconds + 1.0)


def _list_value(result: list[Any]) -> list[Any] | None:
    """A list as it can be stored; None if it can't, because it holds itself or has keys that are no texts."""
    try:
        return list(json.loads(_text(json.dumps(result, default=str, ensure_ascii=False))))
    except Exception:  # a value's own text may raise anything
        return None


def _text(value: object) -> str:
    """A value as a text that a tokenizer takes: halves of characters (lone surrogates) become question marks."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


def _optional_number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def _error_text(error: BaseException) -> str:
    try:
        return _text(error)
    except Exception:  # the error is the user's too
        return type(error).__name__


def _error(text: str) -> str:
    return str({"error": text})


def _accepts(function: ToolFunction, arguments: Mapping[str, Any]) -> bool:
    """Whether a function takes arguments of these names."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return False
    return True


def _reset_arguments(reset: ToolFunction, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The columns that `reset` takes, all of them if it ends in `**columns`, and a seed if it has a parameter of that name."""
    parameters = inspect.signature(reset).parameters
    values = {"seed": seed, **columns} if "seed" in parameters else columns
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}
