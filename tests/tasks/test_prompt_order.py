"""The prompts of a step are a pure function of (seed, step)."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.recipe.schema.sections import Task
from oncurve.records import Prompt
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.prompt_order import batch_indices, prompts_for_step
from oncurve.tasks.registry import build_task


def listed(size: int) -> PromptList:
    return PromptList.of([f"question {i}" for i in range(size)])


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 10**6), st.integers(0, 10**4))
def test_a_step_is_full_and_has_no_twins(size: int, count: int, seed: int, step: int) -> None:
    names = ids(prompts_for_step(listed(size), seed, step, count))
    assert len(names) == len(set(names)) == count
    assert names == ids(prompts_for_step(listed(size), seed, step, count))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 100), st.integers(0, 5))
def test_an_epoch_repeats_nothing(steps: int, count: int, seed: int, epoch: int) -> None:
    task = listed(steps * count)
    names = [name for place in range(steps) for name in ids(prompts_for_step(task, seed, epoch * steps + place, count))]
    assert sorted(names) == sorted(ids(list(task.train)))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    task = listed(50)
    orders = {tuple(ids(prompts_for_step(task, seed, step, 50))) for seed in range(3) for step in range(3)}
    assert len(orders) == 9


def test_too_few_prompts_are_repeated_under_other_ids() -> None:
    names = ids(prompts_for_step(listed(2), 0, 7, 5))
    assert Counter(name.partition("#")[2] for name in names) == {"": 2, "2": 2, "3": 1}


def test_further_rounds_use_fresh_prompts() -> None:
    task = listed(10)
    first, second, third, fourth = (ids(prompts_for_step(task, 3, 1, 4, round=turn)) for turn in range(4))
    assert len({*first, *second, *third}) == 10
    assert (len(second), len(third), len(fourth)) == (4, 2, 0)


def test_endless_prompts_are_fresh() -> None:
    task = build_task(Task(type="arithmetic"))
    names_by_step = [ids(prompts_for_step(task, 0, step, 16)) for step in range(20)]
    assert all(len(set(step)) == 16 for step in names_by_step)
    assert len({name for step in names_by_step for name in step}) > 250
    assert names_by_step[11] == ids(prompts_for_step(task, 0, 11, 16)) != ids(prompts_for_step(task, 1, 11, 16))


def test_endless_rounds_go_on_without_twins() -> None:
    task = build_task(Task(type="arithmetic"))
    rounds = [ids(prompts_for_step(task, 0, 5, 8, round=turn)) for turn in range(3)]
    assert len({name for names in rounds for name in names}) == 24


def test_an_endless_task_of_few_problems_still_fills_a_step() -> None:
    """28 sums of two single digits are left for training, in at most 56 orders."""
    task = build_task(Task.model_validate({"type": "arithmetic", "digits": 1, "heldout": 27}))
    names = ids(prompts_for_step(task, 0, 0, 100))
    assert len(set(names)) == 100
    assert any("#2" in name for name in names)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 1000))
def test_examples_are_laid_out_in_epochs(size: int, batch: int, seed: int) -> None:
    indices = [index for step in range(size) for index in batch_indices(size, seed, step, batch)]
    for epoch in range(batch):
        assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))
