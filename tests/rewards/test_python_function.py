"""Python functions as rewards, and TRL's own functions unchanged."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from trl.rewards.format_rewards import think_format_reward
from trl.rewards.other_rewards import get_soft_overlong_punishment

from oncurve.errors import RecipeError, RewardError
from oncurve.plugins import load_function, without_place
from oncurve.rewards.base import Reward
from oncurve.rewards.mix import RewardMix, aspects_of
from oncurve.rewards.python_function import FunctionReward, PythonOptions, as_reward, python_reward
from oncurve.rewards.style.length import OverlongOptions, OverlongReward
from tests.rewards.builders import group

CHAT = [{"role": "user", "content": "Hi"}]


def run(function: Any, *texts: str, prompt: Any = "12+34=", **columns: Any) -> list[tuple[float | None, str | None]]:
    """Values and failures, without the lines of this file at which functions fail."""
    aspects = aspects_of(as_reward(function), group(*texts, prompt=prompt, **columns))
    return [(a.value, a.failure and re.sub(r" \(test_python_function\.py:\d+\)$", "", a.failure)) for a in aspects]


def numbers(function: Any, *texts: str, prompt: Any = "12+34=", **columns: Any) -> list[float | None]:
    results = run(function, *texts, prompt=prompt, **columns)
    assert all(failure is None for _, failure in results), results
    return [value for value, _ in results]


def test_per_completion() -> None:
    assert numbers(lambda text: len(text), "a", "bbb") == [1.0, 3.0]
    assert numbers(lambda completion, answer: completion == answer, "46", "47", answer="46") == [1.0, 0.0]
    assert numbers(lambda completion, prompt: prompt + completion == "12+34=46", "46") == [1.0]
    assert numbers(lambda completion, missing=7: missing, "46") == [7.0]
    assert numbers(lambda completion, **columns: len(columns), "46", answer="46", extra=1) == [3.0]
    assert numbers(lambda completion, prompt: prompt[0]["content"] == "Hi", "x", prompt=CHAT) == [1.0]
    assert numbers(lambda _: None, "a") == [None]


def test_a_builtin_function() -> None:
    assert numbers(len, "abc") == [3.0]


def test_only_the_completion_that_raises_fails() -> None:
    assert run(lambda text: 1 / len(text), "", "a") == [(None, "ZeroDivisionError: division by zero"), (1.0, None)]


def test_a_column_that_is_not_there() -> None:
    ((value, failure),) = run(lambda completion, solution: 1.0, "a", answer="46")
    assert value is None
    assert failure == "TypeError: the function needs 'solution', and the prompt's columns are: answer, prompt"


def test_per_group_as_trl_calls_it() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [float(len(completion)) for completion in completions]

    assert numbers(reward, "a", "bb", answer="46") == [1.0, 2.0]
    assert (seen["prompts"], seen["completions"], seen["answer"]) == (["12+34="] * 2, ["a", "bb"], ["46", "46"])
    assert seen["completion_ids"] == [[0], [0, 1]]
    seen["log_metric"]("name", 1.0)


def test_what_a_trl_function_logs_for_completions_is_their_reason() -> None:
    def reward(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("found", [text[:1] for text in completions])
        log_extra("length", [len(text) for text in completions])
        return [0.5] * len(completions)

    aspects = aspects_of(as_reward(reward), group("a", "bb"))
    assert [(a.value, a.reason) for a in aspects] == [(0.5, "found a, length 1"), (0.5, "found b, length 2")]

    def too_few(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("found", ["a"])
        return [0.5] * len(completions)

    assert "log_extra got 1 values of 'found' for 2 completions" in str(run(too_few, "a", "bb"))

    def too_few_scores(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("found", completions)
        return [0.5]

    assert "returned 1 scores for 2 completions" in str(run(too_few_scores, "a", "bb"))


def test_the_log_says_that_log_metric_is_not_recorded() -> None:
    def named(completions: list[str], log_metric: Any) -> None: ...

    def in_kwargs(completions: list[str], **kwargs: Any) -> None:
        kwargs["log_metric"]("accuracy", 1.0)

    for function in (named, in_kwargs):
        (line,) = RewardMix([as_reward(function)]).log_lines
        assert "log_metric is not recorded" in line
    assert not RewardMix([as_reward(lambda completions: None), as_reward(len)]).log_lines


def test_the_state_of_trl_s_trainer_can_not_be_read() -> None:
    """With a default in its place, the reward would be another one than in TRL."""

    def unread(completions: list[str], trainer_state: Any) -> list[float]:
        return [1.0] * len(completions)

    def read(completions: list[str], trainer_state: Any = None, **kwargs: Any) -> list[float]:
        return [1.0 if trainer_state is None else trainer_state.global_step] * len(completions)

    assert numbers(unread, "a") == [1.0]
    RewardMix([as_reward(unread)]).check_columns([group("a").prompt])
    ((value, failure),) = run(read, "a")
    assert value is None
    assert failure is not None
    assert "trainer_state.global_step can't be read" in failure


def test_chats_are_messages_to_a_trl_function() -> None:
    def reward(completions: list[list[dict[str, str]]], prompts: list[list[dict[str, str]]]) -> list[bool]:
        return [c == [{"role": "assistant", "content": "yo"}] and p == CHAT for c, p in zip(completions, prompts, strict=True)]

    assert numbers(reward, "yo", "no", prompt=CHAT) == [1.0, 0.0]


def test_a_group_function_that_raises_fails_the_group() -> None:
    def reward(completions: list[str]) -> list[float]:
        raise ValueError("no")

    assert run(reward, "a", "b") == [(None, "ValueError: no")] * 2


def test_async_functions_run_together() -> None:
    waiting = 0

    async def reward(completion: str) -> float:
        nonlocal waiting
        waiting += 1
        for _ in range(200):
            if waiting == 3:
                break
            await asyncio.sleep(0.01)
        return waiting / len(completion)

    assert run(reward, "a", "", "b") == [(3.0, None), (None, "ZeroDivisionError: division by zero"), (3.0, None)]


def test_async_per_group() -> None:
    async def reward(completions: list[str], **_: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [None, 1.0]

    async def broken(completions: list[str]) -> list[float]:
        raise ValueError("no")

    assert numbers(reward, "a", "b") == [None, 1.0]
    assert run(broken, "a") == [(None, "ValueError: no")]


def test_async_inside_a_running_loop() -> None:
    """A notebook already runs an event loop; the reward must not need it."""

    async def reward(completion: str) -> float:
        await asyncio.sleep(0)
        return 1.0

    async def notebook() -> list[float | None]:
        return numbers(reward, "a")

    assert asyncio.run(notebook()) == [1.0]


def test_trl_s_own_functions() -> None:
    texts = ("<think>a</think>b", "b")
    assert numbers(think_format_reward, *texts, prompt=CHAT) == [1.0, 0.0]
    overlong = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    lengths = [0, 80, 81, 90, 99, 100, 101, 140]
    ours: Reward = OverlongReward("overlong", 1.0, OverlongOptions(limit=100, buffer=20))
    sampled = group(*("x" * length for length in lengths))
    assert [a.value for a in aspects_of(ours, sampled)] == pytest.approx(
        [a.value for a in aspects_of(as_reward(overlong), sampled)]
    )


def test_arguments_and_names() -> None:
    reward = FunctionReward(lambda completion, bonus: bonus, "mine", 2.0, {"bonus": 3})
    assert [(a.name, a.value, a.weight) for a in aspects_of(reward, group("a", bonus=1))] == [("mine", 3.0, 2.0)]

    class Judge:
        def __call__(self, completion: str) -> float:
            return 1.0

    assert (as_reward(Judge()).name, as_reward(len).name, as_reward(reward)) == ("Judge", "len", reward)
    with pytest.raises(RewardError, match="a reward is a function"):
        as_reward("answer")  # type: ignore[arg-type]


def test_functions_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Box:\n    size: int = 2\n    @staticmethod\n    def of(text):\n        return 2.0\n"
        "def long(completion):\n    return len(completion) / Box().size\nNUMBER = 3\n"
    )
    assert numbers(load_function(f"{path}:long", "here"), "abcd") == [2.0]
    assert numbers(load_function(f"{path}:Box.of", "here"), "abcd") == [2.0]
    assert load_function("os.path:basename", "here")("a/b") == "b"
    (tmp_path / "broken.py").write_text("1 / 0")
    for reference, because in [
        ("long", "not written as"),
        (f"{path}:", "not written as"),
        (f"{path}:lang", "did you mean 'long'?"),
        (f"{path}:NUMBER", "is of type int: it can't be called"),
        (f"{tmp_path}/none.py:long", "there is no file"),
        (f"{tmp_path}/broken.py:long", "ZeroDivisionError"),
        ("no_such_module_here:long", "No module named"),
    ]:
        with pytest.raises(RecipeError) as caught:
            load_function(reference, "rewards.mine.function")
        assert caught.value.where == "rewards.mine.function"
        assert because in caught.value.because


def limited(path: Path, name: str, seconds: float = 120.0, **options: Any) -> Reward:
    return python_reward("mine", 1.0, PythonOptions(function=f"{path}:{name}", seconds=seconds, **options))


def test_functions_with_a_time_limit(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, time, asyncio\nimport numpy as np\n"
        "def hang(completion):\n    if completion == 'b': 9**9**9\n    return len(completion)\n"
        "def batch(completions, answer, **columns): return np.array([len(c) for c in completions]) + len(answer)\n"
        "async def later(completion, bonus):\n    await asyncio.sleep(0)\n    return bonus\n"
        "def die(completion): os._exit(1)\ndef raises(completion): raise KeyError('no')\ndef none(completion): return None\n"
    )
    results = [(a.value, a.failure) for a in aspects_of(limited(path, "hang", 2.0), group("a", "b", "ccc"))]
    assert results == [(1.0, None), (None, "TimeoutError: it took more than 2 s"), (3.0, None)]
    assert [a.value for a in aspects_of(limited(path, "batch"), group("a", "bb", answer="xy"))] == [3.0, 4.0]
    assert [a.value for a in aspects_of(limited(path, "later", arguments={"bonus": 2.5}), group("a"))] == [2.5]
    assert [a.failure for a in aspects_of(limited(path, "die"), group("a"))] == [
        "WorkerDiedError: the worker process ended (exit code 1)"
    ]
    assert [a.failure for a in aspects_of(limited(path, "raises"), group("a"))] == [
        "WorkerFailedError: KeyError: 'no' (mine.py:11)"
    ]
    assert [(a.value, a.failure) for a in aspects_of(limited(path, "none"), group("a"))] == [(None, None)]


def test_a_failure_names_the_line_in_the_user_s_folder(tmp_path: Path) -> None:
    """The innermost one: not that of a library that the function calls, and the file's name without its path."""
    (tmp_path / "helper_of_mine.py").write_text("def parse(text):\n    return {}['x']\n")
    (tmp_path / "mine.py").write_text(
        "import json, sys\nsys.path.append(__file__.rpartition('/')[0])\n"
        "def decode(completion):\n    return json.loads(completion)\n"
        "def batch(completions):\n    from helper_of_mine import parse\n    return [parse(c) for c in completions]\n"
        "async def later(completion):\n    raise KeyError('x')\n"
        "def lazy(completions):\n    return (1 / 0 for c in completions)\n"
        "class Judge:\n    def __call__(self, completion):\n        raise KeyError('x')\njudge = Judge()\n"
        "def none(completion):\n    return 'a'\n"
    )
    for name, failure in [
        ("decode", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py:4)"),
        ("batch", "KeyError: 'x' (helper_of_mine.py:2)"),
        ("later", "KeyError: 'x' (mine.py:9)"),
        ("lazy", "ZeroDivisionError: division by zero (mine.py:11)"),
        ("judge", "KeyError: 'x' (mine.py:14)"),
        ("none", "returned str instead of a number"),
    ]:
        function = load_function(f"{tmp_path / 'mine.py'}:{name}", "here")
        assert run(function, "a") == run(function, "a") == [(None, failure)]
    namespace: dict[str, Any] = {}
    exec("def typed(completion):\n    raise KeyError('x')", namespace)
    assert run(namespace["typed"], "a") == [(None, "KeyError: 'x'")]


def test_a_place_that_can_t_be_found_is_left_out(tmp_path: Path) -> None:
    """A reward that fails never stops the run, whatever its function is made of."""
    namespace: dict[str, Any] = {}
    exec(compile("def typed(completion):\n    raise KeyError('x')", "x" * 300, "exec"), namespace)
    assert run(namespace["typed"], "a") == [(None, "KeyError: 'x'")]

    def endless(completion: str) -> float:
        raise KeyError("x")

    reward = FunctionReward(endless, "endless")
    assert "completion" in reward._parameters
    endless.__wrapped__ = endless  # type: ignore[attr-defined]
    assert [a.failure for a in aspects_of(reward, group("a"))] == ["KeyError: 'x'"]

    class Own:
        name, weight, place_of = "own", 1.0, "the shop"

        def score(self, group: Any) -> list[float]:
            raise KeyError("x")

    assert run(Own(), "a") == [(None, "KeyError: 'x'")]


def test_a_long_message_keeps_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def raises(completion):\n    raise ValueError('x' * 900)\n")
    for reward, start in [
        (limited(path, "raises"), "WorkerFailedError: ValueError: "),
        (FunctionReward(load_function(f"{path}:raises", "here"), "mine"), "ValueError: "),
    ]:
        (aspect,) = aspects_of(reward, group("a"))
        assert aspect.failure == f"{start}{'x' * 300}"[:300] + " (mine.py:2)"


def test_a_place_is_removed_exactly(tmp_path: Path) -> None:
    for name, place in [("mine.py", " (mine.py:2)"), ("my rewards.py", " (my rewards.py:2)"), ("mine (1).py", "")]:
        (tmp_path / name).write_text("def raises(completion):\n    raise ValueError('no (at 10:30)')\n")
        (failure,) = [failure for _, failure in run(load_function(f"{tmp_path / name}:raises", "here"), "a")]
        assert failure == f"ValueError: no (at 10:30){place}"
        assert without_place(failure) == "ValueError: no (at 10:30)"


def test_a_function_that_changes_its_columns_changes_no_later_score() -> None:
    def per_group(completions: list[str], answer: list[list[str]]) -> list[float]:
        return [float(len(golds.pop())) for golds in answer]

    def per_completion(completion: str, answer: list[str], more: dict[str, list[int]]) -> float:
        answer.append("wrong")
        more["a"].append(1)
        return float(len(answer) + len(more["a"]))

    scored = group("a", "b", answer=["12"], more={"a": []})
    for _ in range(2):
        assert [a.value for a in aspects_of(FunctionReward(per_group, "f"), scored)] == [2.0, 2.0]
        assert [a.value for a in aspects_of(FunctionReward(per_completion, "g"), scored)] == [3.0, 3.0]
    assert scored.prompt.columns == {"answer": ["12"], "more": {"a": []}}
