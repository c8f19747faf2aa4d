from __future__ import annotations

from oncurve.recipe.load import changes, flat, parse_recipe

DATA = {
    "task": {"type": "arithmetic"},
    "rewards": [{"type": "answer"}],
    "stages": [{"type": "sft"}, {"type": "grpo", "steps": 7}],
}


def test_keys_are_those_of_set() -> None:
    keys = flat(parse_recipe(DATA))
    assert keys["grpo.steps"] == 7
    assert keys["rewards.answer.weight"] == 1.0
    assert keys["sft.optimiser.learning_rate"] == 1e-3
    assert keys["model.tiny.layers"] == 4


def test_changes_are_what_was_set() -> None:
    before, after = parse_recipe(DATA), parse_recipe(DATA, ["grpo.steps=9", "rewards.answer.weight=0.5"])
    assert changes(before, after) == {"grpo.steps": 9, "rewards.answer.weight": 0.5}
    assert changes(before, before) == {}
