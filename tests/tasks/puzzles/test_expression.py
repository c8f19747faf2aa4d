"""The parser of arithmetic that a model writes."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.tasks.puzzles.expression import ExpressionError, parse


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, (7,)),
        ("1+2*3", 7, (1, 2, 3)),
        ("(1+2)*3", 9, (1, 2, 3)),
        ("10-3-2", 5, (10, 3, 2)),
        ("1/3", Fraction(1, 3), (1, 3)),
        ("12/3/2", 2, (12, 3, 2)),
        (" 2 × 3 ÷ 4 − 1 ", Fraction(1, 2), (2, 3, 4, 1)),
        ("((((5))))", 5, (5,)),
        ("007", 7, (7,)),
    ],
)
def test_values(text: str, value: Fraction, numbers: tuple[int, ...]) -> None:
    assert parse(text).value == value
    assert parse(text).numbers == numbers


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "1+", "+1", "-1", "1 2", "(1", "1)", "()", "1//2", "9**9**9", "2^3", "1/0", "1/(2-2)", "1.5", "1e9", "x",
        "5=5",
        "__import__('os').system('true')", "٣+٤", "５", "1" * 10, "1+" * 5000 + "1", "(" * 21 + "1" + ")" * 21, "(" * 10_000,
        "²",
    ],
)  # fmt: skip
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)


def test_the_worst_text_is_quick() -> None:
    started = time.process_time()
    parse("999999999*" * 19 + "9")
    parse("(" * 20 + "1" + ")" * 20)
    assert time.process_time() - started < 2


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/() ", max_size=60))
def test_agrees_with_python_on_what_both_parse(text: str) -> None:
    try:
        expression = parse(text)
    except ExpressionError:
        return
    spaced = "".join(f"Fraction({part})" if part.isdigit() else part for part in _split(text))
    assert eval(spaced, {"Fraction": Fraction}) == expression.value


def _split(text: str) -> list[str]:
    parts: list[str] = []
    for character in text:
        if character.isdigit() and parts and parts[-1].isdigit():
            parts[-1] = (parts[-1] + character).lstrip("0") or "0"
        else:
            parts.append(character)
    return parts
