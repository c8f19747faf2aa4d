"""The reward `json`: 1 for valid JSON that matches a schema, else 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import regex  # type: ignore[import-untyped]
from pydantic import PositiveFloat

from oncurve.errors import MissingPackage, RecipeError, pip_install
from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, score_each
from oncurve.rewards.verifiers.answer_extraction import extract_fenced, extract_tagged, without_thinking


class JsonOptions(Section):
    """1 for valid JSON, or for JSON that matches a schema."""

    take: Literal["any", "all", "tag", "fence"] = "any"
    """Where the JSON is read from: `tag` (the last `<answer>`), `fence` (the last fenced block), `all` (everything but the
    thinking), or `any`, the first of these that is present."""
    schema_file: str | None = None
    """A file with a JSON Schema (2020-12). If neither it nor `rules` is set, any valid JSON gets 1."""
    rules: dict[str, Any] | None = None
    """The schema, written in the recipe."""
    seconds: PositiveFloat = 0.2
    """Time limit of each regular expression of the schema; if it is exceeded, the reward has failed for that completion."""


@dataclass(frozen=True)
class JsonReward:
    """1 for JSON that matches the schema. `NaN` and `Infinity`, which Python accepts, are not JSON."""

    name: str
    weight: float
    options: JsonOptions = field(default_factory=JsonOptions)

    def __post_init__(self) -> None:
        _ = self._validator  # an invalid schema raises when the reward is built, not on the first completion

    def score(self, group: Group) -> list[Result]:
        return score_each(group, self._score)

    def _score(self, completion: Completion) -> Score:
        text = self._extract(without_thinking(completion.text))
        if text is None:
            return Score(0.0, "no JSON found")
        try:
            data = json.loads(text, parse_constant=_reject_constant)
            fault = None if self._validator is None else next(iter(self._validator.iter_errors(data)), None)
        except (ValueError, RecursionError, OverflowError) as error:  # a schema's arithmetic overflows for 1e999
            return Score(0.0, f"not valid JSON: {str(error)[:100]}")
        return Score(1.0) if fault is None else Score(0.0, f"{fault.json_path}: {fault.message[:150]}")

    def _extract(self, text: str) -> str | None:
        extractors: dict[str, Callable[[str], str | None]] = {"tag": extract_tagged, "fence": extract_fenced, "all": str}
        chosen = extractors.values() if self.options.take == "any" else (extractors[self.options.take],)
        return next((part for extract in chosen if (part := extract(text)) is not None), None)

    @cached_property
    def _validator(self) -> Any:
        rules = self._rules()
        if rules is None:
            return None
        where = f"rewards.{self.name}"
        try:
            jsonschema, referencing = import_module("jsonschema"), import_module("referencing")
        except ImportError:
            raise MissingPackage(
                where,
                "jsonschema is not installed",
                because="schemas are checked with it",
                fix=pip_install("schema"),
            ) from None
        try:
            jsonschema.Draft202012Validator.check_schema(rules)
        except jsonschema.SchemaError as error:
            because = f"it is not a valid JSON Schema: {error.message}"
            raise RecipeError(where, "the schema", because=because, fix="correct the schema") from None
        bounded = {"pattern": self._pattern, "patternProperties": self._pattern_properties, "uniqueItems": _unique_items}
        kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, bounded)
        return kind(rules, registry=referencing.Registry())  # an empty registry: no reference is fetched from the network

    def _rules(self) -> dict[str, Any] | None:
        if self.options.schema_file is None:
            return self.options.rules
        where = f"rewards.{self.name}.schema_file"
        try:
            rules = json.loads(Path(self.options.schema_file).read_text("utf-8"))
        except (OSError, ValueError) as error:
            because = getattr(error, "strerror", None) or f"it is not JSON: {error}"
            raise RecipeError(where, self.options.schema_file, because=because, fix="give the path of a JSON file") from None
        if not isinstance(rules, dict):
            raise RecipeError(where, self.options.schema_file, because="a schema is an object", fix="give a JSON object")
        return rules

    def _search(self, pattern: str, text: str) -> bool:
        try:
            return regex.search(pattern, text, timeout=self.options.seconds) is not None
        except TimeoutError:
            raise TimeoutError(f"the pattern {pattern!r} took more than {self.options.seconds} s") from None

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not self._search(pattern, instance):
            yield import_module("jsonschema").ValidationError(f"it does not match {pattern!r}")

    def _pattern_properties(self, validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
        if not isinstance(instance, dict):
            return
        for pattern, rules in patterns.items():
            for key, value in instance.items():
                if self._search(pattern, key):
                    yield from validator.descend(value, rules, path=key, schema_path=pattern)


def _unique_items(validator: Any, is_required: bool, instance: Any, schema: Any) -> Iterator[Any]:
    """In linear time: jsonschema compares every pair if items can't be sorted."""
    if is_required and isinstance(instance, list) and len({_identity(item) for item in instance}) < len(instance):
        yield import_module("jsonschema").ValidationError("its items are not unique")


def _identity(value: Any) -> Hashable:
    """Equal for values that are equal in JSON: 1 is 1.0, but true is not 1."""
    if isinstance(value, dict):
        return frozenset((key, _identity(part)) for key, part in value.items())
    if isinstance(value, list):
        return tuple(_identity(part) for part in value)
    return (type(value) in (int, float), value)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
