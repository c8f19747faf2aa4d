"""Partial credit for the columns of sums, computed by hand."""

import pytest

from oncurve.rewards.verifiers.puzzles import ColumnsReward
from tests.rewards.builders import group

REWARD = ColumnsReward("columns", 1.0)


@pytest.mark.parametrize(
    ("thought", "value"),
    [
        ("<think>75:12,48:13,30:04</think><answer>432</answer>", 1.0),
        ("<think>75:12,48:13,30:04</think><answer>9</answer>", 1.0),
        ("<think>75:12,48:12,30:04</think>", 2 / 3),
        ("<think>75:12,48:13</think>", 2 / 3),
        ("<think>75:12,48:13,30:04,00:00</think>", 3 / 4),
        ("<think>48:13,75:12,30:04</think>", 1 / 3),
        ("<think></think>", 0.0),
        ("<think>75:12,48:13,30:04", 0.0),
        ("75:12,48:13,30:04", 0.0),
        ("", 0.0),
    ],
)
def test_by_hand(thought: str, value: float) -> None:
    (score,) = REWARD.score(group(thought, prompt="347+85="))
    assert not isinstance(score, BaseException)
    assert score.value == pytest.approx(value)


def test_a_prompt_that_asks_no_sum_is_not_graded() -> None:
    (score,) = REWARD.score(group("<think>75:12</think>", prompt="reach 7 from 3 and 4:"))
    assert not isinstance(score, BaseException)
    assert score.value is None
