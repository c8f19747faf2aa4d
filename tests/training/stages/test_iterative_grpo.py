"""Iterative GRPO over a complete recipe: comparisons, training of the reward model, and exact resume in time slices."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oncurve.errors import RecipeError, RewardError
from oncurve.operations.run_model import LoadedModel, evaluate_model, load_model
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward
from oncurve.recipe.schema.stages import Iteration
from oncurve.rewards.verifiers.answer_extraction import without_thinking
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.runs.preference_pairs import is_comparable
from oncurve.training.stages.iterative_grpo import comparison_batch
from oncurve.training.stages.reward_model import TokenizedExample
from oncurve.training.start import begin, resume
from oncurve.training.trainer import TimeUp
from tests.rewards.models.test_judge import Judge
from tests.training.builders import RECIPE


def recipe(folder: Path, **iterate: Any) -> Recipe:
    """sft → reward_model → grpo with it, in rounds of two steps; the labeller prefers more digits."""
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i}+1=", "chosen": "12", "rejected": "="}) + "\n" for i in range(8)))
    (folder / "rule.py").write_text("def digits(completion):\n    return sum(c.isdigit() for c in completion)\n")
    data = tomllib.loads(RECIPE)
    sft, grpo = data["stages"]
    data["rewards"] = []
    data["task"]["heldout"] = 3
    grpo |= {
        "rewards": [{"type": "model", "model": "stage:reward_model"}],
        "kl": {"beta": 0.1},
        "save_every": 2,
        "iterate": {
            "every": 2,
            "updates": 2,
            "batch_size": 4,
            "labeller": {"type": "python", "function": f"{folder / 'rule.py'}:digits"},
            **iterate,
        },
    }
    model = {"type": "reward_model", "data": str(pairs), "steps": 2, "batch_size": 4, "eval_every": 1}
    data["stages"] = [{**sft, "save_every": 1}, model, grpo]
    return parse_recipe(data)


def with_last(recipe: Recipe, **changed: Any) -> Recipe:
    """The recipe with another last stage."""
    last = recipe.stages[-1].model_copy(update=changed)
    return recipe.model_copy(update={"stages": (*recipe.stages[:-1], last)})


def weights(run: RunFolder, *parts: str) -> dict[str, torch.Tensor]:
    return load_file(run.path.joinpath(*parts, "model.safetensors"))


def in_slices(recipe: Recipe, out: Path) -> RunFolder:
    """Stopped by the clock after every step."""
    try:
        return begin(recipe, out=out, minutes=0)
    except TimeUp:
        pass
    for _ in range(20):
        try:
            return resume(RunFolder.open(out, out.parent), minutes=0)
        except TimeUp:
            continue
    raise AssertionError("it never ended")


def test_rounds_of_comparisons_and_slices_of_time_that_end_in_the_same_bits(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    full = begin(config, out=tmp_path / "whole")
    lines = [json.loads(line) for line in (full.path / "comparisons" / "grpo.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} <= {1, 2, 3, 4}
    count = sum(map(str.isdigit, lines[0]["chosen"])), sum(map(str.isdigit, lines[0]["rejected"]))
    assert count[0] > count[1]
    with RunReader.open(full.path) as store:
        rounds = dict(store.metric("comparisons", "grpo"))
        assert set(rounds) == {2, 4}
        assert rounds[4] == sum(line["step"] > 2 for line in lines)
        assert len(store.metric("heldout_pair_accuracy", "reward_model")) == 2
    first, last = (weights(full, "reward_models", name) for name in ("reward_model", "grpo"))
    assert any(not torch.equal(first[name], last[name]) for name in first)
    sliced = in_slices(config, tmp_path / "sliced")
    for parts in (("model",), ("reward_models", "grpo")):
        one, other = weights(full, *parts), weights(sliced, *parts)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert (sliced.path / "comparisons" / "grpo.jsonl").read_text() == (full.path / "comparisons" / "grpo.jsonl").read_text()


def test_what_a_reward_model_likes_is_not_what_is_right(tmp_path: Path) -> None:
    """A score does not define correctness: the task's verifiable reward is watched, in the run and by `eval`."""
    config = recipe(tmp_path)
    config = with_last(config, iterate=None)
    run = begin(config, out=tmp_path / "run")
    with RunReader.open(run.path) as store:
        (output,) = store.evals("grpo")
        aspects = store.group("grpo", 1, 0).graded.scored.scored[0].aspects
    assert [(a.name, a.weight) for a in aspects] == [("model", 1.0), ("answer", 0.0)]
    loaded = load_model(str(run.path), tmp_path)
    again = evaluate_model(loaded, config)
    assert again.accuracy == output.accuracy == 0.0
    assert again.metrics["reward"] == pytest.approx(output.metrics["reward"], abs=1e-4)
    assert again.metrics["reward"] != 0
    deciding = {"type": "model", "model": "stage:reward_model", "name": "answer"}
    with pytest.raises(RewardError, match="no answer could be graded"):
        evaluate_model(LoadedModel(loaded.policy, "a model"), with_last(config, rewards=(Reward.model_validate(deciding),)))


def test_a_tenth_of_an_update_is_from_the_past() -> None:
    fresh, past = ([TokenizedExample(((i,), (i,)), (1.0,), 0.0) for i in numbers] for numbers in (range(50), range(100, 150)))
    output = Iteration(every=2, batch_size=40)
    batch = comparison_batch(fresh, past, output, 0, 2, 0)
    assert len(batch) == 40
    assert sum(coded.texts[0][0] >= 100 for coded in batch) == 4
    assert batch == comparison_batch(fresh, past, output, 0, 2, 0) != comparison_batch(fresh, past, output, 0, 2, 1)
    assert len(comparison_batch(fresh, [], output, 0, 2, 0)) == 40


@pytest.fixture
def judge() -> Iterator[Judge]:
    """AI feedback behind real HTTP: the more digits an answer has, the better."""
    server = Judge()

    def reply(body: dict[str, Any]) -> str:
        shown = body["messages"][-1]["content"]
        answer = shown.partition("<<<")[2].partition("\n")[2].rpartition("\n")[0]
        return json.dumps({"score": min(sum(map(str.isdigit, answer)), 10)})

    server.reply = reply
    yield server
    server.server.shutdown()
    server.server.server_close()


def compared(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "comparisons" / "grpo.jsonl").read_text().splitlines()]


def digits(text: str) -> int:
    return sum(map(str.isdigit, text))


def test_a_judge_behind_an_endpoint_compares(judge: Judge, tmp_path: Path) -> None:
    labeller = {"type": "judge", "model": "m", "base_url": judge.url, "cache": None, "retries": 0}
    run = begin(recipe(tmp_path, labeller=labeller), out=tmp_path / "run")
    with RunReader.open(run.path) as store:
        count = sum(len(g.scored.scored) for n in range(1, 5) for g in store.step("grpo", n).groups)
        assert len(judge.requests) == count == 4 * 3 * 4
        assert min(dict(store.metric("comparisons", "grpo")).values()) > 0
    assert all(digits(without_thinking(pair["chosen"])) > digits(without_thinking(pair["rejected"])) for pair in compared(run))


def test_a_judge_that_is_out_of_order_ends_the_run_and_with_one_that_is_back_it_resumes(judge: Judge, tmp_path: Path) -> None:
    cache = str(tmp_path / "replies.sqlite")
    labeller = {"type": "judge", "model": "m", "base_url": judge.url, "cache": cache, "retries": 0}
    answer, judge.reply = judge.reply, lambda _: (500, "out of order")
    with pytest.raises(RewardError, match="12 of 12 completions of a step could not be judged") as raised:
        begin(recipe(tmp_path, labeller=labeller), out=tmp_path / "run")
    assert raised.value.where == "grpo.iterate.labeller"
    judge.reply = answer
    run = resume(RunFolder.open(tmp_path / "run", tmp_path))
    assert {pair["step"] for pair in compared(run)} <= {1, 2, 3, 4}


def test_people_rank_while_it_trains_and_each_ranking_is_learned_from_as_fresh_once(tmp_path: Path) -> None:
    config, out = recipe(tmp_path, labeller=None), tmp_path / "run"
    with contextlib.suppress(TimeUp):
        begin(config, out=out, minutes=0)
    ranked = 0
    for _ in range(20):
        ranked = ranked or rank_a_group(out)
        try:
            run = resume(RunFolder.open(out, tmp_path), minutes=0)
            break
        except TimeUp:
            continue
    pairs = compared(run)
    assert {pair["step"] for pair in pairs} == {2}, "what was said before the first round's end was fresh then, and no more"
    assert len(pairs) == ranked
    with RunReader.open(run.path) as store:
        assert dict(store.metric("comparisons", "grpo")) == {2: float(ranked), 4: 0.0}
        assert any("can't be read" in event.message for event in store.events())
    first, last = (weights(run, "reward_models", name) for name in ("reward_model", "grpo"))
    assert any(not torch.equal(first[name], last[name]) for name in first)


def rank_a_group(out: Path) -> int:
    """Ranks the first group of grpo's first step, once it is there: one text over all that differ. Returns how many pairs."""
    with RunReader.open(out) as store:
        if not any(row.stage == "grpo" for row in store.steps()):
            return 0
        texts = [s.completion.text.strip() for s in store.group("grpo", 1, 0).graded.scored.scored]
    others = [i for i, text in enumerate(texts) if text != texts[0]]
    assert others
    ranking = {"stage": "grpo", "step": 1, "group": 0, "type": "ranking", "tiers": [[0], others]}
    (out / "feedback.jsonl").write_text(json.dumps(ranking) + '\n{"stage": "grpo", "st')
    return sum(is_comparable(texts[0], texts[i]) for i in others)


def test_only_a_learned_reward_can_be_trained(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"grpo\.iterate\.reward"):
        begin(recipe(tmp_path, reward="format"), out=tmp_path / "run")
