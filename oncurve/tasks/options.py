"""Reads the options of a task or a reward: pydantic's complaints become errors with a dotted key and the closest known word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from oncurve.errors import RecipeError, did_you_mean
from oncurve.recipe.schema import Section

Options = TypeVar("Options", bound=Section)


def read_options(model: type[Options], values: Mapping[str, Any], where: str) -> Options:
    """The options as their own schema sees them; the first complaint is raised, under `where.key`."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise _recipe_error(model, error.errors()[0], where) from None


def _recipe_error(model: type[Section], problem: ErrorDetails, where: str) -> RecipeError:
    key = ".".join([where, *(str(part) for part in problem["loc"])])
    known = ", ".join(model.model_fields) or "none"
    if problem["type"] == "extra_forbidden":
        word = str(problem["loc"][-1])
        hint = did_you_mean(word, model.model_fields)
        return RecipeError(key, f"there is no such key{hint}", because=f"its own keys are: {known}", fix="rename or remove it")
    if problem["type"] == "missing":
        return RecipeError(key, "not set", because="it has no default", fix=f"set {key}")
    what = repr(problem["input"]) if problem["loc"] else "these options"
    return RecipeError(key, what, because=problem["msg"].removeprefix("Value error, "), fix=f"change {key}")
