"""Reads recipes from TOML, applies `--set a.b=c`, and writes them: a valid Recipe, or one RecipeError that says what is wrong
and how to fix it."""

from __future__ import annotations

import copy
import datetime
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oncurve.errors import RecipeError, closest, did_you_mean
from oncurve.recipe.error_messages import as_recipe_error, entry_label
from oncurve.recipe.keys import toml_key, toml_value
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.toml_tables import MAX_DEPTH, NestedTooDeeply, check_depth, parse_tables
from oncurve.recipe.validate import check_recipe

PACKAGE = Path(__file__).resolve().parents[1]


def load_recipe(path: Path | str, sets: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a built-in recipe by its name, and apply the ``--set`` changes."""
    file = find_recipe(Path(path))
    data = read_toml(file)
    return parse_recipe(data if file == Path(path) else _find_own_files(data, file.parent.parent), sets)


def _find_own_files(value: Any, root: Path) -> Any:
    """A built-in recipe's tables with the paths of its own files (`recipes/…`, below ``root``), so that it runs in any folder.

    Files of the current folder come first: in a checkout the recipe stays as it is.
    """
    if isinstance(value, Mapping):
        return {key: _find_own_files(item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_find_own_files(item, root) for item in value]
    if isinstance(value, str) and value.startswith("recipes/"):
        file = value.partition(":")[0]  # of recipes/rewards.py:function too
        if not Path(file).exists() and (root / file).exists():
            return str(root / value)
    return value


SMOKE_STEPS = 2
"""Steps of each stage of a smoke test."""
SMOKE_HELDOUT = 8
"""Held-out prompts of a smoke test."""


def smoke_sets(path: Path | str, sets: Sequence[str] = ()) -> list[str]:
    """``sets``, and the changes that shorten a recipe to two steps per stage, each with an evaluation and a checkpoint.

    Warm-ups and rounds are shortened too. Batch sizes and lengths stay, so that the memory is that of the complete run.
    """
    data = apply_sets(read_toml(find_recipe(Path(path))), sets)
    changes = [f"name={data.get('name', 'run')}-smoke"]
    tables = [("", data), *_by_label(data.get("stages")).items()]
    for label, table in tables:
        prefix = f"{label}." if label else ""
        changes += [
            f"{label}.{key}={value}" for key, value in (("steps", SMOKE_STEPS), ("eval_every", 1), ("save_every", 1)) if label
        ]
        for key, most in SMOKE_LIMITS.items():
            value = _value_at(table, key.split("."))
            if isinstance(value, int) and value > most:
                changes.append(f"{prefix}{key}={most}")
        if isinstance(table.get("task"), Mapping) and _value_at(table, ["task", "heldout"]) is None:
            changes.append(f"{prefix}task.heldout={SMOKE_HELDOUT}")
    return [*sets, *changes]


SMOKE_LIMITS = {
    "optimiser.warmup_steps": 1,
    "critic.warmup_steps": 1,
    "kl.refresh_every": 1,
    "iterate.every": 1,
    "task.heldout": SMOKE_HELDOUT,
}
"""Keys of a recipe or stage that a smoke test lowers to at most this."""


def _value_at(table: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        table = table.get(part) if isinstance(table, Mapping) else None
    return table


def parse_recipe(data: Mapping[str, Any], sets: Sequence[str] = ()) -> Recipe:
    """Validate the tables of a TOML file against the schema, then check the combinations of keys."""
    try:
        check_depth(data)
    except NestedTooDeeply:
        raise _depth_error("recipe") from None
    changed = apply_sets(data, sets)
    try:
        recipe = Recipe.model_validate(changed)
    except ValidationError as error:
        raise as_recipe_error(error, Recipe, changed) from None
    return check_recipe(recipe)


UNUSED_KEYS: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], bool]]] = (
    ("dpo", "margin", lambda stage: stage.get("loss") != "simpo"),
    ("ppo", "critic.loss_weight", lambda stage: _value_at(stage, ["critic", "trunk"]) != "shared"),
    ("grpo", "kl.estimator", lambda stage: _value_at(stage, ["kl", "beta"]) == 0),
    ("grpo", "kl.on_cpu", lambda stage: _value_at(stage, ["kl", "beta"]) == 0),
    ("ppo", "kl.estimator", lambda stage: _value_at(stage, ["kl", "beta"]) == 0),
    ("ppo", "kl.on_cpu", lambda stage: _value_at(stage, ["kl", "beta"]) == 0),
    *(
        ("training_free", key, lambda stage: True)
        for key in ("sampling.top_k", "sampling.min_p", "sampling.min_new_tokens", "mask_cut")
    ),
)
"""(type of stage, key, when it did nothing): what 0.1.0 accepted, and `oncurve.recipe.validate` refuses now."""


def drop_unused_keys(tables: Mapping[str, Any], sets: Sequence[str] = ()) -> dict[str, Any]:
    """A run's recipe with the ``--set`` changes, without recorded keys that do nothing and are refused now: runs of 0.1.0 still
    open. A recorded key that the changes put to use is kept, and so is a key that they set."""
    changed = apply_sets(tables, sets)
    recorded, stages = (_by_label(of.get("stages")).values() for of in (tables, changed))
    for before, stage in zip(recorded, stages, strict=False):
        for kind, key, is_unused in UNUSED_KEYS:
            path = key.split(".")
            table, is_recorded = _value_at(stage, path[:-1]), _value_at(stage, path) == _value_at(before, path)
            if stage.get("type") == kind and isinstance(table, dict) and is_unused(stage) and is_recorded:
                table.pop(path[-1], None)
    return changed


def _depth_error(where: str) -> RecipeError:
    because = f"tables and lists may be nested {MAX_DEPTH} deep"
    return RecipeError(where, "nested too deeply", because=because, fix="remove the brackets or dots that you don't need")


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML with every default written out; it reads back equal. TOML has no null, so unset keys are left out."""
    return "\n".join(_tables(recipe.model_dump(exclude_none=True), "")).lstrip("\n") + "\n"


def _tables(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """A table's plain values first, then its sections: TOML cannot return to a table after a [section] line."""
    sections = {key: value for key, value in table.items() if isinstance(value, dict) or _is_section_list(value)}
    yield from (f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items() if key not in sections)
    for key, value in sections.items():
        name = f"{path}{toml_key(key)}"
        for entry in [value] if isinstance(value, dict) else value:
            yield f"\n[{name}]" if isinstance(value, dict) else f"\n[[{name}]]"
            yield from _tables(entry, f"{name}.")


def _is_section_list(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(entry, dict) for entry in value)


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every value of a recipe by its dotted key as `--set` spells it; stages and rewards by name."""
    return _flatten(recipe.model_dump(mode="json"), "")


def _flatten(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for name, item in value.items() for k, v in _flatten(item, f"{key}.{name}" if key else name).items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        prefix = "" if key == "stages" else f"{key}."
        labelled = {prefix + str(item.get("name") or item.get("type") or i): item for i, item in enumerate(value)}
        return {k: v for label, item in labelled.items() for k, v in _flatten(item, label).items()}
    return {key: value}


def changed_keys(before: Recipe, after: Recipe) -> dict[str, Any]:
    """The keys whose values differ, with the new values."""
    old = flatten(before)
    return {key: value for key, value in flatten(after).items() if old.get(key) != value}


def builtin_recipes() -> dict[str, Path]:
    """The built-in recipes by name: inside the installed package, or next to it in a checkout."""
    checkout = PACKAGE.parent
    folders = [PACKAGE / "recipes"] + ([checkout / "recipes"] if (checkout / "pyproject.toml").is_file() else [])
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def find_recipe(path: Path) -> Path:
    """The file at this path, else the built-in recipe of this name."""
    if path.is_file():
        return path
    builtin = builtin_recipes()
    if len(path.parts) == 1 and path.suffix in ("", ".toml") and path.stem in builtin:
        return builtin[path.stem]
    if path.is_dir():
        files = sorted(path.glob("*.toml"))
        fix = f"give a file: {', '.join(map(str, files[:5]))}" if files else "give the path of a .toml file"
        raise RecipeError(str(path), "a folder", because="a recipe is one TOML file", fix=fix)
    files = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
    nearby = [str(file) for file in files if file.name != "pyproject.toml"]
    folder = path.parent.resolve() if path.parent.is_dir() else path.parent
    because = f"{folder} has no such file" + (f"; the built-in recipes are {', '.join(builtin)}" if builtin else "")
    raise RecipeError(str(path), "no such file", because=because, fix=_suggest_recipe(path, nearby, builtin))


def _suggest_recipe(path: Path, nearby: list[str], builtin: Mapping[str, Path]) -> str:
    if path.stem in builtin:
        return f"write only '{path.stem}' for the built-in recipe"
    similar = closest(path.stem, [Path(name).stem for name in nearby] + list(builtin), count=2, cutoff=0.65)
    names = [name for name in nearby if Path(name).stem in similar] + [name for name in builtin if name in similar]
    if names:
        return f"did you mean {' or '.join(dict.fromkeys(names))}?"
    return "check the path" + (f"; recipes in this folder: {', '.join(nearby[:5])}" if nearby else "")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises RecipeError with line and column if it is not TOML."""
    if path.suffix in (".yaml", ".yml"):
        raise RecipeError(
            str(path), "a YAML file", because="recipes are TOML", fix="for a TRL config: oncurve recipe from-trl FILE"
        )
    if not path.is_file():  # but a pipe, for example, which might never end
        raise RecipeError(str(path), "not a file", because="a recipe is one TOML file", fix="check the path")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(str(path), "not text", because=f"byte {error.start} is not UTF-8", fix="save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(str(path), "can't be read", because=str(error.strerror), fix="check the file's permissions") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_tables(text)
    except tomllib.TOMLDecodeError as error:
        raise _toml_error(str(error), text, where) from None
    except NestedTooDeeply:
        raise _depth_error(where) from None


def _toml_error(message: str, text: str, where: str) -> RecipeError:
    """Tomllib's message ends with the position: '(at line 3, column 5)' or '(at end of document)'."""
    lines = text.splitlines() or [""]
    position = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    line, column = (int(position[1]), int(position[2])) if position else (len(lines), len(lines[-1]) + 1)
    reason = re.sub(r" \(at .*\)$", "", message)
    shown = lines[min(line, len(lines)) - 1].strip()
    because = reason[:1].lower() + reason[1:]
    return RecipeError(f"{where}:{line}:{column}", shown or "an empty line", because=because, fix=_toml_fix(reason, shown))


def _toml_fix(reason: str, line: str) -> str:
    key, equals, value = line.partition("=")
    if "overwrite a value" in reason or "twice" in reason:
        return "keep one of the two"
    if "Invalid value" in reason and equals and re.fullmatch(r"[A-Za-z][\w ./-]*", value.strip()):
        word = value.strip()
        return f"write {word.lower()}" if word.lower() in ("true", "false") else f'put text in quotes: {key.strip()} = "{word}"'
    if "Expected '='" in reason:
        return 'write key = value; text goes in "quotes"'
    if "Unescaped '\\'" in reason:
        return "put text with backslashes in single quotes"
    return "correct this line: key = value, [section] or [[list]]; text in quotes, true and false in lower case"


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
        document = parse_tables(f"value = {text}")
    except ValueError:
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
        key = ".".join(parts)
        raise RecipeError(key, "can't be set", because=because, fix=f"set one of its keys: {key}.KEY=VALUE")
    return table


def _find_section(table: dict[str, Any], parts: Sequence[str], depth: int) -> dict[str, Any]:
    section = table.setdefault(parts[depth], {})
    if isinstance(section, dict):
        return section
    where = ".".join(parts[: depth + 1])
    because = f"{where} is {section!r}, which has no keys below it"
    raise RecipeError(".".join(parts), "can't be set", because=because, fix=f"set {where} itself")


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
    raise RecipeError(".".join(parts), "can't be set", because=because, fix=fix)


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
        names, named = list(stages), parts[1]
        if named.isdecimal() and int(named) < len(names):
            named = names[int(named)]
        because = "a stage's keys are set by its name" + ("" if named in stages else did_you_mean(named, names))
        keys = ".".join(parts[2:]) or "KEY"
        fix = f"write --set {named}.{keys}=…" if named in stages else f"start with one of {', '.join(names)}: NAME.{keys}=…"
        return RecipeError(where, "can't be set", because=because, fix=fix)
    known = [*(key for key in Recipe.model_fields if key != "stages"), *stages]
    because = f"this recipe has no section and no stage '{parts[0]}'{did_you_mean(parts[0], known)}"
    return RecipeError(where, "can't be set", because=because, fix=f"start with one of {', '.join(known)}")
