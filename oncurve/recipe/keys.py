"""The schema as a tree of keys: what each may hold, in words. Error messages, `recipe explain` and the docs read it here."""

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
from oncurve.recipe.schema.stages import Stage

STAGES: dict[str, type[Section]] = {
    cls.model_fields["type"].default: cls for cls in get_args(get_args(Stage)[0]) if issubclass(cls, Section)
}
"""Stage classes by `type`."""

WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    dict: "table",
    tuple: "list",
    Any: "anything",
}


def kind_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """What may be written, in words: `whole number, 1 or more`, `one of k1, k2, k3`."""
    if get_origin(annotation) is Annotated:
        base, *more = get_args(annotation)
        return kind_of(base, (*more, *metadata))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return _list_kind(get_args(annotation))
    if get_origin(annotation) is dict:
        return "table"
    inner = [part for part in get_args(annotation) if part is not NoneType]
    if inner:
        return " or ".join(kind_of(part, metadata) for part in inner)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return WORDS.get(annotation, getattr(annotation, "__name__", str(annotation))) + _limits(annotation, metadata)


def _list_kind(items: tuple[Any, ...]) -> str:
    if any(issubclass(cls, Section) for item in items for cls in types_in(item) if isinstance(cls, type)):
        return "list of sections"
    count = "" if Ellipsis in items else f"{len(items)}, each a "
    return f"list of {count}{kind_of(items[0])}"


def _limits(base: Any, metadata: tuple[Any, ...]) -> str:
    """The range, for numbers: whole numbers above 0 are '1 or more'."""
    parts: list[str] = []
    for item in _flat(metadata):
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


def _flat(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def sections_in(annotation: Any) -> list[type[Section]]:
    """The sections that a field may hold, lists and unions looked through."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [cls for part in get_args(annotation) for cls in sections_in(part)]


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def toml(value: object) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    try:
        return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()
    except TypeError:
        return repr(value)


def toml_text(value: object) -> str:
    """A value for a table or a message: not too long, None as 'unset'."""
    if value is None:
        return "unset"
    text = "section" if isinstance(value, Section) else toml(value)
    return text if len(text) <= 80 else text[:79] + "…"


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the tree. ``owner`` is the section it stands in, ``inside`` the sections that its value may be."""

    key: str
    field: FieldInfo
    owner: type[Section]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def kind(self) -> str:
        return kind_of(self.field.annotation, tuple(self.field.metadata))

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> str:
        return "required" if self.required else toml_text(self.field.get_default(call_default_factory=True))

    @property
    def allowed(self) -> tuple[str, ...]:
        return _choices(self.field.annotation)

    @property
    def inside(self) -> list[type[Section]]:
        return sections_in(self.field.annotation)

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


def entries_of(section: type[Section], prefix: str) -> Iterator[Entry]:
    """A section's keys, each followed by those inside it. A stage's own task and rewards are as the recipe's: not repeated."""
    for name, field in section.model_fields.items():
        entry = Entry(f"{prefix}{name}", field, section)
        yield entry
        if prefix and name in ("task", "rewards"):
            continue
        for inner in entry.inside if name != "stages" else ():
            yield from entries_of(inner, f"{prefix}{name}.")


def tree(extensions: Mapping[str, type[Section]] | None = None) -> list[Entry]:
    """Every key, top-level ones first, then each stage type's as `grpo.…`, then the options of task and reward types.

    ``extensions`` maps `task.TYPE` or `rewards.TYPE` to the options of that type: they are known above this package.
    """
    found = list(entries_of(Recipe, ""))
    for name, stage in STAGES.items():
        found += entries_of(stage, f"{name}.")
    for name, options in (extensions or {}).items():
        found += entries_of(options, f"{name}.")
    return found


def field_at(model: type[Section], loc: tuple[int | str, ...]) -> tuple[FieldInfo | None, list[type[Section]]]:
    """The field that a pydantic location leads to, and the sections one may stand in there."""
    field, here = None, [model]
    for part in loc:
        if isinstance(part, int):
            continue
        owner = next((cls for cls in here if part in cls.model_fields), None)
        if owner is not None:
            field = owner.model_fields[part]
            here = sections_in(field.annotation)
        elif part in STAGES and STAGES[part] in here:
            here = [STAGES[part]]
        else:
            return None, []
    return field, here
