"""Programs scored by their tests, in the formats of MBPP, HumanEval and contest problems."""

from typing import Any

import pytest

from oncurve.records import Aspect
from oncurve.rewards.mix import RewardMix, aspects_of
from oncurve.rewards.verifiers.code import CodeOptions, CodeReward, program_in, read_tests, same_output
from tests.rewards.builders import group

MBPP = {"tests": ["assert double(2) == 4", "assert double(0) == 0", "assert double(-3) == -6"], "setup": ""}
HUMANEVAL = {
    "prompt_code": 'import math\n\ndef area(r: float) -> float:\n    """ Area of a circle. """\n',
    "entry_point": "area",
    "test_code": "METADATA = {}\n\ndef check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n",
}
CONTEST = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11"]}


def graded(*texts: str, columns: dict[str, Any], **options: Any) -> list[Aspect]:
    return aspects_of(CodeReward("code", 1.0, CodeOptions(workers=2, **options)), group(*texts, **columns))


def test_assert_lists() -> None:
    right = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    partly = "```python\ndef double(x):\n    return abs(2 * x)\n```"
    assert [a.value for a in graded(right, partly, "nothing", columns=MBPP)] == [1.0, 0.0, 0.0]
    shares = graded(right, partly, columns=MBPP, score="share")
    assert [a.value for a in shares] == pytest.approx([1.0, 2 / 3])
    assert shares[1].reason == "2 of 3 tests passed; assert double(-3) == -6: AssertionError: "


def test_a_function_begun_by_the_prompt() -> None:
    goes_on = "    return math.pi * r * r\n"
    whole = "```python\ndef area(r):\n    return math.pi * r ** 2\n```"
    assert [a.value for a in graded(goes_on, whole, "    return 0\n", columns=HUMANEVAL)] == [1.0, 1.0, 0.0]


def test_input_and_output() -> None:
    right, wrong = "a, b = map(int, input().split())\nprint(a + b)", "print(3)"
    assert [a.value for a in graded(right, wrong, columns=CONTEST)] == [1.0, 0.0]
    assert [a.value for a in graded(right, wrong, columns=CONTEST, score="share")] == [1.0, 0.5]
    (aspect,) = graded("print(1 / 0)", columns=CONTEST)
    assert aspect.reason == "0 of 2 tests passed; test 1: ZeroDivisionError: division by zero"


def test_what_is_the_program_s_fault_is_a_grade() -> None:
    texts = [
        "def double(x:",
        "raise SystemExit",
        "def double(x):\n    while True: pass",
        "def other(): pass",
        "x = bytearray(1 << 50)",
    ]
    aspects = graded(*texts, columns=MBPP, seconds=1.0)
    assert [(a.value, a.failure) for a in aspects] == [(0.0, None)] * 5
    assert [a.reason for a in aspects][2] == "0 of 3 tests passed; it took too long"


def test_what_is_the_data_s_fault_is_a_failure() -> None:
    (aspect,) = graded("def f(): pass", columns={"test_code": "def test_a(:"})
    assert aspect.value is None
    assert aspect.failure is not None
    assert "DataError" in aspect.failure


def test_prompts_without_tests() -> None:
    (aspect,) = graded("print(1)", columns={})
    assert (aspect.value, aspect.failure) == (None, None)


def test_the_level_is_logged() -> None:
    (remark,) = RewardMix([CodeReward("code", 1.0)]).log_lines
    assert remark.startswith(("code: sandbox: bubblewrap (", "code: sandbox: seccomp ("))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```", "b"),
        ("```\na\n```", "a"),
        ("```python\na\n```\n```bash\nrm\n```", "a"),
        ("<think>```python\nno\n```</think>```python\nyes\n```", "yes"),
        ("<answer>print(1)</answer>", "print(1)"),
        ("print(1)", "print(1)"),
        ("```python\nnever closed", "never closed"),
    ],
)
def test_finding_the_program(text: str, program: str) -> None:
    assert program_in(text) == program


def test_counting_tests() -> None:
    tests = read_tests({"test_code": "def test_a(): pass\ndef test_b(): pass\ndef helper(): pass"}, 100)
    assert tests is not None
    assert tests.count == 2
    cut = read_tests({"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}, 2)
    assert cut is not None
    assert cut.pairs == (("1", "1"), ("2", "2"))


def test_what_counts_as_the_same_output() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1", "1")


def test_a_text_instead_of_a_list_is_one_test() -> None:
    printed = read_tests({"inputs": "12\n", "outputs": "144\n"}, 100)
    assert printed is not None
    assert printed.pairs == (("12\n", "144\n"),)
    tests = read_tests({"tests": "assert f(2) == 4"}, 100)
    assert tests is not None
    assert (tests.count, tests.job["tests"]) == (1, ["assert f(2) == 4"])
