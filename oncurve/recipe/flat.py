"""A recipe as dotted keys, as `--set` writes them, and how two recipes differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oncurve.recipe.schema import Recipe


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key with its value; stages and rewards by name."""
    return _flat(recipe.model_dump(mode="json"), "")


def changes(before: Recipe, after: Recipe) -> dict[str, Any]:
    """The keys whose values differ, with the new values."""
    old = flat(before)
    return {key: value for key, value in flat(after).items() if old.get(key) != value}


def _flat(value: Any, at: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{at}.{key}" if at else key).items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        prefix = "" if at == "stages" else f"{at}."
        named = {prefix + str(item.get("name") or item.get("type")): item for item in value}
        return {k: v for name, item in named.items() for k, v in _flat(item, name).items()}
    return {at: value}
