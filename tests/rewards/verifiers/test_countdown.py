"""Countdown's partial credit, computed by hand: form 0.1, numbers 0.1, closeness up to 0.3."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from oncurve.recipe.schema.sections import Task
from oncurve.rewards.verifiers.puzzles import CountdownReward, CountdownRewardOptions
from oncurve.tasks.registry import build_task
from tests.rewards.builders import aspects, values

REWARD = CountdownReward("countdown", 1.0)


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("5*7-3", 1.0),
        ("(7*5)-3", 1.0),
        ("32", 0.1),
        ("5*7", 0.2 + 0.3 * (1 - 3 / 32)),
        ("7", 0.2 + 0.3 * (1 - 25 / 32)),
        ("3-7", 0.2),
        ("5*5+7", 0.1),
        ("5*7-3-0", 0.1),
        ("7*5*3", 0.2),
        ("5/7", 0.2 + 0.3 * (1 - (32 - 5 / 7) / 32)),
        ("5*7-", 0.0),
        ("5*7-3=32", 0.0),
        ("9**9**9", 0.0),
        ("7/(5-5)", 0.0),
        ("", 0.0),
        ("(" * 5000, 0.0),
        ("1+" * 5000 + "1", 0.0),
        ("__import__('os')", 0.0),
    ],
)
def test_by_hand(answer: str, value: float) -> None:
    text = f"<think>…</think><answer>{answer}</answer>"
    assert values(REWARD, text, numbers=[3, 5, 7], target=32) == [pytest.approx(value)]


def test_a_number_given_twice_may_be_used_twice() -> None:
    assert values(REWARD, "<answer>5*5</answer>", "<answer>5*5*5</answer>", numbers=[5, 5, 2], target=25) == [1.0, 0.1]


def test_no_answer_and_no_columns() -> None:
    assert values(REWARD, "5*7-3", "<think><answer>5*7-3</answer>", numbers=[3, 5, 7], target=32) == [0.0, 0.0]
    assert values(REWARD, "<answer>5*7-3</answer>", target=32) == [None]


def test_columns_that_make_no_sense_are_a_failure() -> None:
    (aspect,) = aspects(REWARD, "<answer>5</answer>", columns={"numbers": ["x"], "target": 5})
    assert aspect.value is None
    assert aspect.failure is not None


def test_demonstrations_get_1() -> None:
    task = build_task(Task.model_validate({"type": "countdown", "heldout": 10, "examples": 50, "numbers": 4}))
    for example in task.examples:
        assert values(REWARD, example.completion, **example.prompt.columns) == [1.0]


@settings(deadline=None)
@given(st.text(alphabet="3579+-*/() ", max_size=30))
def test_only_a_right_answer_gets_one(answer: str) -> None:
    (value,) = values(REWARD, f"<answer>{answer}</answer>", numbers=[3, 5, 7], target=32)
    assert value is not None
    assert value == 1.0 or 0 <= value <= 0.5


def test_partial_credit_stays_below_one() -> None:
    with pytest.raises(ValidationError, match="must stay below 1"):
        CountdownRewardOptions(form=0.5, numbers=0.2, closeness=0.3)
