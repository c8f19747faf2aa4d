"""Lengths in tokens."""

import numpy as np
import pytest

from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Reward
from oncurve.rewards.length import LengthOptions, LengthReward, OverlongOptions, OverlongReward
from oncurve.rewards.mix import aspects_of
from tests.rewards.builders import completion


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
