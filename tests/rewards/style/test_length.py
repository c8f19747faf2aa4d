"""Rewards by length in tokens and by repetition."""

from dataclasses import replace

import numpy as np
import pytest
from trl.rewards.other_rewards import get_repetition_penalty_reward

from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Reward, Score
from oncurve.rewards.mix import aspects_of
from oncurve.rewards.style.length import (
    CosineOptions,
    CosineReward,
    LengthOptions,
    LengthReward,
    OverlongOptions,
    OverlongReward,
    RepetitionOptions,
    RepetitionReward,
)
from tests.rewards.builders import completion, values


def value(reward: Reward, one: Completion) -> float | None:
    return aspects_of(reward, Group(Prompt(id="p", text="?"), np.zeros(1, dtype=np.int64), (one,)))[0].value


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (150, -1.0)])
def test_overlong(length: int, expected: float) -> None:
    reward = OverlongReward("overlong", 1.0, OverlongOptions(limit=100, buffer=20))
    assert value(reward, completion("", length)) == pytest.approx(expected)


@pytest.mark.parametrize(("length", "expected"), [(50, 1.0), (40, 0.5), (60, 0.5), (30, 0.0), (99, 0.0)])
def test_target(length: int, expected: float) -> None:
    reward = LengthReward("length", 1.0, LengthOptions(target=50, tolerance=20))
    assert value(reward, completion("", length)) == pytest.approx(expected)
    assert value(LengthReward("length", 1.0, LengthOptions(target=50)), completion("", 25)) == pytest.approx(0.5)


def test_tokens_of_an_environment_do_not_count() -> None:
    whole = completion("", 100)
    mask = np.arange(100) < 50
    half = Completion(whole.token_ids, "", "end", whole.logps, whole.logps, whole.logps, mask)
    assert value(LengthReward("length", 1.0, LengthOptions(target=50)), half) == 1.0


def test_cosine_length() -> None:
    """At half the limit the cosine is 0, so the reward is the mean of both ends."""
    reward = CosineReward("cosine", 1.0, CosineOptions(limit=100, take="tag"))
    texts = ["<answer>7</answer>", "<answer>8</answer>"]
    found = [
        reward.score(Group(Prompt("p", "?", columns={"answer": "7"}), np.zeros(1, np.int64), (completion(text, length),)))[0]
        for text in texts
        for length in (0, 50, 99, 100, 140)
    ]
    rewards = [result.value for result in found if isinstance(result, Score)]
    assert rewards == pytest.approx([2.0, 1.5, 1.0, -10.0, -10.0, -10.0, -5.0, 0.0, -10.0, -10.0], abs=0.003)
    assert values(reward, "7") == [None]


def test_repetition_as_trl_has_it() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 3, size=length).tolist() for length in (0, 1, 2, 3, 10, 40)] + [[5] * 9, list(range(9))]
    for size in (1, 2, 3, 5):
        trl = get_repetition_penalty_reward(ngram_size=size, max_penalty=-0.5)(completion_ids=rows)
        ours = RepetitionReward("repetition", 1.0, RepetitionOptions(size=size, penalty=-0.5))
        completions = [replace(completion("x", len(row)), token_ids=np.array(row, dtype=np.int64)) for row in rows]
        found = ours.score(Group(Prompt("p", "?"), np.zeros(1, np.int64), tuple(completions)))
        assert [result.value for result in found if isinstance(result, Score)] == pytest.approx(trl)
