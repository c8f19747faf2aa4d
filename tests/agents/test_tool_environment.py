"""Tools and stateful environments by themselves: schemas, calls, results, failures, time limits and bad input."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.errors import RecipeError
from oncurve.records import Observation, Outcome, Prompt, Rollout, Turn

PROMPT = Prompt("p", messages=({"role": "user", "content": "go"},), columns={"start": 3, "unused": 1})


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product.
    """
    return a * b


async def slow_echo(text: str) -> str:
    """
    Says the same.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0.01)
    return text


class Counter:
    """By TRL's contract."""

    def reset(self, start: int, **columns: Any) -> str | None:
        self.value, self.columns, self.thread = start, columns, threading.get_ident()
        return None

    def increment(self, step: int) -> int:
        """
        Adds to the counter.

        Args:
            step: How much to add.

        Returns:
            The new value.
        """
        if step < 0:
            raise ValueError("step must not be negative")
        assert threading.get_ident() == self.thread, "an instance is used by one thread"
        self.value += step
        return self.value

    def get_reward(self) -> float:
        return float(self.value)

    def _hidden(self) -> None: ...


def rollout(sample: int = 0) -> Rollout:
    return Rollout(PROMPT, seed=0, step=1, sample=sample, tokenizer=object())


def turn(text: str, index: int = 0, *, is_last: bool = False) -> Turn:
    return Turn(index, np.array([ord(letter) for letter in text]), text, is_last)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def converse(environment: ToolEnvironment, *texts: str) -> tuple[list[Observation], Outcome]:
    episode = environment.begin(rollout())
    start = episode.start()
    if start is not None:
        start.result(120)
    observations = [episode.answer(turn(text, index)).result(120) for index, text in enumerate(texts)]
    outcome = episode.finish().result(120)
    episode.close()
    return observations, outcome


def test_schemas_are_those_of_transformers() -> None:
    from transformers.utils import get_json_schema

    environment = ToolEnvironment([multiply, slow_echo], Counter)
    assert environment.tools == (get_json_schema(multiply), get_json_schema(slow_echo), get_json_schema(Counter().increment))


def test_several_calls_in_a_turn_run_in_order_on_one_instance() -> None:
    environment = ToolEnvironment([multiply], Counter)
    text = "first " + call("increment", '{"step": 2}') + call("multiply", '{"a": 3, "b": 4}') + call("increment", '{"step": 5}')
    (first, last), outcome = converse(environment, text, "done")
    assert first.reply == (
        {"role": "tool", "name": "increment", "content": "5"},
        {"role": "tool", "name": "multiply", "content": "12"},
        {"role": "tool", "name": "increment", "content": "10"},
    )
    assert first.message is not None
    assert first.message["content"] == "first"
    assert [c["function"]["name"] for c in first.message["tool_calls"]] == ["increment", "multiply", "increment"]
    assert last.reply is None
    assert last.message == {"role": "assistant", "content": "done"}
    assert outcome.reward == 10.0
    assert outcome.instance.columns == {"unused": 1, "prompt": [{"role": "user", "content": "go"}]}


@pytest.mark.parametrize(
    ("text", "failure", "words"),
    [
        ("<tool_call>{oops}</tool_call>", "syntax", "not valid JSON"),
        ('<tool_call>{"name": "multiply"', "syntax", "not closed"),
        ("<tool_call>[1]</tool_call>", "syntax", "not a JSON object"),
        (call("divide", "{}"), "unknown tool", "Tool divide not found."),
        (call("multiply", '{"a": 1}'), "arguments", "missing 1 required positional argument: 'b'"),
        (call("multiply", '{"a": 1, "b": 2, "c": 3}'), "arguments", "unexpected keyword argument 'c'"),
        (call("multiply", '{"a": "1", "b": 2}'), "arguments", "must be of type integer"),
        (call("multiply", "[1, 2]"), "syntax", "not a JSON object"),
        (call("increment", '{"step": -1}'), "exception", "step must not be negative"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "syntax", "nested too deeply"),
        (call("multiply", f'"{"[" * 100_000}"'), "syntax", "nested too deeply"),
        (call("multiply", '{"a": 1, "b": 1e999}'), "syntax", "too large"),
        (call("multiply", '{"a": 1, "b": NaN}'), "syntax", "not a number of JSON"),
        (call("multiply", '{"a": "\\ud83d", "b": 1}'), "syntax", "half of a character"),
    ],
)
def test_what_goes_wrong_is_an_answer_that_the_model_reads(text: str, failure: str, words: str) -> None:
    (first, second), outcome = converse(ToolEnvironment([multiply], Counter), text, call("increment", '{"step": 1}'))
    (made,) = first.calls
    assert made.failure == failure
    assert words in made.result
    assert made.result.startswith("{'error': ")
    assert isinstance(first.reply, tuple)
    assert first.reply[0]["content"] == made.result
    assert second.calls[0].failure is None, "the episode continues"
    assert outcome == Outcome(4.0)


class NoTextError(Exception):
    """Neither has a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def odd(kind: str) -> Any:
    """
    Returns or raises something odd.

    Args:
        kind: What.
    """
    if kind == "exit":
        sys.exit("bye")
    if kind == "assert":
        raise AssertionError
    if kind == "no text":
        raise NoTextError
    values = {"object": NoTextError(), "number": 10**5000, "half": "a\ud800b", "halves": ["a\ud800b", float("nan")]}
    return values[kind]


async def odd_async(kind: str) -> Any:
    """
    Does the same.

    Args:
        kind: What.
    """
    await asyncio.sleep(0)
    return odd(kind)


@pytest.mark.parametrize("tool", ["odd", "odd_async"])
def test_whatever_a_tool_raises_or_returns_the_episode_continues(tool: str) -> None:
    kinds = ["exit", "assert", "no text", "object", "number", "half", "halves"]
    text = "".join(call(tool, f'{{"kind": "{kind}"}}') for kind in kinds)
    (first, second), _ = converse(ToolEnvironment([odd, odd_async]), text, call(tool, '{"kind": "half"}'))
    assert [c.failure for c in first.calls] == ["exception"] * 5 + [None] * 2
    assert [c.result for c in first.calls[:4]] == [
        str({"error": e}) for e in ("bye", "AssertionError", "NoTextError", "no text")
    ]
    assert "4300 digits" in first.calls[4].result
    assert (first.calls[5].result, second.calls[0].result) == ("a?b", "a?b"), "a tokenizer takes no lone surrogate"
    assert first.calls[6].value is not None
    assert first.calls[6].value[0] == "a?b"


def test_what_a_tool_does_to_its_arguments_does_not_change_what_the_model_wrote() -> None:
    def pop(items: list[int]) -> int:
        """
        Takes the last one.

        Args:
            items: Some.
        """
        return items.pop()

    (first, _), _ = converse(ToolEnvironment([pop]), call("pop", '{"items": [1, 2]}'), "done")
    assert first.calls[0].result == "2"
    assert first.message is not None
    assert first.message["tool_calls"][0]["function"]["arguments"] == first.calls[0].arguments == {"items": [1, 2]}


def test_a_schema_of_ones_own_may_leave_things_open() -> None:
    def say(**arguments: Any) -> str:
        return str(arguments)

    for function in ({"name": "say"}, {"name": "say", "parameters": {"properties": {"word": True}}}):
        say.json_schema = {"type": "function", "function": function}  # type: ignore[attr-defined]
        (first, _), _ = converse(ToolEnvironment([say]), call("say", '{"word": 1}'), "done")
        assert first.calls[0].result == "{'word': 1}"


def test_async_tools_and_environments() -> None:
    class Waiting:
        async def reset(self) -> str:
            await asyncio.sleep(0.001)
            return " with a clue"

        async def get_reward(self) -> float:
            return 0.5

        async def get_turn_reward(self) -> float:
            return 0.25

    environment = ToolEnvironment([slow_echo], Waiting)
    episode = environment.begin(rollout())
    start = episode.start()
    assert start is not None
    assert start.result(120) == " with a clue"
    assert episode.answer(turn(call("slow_echo", '{"text": "hi"}'))).result(120).reward == 0.25
    assert episode.finish().result(120).reward == 0.5


def test_a_hang_ends_the_completion_and_nothing_else() -> None:
    def sleep(seconds: float) -> str:
        """
        Sleeps.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "slept"

    environment = ToolEnvironment([sleep], timeout_s=1.0)
    episode = environment.begin(rollout())
    observation = episode.answer(turn(call("sleep", '{"seconds": 0.01}') + call("sleep", '{"seconds": 60}'))).result(120)
    assert observation.reply is None
    assert observation.failure == "sleep took more than 1 s"
    assert [c.failure for c in observation.calls] == [None, "timeout"]
    assert episode.finish().result(120) == Outcome(), "rewards judge what there is"
    (first, _), _ = converse(environment, call("sleep", '{"seconds": 0.0}'), "done")
    assert first.reply == ({"role": "tool", "name": "sleep", "content": "slept"},)


def test_an_async_tool_that_blocks_the_event_loop_ends_its_completion_and_nothing_else() -> None:
    async def block() -> None:
        """Waits without awaiting."""
        time.sleep(60)

    environment = ToolEnvironment([block, slow_echo, multiply], timeout_s=0.5)
    observation = environment.begin(rollout()).answer(turn(call("block", "{}"))).result(120)
    assert observation.failure == "block took more than 0.5 s"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # until the blocked loop is replaced, async calls take too long
        observation = environment.begin(rollout()).answer(turn(call("slow_echo", '{"text": "hi"}'))).result(120)
        if observation.failure is None:
            break
    assert observation.calls[0].result == "hi"


class HungEnvironment(Counter):
    def reset(self, **columns: Any) -> None:  # type: ignore[override]
        time.sleep(60)


class ExitingEnvironment(Counter):
    def __init__(self) -> None:
        sys.exit("closed")


class InfiniteEnvironment(Counter):
    def get_reward(self) -> float:
        return float("inf")


class EnormousEnvironment(Counter):
    def get_reward(self) -> float:
        return 10**400


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        (HungEnvironment, "reset took more than 0.5 s"),
        (ExitingEnvironment, "__init__: SystemExit: closed"),
        (InfiniteEnvironment, "get_reward: ValueError: inf is not a finite number"),
        (EnormousEnvironment, "get_reward: OverflowError: int too large to convert to float"),
    ],
)
def test_an_environment_that_cannot_begin_or_end_fails_its_completion(kind: type, failure: str) -> None:
    _, outcome = converse(ToolEnvironment([], kind, timeout_s=0.5), "done")
    assert outcome == Outcome(None, failure)


def test_an_environment_that_fails_gives_no_reward() -> None:
    class Broken(Counter):
        def reset(self, **columns: Any) -> None:  # type: ignore[override]
            raise OSError("no connection")

    class Hung(Counter):
        def increment(self, step: int) -> int:
            """
            Never returns.

            Args:
                step: Anything.
            """
            time.sleep(60)
            return 0

    (observation,), outcome = converse(ToolEnvironment([], Broken), call("increment", '{"step": 1}'))
    assert observation.failure == "reset: OSError: no connection"
    assert outcome == Outcome(None, "reset: OSError: no connection")
    (_,), outcome = converse(ToolEnvironment([], Hung, timeout_s=0.1), call("increment", '{"step": 1}'))
    assert outcome == Outcome(None, "increment took more than 0.1 s")


def test_a_tool_that_sets_a_signal_handler_runs_in_the_main_thread() -> None:
    """As the tool of TRL's example does, for a time limit of its own. Python refuses it in every other thread."""

    def look_up(key: str) -> list[tuple[str, int]]:
        """
        Looks something up.

        Args:
            key: What.
        """
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.signal(signal.SIGALRM, before)
        if key == "none":
            raise KeyError(key)
        return [(key, 1)]

    environment = ToolEnvironment([look_up, multiply])
    several = call("look_up", '{"key": "a"}') + call("multiply", '{"a": 2, "b": 3}') + call("look_up", '{"key": "none"}')
    (first, _), _ = converse(environment, several, "done")
    assert [c.result for c in first.calls] == ["[('a', 1)]", "6", "{'error': \"'none'\"}"]
    assert [c.failure for c in first.calls] == [None, None, "exception"]
    assert first.calls[0].value == [["a", 1]]
    # A main thread that waits for other things learns by the callback that it has to ask.
    episode, woken = environment.begin(rollout()), threading.Event()
    answer = episode.answer(turn(several))
    answer.add_done_callback(lambda _: woken.set())
    while not answer.done():
        assert woken.wait(30)
        woken.clear()
    assert [c.failure for c in answer.result().calls] == [None, None, "exception"]


def test_elsewhere_a_signal_handler_is_an_error_that_the_model_reads() -> None:
    def alarm() -> None:
        """Sets a signal handler."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    observations: list[Observation] = []

    def run() -> None:
        observations.extend(converse(ToolEnvironment([alarm]), call("alarm", "{}"), "done")[0])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert "main thread" in observations[0].calls[0].result


def test_a_list_that_cannot_be_stored_is_a_text_for_rewards() -> None:
    def keys() -> list[Any]:
        """Lists something odd."""
        return [{(1, 2): 3}]

    (first, _), _ = converse(ToolEnvironment([keys]), call("keys", "{}"), "done")
    assert (first.calls[0].result, first.calls[0].value) == ("[{(1, 2): 3}]", None)


def test_the_last_turn_runs_no_calls() -> None:
    text = call("increment", '{"step": 1}')
    observations, outcome = converse(ToolEnvironment([], Counter, max_turns=2), text, text)
    assert [o.reply is None for o in observations] == [False, True]
    assert outcome.reward == 4.0
    episode = ToolEnvironment([], Counter).begin(rollout())
    assert episode.start() is not None
    assert episode.answer(turn(text, is_last=True)).result(120).calls == ()


def test_a_seed_comes_from_the_rollout_alone() -> None:
    class Seeded:
        def reset(self, seed: int) -> str:
            return str(seed)

    environment = ToolEnvironment([], Seeded)
    seeds = []
    for sample in (0, 1, 0):
        start = environment.begin(rollout(sample)).start()
        assert start is not None
        seeds.append(start.result(120))
    assert seeds[0] == seeds[2] != seeds[1]


def no_hints(a, b):  # type: ignore[no-untyped-def]
    """
    Adds.

    Args:
        a: One.
        b: Another.
    """


def no_docstring(a: int) -> int:
    return a


def by_position(*items: int) -> int:
    """
    Adds.

    Args:
        items: Numbers.
    """
    return sum(items)


@pytest.mark.parametrize(
    ("tools", "factory", "message"),
    [
        ([no_hints], None, r"tools\[0\]: the tool 'no_hints' can't be described to the model.*missing a type hint"),
        ([no_docstring], None, r"tools\[0\]: the tool 'no_docstring' can't be described.*docstring"),
        ([by_position], None, r"tools\[0\]: the tool 'by_position' takes 'items' by its position.*by its name"),
        ([multiply, multiply], None, "two tools are called 'multiply'"),
        ([42], None, "42 is not a tool"),
        ([Counter], None, "class Counter is not a tool"),
        ([], 42, "42 is not a class"),
        ([], object, "object has no method `reset`"),
        ([], lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_bad_input_gets_one_clear_message(tools: list[Any], factory: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        ToolEnvironment(tools, factory)


def test_a_reward_can_read_the_conversation() -> None:
    class Echo:
        def reset(self) -> None:
            self.read: list[Any] = []

        def say(self, **arguments: Any) -> str:
            return str(arguments["word"])

        def get_reward(self, messages: list[Any]) -> float:
            self.read += messages
            return float(len(messages))

    schema = {
        "name": "say",
        "description": "Says.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    }
    Echo.say.json_schema = {"type": "function", "function": schema}  # type: ignore[attr-defined]
    environment = ToolEnvironment(factory=Echo)
    assert environment.tools == ({"type": "function", "function": schema},), "a function may carry its own schema"
    _, outcome = converse(environment, call("say", '{"word": "tea"}'), "done")
    assert outcome.reward == 3.0
    assert [message["role"] for message in outcome.instance.read] == ["assistant", "tool", "assistant"]
    assert [message["content"] for message in outcome.instance.read[1:]] == ["tea", "done"]
