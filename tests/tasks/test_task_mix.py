"""The task `mix`: shares, ids that name the task, held-out splits, and rewards of single tasks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.errors import DataError, OncurveError, RecipeError
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Task
from oncurve.recipe.schema.stages import Curriculum
from oncurve.records import Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.runs.database.reader import RunReader
from oncurve.tasks.curriculum import GroupResult, MixSelector, build_selector
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.tasks.registry import build_task
from oncurve.tasks.task_mix import MixPart, TaskMix
from oncurve.training.start import begin, rewards_for, task_for

SUMS = {"type": "arithmetic", "name": "sums", "digits": 2, "heldout": 5, "share": 3.0}
COUNT = {"type": "countdown", "share": 1.0, "heldout": 4}
TINY = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_width": 48, "context": 96}
GRPO = {"type": "grpo", "steps": 2, "prompts_per_step": 6, "group_size": 4, "sampling": {"max_new_tokens": 8}}
REWARDS = [
    {"type": "answer", "name": "sum", "task": "sums"},
    {"type": "countdown", "task": "countdown"},
    {"type": "format", "style": "soft"},
]


def recipe(**changes: Any) -> Recipe:
    data = {
        "name": "mixed", "threads": 1, "model": {"tiny": TINY}, "task": {"type": "mix", "mix": [SUMS, COUNT]},
        "rewards": REWARDS, "stages": [GRPO], **changes,
    }  # fmt: skip
    return parse_recipe(data)


def mix_of(sizes: list[int], shares: list[float]) -> TaskMix:
    lists = [PromptList.of([f"{name} {i}" for i in range(size)]) for name, size in enumerate(sizes)]
    return TaskMix([MixPart(f"t{i}", share, task) for i, (task, share) in enumerate(zip(lists, shares, strict=True))])


def tasks_of(prompts: list[Prompt]) -> Counter[str]:
    return Counter(prompt.columns["task"] for prompt in prompts)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(1, 20), st.integers(0, 60))
def test_shares_hold_to_within_a_prompt_after_every_step(shares: list[float], count: int, steps: int) -> None:
    mix = mix_of([3] * len(shares), shares)
    for n in range(1, steps + 1):
        ranges = mix.ranges(n - 1, count)
        assert sum(end - first for first, end in ranges) == count
        assert all(first <= end for first, end in ranges)
        for share, (_, end) in zip(shares, ranges, strict=True):
            assert abs(end - share / sum(shares) * count * n) < len(shares)
    assert mix_of([3] * len(shares), shares).ranges(steps, count) == mix.ranges(steps, count)


@pytest.mark.parametrize(
    ("shares", "count"),
    [([100.0, 1.0, 100.0, 1.0, 0.034, 1.0, 1.0, 100.0, 100.0], 11), ([0.76, 0.015, 100, 3.4, 100, 100, 1, 100, 1, 1], 13)],
)
def test_many_small_shares_do_not_add_prompts_to_a_step(shares: list[float], count: int) -> None:
    """Several tasks that are ahead of their share at once leave more than a step to the others."""
    mix = mix_of([3] * len(shares), shares)
    for step in range(60):
        ranges = mix.ranges(step, count)
        assert sum(end - first for first, end in ranges) == count
        assert all(
            abs(end - share / sum(shares) * count * (step + 1)) < 2 for share, (_, end) in zip(shares, ranges, strict=True)
        )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 30), st.integers(0, 999))
def test_a_step_is_full_and_has_no_twins(one: int, two: int, count: int, step: int, seed: int) -> None:
    mix = mix_of([one, two], [2.0, 1.0])
    names = [prompt.id for prompt in prompts_for_step(mix, seed, step, count)]
    assert len(names) == len(set(names)) == count
    assert names == [prompt.id for prompt in prompts_for_step(mix, seed, step, count)]


def test_an_epoch_of_each_task_repeats_nothing() -> None:
    mix = mix_of([9, 6], [3.0, 2.0])
    names = [prompt.id for step in range(3) for prompt in prompts_for_step(mix, 0, step, 5)]
    assert sorted(names) == sorted(mix.train_prompt(i).id for i in range(15))


def test_further_rounds_have_other_prompts() -> None:
    mix = mix_of([9, 6], [3.0, 2.0])
    rounds = [prompts_for_step(mix, 0, 1, 5, round=turn) for turn in range(4)]
    names = [prompt.id for prompts in rounds for prompt in prompts]
    assert len(names) == len(set(names)) == 15


def test_prompts_name_their_task() -> None:
    mix = task_for(recipe(), recipe().stages[0])
    assert isinstance(mix, TaskMix)
    prompts = prompts_for_step(mix, 0, 0, 8)
    assert tasks_of(prompts) == {"sums": 6, "countdown": 2}
    assert all(prompt.id.startswith(f"{prompt.columns['task']}/") for prompt in prompts)
    assert Counter(prompt.columns["task"] for prompt in mix.heldout) == {"sums": 5, "countdown": 4}
    assert {(prompt.difficulty or "").partition(":")[0] for prompt in mix.heldout} == {"sums", "countdown"}
    assert set("0123456789+=*-") <= set(mix.alphabet or "")


def test_a_run_has_figures_for_each_task(tmp_path: Path) -> None:
    """Rewards score the prompts of their task only, and metrics and held-out accuracy are given by task."""
    run = begin(recipe(), out=tmp_path / "run")
    with RunReader.open(run.path) as store:
        report = store.step("grpo", 2)
        (held_out,) = store.evals("grpo")
    for group in report.groups:
        own = {"sums": "sum", "countdown": "countdown"}[group.group.prompt.columns["task"]]
        assert [a.name for a in group.scored.scored[0].aspects] == [own, "format"]
    assert {"accuracy", "accuracy/sums", "accuracy/countdown", "reward/sum", "reward/countdown"} <= report.metrics.keys()
    assert {"accuracy/sums", "accuracy/countdown"} <= held_out.metrics.keys()
    asked = Counter[str]()
    for level, (_, count) in held_out.by_difficulty.items():
        asked[level.partition(":")[0]] += count
    assert asked == {"sums": 5, "countdown": 4}


def test_each_task_has_its_own_definition_of_correct() -> None:
    config = recipe()
    rewards: RewardMix = rewards_for(config, config.stages[0])
    assert rewards.accuracy_rewards == ("sum", "countdown")


def test_a_curriculum_keeps_the_shares_and_selects_within_each_task() -> None:
    mix = mix_of([40, 40], [3.0, 1.0])
    selector = build_selector(Curriculum(unseen=0.25), mix, 0)
    assert isinstance(selector, MixSelector)
    for step in range(4):
        prompts = selector.select(step, 8)
        assert tasks_of(prompts) == {"t0": 6, "t1": 2}
        selector.record(GroupResult(prompt, 4, 8) for prompt in prompts)
    restored = build_selector(Curriculum(unseen=0.25), mix, 0)
    restored.load_state(selector.state())
    assert [p.id for p in restored.select(4, 8)] == [p.id for p in selector.select(4, 8)]
    assert all(np.array_equal(array, restored.state()[name]) for name, array in selector.state().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [{"type": "answer", "task": "sum"}]}, "rewards.answer.task.*sums, countdown.*did you mean 'sums'"),
        ({"rewards": [{"type": "answer", "task": "sums"}]}, "no reward scores the prompts of task 'countdown'"),
        ({"task": {"type": "arithmetic"}, "rewards": [{"type": "answer", "task": "sums"}]}, "the task is not a mix"),
        ({"task": {"type": "mix", "mix": []}, "rewards": [{"type": "answer"}]}, "task.mix"),
        ({"task": {"type": "mix", "mix": [COUNT, COUNT]}, "rewards": [{"type": "answer"}]}, "two of its tasks have this name"),
        ({"task": {"type": "mix", "mix": [{"type": "mix", "mix": []}]}, "rewards": [{"type": "answer"}]}, "a mix itself"),
        ({"task": {"type": "mix", "mix": [{**SUMS, "share": 0.0}]}, "rewards": [{"type": "answer"}]}, "share"),
        ({"task": {"type": "mix", "mix": [{**SUMS, "digitz": 2}]}, "rewards": [{"type": "answer"}]}, "task.mix.sums.digitz"),
        ({"task": {"type": "mix", "mix": [{"share": 1.0}]}, "rewards": [{"type": "answer"}]}, "type"),
        ({"task": {"type": "mix", "mix": "sums"}, "rewards": [{"type": "answer"}]}, "task.mix"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        build_task(recipe(**changes).task)


def test_a_column_of_another_name_is_not_overwritten() -> None:
    rows = PromptList.of([{"prompt": "a", "task": "spelling"}])
    with pytest.raises(DataError, match="rename the column"):
        MixPart("words", 1.0, rows).train_prompt(0)


def test_an_unknown_type_in_a_mix_is_named() -> None:
    with pytest.raises(OncurveError, match=r"task\.mix"):
        build_task(Task.model_validate({"type": "mix", "mix": [{"type": "arithmetik"}]}))
