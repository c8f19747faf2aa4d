"""`--set a.b=c`: changes to a recipe from the command line, applied before validation."""

from __future__ import annotations

import copy
import datetime
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.errors import RecipeError, did_you_mean
from oncurve.recipe.error_messages import entry_label
from oncurve.recipe.schema.recipe import Recipe


def apply_sets(data: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """A copy of the recipe with the changes `a.b=c`, in order. `a.b=` removes the key, so that its default applies.

    The first part of a key is a top-level key, a section, or a stage's name; `rewards.NAME` is the reward of that name. Unknown
    keys are reported by the validation that follows.
    """
    changed = copy.deepcopy(dict(data))
    for text in sets:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise RecipeError("--set", text, because="a change is KEY=VALUE", fix="for example --set grpo.group_size=16")
        _set_value(_find_table(changed, parts), parts[-1], value.strip())
    return changed


def _set_value(table: dict[str, Any], name: str, text: str) -> None:
    if text:
        table[name] = read_value(text)
    else:
        table.pop(name, None)


def read_value(text: str) -> Any:
    """The text as a TOML value, else as a plain string. Dates are strings, because no recipe key takes one."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    return text if len(document) > 1 or isinstance(value, datetime.date | datetime.time) else value


def _find_table(data: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The table that holds the last part of a key. Sections that the file does not have are created."""
    table, depth = data, 0
    stages = _by_label(data.get("stages"))
    if parts[0] in stages and parts[0] not in Recipe.model_fields:
        table, depth = stages[parts[0]], 1
    elif len(parts) > 1 and (parts[0] not in Recipe.model_fields or parts[0] == "stages"):
        raise _unknown_first_part(parts, stages)
    while depth < len(parts) - 1:
        if parts[depth] == "rewards":
            table, depth = _find_reward(table, parts, depth), depth + 2
        else:
            table, depth = _find_section(table, parts, depth), depth + 1
    if depth >= len(parts):
        because = "it is a complete stage or reward, with its own keys"
        raise RecipeError(".".join(parts), "--set", because=because, fix=f"set one of its keys: {'.'.join(parts)}.KEY=VALUE")
    return table


def _find_section(table: dict[str, Any], parts: Sequence[str], depth: int) -> dict[str, Any]:
    section = table.setdefault(parts[depth], {})
    if isinstance(section, dict):
        return section
    where = ".".join(parts[: depth + 1])
    raise RecipeError(
        ".".join(parts), "--set", because=f"{where} is {section!r}, which has no keys below it", fix=f"set {where} itself"
    )


def _find_reward(table: dict[str, Any], parts: Sequence[str], depth: int) -> dict[str, Any]:
    rewards, name = _by_label(table.get("rewards")), parts[depth + 1]
    if name in rewards:
        return rewards[name]
    where = ".".join(parts[: depth + 1])
    because = f"there is no reward '{name}' in {where}{did_you_mean(name, rewards)}"
    if rewards:
        fix = f"use one of {', '.join(rewards)}"
    elif depth:
        fix = "the recipe's own rewards are set by rewards.NAME.KEY"
    else:
        fix = "add it to the file"
    raise RecipeError(".".join(parts), "--set", because=because, fix=fix)


def _by_label(entries: Any) -> dict[str, dict[str, Any]]:
    """Stages or rewards by name; the first one if two have the same."""
    labelled: dict[str, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list | tuple) else ():
        label = entry_label(entry)
        if label is not None:
            labelled.setdefault(label, entry)
    return labelled


def _unknown_first_part(parts: Sequence[str], stages: Mapping[str, Any]) -> RecipeError:
    where = ".".join(parts)
    if parts[0] == "stages":
        because, fix = "a stage's keys are set by its name", f"write --set {'.'.join(parts[1:])}=…"
        return RecipeError(where, "--set", because=because, fix=fix)
    known = [*(key for key in Recipe.model_fields if key != "stages"), *stages]
    because = f"this recipe has no section and no stage '{parts[0]}'{did_you_mean(parts[0], known)}"
    return RecipeError(where, "--set", because=because, fix=f"start with one of {', '.join(known)}")
