from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncurve.errors import printable
from oncurve.terminal.text import BARS, duration, number, percent, score, shorten, signed, size, sparkline


def test_a_curve_rises_from_the_lowest_bar_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BARS
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([1.0, math.nan, 2.0], 3) == "▁ █"
    assert sparkline([5.0, 5.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert sparkline([math.nan], 8) == " "


def test_fixed_ends_place_a_value_on_their_scale() -> None:
    assert sparkline([0.5], 8, 0.0, 1.0) == "▅"
    assert sparkline([-1.0, 2.0], 8, 0.0, 1.0) == "▁█"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60), st.integers(0, 40))
def test_a_curve_is_never_wider_than_requested(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.98765, "0.988"),
        (23.44, "23.4"),
        (0.012345, "0.0123"),
        (4210.4, "4,210"),
        (3e-7, "3.0e-07"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_shares_scores_times_and_sizes() -> None:
    assert percent(0.846, 1) == "84.6 %"
    assert score(0.1) == "0.10"
    assert score(-1.0) == "−1.00"
    assert score(0.004) == "0.00400"
    assert signed(-1.214) == "−1.21"
    assert [duration(s) for s in (7, 754, 3723, 273600, None)] == ["0:07", "12:34", "1:02:03", "3 d 4 h", "–"]
    assert [size(n) for n in (12, 842_112, 1_720_000, 7_600_000_000)] == ["12", "842k", "1.72M", "7.6B"]


def test_a_model_can_not_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\x07\tc\nd") == "a�[2Jb�\tc\nd"
    assert shorten("one\ntwo\r\nthree", 20) == "one⏎two⏎three"


@given(st.text(max_size=80), st.integers(1, 40))
def test_shortened_text_fits(text: str, width: int) -> None:
    assert len(shorten(text, width)) <= width


def test_shortened_text_keeps_its_end() -> None:
    assert shorten("<think>a long way</think><answer>46</answer>", 21) == "<think>a l…6</answer>"
