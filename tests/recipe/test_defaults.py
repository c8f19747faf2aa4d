from __future__ import annotations

import pytest

from oncurve.recipe.defaults import advantage_settings, kl_settings, rewards_for_stage, task_for_stage
from oncurve.recipe.schema.sections import Task
from oncurve.recipe.schema.stages import Grpo

from .recipes import grpo, recipe


@pytest.mark.parametrize(
    ("objective", "advantage", "kl"),
    [
        ("grpo", ("mean", "group"), ("loss", "k3")),
        ("dapo", ("mean", "group"), ("loss", "k3")),
        ("gspo", ("mean", "group"), ("loss", "k3")),
        ("dr_grpo", ("mean", "none"), ("loss", "k3")),
        ("rloo", ("leave_one_out", "none"), ("reward", "k1")),
        ("reinforce", ("none", "none"), ("reward", "k1")),
    ],
)
def test_an_objective_brings_its_own_habits(objective: str, advantage: tuple[str, str], kl: tuple[str, str]) -> None:
    stage = grpo(f"grpo.objective={objective}")
    assert advantage_settings(stage) == advantage
    assert kl_settings(stage) == kl


def test_what_the_recipe_says_comes_first() -> None:
    stage = grpo("grpo.objective=dr_grpo", "grpo.advantage.scale=batch", "grpo.advantage.baseline=leave_one_out")
    assert advantage_settings(stage) == ("leave_one_out", "batch")
    assert kl_settings(grpo("grpo.kl.beta=0.1", "grpo.kl.where=reward")) == ("reward", "k1")
    assert kl_settings(grpo("grpo.kl.beta=0.1", "grpo.kl.where=reward", "grpo.kl.estimator=k2")) == ("reward", "k2")
    assert kl_settings(grpo("grpo.objective=rloo", "grpo.kl.where=loss")) == ("loss", "k3")


def test_a_stages_own_task_and_rewards_come_first() -> None:
    plain = recipe()
    stage = plain.stages[1]
    assert isinstance(stage, Grpo)
    assert task_for_stage(plain, stage) is plain.task
    assert rewards_for_stage(plain, stage) is plain.rewards
    changed = stage.model_copy(update={"task": Task(type="countdown"), "rewards": ()})
    assert task_for_stage(plain, changed).type == "countdown"
    assert rewards_for_stage(plain, changed) == ()
