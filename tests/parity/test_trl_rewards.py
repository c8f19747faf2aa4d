"""TRL's own rewards as oracles: the same scores for the same inputs, and the cases in which both differ on purpose."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Reward
from oncurve.rewards.mix import aspects_of
from oncurve.rewards.style.format import FormatOptions, FormatReward
from oncurve.rewards.style.length import (
    CosineOptions,
    CosineReward,
    OverlongOptions,
    OverlongReward,
    RepetitionOptions,
    RepetitionReward,
)
from oncurve.rewards.verifiers.math import MathOptions, MathReward

BOXED = MathReward("math", 1.0, MathOptions(take="boxed", column="solution", seconds=60.0))
THINK = FormatReward("format", 1.0, FormatOptions(pattern=r"<think>(?!.*<think>).*?</think>.*"))


def build_group(texts: list[str], ids: list[list[int]] | None = None, **columns: object) -> Group:
    rows = []
    for text, tokens in zip(texts, ids or [[0]] * len(texts), strict=True):
        zeros = np.zeros(len(tokens), np.float32)
        rows.append(Completion(np.array(tokens, np.int64), text, "end", zeros, zeros, zeros, np.ones(len(tokens), bool)))
    return Group(Prompt("p", "?", columns=columns), np.zeros(1, np.int64), tuple(rows))


def ours(reward: Reward, group: Group) -> list[float | None]:
    return [aspect.value for aspect in aspects_of(reward, group)]


def messages(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def without_timeout(reward: Callable[..., list[float | None]], *arguments: object) -> list[float | None]:
    """TRL's rewards count an answer that takes more than 5 s as wrong, but off the main thread they have no clock."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(reward, *arguments).result()


TOKENS = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4)


@settings(deadline=None)
@given(ids=TOKENS, limit=st.integers(1, 40), data=st.data())
def test_soft_overlong_punishment(ids: list[list[int]], limit: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, limit))
    expected = get_soft_overlong_punishment(limit, buffer)(ids)
    assert (
        ours(OverlongReward("o", 1.0, OverlongOptions(limit=limit, buffer=buffer)), build_group([""] * len(ids), ids))
        == expected
    )


@settings(deadline=None)
@given(ids=TOKENS, size=st.integers(1, 5), penalty=st.floats(-3, 0, allow_nan=False))
def test_repetition_penalty(ids: list[list[int]], size: int, penalty: float) -> None:
    expected = get_repetition_penalty_reward(size, penalty)(ids)
    scores = ours(RepetitionReward("r", 1.0, RepetitionOptions(size=size, penalty=penalty)), build_group([""] * len(ids), ids))
    assert scores == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", " "]), max_size=8).map("".join))
def test_think_format(text: str) -> None:
    assert ours(THINK, build_group([text])) == think_format_reward(messages(text))


@pytest.mark.parametrize("length", [1, 25, 50, 99])
def test_cosine_length(length: int) -> None:
    texts = [r"so \boxed{\frac{1}{3}}", r"so \boxed{\frac{1}{2}}"]
    ids = [[1] * length] * 2
    expected = get_cosine_scaled_reward(100)(messages(*texts), [r"$\frac{1}{3}$"] * 2, ids)
    options = CosineOptions(limit=100, right=(1.0, 0.5), wrong=(-1.0, -0.5), take="boxed")
    assert ours(CosineReward("c", 1.0, options), build_group(texts, ids, answer=r"\frac{1}{3}")) == pytest.approx(expected)


def test_cosine_length_at_the_limit_differs() -> None:
    """The paper's reward of a completion that exceeds the limit is one number, right or wrong; TRL has none."""
    ids = [[1] * 100]
    assert get_cosine_scaled_reward(100)(messages(r"\boxed{1}"), ["$1$"], ids) == [0.5]
    options = CosineOptions(limit=100, right=(1.0, 0.5), wrong=(-1.0, -0.5), take="boxed")
    assert ours(CosineReward("c", 1.0, options), build_group([r"\boxed{1}"], ids, answer="1")) == [-10.0]


AGREED = [
    (r"My answer is \boxed{\frac{1}{3}}", r"$\frac{1}{3}$"),
    (r"My answer is \boxed{\frac{2}{6}}", r"$\frac{1}{3}$"),
    (r"My answer is \boxed{\frac{1}{2}}", r"$\frac{1}{3}$"),
    (r"\boxed{18}", "18"),
    (r"\boxed{18.0}", "18"),
    (r"\boxed{17}", "18"),
    (r"\boxed{x^2+2x+1}", r"$(x+1)^2$"),
    (r"\boxed{\{1,2\}}", r"$\{2,1\}$"),
    (r"\boxed{[0,1)}", r"$[0,1)$"),
    (r"\boxed{(0,1)}", r"$[0,1)$"),
    (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$"),
    (r"\boxed{5 \text{ cm}}", "5"),
    (r"no box at all", "18"),
    (r"\boxed{1,000}", "1000"),
]


def test_accuracy() -> None:
    texts, golds = zip(*AGREED, strict=True)
    expected = without_timeout(accuracy_reward, messages(*texts), list(golds))
    assert [ours(BOXED, build_group([text], solution=gold))[0] for text, gold in AGREED] == expected
    assert set(expected) == {0.0, 1.0}


def test_reasoning_accuracy() -> None:
    """What is thought does not count, and thinking that does not end is no answer."""
    texts = [
        r"<think> so </think> It is \boxed{\frac{1}{3}}",
        r"<think> so </think> It is \boxed{\frac{1}{2}}",
        r"<think> partly \boxed{\frac{1}{3}} but no end",
        r"<think> \boxed{\frac{1}{3}} </think> I don't know",
        r"so </think> \boxed{\frac{1}{3}}",
    ]
    expected = without_timeout(reasoning_accuracy_reward, messages(*texts), [r"$\frac{1}{3}$"] * len(texts))
    assert ours(BOXED, build_group(texts, solution=r"\frac{1}{3}")) == expected == [1.0, 0.0, 0.0, 0.0, 1.0]


DIFFER = [
    # text, gold, TRL, here: why
    (r"\boxed{18} then \boxed{20}", "20", 0.0, 1.0),  # the last box counts; to TRL both are one answer
    (r"\boxed{\text{yes}}", "yes", None, 1.0),  # words are compared as words
    (r"\boxed{\frac12}", r"\frac12", None, 1.0),  # a bare formula is a gold too
    (r"It is $18$.", "18", 0.0, 0.0),  # the same: with take = "boxed" only boxes count
]


@pytest.mark.parametrize(("text", "gold", "theirs", "here"), DIFFER)
def test_where_accuracy_differs(text: str, gold: str, theirs: float | None, here: float) -> None:
    assert without_timeout(accuracy_reward, messages(text), [gold]) == [theirs]
    assert ours(BOXED, build_group([text], solution=gold)) == [here]


def test_where_reasoning_differs() -> None:
    """TRL gives 0 to an answer without any thinking; here that is the business of the reward `format`."""
    assert reasoning_accuracy_reward(messages(r"\boxed{3}"), ["$3$"]) == [0.0]
    assert ours(BOXED, build_group([r"\boxed{3}"], solution="3")) == [1.0]
