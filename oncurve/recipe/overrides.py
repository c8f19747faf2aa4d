"""`--set a.b=c`: changes to a recipe from the command line, before it is checked."""

from __future__ import annotations

import copy
import datetime
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.errors import RecipeError, did_you_mean
from oncurve.recipe.error_messages import label_of
from oncurve.recipe.schema.recipe import Recipe


def apply_sets(data: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """A copy of the recipe with `a.b=c` changes, each in turn. `a.b=` takes the key out, so that its default holds.

    The first part is a key or section of the recipe, or a stage's name; `rewards.NAME` is the reward of that name. Whether the
    key exists is seen when the recipe is checked.
    """
    changed = copy.deepcopy(dict(data))
    for text in sets:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise RecipeError("--set", text, because="a change is KEY=VALUE", fix="for example --set grpo.group_size=16")
        _put(_table_of(changed, parts), parts[-1], value.strip())
    return changed


def _put(table: dict[str, Any], name: str, text: str) -> None:
    if text:
        table[name] = read_value(text)
    else:
        table.pop(name, None)


def read_value(text: str) -> Any:
    """A TOML value where it parses as one, else the text itself. Dates have no use in a recipe and stay text."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = found["value"]
    return text if len(found) > 1 or isinstance(value, datetime.date | datetime.time) else value


def _table_of(data: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The table that the last part is set in; sections that the file leaves out are made."""
    here, done = data, 0
    stages = _named(data.get("stages"))
    if parts[0] in stages and parts[0] not in Recipe.model_fields:
        here, done = stages[parts[0]], 1
    elif len(parts) > 1 and (parts[0] not in Recipe.model_fields or parts[0] == "stages"):
        raise _unknown_start(parts, stages)
    while done < len(parts) - 1:
        if parts[done] == "rewards":
            here, done = _reward(here, parts, done), done + 2
        else:
            here, done = _section(here, parts, done), done + 1
    if done >= len(parts):
        because = "it is a whole stage or reward, with keys of its own"
        raise RecipeError(".".join(parts), "--set", because=because, fix=f"set one of its keys: {'.'.join(parts)}.KEY=VALUE")
    return here


def _section(here: dict[str, Any], parts: Sequence[str], done: int) -> dict[str, Any]:
    found = here.setdefault(parts[done], {})
    if isinstance(found, dict):
        return found
    where = ".".join(parts[: done + 1])
    raise RecipeError(
        ".".join(parts), "--set", because=f"{where} is {found!r}, with no keys below it", fix=f"set {where} itself"
    )


def _reward(here: dict[str, Any], parts: Sequence[str], done: int) -> dict[str, Any]:
    rewards, name = _named(here.get("rewards")), parts[done + 1]
    if name in rewards:
        return rewards[name]
    where = ".".join(parts[: done + 1])
    because = f"there is no reward '{name}' in {where}{did_you_mean(name, rewards)}"
    own = (
        f"{where} has {', '.join(rewards)}"
        if rewards
        else "the recipe's own are set as rewards.NAME.KEY"
        if done
        else "add it to the file"
    )
    raise RecipeError(".".join(parts), "--set", because=because, fix=own)


def _named(entries: Any) -> dict[str, dict[str, Any]]:
    """Stages or rewards by name; the first one of a name."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list | tuple) else ():
        label = label_of(entry)
        if label is not None:
            found.setdefault(label, entry)
    return found


def _unknown_start(parts: Sequence[str], stages: Mapping[str, Any]) -> RecipeError:
    where = ".".join(parts)
    if parts[0] == "stages":
        because, fix = "a stage is called by its own name", f"write --set {'.'.join(parts[1:])}=…"
        return RecipeError(where, "--set", because=because, fix=fix)
    known = [*(key for key in Recipe.model_fields if key != "stages"), *stages]
    because = f"'{parts[0]}' is no section and no stage of this recipe{did_you_mean(parts[0], known)}"
    return RecipeError(where, "--set", because=because, fix=f"begin with one of {', '.join(known)}")
