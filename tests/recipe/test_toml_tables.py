from __future__ import annotations

import time
from typing import Any

import pytest

from oncurve.errors import RecipeError
from oncurve.recipe.load import dump_recipe, load_recipe, parse_recipe, parse_toml
from oncurve.recipe.toml_tables import MAX_DEPTH, parse_tables

GOOD = {"stages": [{"type": "grpo", "steps": 1}], "task": {"type": "arithmetic"}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 20_000 + "]" * 20_000,
        "x = " + "{a = " * 20_000 + "1" + "}" * 20_000,
        ".".join(["a"] * 20_000) + " = 1",
        "[" + ".".join(["a"] * 20_000) + "]",
        ".".join(["a"] * (MAX_DEPTH + 1)) + " = 1",
    ],
    ids=["lists", "tables", "keys", "section", "one too many"],
)
def test_a_deep_recipe_is_one_error(text: str) -> None:
    began = time.process_time()
    with pytest.raises(RecipeError, match="nested too deeply"):
        parse_toml(text, "deep.toml")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("depth", [MAX_DEPTH, 20_000])
def test_a_deep_dict_is_one_error(depth: int) -> None:
    with pytest.raises(RecipeError, match="nested too deeply"):
        parse_recipe({**GOOD, "model": nested(depth)})


def test_a_dict_that_contains_itself_is_one_error() -> None:
    loop: dict[str, Any] = dict(GOOD)
    loop["model"] = loop
    with pytest.raises(RecipeError, match="nested too deeply"):
        parse_recipe(loop)


def test_a_number_of_thousands_of_digits_is_one_error() -> None:
    with pytest.raises(RecipeError):
        parse_toml("seed = " + "9" * 10_000, "long.toml")


@pytest.mark.parametrize("value", ["[" * 20_000, "9" * 10_000, "{a." + "a." * 20_000])
def test_an_odd_value_of_set_is_text(value: str) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(GOOD, [f"seed={value}"])


def test_ordinary_text_with_dots_is_read() -> None:
    dots = "." * 500
    assert parse_tables(f'a = "{dots}" # {dots}') == {"a": dots}
    assert parse_tables(dump_recipe(load_recipe("arithmetic")))["name"] == "arithmetic"
