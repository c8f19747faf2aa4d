from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.errors import RecipeError
from oncurve.recipe import load
from oncurve.recipe.load import (
    builtin_recipes,
    changed_keys,
    drop_unused_keys,
    dump_recipe,
    find_recipe,
    flatten,
    load_recipe,
    parse_recipe,
    parse_toml,
)
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Grpo, Sft

from .recipes import BASE, base, recipe


def test_a_file_is_read_with_changes_on_top(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("\ufeff" + BASE, encoding="utf-8")
    assert load_recipe(path) == recipe()
    assert load_recipe(str(path), ["seed=4"]).seed == 4


def test_defaults_of_a_stage_survive_setting_one_key_of_a_section() -> None:
    sft = recipe("sft.optimiser.warmup_steps=10").stages[0]
    assert isinstance(sft, Sft)
    assert (sft.optimiser.learning_rate, sft.optimiser.schedule) == (1e-3, "linear")


option_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda n: n not in ("type", "heldout", "seed")
)
option_values = st.recursive(
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(option_names, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(option_names, option_values, max_size=4),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(1, 64),
)
def test_a_dumped_recipe_reads_back_equal(options: dict[str, Any], prompt: str, group_size: int) -> None:
    data = base()
    data["task"] |= options
    data["model"] = {"system_prompt": prompt, "template_options": options}
    data["stages"][1] |= {"group_size": max(2, group_size), "clip": {"low": 0.1, "high": 0.3}, "rewards": [{"type": "answer"}]}
    first = parse_recipe(data)
    again = parse_recipe(tomllib.loads(dump_recipe(first)))
    assert again == first
    assert dump_recipe(again) == dump_recipe(first)


def test_the_dump_says_every_default_and_leaves_unset_keys_out() -> None:
    text = dump_recipe(recipe())
    dumped = tomllib.loads(text)
    assert dumped["stages"][1]["sampling"]["max_new_tokens"] == 256
    assert dumped["stages"][0]["optimiser"]["learning_rate"] == 1e-3
    assert "clip" not in dumped["stages"][1]
    assert "betas = [0.9, 0.999]" in text


def test_recipes_made_in_python_take_lists_and_are_frozen() -> None:
    recipe_object = Recipe.model_validate({"task": {"type": "a"}, "rewards": [{"type": "answer"}], "stages": [Sft(), Grpo()]})
    assert isinstance(recipe_object.stages, tuple)
    with pytest.raises(Exception, match="frozen"):
        recipe_object.seed = 3


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("seed 3", "r.toml:1:6", "write key = value"),
        ("a = 1\nname = abc", "r.toml:2:8", 'put text in quotes: name = "abc"'),
        ("x = True", "r.toml:1:5", "write true"),
        ("x = 1\nx = 2", "r.toml:2:6", "keep one of the two"),
        ("[a]\n[a]", "r.toml:2:3", "keep one of the two"),
        ("[a\nx=1", "r.toml:1:3", "[section]"),
        ('x = "C:\\path"', "r.toml:1:10", "single quotes"),
        ('x = "abc', "r.toml:1:9", "text in quotes"),
        ("a = 1\nx = [1,", "r.toml:2:8", "[[list]]"),
    ],
)
def test_bad_toml_is_reported_with_line_and_column(text: str, where: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_toml(text, "r.toml")
    assert caught.value.where == where
    assert words in caught.value.fix


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    (tmp_path / "trl.yaml").write_text("beta: 0")
    for name, words in [("latin.toml", "UTF-8"), ("trl.yaml", "from-trl"), (".", "latin.toml")]:
        with pytest.raises(RecipeError) as caught:
            load_recipe(tmp_path / name)
        assert words in caught.value.fix


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one built-in recipe next to the package."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "recipes" / "arithmetic.toml").write_text(BASE)
    monkeypatch.setattr(load, "PACKAGE", tmp_path / "oncurve")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_bare_name_is_a_built_in_recipe(checkout: Path) -> None:
    assert find_recipe(Path("arithmetic")) == checkout / "recipes" / "arithmetic.toml"
    assert find_recipe(Path("arithmetic.toml")) == checkout / "recipes" / "arithmetic.toml"
    (checkout / "arithmetic.toml").write_text(BASE)
    assert find_recipe(Path("arithmetic.toml")) == Path("arithmetic.toml")


def test_recipes_inside_an_installed_package_are_found(checkout: Path) -> None:
    inside = checkout / "oncurve" / "recipes"
    inside.mkdir(parents=True)
    (inside / "countdown.toml").write_text(BASE)
    assert set(builtin_recipes()) == {"arithmetic", "countdown"}
    (checkout / "pyproject.toml").unlink()
    assert set(builtin_recipes()) == {"countdown"}


def test_a_built_in_recipe_finds_its_own_files_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Path(__file__).parents[2]
    monkeypatch.chdir(checkout)
    assert flatten(load_recipe("agent-sort"))["task.path"] == "recipes/agent-sort.jsonl"
    monkeypatch.chdir(tmp_path)
    for name in builtin_recipes():
        own = [value for value in flatten(load_recipe(name)).values() if isinstance(value, str) and "recipes/" in value]
        assert all(Path(value.partition(":")[0]).is_file() for value in own), own
    assert flatten(load_recipe("agent-sort"))["task.environment"] == f"{checkout}/recipes/agent_sort.py:Sort"


def test_a_missing_file_names_the_nearest(checkout: Path) -> None:
    (checkout / "mine.toml").write_text(BASE)
    for name, words in [
        ("arithmetc", "did you mean arithmetic?"),
        ("mina.toml", "mine.toml"),
        ("x/arithmetic.toml", "only 'arithmetic'"),
    ]:
        with pytest.raises(RecipeError) as caught:
            load_recipe(name)
        assert words in caught.value.fix


DATA = {
    "task": {"type": "arithmetic"},
    "rewards": [{"type": "answer"}],
    "stages": [{"type": "sft"}, {"type": "grpo", "steps": 7}],
}


def test_keys_are_those_of_set() -> None:
    keys = flatten(parse_recipe(DATA))
    assert keys["grpo.steps"] == 7
    assert keys["rewards.answer.weight"] == 1.0
    assert keys["sft.optimiser.learning_rate"] == 1e-3
    assert keys["model.tiny.layers"] == 4


def test_changes_are_what_was_set() -> None:
    before, after = parse_recipe(DATA), parse_recipe(DATA, ["grpo.steps=9", "rewards.answer.weight=0.5"])
    assert changed_keys(before, after) == {"grpo.steps": 9, "rewards.answer.weight": 0.5}
    assert changed_keys(before, before) == {}


def test_a_runs_keys_that_did_nothing_are_dropped_and_those_that_act_stay() -> None:
    tables = {
        "stages": [
            {"type": "dpo", "name": "a", "margin": 0.2, "loss": "dpo"},
            {"type": "dpo", "name": "b", "margin": 0.2, "loss": "simpo"},
            {
                "type": "ppo",
                "name": "c",
                "critic": {"loss_weight": 0.1, "trunk": "separate"},
                "kl": {"beta": 0.1, "on_cpu": True},
            },
            {
                "type": "ppo",
                "name": "d",
                "critic": {"loss_weight": 0.1, "trunk": "shared"},
                "kl": {"beta": 0.0, "on_cpu": True},
            },
            {"type": "training_free", "mask_cut": True, "sampling": {"top_k": 4, "top_p": 0.9}},
            3,
        ]
    }
    assert drop_unused_keys(tables)["stages"] == [
        {"type": "dpo", "name": "a", "loss": "dpo"},
        {"type": "dpo", "name": "b", "margin": 0.2, "loss": "simpo"},
        {"type": "ppo", "name": "c", "critic": {"trunk": "separate"}, "kl": {"beta": 0.1, "on_cpu": True}},
        {"type": "ppo", "name": "d", "critic": {"loss_weight": 0.1, "trunk": "shared"}, "kl": {"beta": 0.0}},
        {"type": "training_free", "sampling": {"top_p": 0.9}},
        3,
    ]
    assert drop_unused_keys({"stages": 3}) == {"stages": 3}
    used = drop_unused_keys(tables, ["a.loss=simpo", "c.critic.trunk=shared", "d.kl.beta=0.05", "a.name=e"])["stages"]
    assert used[0] == {"type": "dpo", "name": "e", "margin": 0.2, "loss": "simpo"}, "what a change puts to use is kept"
    assert used[2]["critic"] == {"loss_weight": 0.1, "trunk": "shared"}
    assert used[3]["kl"] == {"beta": 0.05, "on_cpu": True}
    assert "margin" not in drop_unused_keys(tables, ["b.loss=dpo"])["stages"][1]
    assert drop_unused_keys(tables, ["a.margin=0.5"])["stages"][0]["margin"] == 0.5, "and refused, as in a new recipe"
