r"""Answers compared by meaning, and each known pitfall of math-verify 0.9.0."""

from typing import Any

import pytest

from oncurve.records import Aspect
from oncurve.rewards.mix import aspects_of
from oncurve.rewards.verifiers.math import MathOptions, MathReward, fast_compare
from oncurve.rewards.verifiers.math_worker import math_equal
from tests.rewards.builders import group


def graded(gold: Any, *texts: str, **options: Any) -> list[Aspect]:
    return aspects_of(MathReward("math", 1.0, MathOptions(**options)), group(*texts, answer=gold))


def right(gold: Any, answer: str) -> bool:
    (aspect,) = graded(gold, f"<answer>{answer}</answer>", seconds=60.0)
    assert aspect.failure is None
    return aspect.value == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{3}{4}", "0.75"),
        ("7/2", r"3\frac12"),
        ("7/2", "3 1/2"),
        (r"\{1,2\}", r"\{2, 1\}"),
        ("(1,2)", "(1, 2)"),
        (r"[0,\infty)", r"[0, \infty)"),
        (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("x=5", "5"),
        ("5", "x = 5"),
        (r"10\text{ cm}^2", "10"),
        ("18", "18 dollars"),
        ("18", "$18"),
        ("18", "\\$18.00"),
        ("90", r"90^\circ"),
        (r"\sqrt{2}", "sqrt(2)"),
        (r"2\pi", "2pi"),
        ("1000", "1e3"),
        ("1000", "1,000"),
        ("-3", "−3"),
        (r"50\%", "50%"),
        (r"\frac{1}{3}", "$\\frac{1}{3}$"),
        ("#### 18", "18"),
        (r"So the answer is $\boxed{\frac{1}{2}}$.", "0.5"),
        (["7", "8"], "8"),
        (8, "8"),
    ],
)
def test_the_same(gold: Any, answer: str) -> None:
    assert right(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("(1,2)", "(2,1)"), ("4", r"x \leq 4"), ("3", "1/0"), (r"50\%", "0.5"), ("12", ""), ("12", "{{{{"), ("12", "\\frac{1}{")],
)
def test_not_the_same(gold: str, answer: str) -> None:
    assert not right(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("1e-9", "1e-8", False),
        ("0.0000001", "0", False),
        (r"10^{-9}", r"10^{-8}", False),
        ("1e-9", r"10^{-9}", True),
        ("0.0001", "1/10000", True),
        ("1/3", "0.333333", True),
        ("3 cm", "3 m", False),
        ("3 m", "3 cm", False),
        (r"3\text{ cm}", "3 km", False),
        ("3 cm", "3 centimeters", True),
        ("3 cm", "3", True),
        ("3", "3 meters", True),
        ("5 hours", "5 minutes", False),
        ("5 apples", "5 pears", True),
        (r"\frac{1}{2}\text{ m}", r"\frac{1}{2}\text{ km}", False),
        (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}\text{ m}", False),
        (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}", True),
        (r"12\text{ cm}^2", r"12\text{ cm}^3", False),
        (r"12\text{ m}^2", r"12\text{ square feet}", False),
        (r"12\text{ m}^2", "12 square meters", True),
        (r"3\text{ m/s}", r"3\text{ km/h}", False),
        (r"3\text{ m/s}", "3 meters per second", True),
        ("60 mph", "60 km/h", False),
        (r"45^\circ", "45 radians", False),
        (r"45^\circ", "45 degrees", True),
        (r"45^{\circ}", "45", True),
        (r"\$5", "5 cents", False),
        (r"\$5", "5 dollars", True),
        ("3m^2", "3m^3", False),
        ("2m+1", "2m+1", True),
        ("0", "x^2-5=0", False),
        ("10", "2x=10", False),
        ("5", "x=5", True),
        ("5", "2+3=5", True),
        ("5", "f(x) = 5", True),
        ("x^2-5=0", "x^2-5=0", True),
        ("1", "(1+x)^{9999}", False),
    ],
)
def test_small_numbers_units_and_equations(gold: str, answer: str, same: bool) -> None:
    assert right(gold, answer) is same


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("5000000", "5 million", True),
        ("5", "5 million", False),
        ("12", "$12 million", False),
        ("1500000", r"\$1.5\text{ million}", True),
        ("3 PM", "3 AM", False),
        ("3:00 PM", "3:00 p.m.", True),
        ("3 PM", "3", True),
        ("3/4", "3/4 cups", True),
        ("1/2", "1/2 pound", True),
        ("3/4", "4/3 cups", False),
        ("8", "8 cm^3", True),
        ("8 cm³", "8", True),
        ("8 cm^3", "8 cm^2", False),
        ("3m^2", "3", False),
        ("5", r"\text{5 apples}", True),
        ("18", "**18**", True),
        ("18", "**$18**", True),
        ("10000", r"10\,000", True),
        ("10000", "10 000", True),
        ("1", "1 200", False),
        ("3.125", "3 125/1000", True),
        ("-0.5", "–0.5", True),
        ("3.5", "3½", True),
        ("x^2", "x²", True),
        ("6", "≈ 6", True),
        (r"\infty", "∞", True),
        (r"\infty", "infinity", True),
        ("infinity", "-∞", False),
        (r"\emptyset", r"\varnothing", True),
        ("pi", "π", True),
        ("5", "f(2) = 5", True),
        ("x-1", "f^{-1}(x) = x-1", True),
        ("2x", "f'(x) = 2x", True),
        ("2x", r"\frac{dy}{dx} = 2x", True),
        ("60", r"\angle ABC = 60^\circ", True),
        ("(1,2)", r"\left(x, y\right) = (1, 2)", True),
        ("0", "x(x-5)=0", False),
        ("5", "x^{-1}=5", False),
    ],
)
def test_notations_of_numbers_units_and_results(gold: str, answer: str, same: bool) -> None:
    assert right(gold, answer) is same


def test_a_box_with_a_space_or_a_single_escaped_brace() -> None:
    system = r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right."
    assert graded("4", r"so \boxed {4}", take="boxed")[0].value == 1.0
    assert graded(system, rf"so \boxed{{{system}}}.", take="boxed")[0].value == 1.0


@pytest.mark.parametrize(
    "answer", ["(" * 400 + "5" + ")" * 400, "{" * 900, "[(" * 300, r"\frac{" * 200, "(" * 40 + "5" + ")" * 40]
)
def test_an_answer_of_nested_brackets_is_wrong_at_once(answer: str) -> None:
    assert not right("5", answer)  # a failure if the workers' time limit is reached


def test_trap_a_bare_fraction_as_gold() -> None:
    assert right(r"\frac12", r"\frac{1}{2}")


def test_trap_two_boxes_the_last_counts() -> None:
    assert [a.value for a in graded("4", r"\boxed{3} no, \boxed{4}", r"\boxed{4} no, \boxed{3}")] == [1.0, 0.0]


def test_trap_two_numbers_in_a_sentence_are_no_answer() -> None:
    assert not right("18", "$18 and then 20")
    assert not right("20", "$18 and then 20")
    assert [a.value for a in graded("20", "$18 and then 20", take="number")] == [1.0]


def test_trap_numbers_in_a_row_are_no_answer() -> None:
    assert not right("3", "1 2 3")
    assert not right("6", "1 2 3")
    assert right("1 2 3", "1  2 3")


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("A", "(A)", True),
        ("A", "a.", True),
        ("A", "B", False),
        (r"\text{Evelyn}", "evelyn", True),
        ("yes", "Yes.", True),
        ("yes", "no", False),
        ("yes", "3", False),
    ],
)
def test_trap_letters_and_words(gold: str, answer: str, same: bool) -> None:
    assert right(gold, answer) is same


def test_trap_power_towers_are_not_evaluated() -> None:
    assert not right("7", "9^{9^{9}}")
    assert not right("7", "(10^{9})!")
    assert right("9^{9^{9}}", "9^{9^{9}}")


def test_a_subscript_is_dropped_by_math_verify() -> None:
    """Documented, not fixed: `11_2` reads as 11."""
    assert right("11", "11_2")


def test_a_comparison_past_its_limit_fails_that_completion_alone() -> None:
    right("1/2", "2/4")
    slow = r"\int_0^{1} \frac{\sin(x^7+x^5+1)}{\cos(x^3)+e^{x^2}+\sqrt{x+17}} dx"
    late, quick = graded("0.123", f"<answer>{slow}</answer>", "<answer>0.123</answer>", seconds=0.05)
    assert (late.value, late.failure) == (None, "TimeoutError: it took more than 0.05 s")
    assert quick.value == 1.0


def test_from_any_thread_and_with_an_alarm_of_the_trainer() -> None:
    import signal
    from concurrent.futures import ThreadPoolExecutor

    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda n: right(f"{n}/7", rf"\frac{{{2 * n}}}{{14}}"), range(1, 9))) == [True] * 8
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_where_the_answer_is_taken_from() -> None:
    text = r"<think>\boxed{9}</think> 5 <answer>1/2</answer> \boxed{1/3}" + "\n#### 1/4\n and 1/5"
    assert [graded(gold, text, take=take)[0].value for gold, take in [("0.5", "tag"), ("1/3", "boxed"), ("1/4", "hashes")]] == [
        1.0
    ] * 3
    assert graded("5", text, take="number")[0].value == 1.0
    assert graded("0.5", text)[0].value == 1.0
    assert graded("0.5", "no number")[0].reason == "no answer found"


def test_prompts_without_the_column() -> None:
    (aspect,) = aspects_of(MathReward("math", 1.0), group("<answer>1</answer>"))
    assert (aspect.value, aspect.failure) == (None, None)


def test_what_needs_no_worker() -> None:
    assert (fast_compare("46", "46.0"), fast_compare("46", "47"), fast_compare("yes", "no"), fast_compare("1/2", "0.5")) == (
        True,
        False,
        False,
        None,
    )
    assert fast_compare("1", "9" * 3000) is False


@pytest.mark.parametrize(
    ("gold", "answer", "settled"),
    [
        ("1/7", r"\frac{2}{14}", True),
        (r"$\dfrac{3}{4}$", "3 / 4", True),
        ("-1/2", r"\frac{-1}{2}", True),
        (r"-\frac{1}{2}", "1/2", False),
        ("6/3", "2", True),
        ("6/3", "3", False),
        ("1/3", "0.333333", None),
        ("1/0", "1/0 ", True),
        ("1/0", "2/0", None),
        (r"\frac12", "1/2", None),
    ],
)
def test_fractions_need_no_worker(gold: str, answer: str, settled: bool | None) -> None:
    """Equal to math-verify's verdict; comparisons that may involve rounding are left to it."""
    assert fast_compare(gold, answer) is settled


def test_fractions_are_compared_as_by_math_verify() -> None:
    pairs = [
        (f"{a}/{b}", rf"\frac{{{c}}}{{{d}}}") for a, b, c, d in [(1, 7, 2, 14), (3, 4, 3, 5), (10, 5, 2, 1), (7, 3, 14, 6)]
    ]
    assert [fast_compare(*pair) for pair in pairs] == [
        bool(math_equal({"gold": gold, "answer": answer})) for gold, answer in pairs
    ]
