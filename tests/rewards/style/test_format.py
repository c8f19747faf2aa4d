"""The format of completions."""

import pytest

from oncurve.errors import RecipeError
from oncurve.rewards.style.format import FormatOptions, FormatReward
from tests.rewards.builders import aspects, values

STRICT, SOFT = FormatReward("format", 1.0), FormatReward("format", 1.0, FormatOptions(style="soft"))


@pytest.mark.parametrize(
    ("text", "strict", "soft"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        (" <think>a\nb</think>\n<answer>b</answer>\n", 1.0, 1.0),
        ("<think>a</think><answer>b", 0.0, 0.6),
        ("<think>a<answer>b</answer>", 0.0, 0.6),
        ("<answer>b</answer><think>a</think>", 0.0, 0.8),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, 0.4),
        ("<think>a</think>so<answer>b</answer>", 0.0, 0.8),
        ("<think>a</think><answer>b</answer> bye", 0.0, 0.8),
        ("<think></think><answer>b</answer>", 0.0, 0.8),
        ("<think>a</think><answer> </answer>", 0.0, 0.8),
        ("<think>a<answer>b</think></answer>", 0.0, 0.8),
        ("<THINK>a</THINK><answer>b</answer>", 0.0, 0.4),
        ("", 0.0, 0.0),
        ("<answer>" * 10_000, 0.0, 0.0),
    ],
)
def test_tags(text: str, strict: float, soft: float) -> None:
    assert values(STRICT, text) == [strict]
    assert values(SOFT, text) == [pytest.approx(soft)]


def test_thinking_opened_by_the_template() -> None:
    reward = FormatReward("format", 1.0, FormatOptions(think_opened=True))
    assert values(reward, "a</think><answer>b</answer>", "<think>a</think><answer>b</answer>") == [1.0, 0.0]


def test_a_pattern_matches_the_complete_text() -> None:
    reward = FormatReward("format", 1.0, FormatOptions(pattern=r"\d+(\n.*)?"))
    assert values(reward, "12", "12\nand\nmore", "a12", "12a") == [1.0, 1.0, 0.0, 0.0]


def test_catastrophic_backtracking_fails_in_time() -> None:
    reward = FormatReward("format", 1.0, FormatOptions(pattern=r"(a|a|aa)+$", seconds=0.05))
    bad, good = aspects(reward, "a" * 60 + "b", "aa")
    assert bad.value is None
    assert "took more than 0.05 s" in (bad.failure or "")
    assert good.value == 1.0


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(RecipeError, match=r"rewards\.shape\.pattern"):
        FormatReward("shape", 1.0, FormatOptions(pattern="("))
