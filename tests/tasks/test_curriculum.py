"""The prompts of a curriculum: proportions, unseen prompts, rising difficulty, and the same prompts after a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.errors import DataError
from oncurve.recipe.schema.sections import Task
from oncurve.recipe.schema.stages import Curriculum
from oncurve.records import Prompt
from oncurve.tasks import base
from oncurve.tasks.curriculum import GroupResult, PromptSelector, estimate_row, read_estimates
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.tasks.registry import build_task


def listed(size: int) -> PromptList:
    return PromptList.of([f"question {i}" for i in range(size)])


def selector(task: base.Task | None = None, seed: int = 0, **options: Any) -> PromptSelector:
    return PromptSelector(Curriculum.model_validate(options), task or listed(40), seed)


def endless() -> base.Task:
    return build_task(Task.model_validate({"type": "arithmetic", "digits": 4, "weights": [1, 1, 1, 1]}))


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def number(prompt: Prompt) -> int:
    return int(prompt.id.partition("#")[0].rpartition("/")[2])


def results(prompts: list[Prompt], *solved: int, sampled: int = 8) -> list[GroupResult]:
    return [GroupResult(prompt, solved[number(prompt) % len(solved)], sampled) for prompt in prompts]


def test_the_first_step_is_that_of_a_run_without_a_curriculum() -> None:
    task = listed(40)
    assert ids(selector(task).select(0, 8)) == ids(prompts_for_step(task, 0, 0, 8))


def test_known_prompts_are_selected_in_proportion_to_p_times_1_minus_p() -> None:
    """Of three prompts with p = 1/2, 1/8 and 0: with one prior completion of 1/2 they are 4.5/9, 1.5/9 and 0.5/9."""
    of_three = selector(listed(3), unseen=0.0)
    of_three.record(results(of_three.select(0, 3), 4, 1, 0))
    counts = Counter(number(of_three.select(step, 1)[0]) for step in range(1, 6001))
    rates = np.array([4.5, 1.5, 0.5]) / 9
    expected = rates * (1 - rates) / (rates * (1 - rates)).sum()
    np.testing.assert_allclose([counts[i] / 6000 for i in range(3)], expected, atol=0.025)


def test_pools_weight_hard_medium_and_easy_prompts() -> None:
    of_four = selector(listed(4), unseen=0.0, pools=[0.0, 1.0, 0.5])
    of_four.record(results(of_four.select(0, 4), 0, 4, 8, 4))
    counts = Counter(number(of_four.select(step, 1)[0]) for step in range(1, 4001))
    np.testing.assert_allclose([counts[i] / 4000 for i in range(4)], [0.0, 0.4, 0.2, 0.4], atol=0.03)
    assert sorted(map(number, of_four.select(1, 4))) == [0, 1, 2, 3]  # a pool of weight 0 fills a step that needs it


def test_a_share_of_each_step_is_unseen_as_long_as_there_is_any() -> None:
    curriculum, seen = selector(unseen=0.25), set[str]()
    shares = []
    for step in range(8):
        prompts = curriculum.select(step, 8)
        assert len(set(ids(prompts))) == 8
        shares.append(sum(prompt.id not in seen for prompt in prompts))
        seen.update(ids(prompts))
        curriculum.record(results(prompts, 4))
    assert shares == [8, 2, 2, 2, 2, 2, 2, 2]


def test_a_task_with_too_few_prompts_repeats_them_under_other_ids() -> None:
    curriculum = selector(listed(3))
    for step in range(3):
        prompts = curriculum.select(step, 7)
        assert len(set(ids(prompts))) == 7
        assert Counter(map(number, prompts)).most_common()[-1][1] >= 2
        curriculum.record(results(prompts, 4))
    assert len(curriculum.known) == 3


def test_further_rounds_have_other_prompts() -> None:
    curriculum = selector(listed(20), unseen=0.5)
    curriculum.record(results(curriculum.select(0, 8), 4))
    rounds = [curriculum.select(1, 4, round=turn) for turn in range(5)]
    names = [name for prompts in rounds for name in ids(prompts)]
    assert len(names) == len(set(names))
    assert [len(prompts) for prompts in rounds[:4]] == [4, 4, 4, 4]


def test_earlier_results_count_less() -> None:
    curriculum = selector(listed(1), memory=0.5)
    for step, solved in enumerate((8, 0)):
        curriculum.record(results(curriculum.select(step, 1), solved))
    (known,) = curriculum.known.values()
    assert (known.rate.solved, known.rate.sampled) == (4.0, 12.0)


def test_difficulty_rises_as_levels_are_solved() -> None:
    """A policy that solves levels 1 and 2 always, 3 half of the time and 4 never gets mostly level 3; later it solves 3 too."""

    def solve(limit: int, steps: range, curriculum: PromptSelector) -> Counter[str | None]:
        unseen: Counter[str | None] = Counter()
        for step in steps:
            prompts = curriculum.select(step, 16)
            unseen.update(prompt.difficulty for prompt in prompts if prompt.id not in curriculum.known)
            levels = [int((prompt.difficulty or "0")[0]) for prompt in prompts]
            solved = [8 if level < limit else 4 if level == limit else 0 for level in levels]
            curriculum.record(GroupResult(p, s, 8) for p, s in zip(prompts, solved, strict=True))
        return unseen

    curriculum = selector(endless(), unseen=1.0)
    solve(3, range(30), curriculum)
    at_three = solve(3, range(30, 60), curriculum)
    assert at_three["3 digits"] > 0.6 * at_three.total()
    solve(4, range(60, 90), curriculum)
    at_four = solve(4, range(90, 120), curriculum)
    assert at_four["4 digits"] > 0.6 * at_four.total()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 6), st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_a_restored_selector_selects_the_same_prompts(seed: int, is_endless: bool, stop: int, solved: list[int]) -> None:
    """Through the arrays of a checkpoint, after any step: prompts, pass rates and levels are the same from there on."""
    task = endless() if is_endless else listed(30)
    whole, parts = selector(task, seed), selector(task, seed)
    for step in range(8):
        if step == stop:
            state = {name: array.copy() for name, array in parts.state().items()}
            parts = selector(task, seed)
            parts.load_state(state)
        prompts = whole.select(step, 6)
        assert ids(prompts) == ids(parts.select(step, 6))
        for one in (whole, parts):
            one.record([GroupResult(p, solved[i % len(solved)], 8) for i, p in enumerate(prompts)])
    assert all(np.array_equal(array, parts.state()[name]) for name, array in whole.state().items())


def test_another_seed_keeps_the_pass_rates_of_what_it_has_too() -> None:
    """A fork may change the seed. A list has the same prompts then; an endless task has others, whose levels are the same."""
    for task, is_endless in ((listed(12), False), (endless(), True)):
        before, after = selector(task, seed=0), selector(task, seed=1)
        before.record([GroupResult(p, 8, 8) for p in before.select(0, 6)])
        after.load_state(before.state())
        assert set(after.known) == (set() if is_endless else set(before.known))
        assert {level: rate.solved for level, rate in after.levels.items()} == {
            level: rate.solved for level, rate in before.levels.items()
        }


def test_a_group_whose_rewards_failed_changes_nothing() -> None:
    """It is neither known nor solved or unsolved, and the level keeps what it knew."""
    curriculum = selector(endless(), memory=0.0)
    first, second = curriculum.select(0, 1)[0], curriculum.select(1, 1)[0]
    curriculum.select(0, 1)
    curriculum.record([GroupResult(first, 6, 8)])
    state = curriculum.state()
    curriculum.select(1, 1)
    curriculum.record([GroupResult(second, 0, 0)])
    assert all(np.array_equal(array, curriculum.state()[name]) for name, array in state.items())


def test_rounds_share_no_prompt_if_few_levels_are_accepted() -> None:
    """With levels that are almost solved, a round takes prompts that it had refused; a later one does not offer them again."""
    levels = [GroupResult(Prompt("p", columns={"difficulty": f"{n} digits"}), 4000, 4000) for n in (2, 3, 4)]
    levels.append(GroupResult(Prompt("p", columns={"difficulty": "1 digit"}), 4000, 4000))
    for seed in range(20):
        curriculum = selector(endless(), seed=seed, unseen=1.0)
        curriculum.add_estimates(levels)
        names = [name for turn in range(4) for name in ids(curriculum.select(0, 8, round=turn))]
        assert len(names) == len(set(names)) == 32


def test_a_state_without_results_is_restored() -> None:
    curriculum = selector()
    curriculum.load_state(selector().state())
    assert ids(curriculum.select(0, 4)) == ids(selector().select(0, 4))


def test_estimates_are_known_before_the_first_step(tmp_path: Path) -> None:
    """Of a list, its prompts; of an endless task, its levels."""
    task, file = listed(4), tmp_path / "estimates.jsonl"
    rows = [estimate_row(GroupResult(task.train_prompt(i), solved, 16)) for i, solved in enumerate((8, 0, 16))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curriculum = selector(task, unseen=0.0, pools=[0.0, 1.0, 0.0])
    curriculum.add_estimates(read_estimates(file))
    assert [number(curriculum.select(step, 1)[0]) for step in range(20)] == [0] * 20
    levels = [{"id": "probe", "difficulty": f"{n} digits", "solved": s, "sampled": 16} for n, s in ((2, 16), (3, 8), (4, 0))]
    file.write_text("".join(json.dumps(row) + "\n" for row in levels))
    generated = selector(endless(), pools=[0.0, 1.0, 0.0])
    generated.add_estimates(read_estimates(file))
    levels_asked = {p.difficulty for p in generated.select(0, 32)}
    assert levels_asked == {"1 digit", "3 digits"}  # one level that is medium, and one that nothing is known of


@pytest.mark.parametrize("row", ['{"id": "a", "solved": 3, "sampled": 2}', '{"solved": 1, "sampled": 2}', '{"id": "a"}'])
def test_a_broken_row_of_estimates_is_named(row: str, tmp_path: Path) -> None:
    file = tmp_path / "estimates.jsonl"
    file.write_text(f'{{"id": "b", "solved": 1, "sampled": 2}}\n{row}\n')
    with pytest.raises(DataError, match=r"(?s)estimates\.jsonl:2.*oncurve probe"):
        read_estimates(file)
