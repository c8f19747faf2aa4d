"""From what pydantic found wrong to one RecipeError in the recipe's own words: the key, what was found, why, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from oncurve.errors import RecipeError
from oncurve.recipe.keys import STAGES, Entry, field_at, toml, toml_text, tree
from oncurve.recipe.schema.base import Section, types_in
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.trl.options import TRL_OPTIONS

Loc = tuple[int | str, ...]
S = TypeVar("S", bound=Section)

FIRST = {"extra_forbidden": 0, "union_tag_invalid": 1, "union_tag_not_found": 1}
"""A misspelt key also shows as a missing one, and a wrong stage type hides what is in the stage: they are told first."""


LIMITS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
EXAMPLES = {"task": '"arithmetic"', "rewards": '"answer"'}


def read_section(model: type[S], data: Mapping[str, Any], where: str) -> S:
    """Read a section on its own, such as a task's options: ``where`` is the dotted key that it stands under."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise as_recipe_error(error, model, data, where) from None


def as_recipe_error(error: ValidationError, model: type[Section], data: Mapping[str, Any], where: str = "") -> RecipeError:
    """The first problem in full, and the keys of the others."""
    found = sorted(error.errors(include_url=False), key=lambda e: FIRST.get(e["type"], 2))
    problem = FieldError(found[0], model, data, where)
    # A list that lost its bad entries counts as too short, and a misspelt key as missing: the same mistakes, told already.
    echoes = {"too_short", "missing"} if found[0]["type"] == "extra_forbidden" else {"too_short"}
    others = dict.fromkeys(FieldError(other, model, data, where).key for other in found[1:] if other["type"] not in echoes)
    others.pop(problem.key, None)
    because, fix = problem.explain()
    if others:
        fix += f"\n  also wrong: {', '.join(others)}"
    return RecipeError(problem.key, problem.shown_value, because=because, fix=fix)


@dataclass(frozen=True)
class FieldError:
    """One of pydantic's complaints, with the recipe that it is about."""

    error: ErrorDetails
    model: type[Section]
    data: Mapping[str, Any]
    where: str

    @property
    def loc(self) -> Loc:
        """Pydantic's location, less what it adds after a list's entry and what a whole section's check lacks."""
        loc = self.error["loc"]
        if self.error["type"] == "impossible":
            return (*loc, str(self.error["ctx"]["key"]))
        while loc and isinstance(loc[-1], int) and tuple in types_in(self._field_kind(loc)) and not self._entries(loc):
            loc = loc[:-1]
        return loc

    def _field_kind(self, loc: Loc) -> Any:
        field, _ = field_at(self.model, loc)
        return None if field is None else field.annotation

    def _entries(self, loc: Loc) -> bool:
        """Whether the location is an entry of a list of sections, which has a name, and not a number in a list of numbers."""
        return bool(field_at(self.model, loc)[1])

    @property
    def key(self) -> str:
        if self.error["type"] == "union_tag_invalid":
            return f"stages#{int(self.loc[-1]) + 1}"
        return dotted(self.loc, self.data, self.where)

    @property
    def in_list(self) -> bool:
        """Whether the complaint is of one number or word in a list: the whole list is then shown."""
        return self.loc != self.error["loc"] and self.error["type"] != "impossible"

    @property
    def shown_value(self) -> str:
        kind = self.error["type"]
        if kind == "impossible":
            return toml_text(self.error["ctx"]["found"])
        if self.in_list:
            return toml_text(_at(self.data, self.loc))
        if kind == "missing":
            return "missing"
        if kind == "union_tag_not_found":
            return "no type"
        if kind == "union_tag_invalid":
            return f"type = {toml(self.error['ctx']['tag'])}"
        return toml_text(self.error["input"])

    def explain(self) -> tuple[str, str]:
        """Why it can't be, and what to write instead."""
        kind = self.error["type"]
        if kind == "impossible":
            return str(self.error["ctx"]["because"]), str(self.error["ctx"]["fix"])
        if kind == "value_error":
            return str(self.error["ctx"]["error"]), "change one of the keys named"
        if kind in ("union_tag_invalid", "union_tag_not_found"):
            return self._stage_type()
        if kind == "extra_forbidden":
            return self._unknown()
        if kind in ("missing", "too_short") and not self.in_list:
            return self._missing()
        return self._wrong_value()

    def _stage_type(self) -> tuple[str, str]:
        close = closest_name(str(self.error.get("ctx", {}).get("tag", "")), STAGES)
        return f"a stage's type is one of {', '.join(STAGES)}", f'write type = "{close or "grpo"}" in this [[stages]]'

    def _unknown(self) -> tuple[str, str]:
        name = str(self.loc[-1])
        _, here = field_at(self.model, self.loc[:-1])
        known = [key for section in here for key in section.model_fields]
        place = self.key.rpartition(".")[0]
        close = closest_name(name, known)
        hint = f" (did you mean '{close}'?)" if close else ""
        given = _at(self.data, self.loc[:-1])
        asked = [key for section in here for key, field in section.model_fields.items() if field.is_required()]
        lacking = next((key for key in asked if isinstance(given, Mapping) and key not in given), None)
        fix = _where_it_belongs(name, place, self.loc, lacking) or (f"write {close}" if close else _take_out(known))
        return f"{place or 'a recipe'} has no key '{name}'{hint}", fix

    def _missing(self) -> tuple[str, str]:
        entry = self._entry()
        name = str(self.loc[-1])
        if self.model is Recipe and self.loc == ("stages",):
            return "a recipe says what is done, in stages", 'add a line [[stages]] and under it type = "grpo"'
        if self.model is Recipe and self.loc == ("task",):
            return "a recipe says what is asked", 'add a line [task] and under it type = "arithmetic"'
        if entry is None:
            return "it has no default", f"add {name}"
        section = next((part for part in self.loc if part in EXAMPLES), None)
        example = EXAMPLES[str(section)] if name == "type" and section else f"…, {_article(entry.kind)}"
        return f"it has no default: {_uncapital(entry.summary)}", f"add {name} = {example}"

    def _entry(self) -> Entry | None:
        field, _ = field_at(self.model, self.loc)
        return None if field is None else Entry(self.key, field, self.model)

    def _wrong_value(self) -> tuple[str, str]:
        entry, value = self._entry(), self.error["input"]
        if entry is None:
            return self.error["msg"], f"see `oncurve recipe explain {self.where or self.key}`"
        if entry.inside:
            return _wrong_shape(entry, value)
        because = f"{entry.name} takes {_article(entry.kind)}"
        if entry.allowed:
            return because, _pick(str(value), entry)
        if self.error["type"] == "finite_number":
            because += ", and a finite one"
        if self.error["type"] in LIMITS and not self.in_list:
            return because, f"use {entry.kind.partition(', ')[2]}{_or_default(entry)}"
        return because, (None if self.in_list else _retyped(entry, value)) or _in_words(entry)


def dotted(loc: Loc, data: Any, where: str) -> str:
    """The dotted key of a location: stages and rewards by their names (else `stages#1`), as `--set` spells them."""
    parts = [where] if where else []
    node, tag = data, None
    for part in loc:
        if isinstance(part, int):
            node = node[part] if isinstance(node, list | tuple) and part < len(node) else None
            label = label_of(node)
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


def label_of(entry: Any) -> str | None:
    """The name of a stage or reward as written: its `name`, else its `type`."""
    if not isinstance(entry, Mapping):
        return None
    label = entry.get("name") or entry.get("type")
    return label if isinstance(label, str) else None


def _where_it_belongs(name: str, place: str, loc: Loc, lacking: str | None) -> str | None:
    """For a key that exists, but elsewhere, or under another name in TRL. One of another stage was likelier meant as the key
    that this one is ``lacking``."""
    stage = place.partition(".")[0]
    kind = next((part for part in loc[1:] if part in STAGES), None)
    homes = [entry.key for entry in tree() if entry.name == name]
    same_stage = [stage + key.removeprefix(str(kind)) for key in homes if key.startswith(f"{kind}.")]
    if name in homes and place:
        return f"'{name}' is a key of the recipe itself: write it above the first [section]"
    if homes and lacking and place == stage and kind and not same_stage:
        return f"write it as {place}.{lacking}, which is needed here and missing"
    if homes:
        return f"write it as {' or '.join(same_stage or homes[:3])}"
    option = TRL_OPTIONS.get(name)
    if option is not None and option.key is not None:
        return f"TRL's {name} is {option.key} here; `oncurve recipe from-trl` translates a whole file"
    return None


def closest_name(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant; among equals, the one with the same letters, as letters are often swapped."""
    close = difflib.get_close_matches(word.lower(), list(known), n=3, cutoff=0.6)
    return next((match for match in close if sorted(match) == sorted(word.lower())), close[0] if close else None)


def _take_out(known: list[str]) -> str:
    return f"take it out; the keys here are {', '.join(known)}" if known else "take it out"


def _at(data: Any, loc: Loc) -> Any:
    """What the recipe says at a location; pydantic's stage tags are no keys and are passed over."""
    for part in loc:
        in_list = isinstance(data, list | tuple) and isinstance(part, int)
        if in_list or (isinstance(data, Mapping) and part in data):
            data = data[part]
    return data


def _wrong_shape(entry: Entry, value: Any) -> tuple[str, str]:
    name = entry.name
    if entry.kind.startswith("list"):
        if isinstance(value, Mapping):
            return f"{name} is a list, and [{name}] is a single section", f"write [[{name}]], with two brackets"
        return f"{name} is a list of sections", f"give each one under its own [[{name}]]"
    if isinstance(value, list | tuple):
        return f"{name} is one section, and [[{name}]] begins a list", f"write [{name}], with one bracket"
    keys = [f"{entry.key}.{key}" for section in entry.inside for key in section.model_fields]
    return f"{name} is a section with keys of its own", f"set one of its keys: {', '.join(keys)}"


def _pick(value: str, entry: Entry) -> str:
    close = closest_name(value, entry.allowed)
    return f'did you mean {entry.name} = "{close}"?' if close else f"use one of those{_or_default(entry)}"


def _retyped(entry: Entry, value: Any) -> str | None:
    """The same value as the type that was meant, where there is one."""
    kinds = types_in(entry.field.annotation)
    if str in kinds and not isinstance(value, str | list | tuple | Mapping):
        return f'''put it in quotes: {entry.name} = "{value}" (in --set: '{entry.key}="{value}"')'''
    if entry.kind == "list of text" and isinstance(value, str):
        return f"write {entry.name} = {toml([value])}"
    if bool in kinds and str(value).lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        meant = str(value).lower() in ("true", "yes", "on", "1")
        return f"write {entry.name} = {toml(meant)}, in lower case and without quotes"
    number = _number(value)
    if number is None or not isinstance(value, str | float) or not kinds & {int, float}:
        return None
    if int in kinds and number != int(number):
        return None
    meant_number = int(number) if int in kinds else number
    return f"write {entry.name} = {meant_number}" + (", without quotes" if isinstance(value, str) else "")


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None


def _or_default(entry: Entry) -> str:
    if entry.required:
        return ""
    return ", or leave it out" if entry.default == "unset" else f" (the default is {entry.default})"


def _in_words(entry: Entry) -> str:
    if entry.required or entry.default == "unset":
        return f"write {_article(entry.kind)}{_or_default(entry)}"
    return f"write, for example, the default: {entry.name} = {entry.default}"


def _article(kind: str) -> str:
    return kind if kind.startswith(("one of", "true", "text", "anything")) else f"a {kind}"


def _uncapital(text: str) -> str:
    head = text.rstrip(".")
    return head[:1].lower() + head[1:] if head[1:2].islower() else head
