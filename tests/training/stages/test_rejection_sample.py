"""Rejection sampling: what is kept, exact resume, and a later sft stage that imitates it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import DataError, OncurveError, RecipeError, RewardError
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import RejectionSample
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.database.reader import RunReader
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.stages.rejection_sample import RejectionLoop, samples_file
from oncurve.training.start import begin
from tests.rewards.builders import group
from tests.training.builders import RECIPE, policy

TASK = PromptList.of([f"{i}+1=" for i in range(6)])


def digits(completion: str) -> float:
    return float(sum(c.isdigit() for c in completion))


def loop(folder: Path, **options: object) -> RejectionLoop:
    settings = {"steps": 3, "prompts_per_step": 2, "group_size": 4, "sampling": {"max_new_tokens": 12}, **options}
    stage = RejectionSample.model_validate(settings)
    return RejectionLoop(
        stage, 0, TASK, NativeEngine(policy(), Engine(slots=8)), RewardMix([FunctionReward(digits, "d")]), folder
    )


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in samples_file(folder, "rejection_sample").read_text().splitlines()]


def test_the_best_of_each_group_that_are_good_enough_and_not_cut_are_kept(tmp_path: Path) -> None:
    stage_loop = loop(tmp_path, at_least=2.0, keep=2)
    reports = [stage_loop.step(n) for n in range(1, 4)]
    expected = []
    for report in reports:
        for graded in report.groups:
            good = {
                s.completion.text: s.total
                for s in graded.scored.scored
                if (s.total or 0) >= 2 and not s.completion.is_truncated
            }
            best = sorted(good.values(), reverse=True)[:2]  # type: ignore[type-var]
            expected += [(report.step, value) for value in best]
    assert sorted((r["step"], r["reward"]) for r in rows(tmp_path)) == sorted(expected)
    assert sum(r.metrics["samples_kept"] for r in reports) == len(expected) > 0


def test_a_text_that_was_rewarded_differently_counts_by_its_best(tmp_path: Path) -> None:
    rewards = iter([1.0, 3.0, 2.0])
    mix = RewardMix([FunctionReward(lambda completion: next(rewards), "any")])
    (scored,) = mix.score([group("again", "again", "once", prompt="1+1=")])
    (row,) = loop(tmp_path, at_least=0.0)._best_rows(scored)
    assert (row["completion"], row["reward"]) == ("again", 3.0)


def test_steps_done_again_add_nothing_twice(tmp_path: Path) -> None:
    full = loop(tmp_path, at_least=1.0)
    for n in range(1, 4):
        full.step(n)
    kept = rows(tmp_path)
    again = loop(tmp_path, at_least=1.0)
    for n in range(2, 4):
        again.step(n)
    assert rows(tmp_path) == kept


def test_it_ends_at_its_budget_of_tokens_and_a_checkpoint_holds_what_was_spent(tmp_path: Path) -> None:
    first = loop(tmp_path, at_least=1.0)
    tokens = int(first.step(1).metrics["tokens"])
    assert not first.is_over
    limited = loop(tmp_path, at_least=1.0, tokens=tokens + 1)
    limited.step(1)
    assert not limited.is_over
    again = loop(tmp_path, at_least=1.0, tokens=tokens + 1)
    again.load_state(limited.state())
    again.step(2)
    assert again.is_over
    timed = loop(tmp_path, at_least=1.0, seconds=1e-9)
    timed.step(1)
    assert timed.is_over


def test_rewards_that_fail_end_the_run_and_nothing_is_written(tmp_path: Path) -> None:
    def broken(completion: str) -> float:
        raise ValueError("no connection")

    stage_loop = loop(tmp_path, at_least=0.0, max_failure_share=0.9)
    stage_loop.rewards = RewardMix([FunctionReward(broken, "broken")])
    with pytest.raises(RewardError, match="8 of 8 completions") as raised:
        stage_loop.step(1)
    assert raised.value.where == "rejection_sample.max_failure_share"
    assert "no connection" in raised.value.because
    assert not samples_file(tmp_path, "rejection_sample").exists()


def test_a_recipe_imitates_what_an_earlier_stage_kept(tmp_path: Path) -> None:
    data = tomllib.loads(RECIPE)
    first, last = data["stages"]
    sampled = {"type": "rejection_sample", "steps": 2, "prompts_per_step": 4, "group_size": 4, "at_least": 0.0}
    data["stages"] = [
        first,
        {**sampled, "sampling": last["sampling"]},
        {**first, "name": "again", "data": "stage:rejection_sample"},
    ]
    data["task"]["heldout"] = 4
    try:
        run = begin(parse_recipe(data), out=tmp_path / "run")
    except OncurveError as error:
        pytest.fail(str(error))
    kept = samples_file(run.path, "rejection_sample").read_text().splitlines()
    assert kept
    with RunReader.open(run.path) as store:
        assert [s.name for s in store.stages()] == ["sft", "rejection_sample", "again"]
        assert len(store.evals("rejection_sample")) == 0
        assert len(store.evals("again")) == 1


def test_without_a_verifiable_reward_and_a_mark_it_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """No answer could count as correct: prompts without answers, and no verifiable reward."""
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(8)))
    data = tomllib.loads(RECIPE)
    short = {"sampling": {"max_new_tokens": 12}}
    sampled = {"type": "rejection_sample", "steps": 1, "prompts_per_step": 2, "group_size": 2, **short}
    data |= {"task": {"type": "file", "path": str(tmp_path / "asked.jsonl")}, "rewards": [{"type": "repetition"}]}
    data["stages"] = [sampled]
    with pytest.raises(RecipeError, match="none of its rewards defines correct answers") as raised:
        begin(parse_recipe(data), out=tmp_path / "run")
    assert raised.value.where == "rejection_sample.at_least"
    assert not (tmp_path / "run").exists()
    data["stages"] = [{**sampled, "at_least": 0.0}]
    begin(parse_recipe(data), out=tmp_path / "run")


def test_nothing_kept_is_reported_by_the_stage_that_kept_it(tmp_path: Path) -> None:
    data = tomllib.loads(RECIPE)
    first, last = data["stages"]
    sampled = {"type": "rejection_sample", "steps": 1, "prompts_per_step": 2, "group_size": 2, "at_least": 1e6}
    again = {**first, "name": "again", "data": "stage:rejection_sample"}
    data["stages"] = [{**sampled, "sampling": last["sampling"]}, again]
    with pytest.raises(DataError, match="rejection_sample kept nothing") as raised:
        begin(parse_recipe(data), out=tmp_path / "run")
    assert raised.value.where == "again.data"
    assert "complete" in raised.value.because
    assert "max_new_tokens" in raised.value.fix
