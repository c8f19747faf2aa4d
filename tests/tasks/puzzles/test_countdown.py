"""The task `countdown`: solvable problems, an exact held-out split, and shortest solutions."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.errors import RecipeError
from oncurve.recipe.schema.sections import Task
from oncurve.records import Prompt
from oncurve.tasks.base import TAGS
from oncurve.tasks.puzzles.countdown import Countdown, CountdownProblem, combine, solution_text, solve
from oncurve.tasks.puzzles.expression import parse
from oncurve.tasks.registry import build_task


def countdown(heldout: int = 100, **options: object) -> Countdown:
    task = build_task(Task.model_validate({"type": "countdown", "heldout": heldout, "examples": 100, **options}))
    assert isinstance(task, Countdown)
    return task


def key(prompt: Prompt) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(prompt.columns["numbers"])), prompt.columns["target"]


@pytest.mark.parametrize(
    ("numbers", "target", "completion"),
    [
        ((3, 5, 7), 32, "<think>7*5=35,35-3=32</think><answer>7*5-3</answer>"),
        ((2, 3, 4), 20, "<think>3+2=5,5*4=20</think><answer>(3+2)*4</answer>"),
        ((2, 9, 5), 2, "<think>9-2=7,7-5=2</think><answer>9-2-5</answer>"),
        ((8, 2, 16), 14, "<think>16-2=14</think><answer>16-2</answer>"),
    ],
)
def test_steps_computed_by_hand(numbers: tuple[int, ...], target: int, completion: str) -> None:
    assert solution_text(CountdownProblem(numbers, target), ("+", "-", "*")) == completion


@pytest.mark.parametrize(
    ("numbers", "target", "operations", "text"),
    [
        ((3, 2, 12), 2, "/*", "12/(3*2)"),
        ((6, 7, 20), 7, "+-", "20-(7+6)"),
        ((9, 4, 20), 15, "-", "20-(9-4)"),
        ((8, 2, 20), 16, "/-", "20-8/2"),
        ((3, 2, 9), 14, "+", "9+3+2"),
    ],
)
def test_brackets_only_if_needed(numbers: tuple[int, ...], target: int, operations: str, text: str) -> None:
    solution = solve(CountdownProblem(numbers, target), operations)
    assert solution is not None
    assert solution.text == text
    assert parse(text).value == target


def test_no_solution_is_none() -> None:
    assert solve(CountdownProblem((1, 1), 50), ("+", "-", "*")) is None


@pytest.mark.parametrize(
    ("large", "small", "sign", "result"),
    [
        (7, 5, "-", 2),
        (5, 5, "-", None),
        (8, 2, "/", 4),
        (8, 3, "/", None),
        (8, 1, "/", None),
        (8, 1, "*", None),
        (8, 1, "+", 9),
    ],
)
def test_combine(large: int, small: int, sign: str, result: int | None) -> None:
    assert combine(large, small, sign) == result


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 4), st.sampled_from([("+", "-"), ("+", "-", "*"), ("+", "-", "*", "/"), ("*", "/", "+")]))
def test_every_example_reaches_its_target(numbers: int, operations: tuple[str, ...]) -> None:
    task = countdown(heldout=10, numbers=numbers, operations=operations, max_number=30)
    assert len(task.examples) == 100
    for example in task.examples:
        answer = re.fullmatch(r"<think>.+</think><answer>(.+)</answer>", example.completion)
        assert answer is not None
        expression = parse(answer[1])
        assert expression.value == example.prompt.columns["target"]
        assert not set(expression.numbers) - set(example.prompt.columns["numbers"])
        characters = re.sub("|".join(TAGS), "", f"{example.prompt.text}{example.completion}")
        assert set(characters) <= set(task.alphabet)


def test_nothing_held_out_is_trained_on() -> None:
    task = countdown()
    heldout = {key(prompt) for prompt in task.heldout}
    assert len(heldout) == 100
    assert heldout.isdisjoint(key(task.train_prompt(index)) for index in range(1000))
    assert heldout.isdisjoint(key(example.prompt) for example in task.examples)


def test_prompt() -> None:
    prompt = countdown().train_prompt(3)
    match = re.fullmatch(r"(\d+) from ([\d,]+):", prompt.text or "")
    assert match is not None
    assert int(match[1]) == prompt.columns["target"]
    assert [int(n) for n in match[2].split(",")] == prompt.columns["numbers"]
    assert prompt.difficulty == f"{len(prompt.columns['numbers'])} numbers"
    assert prompt.columns["target"] not in prompt.columns["numbers"]


def test_too_few_problems_are_reported_at_once() -> None:
    task = countdown(heldout=50, numbers=2, max_number=2)
    with pytest.raises(RecipeError, match=r"task\.heldout"):
        _ = task.heldout
