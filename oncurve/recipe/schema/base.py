"""TODO"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Share = Annotated[float, Field(ge=0.0, le=1.0)]


NonNegative = Annotated[float, Field(ge=0.0)]


Count = Annotated[int, Field(ge=0)]


def types_in(annotation: Any) -> set[Any]:
    """The plain types that an annotation is made of: `PositiveInt | None` gives {int, NoneType}, a Literal its values'."""
    if get_origin(annotation) is Annotated:
        return types_in(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) is tuple or get_origin(annotation) is dict:
        return {get_origin(annotation)}
    inner = get_args(annotation)
    return set().union(*map(types_in, inner)) if inner else {annotation}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def conflict(key: str, found: object, *, because: str, fix: str) -> PydanticCustomError:
    """For a section's own validators: two keys that contradict each other, told in the words of a RecipeError."""
    return PydanticCustomError("impossible", "{because}", {"key": key, "found": found, "because": because, "fix": fix})


STAGE_PREFIX = "stage:"
"""Begins the name of an earlier stage of the same run, in place of a file's or a model's."""


class Section(BaseModel):
    """A part of a recipe: strict, frozen, documented by the docstrings under its fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, strict=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_as_tuples(cls, data: Any) -> Any:
        """Strict: TOML has types of its own, so `"16"` for 16 or `true` for 1 is a slip. But its lists are our tuples."""
        if not isinstance(data, dict):
            return data
        tuples = {name for name, field in cls.model_fields.items() if tuple in types_in(field.annotation)}
        return {key: _as_tuples(value) if key in tuples else value for key, value in data.items()}
