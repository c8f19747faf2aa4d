"""Every key of a recipe with its type, default and documentation. Error messages, `recipe explain` and the docs read it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types as limits
import tomli_w
from pydantic.fields import FieldInfo

from oncurve.recipe.schema.base import Section, types_in
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import STAGE_CLASSES, STAGE_TYPES, StageBase

TYPE_NAMES = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    dict: "table",
    tuple: "list",
    Any: "anything",
}


def describe_type(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """The values that an annotation allows, in words: `integer, 1 or more`, `one of k1, k2, k3`."""
    if get_origin(annotation) is Annotated:
        base, *more = get_args(annotation)
        return describe_type(base, (*more, *metadata))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return _describe_list(get_args(annotation))
    if get_origin(annotation) is dict:
        return "table"
    inner = [part for part in get_args(annotation) if part is not NoneType]
    if inner:
        return " or ".join(describe_type(part, metadata) for part in inner)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return TYPE_NAMES.get(annotation, getattr(annotation, "__name__", str(annotation))) + _describe_limits(annotation, metadata)


def _describe_list(items: tuple[Any, ...]) -> str:
    if any(issubclass(cls, Section) for item in items for cls in types_in(item) if isinstance(cls, type)):
        return "list of sections"
    count = "" if Ellipsis in items else f"{len(items)}, each a "
    return f"list of {count}{describe_type(items[0])}"


def _describe_limits(base: Any, metadata: tuple[Any, ...]) -> str:
    """The range of a number. For integers, above 0 is '1 or more'."""
    parts: list[str] = []
    for item in _constraints(metadata):
        match item:
            case limits.Ge(ge=low):
                parts.append(f"{low} or more")
            case limits.Gt(gt=low):
                parts.append("1 or more" if base is int and low == 0 else f"above {low}")
            case limits.Le(le=high):
                parts.append(f"{high} or less")
            case limits.Lt(lt=high):
                parts.append(f"below {high}")
    return ", " + " and ".join(part.replace(".0 ", " ").removesuffix(".0") for part in parts) if parts else ""


def _constraints(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def nested_sections(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation may hold, also inside lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [cls for part in get_args(annotation) for cls in nested_sections(part)]


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: object) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    try:
        return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()
    except TypeError:
        return repr(value)


def short_toml(value: object) -> str:
    """A value for a table or a message: at most 80 characters, None as 'unset'."""
    if value is None:
        return "unset"
    text = "section" if isinstance(value, Section) else toml_value(value)
    return text if len(text) <= 80 else text[:79] + "…"


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """One key of a recipe. ``owner`` is the section that it belongs to; ``inside`` lists the sections that it may hold.

    Example: ``find_key("grpo.group_size").kind == "integer, 1 or more"``
    """

    key: str
    field: FieldInfo
    owner: type[Section]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def kind(self) -> str:
        return describe_type(self.field.annotation, tuple(self.field.metadata))

    @property
    def is_required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> str:
        return "required" if self.is_required else short_toml(self.field.get_default(call_default_factory=True))

    @property
    def allowed(self) -> tuple[str, ...]:
        return _choices(self.field.annotation)

    @property
    def inside(self) -> list[type[Section]]:
        return nested_sections(self.field.annotation)

    @property
    def doc(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return re.split(r"(?<=\.)(?<!Dr\.)(?<!et al\.) ", self.doc, maxsplit=1)[0]


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


def section_keys(section: type[Section], prefix: str) -> Iterator[RecipeKey]:
    """A section's keys, each followed by those inside it. A stage's `task` and `rewards` have the recipe's keys, which are not
    repeated."""
    for name, field in section.model_fields.items():
        key = RecipeKey(f"{prefix}{name}", field, section)
        yield key
        if prefix and name in ("task", "rewards"):
            continue
        for inner in key.inside if name != "stages" else ():
            yield from section_keys(inner, f"{prefix}{name}.")


def recipe_keys(extensions: Mapping[str, type[Section]] | None = None) -> list[RecipeKey]:
    """Every key: the top-level ones, then each stage type's as `grpo.…`, then the options of task and reward types.

    ``extensions`` maps `task.TYPE` or `rewards.TYPE` to the options of that type, which packages above this one define.
    """
    keys = list(section_keys(Recipe, ""))
    for name, section in {**STAGE_CLASSES, **(extensions or {})}.items():
        keys += section_keys(section, f"{name}.")
    return keys


def field_at_location(model: type[Section], loc: tuple[int | str, ...]) -> tuple[FieldInfo | None, list[type[Section]]]:
    """The field at a pydantic location, and the sections whose keys may follow there."""
    field, sections = None, [model]
    for part in loc:
        if isinstance(part, int):
            continue
        owner = next((cls for cls in sections if part in cls.model_fields), None)
        if owner is not None:
            field = owner.model_fields[part]
            sections = nested_sections(field.annotation)
        elif part in STAGE_TYPES and any(issubclass(section, StageBase) for section in sections):
            sections = [STAGE_TYPES[part].section]
        else:
            return None, []
    return field, sections
