"""The task `arithmetic`: steps computed by hand, and a held-out split that never leaks."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.errors import RecipeError
from oncurve.recipe.schema.sections import Task
from oncurve.records import Prompt
from oncurve.tasks.base import TAGS
from oncurve.tasks.puzzles.arithmetic import (
    Arithmetic,
    ArithmeticOptions,
    ArithmeticProblem,
    pair,
    pairs_below,
    solution_text,
    steps,
)
from oncurve.tasks.registry import build_task


def arithmetic(heldout: int = 200, seed: int = 0, **options: object) -> Arithmetic:
    task = build_task(Task.model_validate({"type": "arithmetic", "heldout": heldout, "seed": seed, **options}))
    assert isinstance(task, Arithmetic)
    return task


def problem_of(prompt: Prompt) -> tuple[str, frozenset[int]]:
    """The problem, independent of the order of its numbers."""
    match = re.fullmatch(r"(\d+)([-+])(\d+)=", prompt.text or "")
    assert match is not None
    return match[2], frozenset((int(match[1]), int(match[3])))


@pytest.mark.parametrize(
    ("problem", "completion"),
    [
        (ArithmeticProblem("+", 347, 85), "<think>75:12,48:13,30:04</think><answer>432</answer>"),
        (ArithmeticProblem("+", 85, 347), "<think>57:12,84:13,03:04</think><answer>432</answer>"),
        (ArithmeticProblem("+", 999, 1), "<think>91:10,90:10,90:10</think><answer>1000</answer>"),
        (ArithmeticProblem("+", 0, 0), "<think>00:00</think><answer>0</answer>"),
        (ArithmeticProblem("-", 100, 1), "<think>01:19,00:19,10:00</think><answer>99</answer>"),
        (ArithmeticProblem("-", 53, 21), "<think>31:02,52:03</think><answer>32</answer>"),
    ],
)
def test_steps_computed_by_hand(problem: ArithmeticProblem, completion: str) -> None:
    assert solution_text(problem) == completion


@settings(deadline=None)
@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1), st.sampled_from("+-"))
def test_the_steps_spell_the_answer(a: int, b: int, operation: str) -> None:
    problem = ArithmeticProblem(operation, max(a, b), min(a, b))
    columns = steps(problem)
    assert (
        int("".join(str(column.digit) for column in reversed(columns))) + columns[-1].carry * 10 ** len(columns)
        == problem.answer
    )
    assert len(columns) == len(str(max(a, b)))


@settings(deadline=None)
@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1))
def test_each_unordered_pair_has_one_number(a: int, b: int) -> None:
    large, small = max(a, b), min(a, b)
    assert pair(pairs_below(large) + small) == (large, small)


def test_prompt_columns() -> None:
    task = arithmetic()
    prompt = task.train_prompt(5)
    _, numbers = problem_of(prompt)
    assert prompt == task.train_prompt(5)
    assert prompt.columns["answer"] == str(sum(numbers) if len(numbers) == 2 else 2 * min(numbers))
    assert prompt.difficulty in {"1 digit", "2 digits", "3 digits"}
    assert prompt.id == f"arithmetic/{(prompt.text or '').removesuffix('=')}"


@pytest.mark.parametrize(
    "options", [{}, {"digits": 1, "heldout": 27}, {"digits": 2, "operations": ["+", "-"]}, {"min_digits": 3}]
)
def test_nothing_held_out_is_trained_on(options: dict[str, object]) -> None:
    task = arithmetic(**options)  # type: ignore[arg-type]
    heldout = {problem_of(prompt) for prompt in task.heldout}
    assert len(heldout) == len(task.heldout) == options.get("heldout", 200)
    assert heldout.isdisjoint(problem_of(task.train_prompt(index)) for index in range(1500))
    assert heldout.isdisjoint(problem_of(example.prompt) for example in task.examples)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 27))
def test_held_out_by_construction_for_any_seed(seed: int, digits: int, heldout: int) -> None:
    task = arithmetic(seed=seed, digits=digits, heldout=heldout, examples=50)
    kept = {problem_of(prompt) for prompt in task.heldout}
    assert len(kept) == heldout
    assert kept.isdisjoint(problem_of(task.train_prompt(index)) for index in range(50))
    assert kept.isdisjoint(problem_of(example.prompt) for example in task.examples)


def test_single_digits_are_split() -> None:
    """55 unordered sums: 27 may be held out, and the other 28 are the demonstrations."""
    task = arithmetic(digits=1, heldout=27, examples=400)
    assert len(task.examples) == 28
    with pytest.raises(RecipeError, match=r"task\.heldout: 28"):
        arithmetic(digits=1, heldout=28)


def test_held_out_problems_belong_to_the_task_seed() -> None:
    assert [p.id for p in arithmetic(seed=1).heldout] == [p.id for p in arithmetic(seed=1).heldout]
    assert {p.id for p in arithmetic(seed=1).heldout} != {p.id for p in arithmetic(seed=2).heldout}


def test_hard_levels_dominate_unless_weighted_otherwise() -> None:
    levels = [prompt.difficulty for prompt in arithmetic(heldout=70).heldout]
    assert [levels.count(level) for level in ("1 digit", "2 digits", "3 digits")] == [10, 20, 40]
    levels = [prompt.difficulty for prompt in arithmetic(weights=[0, 1, 0]).heldout]
    assert levels == ["2 digits"] * 200
    difficulties = [arithmetic().train_prompt(index).difficulty for index in range(1400)]
    assert 700 < difficulties.count("3 digits") < 900


def test_demonstrations_may_be_easier_than_prompts() -> None:
    task = arithmetic(examples=80, example_weights=[1, 6, 1], heldout=70)
    shown = [example.prompt.difficulty for example in task.examples]
    assert [shown.count(level) for level in ("1 digit", "2 digits", "3 digits")] == [10, 60, 10]
    levels = [prompt.difficulty for prompt in task.heldout]
    assert [levels.count(level) for level in ("1 digit", "2 digits", "3 digits")] == [10, 20, 40]


def test_examples_are_distinct_and_short() -> None:
    task = arithmetic()
    assert len({problem_of(example.prompt) for example in task.examples}) == len(task.examples) == 250
    for example in task.examples:
        tokens = re.findall(r"</?\w+>|.", example.completion)
        assert len(tokens) <= 32
        assert set(tokens) <= {*TAGS, *task.alphabet}
        assert set(example.prompt.text or "") <= set(task.alphabet)
        assert example.completion.endswith(f"<answer>{example.prompt.columns['answer']}</answer>")


def test_differences_never_go_below_zero() -> None:
    task = arithmetic(operations=["-"])
    assert all(int(task.train_prompt(index).columns["answer"]) >= 0 for index in range(200))
    assert "-" in task.alphabet
    assert "+" not in task.alphabet


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"min_digits": 4}, "task.min_digits"),
        ({"weights": [1, 2]}, "task.weights"),
        ({"weights": [0, 0, 0]}, "task.weights"),
        ({"weights": [1, -1, 1]}, "task.weights"),
        ({"example_weights": [1, 1]}, "task.example_weights"),
        ({"digits": 0}, "task.digits"),
        ({"operations": ["*"]}, "task.operations"),
    ],
)
def test_impossible_options(options: dict[str, object], key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        arithmetic(**options)  # type: ignore[arg-type]
    assert caught.value.where == key


def test_defaults_are_the_schema_s() -> None:
    assert ArithmeticOptions().digits == 3
    assert ArithmeticOptions().examples == 250
