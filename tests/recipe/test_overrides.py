from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncurve.errors import RecipeError
from oncurve.recipe.keys import toml_value
from oncurve.recipe.load import apply_sets, read_value
from oncurve.recipe.schema.recipe import Recipe

from .recipes import base, grpo, recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16", 16),
        ("1e-3", 1e-3),
        ("true", True),
        ("bfloat16", "bfloat16"),
        ('"5"', "5"),
        ("[1, 2]", [1, 2]),
        ('["</answer>"]', ["</answer>"]),
        ("{a = 1}", {"a": 1}),
        ("2024-05-01", "2024-05-01"),
        ("1\nname = 2", "1\nname = 2"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("a=b", "a=b"),
    ],
)
def test_a_value_is_toml_if_it_parses_and_text_otherwise(text: str, value: object) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()


@given(scalars.filter(lambda v: v is not None) | st.lists(st.integers(-9, 9)) | st.dictionaries(st.text(), st.integers(-9, 9)))
def test_what_toml_writes_is_read_back(value: object) -> None:
    assert read_value(toml_value(value)) == value
    assert tomllib.loads(f"v = {toml_value(value)}")["v"] == value


def test_sections_stages_rewards_and_plain_keys() -> None:
    changed = recipe(
        "seed=3", "model.dtype=bfloat16", "model.tiny.layers=2", "sft.steps=7", "rewards.format.weight=0.25", "task.digits=3"
    )
    assert changed.seed == 3
    assert changed.model.dtype == "bfloat16"
    assert changed.model.tiny.layers == 2
    assert changed.stages[0].steps == 7
    assert [reward.weight for reward in changed.rewards] == [1.0, 0.25]
    assert changed.task.options == {"digits": 3}
    assert grpo("grpo.group_size=16", "grpo.kl.beta=0.1", 'grpo.sampling.stop=["x"]').sampling.stop == ("x",)


def test_a_stage_is_found_by_its_name_and_by_a_name_just_given() -> None:
    assert recipe("grpo.name=rl", "rl.steps=5").stages[1].steps == 5
    with pytest.raises(RecipeError, match="no stage"):
        recipe("grpo.name=rl", "grpo.steps=5")


def test_a_stages_own_rewards_are_reached_through_it() -> None:
    data = base()
    data["stages"][1]["rewards"] = [{"type": "answer", "name": "right"}]
    assert apply_sets(data, ["grpo.rewards.right.weight=2"])["stages"][1]["rewards"][0]["weight"] == 2


def test_an_empty_value_takes_the_key_out() -> None:
    assert recipe("sft.steps=7", "sft.steps=").stages[0].steps == 200
    assert recipe("model.dtype=").model.dtype == "float32"


def test_the_recipe_given_is_left_as_it_was() -> None:
    data = base()
    apply_sets(data, ["grpo.steps=1", "rewards.answer.weight=3", "model.dtype=bfloat16"])
    assert data == base()


@pytest.mark.parametrize("key", ["grpo.group_size", "sft.optimiser.learning_rate", "rewards.answer.weight", "task.new_option"])
def test_setting_twice_keeps_the_last(key: str) -> None:
    assert apply_sets(base(), [f"{key}=1", f"{key}=2"]) == apply_sets(base(), [f"{key}=2"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("grpo.group_size", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("grpo..steps=3", "KEY=VALUE"),
        ("gropo.steps=1", "did you mean 'grpo'"),
        ("grpo=1", "grpo.KEY=VALUE"),
        ("stages.grpo.steps=1", "write --set grpo.steps=…"),
        ("stages.0.steps=1", "write --set sft.steps=…"),
        ("stages.1.sampling.top_p=1", "write --set grpo.sampling.top_p=…"),
        ("stages.1=1", "write --set grpo.KEY=…"),
        ("stages.2.steps=1", "start with one of sft, grpo: NAME.steps=…"),
        ("stages.-1.steps=1", "start with one of sft, grpo: NAME.steps=…"),
        ("stages.gropo.steps=1", "did you mean 'grpo'"),
        ("rewards.answr.weight=2", "did you mean 'answer'"),
        ("rewards.answer=2", "rewards.answer.KEY=VALUE"),
        ("grpo.rewards.answer.weight=1", "rewards.NAME.KEY"),
        ("name.x=2", "set name itself"),
    ],
)
def test_changes_that_lead_nowhere(change: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        apply_sets(base(), [change])
    assert words in str(caught.value)


def test_every_top_level_key_may_begin_a_change() -> None:
    for key in Recipe.model_fields:
        assert apply_sets({}, [f"{key}=1"]) == {key: 1}
