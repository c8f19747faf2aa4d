"""The Python API."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oncurve
from oncurve.api import as_mix
from oncurve.errors import OncurveError, RecipeError, RewardError, RunError
from oncurve.models.loading.tiny import build_model, build_tokenizer
from oncurve.recipe.schema.model import TinyModel
from oncurve.records import Group, Prompt
from oncurve.rewards.base import completion_by_letters, from_letters
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.process import ProcessReward
from oncurve.runs.database.reader import RunReader

TINY = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=64)
SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 4,
    "steps": 2,
    "sampling": {"max_new_tokens": 8},
    "save_every": 1,
    "threads": 1,
}


def short(completion: str) -> float:
    return float(len(completion) < 6)


def small_model() -> tuple[Any, Any]:
    tokenizer = build_tokenizer("0123456789+=")
    return build_model(TINY, tokenizer, 0), tokenizer


def train(folder: Path, **changes: Any) -> oncurve.Run:
    message: dict[str, Any] = {"model": small_model(), "prompts": ["3+4=", "5+6="], "rewards": [short], "quiet": True, **SMALL}
    return oncurve.train(runs_dir=folder, **(message | changes))


def test_a_function_and_some_prompts_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, heldout=["1+1="], quiet=False)
    assert (run.name, run.path, run.status) == ("run-1", tmp_path / "run-1", "finished")
    assert (run.model_path / "config.json").is_file()
    assert [step for step, _ in run.metrics("reward")] == [1, 2]
    assert run.metrics("nothing") == []
    assert [(e.stage, e.asked) for e in run.evals] == [("grpo", 1)]
    assert run.accuracy in (0.0, 1.0)
    groups = run.groups(1)
    assert [len(group.graded) for group in groups] == [4, 4]
    assert groups[0].scored.scored[0].aspects[0].name == "short"
    shown = capsys.readouterr().out
    assert "oncurve chat" in shown
    assert "oncurve eval" not in shown  # its prompts are not on disk


def test_the_built_in_model_by_name_and_columns_for_rewards(tmp_path: Path) -> None:
    def right(completion: str, answer: str) -> float:
        return float(completion == answer)

    run = train(tmp_path, model="tiny", prompts=[{"prompt": "1+1=", "answer": "2"}], rewards=(right, 0.5), steps=1, name="sums")
    assert run.name == "sums-1"
    assert run.recipe.rewards[0].weight == 0.5
    assert run.recipe.rewards[0].name == "right"


def test_a_recipe_trains_too(tmp_path: Path) -> None:
    sets = [
        "sft.steps=1",
        "sft.optimiser.warmup_steps=0",
        "grpo.optimiser.warmup_steps=0",
        "grpo.steps=1",
        "grpo.prompts_per_step=2",
        "task.heldout=4",
        "threads=1",
        "model.tiny.width=32",
    ]
    recipe = oncurve.load_recipe("arithmetic", sets)
    run = oncurve.train(recipe, runs_dir=tmp_path, out=tmp_path / "mine", quiet=True)
    assert run.path == tmp_path / "mine"
    assert [e.stage for e in run.evals] == ["sft", "grpo"]
    with pytest.raises(RecipeError, match="it is a key of the recipe"):
        oncurve.train(recipe, group_size=4)


def test_it_is_called_by_name_whatever_was_imported_before(tmp_path: Path) -> None:
    import oncurve.training.trainer

    with pytest.raises(RecipeError, match="prompts: missing"):
        oncurve.train(model="tiny")


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("group_sise", "did you mean 'group_size'"),
        ("reward", "did you mean 'rewards'"),
        ("learning_rate", "optimiser={'learning_rate': …}"),
        ("max_new_tokens", "sampling={'max_new_tokens': …}"),
    ],
)
def test_unknown_keywords(tmp_path: Path, keyword: str, words: str) -> None:
    with pytest.raises(RecipeError) as raised:
        train(tmp_path, **{keyword: 3})
    assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": None}, "rewards: missing"),
        ({"rewards": []}, "rewards: none"),
        ({"rewards": [3]}, "a reward is a function"),
        ({"rewards": ["answr"]}, "did you mean 'answer'"),
        ({"prompts": []}, "no training prompts"),
        ({"model": 3}, "a model needs its tokenizer"),
        ({"group_size": 1}, "own mean"),
        ({"steps": "many"}, "grpo.steps"),
    ],
)
def test_what_can_not_be_trained(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(OncurveError) as raised:
        train(tmp_path, **change)
    assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_rewards_as_python_writes_them() -> None:
    mix = as_mix([short, (short, 0.5), lambda completion: 1.0, ("format", 0.1), "answer"])
    assert [(reward.name, reward.weight) for reward in mix.rewards] == [
        ("short", 1.0),
        ("short_2", 0.5),
        ("lambda", 1.0),
        ("format", 0.1),
        ("answer", 1.0),
    ]
    assert as_mix(short).rewards[0].name == "short"
    assert as_mix(["repetition", ("format", 0.5)]).accuracy_reward is None, "nothing says what is right"
    assert as_mix(["repetition", (short, 0.5)]).accuracy_reward == "short"
    assert as_mix(["format", ("countdown", 0.5)]).accuracy_reward == "countdown"
    assert as_mix(mix) is mix
    assert isinstance(as_mix((short, 2)), RewardMix)
    with pytest.raises(RewardError, match="a pair is"):
        as_mix([(short, "much")])  # type: ignore[list-item]


def test_a_reward_under_another_weight_is_the_same_in_all_else() -> None:
    """A reward that reads tokens gets the tokenizer, whether it was passed by name or as an object."""
    for steps in ("process", ProcessReward("process", 1.0)):
        mix = as_mix([(steps, 0.5)])
        mix.bind(lambda: from_letters)
        (scored,) = mix.score([Group(Prompt("p", text="?"), np.zeros(1, np.int64), (completion_by_letters("1+1=2"),))])
        (aspect,) = scored.scored[0].aspects
        assert (aspect.weight, aspect.failure, aspect.steps) == (0.5, None, ((4, 1.0),))


def test_a_stopped_run_resumes_with_the_same_objects(tmp_path: Path) -> None:
    uninterrupted = train(tmp_path / "whole")

    calls = 0

    def stops(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise KeyboardInterrupt
        return short(completion)

    stops.__name__ = "short"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", rewards=[stops])
    run = oncurve.Run.open("run-1", tmp_path / "stopped")
    assert run.status == "interrupted"
    with pytest.raises(RecipeError, match="keeps its recipe"):
        train(tmp_path / "stopped", resume=run)
    again = oncurve.train(model=small_model(), prompts=["3+4=", "5+6="], rewards=[short], resume=run, quiet=True)
    assert again.status == "finished"
    with RunReader.open(uninterrupted.path) as one, RunReader.open(again.path) as other:
        assert one.fingerprint() == other.fingerprint()


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such run"):
        oncurve.Run.open("run-9", tmp_path)


def test_it_works_off_the_main_thread(tmp_path: Path) -> None:
    """As in a notebook's background thread: signal handlers can only be set in the main thread."""
    done: list[oncurve.Run] = []
    thread = threading.Thread(target=lambda: done.append(train(tmp_path, steps=1)))
    thread.start()
    thread.join()
    assert done[0].status == "finished"


def test_nothing_else_is_offered() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        oncurve.trian  # noqa: B018
