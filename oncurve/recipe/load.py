"""A recipe as dotted keys, as `--set` writes them, and how two recipes differ.

Reading recipes: TOML in, a Recipe out, or one RecipeError that says where, what, why and how to mend it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oncurve.errors import RecipeError
from oncurve.recipe.error_messages import as_recipe_error
from oncurve.recipe.keys import toml, toml_key
from oncurve.recipe.overrides import apply_sets
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.validate import check_recipe


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


PACKAGE = Path(__file__).resolve().parents[1]


def load_recipe(path: Path | str, sets: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a built-in recipe by its bare name, with ``--set`` changes on top."""
    return parse_recipe(read_toml(find_recipe(Path(path))), sets)


def parse_recipe(data: Mapping[str, Any], sets: Sequence[str] = ()) -> Recipe:
    """Check what TOML gave against the schema and against the impossible combinations."""
    changed = apply_sets(data, sets)
    try:
        recipe = Recipe.model_validate(changed)
    except ValidationError as error:
        raise as_recipe_error(error, Recipe, changed) from None
    return check_recipe(recipe)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with every default written out; reading it gives an equal one. TOML has no null: unset keys are left out."""
    return "\n".join(_tables(recipe.model_dump(exclude_none=True), "")).lstrip("\n") + "\n"


def _tables(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """A table's own values first, then its sections: after a [section] line TOML has no way back."""
    sections = {key: value for key, value in table.items() if isinstance(value, dict) or _is_sections(value)}
    yield from (f"{toml_key(key)} = {toml(value)}" for key, value in table.items() if key not in sections)
    for key, value in sections.items():
        name = f"{path}{toml_key(key)}"
        for entry in [value] if isinstance(value, dict) else value:
            yield f"\n[{name}]" if isinstance(value, dict) else f"\n[[{name}]]"
            yield from _tables(entry, f"{name}.")


def _is_sections(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(entry, dict) for entry in value)


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with Oncurve, by name: inside the package when installed, beside it in a checkout."""
    checkout = PACKAGE.parent
    folders = [PACKAGE / "recipes"] + ([checkout / "recipes"] if (checkout / "pyproject.toml").is_file() else [])
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def find_recipe(path: Path) -> Path:
    """The file as given, else the built-in recipe of that name."""
    if path.is_file():
        return path
    builtin = builtin_recipes()
    if len(path.parts) == 1 and path.suffix in ("", ".toml") and path.stem in builtin:
        return builtin[path.stem]
    if path.is_dir():
        raise RecipeError(
            str(path), "a folder", because="a recipe is one TOML file", fix=_name_one(sorted(path.glob("*.toml")))
        )
    there = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
    beside = [str(found) for found in there if found.name != "pyproject.toml"]
    raise RecipeError(str(path), "no such file", because=_nobody(path, list(builtin)), fix=_nearest(path, beside, builtin))


def _name_one(files: Sequence[Path]) -> str:
    return f"give a file: {', '.join(map(str, files[:5]))}" if files else "give the path of a .toml file"


def _nobody(path: Path, builtin: list[str]) -> str:
    known = f"; built in are {', '.join(builtin)}" if builtin else ""
    return f"there is no file of that name in {path.parent.resolve() if path.parent.is_dir() else path.parent}{known}"


def _nearest(path: Path, beside: list[str], builtin: Mapping[str, Path]) -> str:
    if path.stem in builtin:
        return f"write '{path.stem}' alone for the built-in recipe"
    close = difflib.get_close_matches(path.stem, [Path(name).stem for name in beside] + list(builtin), n=2, cutoff=0.5)
    names = [name for name in beside if Path(name).stem in close] + [name for name in builtin if name in close]
    if names:
        return f"did you mean {' or '.join(dict.fromkeys(names))}?"
    return "check the path" + (f"; recipes there: {', '.join(beside[:5])}" if beside else "")


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables; a RecipeError at line and column where it is not TOML."""
    if path.suffix in (".yaml", ".yml"):
        raise RecipeError(
            str(path), "a YAML file", because="recipes are TOML", fix="for a TRL config: oncurve recipe from-trl FILE"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(str(path), "not text", because=f"byte {error.start} is not UTF-8", fix="save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(str(path), "can't be read", because=str(error.strerror), fix="check the file's permissions") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _toml_error(str(error), text, where) from None


def _toml_error(message: str, text: str, where: str) -> RecipeError:
    """Tomllib ends its message with the place: '(at line 3, column 5)' or '(at end of document)'."""
    lines = text.splitlines() or [""]
    found = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    line, column = (int(found[1]), int(found[2])) if found else (len(lines), len(lines[-1]) + 1)
    reason = re.sub(r" \(at .*\)$", "", message)
    shown = lines[min(line, len(lines)) - 1].strip()
    return RecipeError(
        f"{where}:{line}:{column}", shown or "an empty line", because=_uncapital(reason), fix=_toml_fix(reason, shown)
    )


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
    return "mend this line: key = value, [section] or [[list]]; text in quotes, true and false in lower case"


def _uncapital(text: str) -> str:
    return text[:1].lower() + text[1:]
