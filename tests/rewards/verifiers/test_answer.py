"""Extraction and comparison of answers, with texts as models write them."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.rewards.verifiers.answer import AnswerOptions, AnswerReward, answers_equal, gold_answer
from oncurve.rewards.verifiers.answer_extraction import Take, answer_in
from tests.rewards.builders import aspects, values


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>x</think><answer> 42 </answer>", "42"),
        ("<answer>42", None),
        ("42</answer>", None),
        ("</answer>42<answer>", None),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>5</answer><think>so it is 5</think>", "5"),
        ("<think><answer>5</answer></think>", None),
        ("<think><answer>5</answer>", None),
        ("<think>not closed <answer>5</answer>", None),
        ("opened by the prompt <answer>4</answer></think><answer>5</answer>", "5"),
        ("<think>a</think><think>b</think><answer>5</answer>", "5"),
        ("<answer></answer>", ""),
        ("", None),
    ],
)
def test_tagged(text: str, found: str | None) -> None:
    assert answer_in(text, "tag") == found


@pytest.mark.parametrize(
    ("text", "take", "found"),
    [
        (r"so \boxed{\frac{1}{2}} it is", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "boxed", "2"),
        (r"\boxed{1", "boxed", None),
        ("because\n#### 1,234\n", "hashes", "1,234"),
        ("#### 1\n#### 2 apples\nbye", "hashes", "2 apples"),
        ("no mark", "hashes", None),
        ("first 12, then 13.", "number", "13"),
        ("it costs $1,234.50 today", "number", "1,234.50"),
        ("5-3", "number", "3"),
        ("= -3", "number", "-3"),
        ("1,2,3", "number", "3"),
        ("٣ and ４", "number", None),
        (r"\boxed{7} and 8 <answer>9</answer>", "any", "9"),
        (r"\boxed{7} and 8", "any", "7"),
        ("7 and 8", "any", "8"),
        ("<think>7</think>", "any", None),
    ],
)
def test_other_places(text: str, take: Take, found: str | None) -> None:
    assert answer_in(text, take) == found


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("3", "3.0", True),
        ("+007", "7", True),
        ("-0", "0", True),
        (".5", "0.50", True),
        ("1,000", "1000", True),
        ("1,00", "100", False),
        ("−5", "-5", True),
        ("new   york", "new york", True),
        ("New York", "new york", False),
        ("٣", "3", False),
        ("３", "3", False),
        ("3.0000001", "3", False),
        ("1e3", "1000", False),
        ("", "", False),
        (".", ".", True),
        ("-", "0", False),
        ("9**9**9", "9**9**9", True),
        ("9" * 10_000, "9" * 10_000, True),
        ("9" * 10_000, "9", False),
    ],
)
def test_same(one: str, other: str, equal: bool) -> None:
    assert answers_equal(one, other) is equal
    assert answers_equal(other, one) is equal


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12))
def test_a_number_is_itself_however_written(n: int) -> None:
    assert answers_equal(str(n), f"{n:,}")
    assert answers_equal(str(n), f"{n}.0")
    assert not answers_equal(str(n), str(n + 1))


def test_gold_that_is_a_complete_solution() -> None:
    assert gold_answer("She has 9 + 9.\n#### 18") == "18"
    assert gold_answer(r"Thus \boxed{\pi}.") == r"\pi"
    assert gold_answer("18") == "18"


def test_scores() -> None:
    reward = AnswerReward("answer", 1.0)
    assert values(reward, "<answer>46</answer>", "<answer>64</answer>", "46", answer="46") == [1.0, 0.0, 0.0]
    assert values(reward, "<answer>46</answer>", answer=46) == [1.0]
    assert values(reward, "<answer>b</answer>", answer=["a", "b"]) == [1.0]


def test_reasons() -> None:
    found = aspects(AnswerReward("answer", 1.0), "<answer>64</answer>", "?", columns={"answer": "46"})
    assert [aspect.reason for aspect in found] == ["'64' is not '46'", "no answer found"]


def test_without_the_column_it_does_not_apply() -> None:
    (aspect,) = aspects(
        AnswerReward("answer", 1.0, AnswerOptions(column="gold")), "<answer>1</answer>", columns={"answer": "1"}
    )
    assert (aspect.value, aspect.failure) == (None, None)


def test_long_texts_are_quick() -> None:
    texts = ["<answer>" * 20_000, "\\boxed{" * 20_000, "1," * 50_000, "<think>" * 20_000 + "</think>" * 20_000, "9" * 100_000]
    started = time.process_time()
    for take in ("tag", "boxed", "hashes", "number", "any"):
        values(AnswerReward("answer", 1.0, AnswerOptions(take=take)), *texts, answer="1")
    assert time.process_time() - started < 30


@settings(deadline=None)
@given(st.text(), st.sampled_from(["tag", "boxed", "hashes", "number", "any"]), st.text())
def test_no_text_makes_it_fail(text: str, take: Take, gold: str) -> None:
    (aspect,) = aspects(AnswerReward("answer", 1.0, AnswerOptions(take=take)), text, columns={"answer": gold})
    assert aspect.failure is None
    assert aspect.value in (0.0, 1.0)


def test_gold_floats_are_written_out_and_nan_is_a_missing_answer() -> None:
    reward = AnswerReward("answer", 1.0)
    assert values(reward, "<answer>0.00001</answer>", answer=0.00001) == [1.0]
    assert values(reward, "<answer>10,000,000,000,000,000</answer>", answer=1e16) == [1.0]
    assert values(reward, "<answer>18</answer>", answer=18.0) == [1.0]
    assert values(reward, "<answer>nan</answer>", answer=float("nan")) == [None]
