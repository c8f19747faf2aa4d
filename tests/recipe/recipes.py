"""A small recipe for tests to bend."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from oncurve.errors import RecipeError
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Grpo

BASE = """
name = "small"

[task]
type = "arithmetic"
digits = 2

[[rewards]]
type = "answer"

[[rewards]]
type = "format"
weight = 0.5

[[stages]]
type = "sft"

[[stages]]
type = "grpo"
"""


def base() -> dict[str, Any]:
    return tomllib.loads(BASE)


def recipe(*sets: str) -> Recipe:
    return parse_recipe(base(), sets)


def grpo(*sets: str) -> Grpo:
    stage = recipe(*sets).stages[-1]
    assert isinstance(stage, Grpo)
    return stage


def refusal(*sets: str, data: dict[str, Any] | None = None) -> RecipeError:
    """The one error that a recipe with these changes gives, which must not sound like pydantic's."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(base() if data is None else data, sets)
    error = caught.value
    assert error.__suppress_context__ or error.__context__ is None
    for word in ("pydantic", "Input should", "validation error", "Traceback", "type=", "Extra inputs"):
        assert word not in str(error)
    assert error.because
    assert error.fix
    return error
