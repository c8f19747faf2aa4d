"""Turns pydantic's validation errors into one RecipeError in terms of the recipe: the key, its value, the reason, the fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from oncurve.errors import RecipeError, closest, did_you_mean
from oncurve.recipe.keys import RecipeKey, field_at_location, recipe_keys, short_toml, toml_value
from oncurve.recipe.schema.base import Section, types_in
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import STAGE_TYPES
from oncurve.recipe.trl.options import explain_trl_key

Loc = tuple[int | str, ...]
S = TypeVar("S", bound=Section)

PRIORITY = {"extra_forbidden": 0, "union_tag_invalid": 1, "union_tag_not_found": 1}
"""Errors to report first: a misspelt key also appears as a missing one, and a wrong stage type hides the stage's keys."""
LIMITS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
EXAMPLES = {"task": '"arithmetic"', "rewards": '"answer"'}


def read_section(model: type[S], data: Mapping[str, Any], where: str) -> S:
    """Validate a section on its own, such as a task's options. ``where`` is its dotted key."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise as_recipe_error(error, model, data, where) from None


def as_recipe_error(error: ValidationError, model: type[Section], data: Mapping[str, Any], where: str = "") -> RecipeError:
    """The first error in full, and the keys of the others."""
    details = sorted(error.errors(include_url=False), key=lambda e: PRIORITY.get(e["type"], 2))
    first = FieldError(details[0], model, data, where)
    # A list without its invalid entries is also reported as too short, and a misspelt key as missing: the same mistake twice.
    repeats = {"too_short", "missing"} if details[0]["type"] == "extra_forbidden" else {"too_short"}
    others = dict.fromkeys(FieldError(other, model, data, where).key for other in details[1:] if other["type"] not in repeats)
    others.pop(first.key, None)
    because, fix = first.explain()
    if others:
        fix += f"\n  also wrong: {', '.join(others)}"
    return RecipeError(first.key, first.shown_value, because=because, fix=fix)


@dataclass(frozen=True)
class FieldError:
    """One of pydantic's errors, with the recipe that it is about."""

    error: ErrorDetails
    model: type[Section]
    data: Mapping[str, Any]
    where: str

    @property
    def loc(self) -> Loc:
        """Pydantic's location, without the index of an item in a list of plain values; a section's own check adds its key."""
        loc = self.error["loc"]
        if self.error["type"] == "conflict":
            return (*loc, str(self.error["ctx"]["key"]))
        while loc and isinstance(loc[-1], int) and tuple in types_in(self._annotation(loc)) and not self._holds_sections(loc):
            loc = loc[:-1]
        return loc

    def _annotation(self, loc: Loc) -> Any:
        field, _ = field_at_location(self.model, loc)
        return None if field is None else field.annotation

    def _holds_sections(self, loc: Loc) -> bool:
        """Whether the location is in a list of sections, which have names, and not in a list of numbers or text."""
        return bool(field_at_location(self.model, loc)[1])

    @property
    def key(self) -> str:
        if self.error["type"] == "union_tag_invalid":
            return f"stages#{int(self.loc[-1]) + 1}"
        return dotted_key(self.loc, self.data, self.where)

    @property
    def is_in_list(self) -> bool:
        """Whether the error is about one item of a list of plain values: then the message shows the complete list."""
        return self.loc != self.error["loc"] and self.error["type"] != "conflict"

    @property
    def shown_value(self) -> str:
        kind = self.error["type"]
        if kind == "conflict":
            return short_toml(self.error["ctx"]["value"])
        if self.is_in_list:
            return short_toml(_value_at(self.data, self.loc))
        if kind == "missing":
            return "missing"
        if kind == "union_tag_not_found":
            return "no type"
        if kind == "union_tag_invalid":
            return f"type = {toml_value(self.error['ctx']['tag'])}"
        return short_toml(self.error["input"])

    def explain(self) -> tuple[str, str]:
        """(reason, fix)."""
        kind = self.error["type"]
        if kind == "conflict":
            return str(self.error["ctx"]["because"]), str(self.error["ctx"]["fix"])
        if kind == "value_error":
            return str(self.error["ctx"]["error"]), "change one of these keys"
        if kind in ("union_tag_invalid", "union_tag_not_found"):
            return self._explain_stage_type()
        if kind == "extra_forbidden":
            return self._explain_unknown_key()
        if kind in ("missing", "too_short") and not self.is_in_list:
            return self._explain_missing_key()
        return self._explain_wrong_value()

    def _explain_stage_type(self) -> tuple[str, str]:
        (name,) = closest(str(self.error.get("ctx", {}).get("tag", "")), STAGE_TYPES) or ["grpo"]
        return f"a stage's type is one of {', '.join(STAGE_TYPES)}", f'write type = "{name}" in this [[stages]]'

    def _explain_unknown_key(self) -> tuple[str, str]:
        name = str(self.loc[-1])
        _, sections = field_at_location(self.model, self.loc[:-1])
        known = [key for section in sections for key in section.model_fields]
        parent = self.key.rpartition(".")[0]
        table = _value_at(self.data, self.loc[:-1])
        required = [key for section in sections for key, field in section.model_fields.items() if field.is_required()]
        missing = next((key for key in required if isinstance(table, Mapping) and key not in table), None)
        similar = closest(name, known)
        fix = _suggest_key(name, parent, self.loc, missing) or (f"write {similar[0]}" if similar else _suggest_removal(known))
        guess = "" if explain_trl_key(name) else did_you_mean(name, known)
        return f"{parent or 'a recipe'} has no key '{name}'{guess}", fix

    def _explain_missing_key(self) -> tuple[str, str]:
        key = self._recipe_key()
        name = str(self.loc[-1])
        if self.model is Recipe and self.loc == ("stages",):
            return "a recipe needs at least one stage", 'add a line [[stages]] and below it type = "grpo"'
        if self.model is Recipe and self.loc == ("task",):
            return "a recipe needs a task, the source of its prompts", 'add a line [task] and below it type = "arithmetic"'
        if key is None:
            return "it has no default", f"add {name}"
        section = next((part for part in self.loc if part in EXAMPLES), None)
        example = EXAMPLES[str(section)] if name == "type" and section else f"… ({_with_article(key.kind)})"
        return f"it has no default: {_uncapitalise(key.summary)}", f"add {name} = {example}"

    def _recipe_key(self) -> RecipeKey | None:
        field, _ = field_at_location(self.model, self.loc)
        return None if field is None else RecipeKey(self.key, field, self.model)

    def _explain_wrong_value(self) -> tuple[str, str]:
        key, value = self._recipe_key(), self.error["input"]
        if key is None:
            return self.error["msg"], f"see `oncurve recipe explain {self.where or self.key}`"
        if key.inside:
            return _explain_wrong_shape(key, value)
        because = f"{key.name} takes {_with_article(key.kind)}"
        if key.allowed:
            return because, _suggest_choice(str(value), key)
        if self.error["type"] == "finite_number":
            because += ", and a finite one"
        if self.error["type"] in LIMITS and not self.is_in_list:
            return because, f"use {key.kind.partition(', ')[2]}{_or_default(key)}"
        return because, (None if self.is_in_list else _suggest_type(key, value)) or _suggest_value(key)


def dotted_key(loc: Loc, data: Any, where: str) -> str:
    """A pydantic location as a dotted key: stages and rewards by name (`stages#1` without one), as `--set` spells them."""
    parts = [where] if where else []
    node, tag = data, None
    for part in loc:
        if isinstance(part, int):
            node = node[part] if isinstance(node, list | tuple) and part < len(node) else None
            label = entry_label(node)
            last = parts.pop() if parts else "entry"
            in_stages = last == "stages" or last.endswith(".stages")
            parts += ([] if in_stages and label else [last]) + ([label] if label else [])
            if not label:
                parts[-1] += f"#{part + 1}"
            tag = node.get("type") if isinstance(node, Mapping) else None
        elif part == tag:
            tag = None
        else:
            parts.append(part)
            node, tag = (node.get(part) if isinstance(node, Mapping) else None), None
    return ".".join(parts) or "recipe"


def entry_label(entry: Any) -> str | None:
    """The name of a stage or reward in the recipe file: its `name`, else its `type`."""
    if not isinstance(entry, Mapping):
        return None
    label = entry.get("name") or entry.get("type")
    return label if isinstance(label, str) else None


def _suggest_key(name: str, parent: str, loc: Loc, missing: str | None) -> str | None:
    """The fix for a key that exists elsewhere in the recipe, or in TRL. If it belongs to another stage type and this section
    has a required key ``missing``, that one was probably meant."""
    stage = parent.partition(".")[0]
    kind = next((part for part in loc[1:] if part in STAGE_TYPES), None)
    homes = [key.key for key in recipe_keys() if key.name == name]
    in_this_stage = [stage + key.removeprefix(str(kind)) for key in homes if key.startswith(f"{kind}.")]
    if name in homes and parent:
        return f"'{name}' is a top-level key: write it above the first [section]"
    if homes and missing and parent == stage and kind and not in_this_stage:
        return f"write it as {parent}.{missing}, which is required and missing"
    if homes:
        return f"write it as {' or '.join(in_this_stage or homes[:3])}"
    return explain_trl_key(name)


def _suggest_removal(known: list[str]) -> str:
    return f"remove it; the keys here are {', '.join(known)}" if known else "remove it"


def _value_at(data: Any, loc: Loc) -> Any:
    """The recipe's value at a location. Pydantic's stage tags are not keys and are skipped."""
    for part in loc:
        in_list = isinstance(data, list | tuple) and isinstance(part, int)
        if in_list or (isinstance(data, Mapping) and part in data):
            data = data[part]
    return data


def _explain_wrong_shape(key: RecipeKey, value: Any) -> tuple[str, str]:
    name = key.name
    if key.kind.startswith("list"):
        if isinstance(value, Mapping):
            return f"{name} is a list, and [{name}] is a single section", f"write [[{name}]], with two brackets"
        return f"{name} is a list of sections", f"write each one below its own [[{name}]]"
    if isinstance(value, list | tuple):
        return f"{name} is one section, and [[{name}]] starts a list", f"write [{name}], with one bracket"
    keys = [f"{key.key}.{name}" for section in key.inside for name in section.model_fields]
    return f"{name} is a section with its own keys", f"set one of its keys: {', '.join(keys)}"


def _suggest_choice(value: str, key: RecipeKey) -> str:
    names = closest(value, key.allowed)
    return f'did you mean {key.name} = "{names[0]}"?' if names else f"use one of those{_or_default(key)}"


def _suggest_type(key: RecipeKey, value: Any) -> str | None:
    """The same value in the type that the key takes, if there is one."""
    kinds = types_in(key.field.annotation)
    if str in kinds and not isinstance(value, str | list | tuple | Mapping):
        return f'''put it in quotes: {key.name} = "{value}" (in --set: '{key.key}="{value}"')'''
    if key.kind == "list of text" and isinstance(value, str):
        return f"write {key.name} = {toml_value([value])}"
    if bool in kinds and str(value).lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        meant = str(value).lower() in ("true", "yes", "on", "1")
        return f"write {key.name} = {toml_value(meant)}, in lower case and without quotes"
    number = _parse_number(value)
    if number is None or not isinstance(value, str | float) or not kinds & {int, float}:
        return None
    if int in kinds and number != int(number):
        return None
    meant_number = int(number) if int in kinds else number
    return f"write {key.name} = {meant_number}" + (", without quotes" if isinstance(value, str) else "")


def _parse_number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None


def _or_default(key: RecipeKey) -> str:
    if key.is_required:
        return ""
    return ", or remove it" if key.default == "unset" else f" (the default is {key.default})"


def _suggest_value(key: RecipeKey) -> str:
    if key.is_required or key.default == "unset":
        return f"write {_with_article(key.kind)}{_or_default(key)}"
    return f"write, for example, the default: {key.name} = {key.default}"


def _with_article(kind: str) -> str:
    if kind.startswith(("one of", "true", "text", "anything")):
        return kind
    return f"an {kind}" if kind.startswith("integer") else f"a {kind}"


def _uncapitalise(text: str) -> str:
    head = text.rstrip(".")
    return head[:1].lower() + head[1:] if head[1:2].islower() else head
