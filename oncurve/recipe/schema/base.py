"""The base class of every section of a recipe, common types, and the error for keys that contradict each other.

The docstring under a field is its documentation in `oncurve recipe explain`, in error messages and in docs/recipes.md. A
default lives in its section and nowhere else. The schema imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]

STAGE_PREFIX = "stage:"
"""`stage:NAME` in place of a file or a model refers to an earlier stage of the same run."""


def types_in(annotation: Any) -> set[Any]:
    """The plain types of an annotation: `PositiveInt | None` gives {int, NoneType}, a Literal the types of its values."""
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


def conflict(key: str, value: object, *, because: str, fix: str) -> PydanticCustomError:
    """For the validators of a section: an error about two of its keys, which becomes a RecipeError with these texts."""
    return PydanticCustomError("conflict", "{because}", {"key": key, "value": value, "because": because, "fix": fix})


class Section(BaseModel):
    """A section of a recipe: strict, frozen, documented by the docstrings under its fields.

    Strict: an unknown key is an error, and so is a value of another type (`"16"` for 16, `true` for 1).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, strict=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_as_tuples(cls, data: Any) -> Any:
        """TOML has lists, and a frozen section has tuples."""
        if not isinstance(data, dict):
            return data
        tuples = {name for name, field in cls.model_fields.items() if tuple in types_in(field.annotation)}
        return {key: _as_tuples(value) if key in tuples else value for key, value in data.items()}
