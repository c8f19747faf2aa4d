"""What in a recipe runs code or sends a secret, and whether the user of this machine agreed to it.

A run's folder may come from anyone, so the agreement is not stored in it but in `~/.local/share/oncurve/trusted`. A run that
this user starts here is recorded there; any other run is recorded by `--trust`. A record is valid for this folder at this path,
for this run, and for exactly the code and secrets that its recipe names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oncurve.errors import RunError
from oncurve.plugins import declared_plugins, package_name
from oncurve.recipe.load import drop_unused_keys, parse_recipe, read_toml
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.checkpoints.listing import find_target
from oncurve.runs.folder import STATE, RunFolder, RunState

Part = Literal["model", "task", "rewards", "sinks", "stages"]
PARTS: tuple[Part, ...] = ("model", "task", "rewards", "sinks", "stages")

PART_OF_KEY: Mapping[str, Part] = {
    "model": "model", "task": "task", "rewards": "rewards", "labeller": "rewards", "sinks": "sinks", "stages": "stages",
}  # fmt: skip
"""The part of a recipe that a table under a key belongs to; a labeller is a reward that `iterate` of a stage names."""
LOADING_PARTS: tuple[Part, ...] = ("model", "task")
"""Parts that loading a run's model uses: the task defines the tokenizer of the built-in model."""
GRADING_PARTS: tuple[Part, ...] = ("model", "task", "rewards")
"""Parts that evaluating a run's model uses."""

PLUGIN_KINDS: Mapping[Part, str] = {"task": "tasks", "rewards": "rewards", "sinks": "sinks", "stages": "stages"}
"""Parts whose `type` may name a plug-in, and the kind of plug-in."""
CODE_KEYS = frozenset({"function", "splitter", "environment", "tools"})
"""Keys that name a function or class to import: `file.py:name` or `module:name`."""
BUILT_IN = frozenset({"calculator"})
"""Values of those keys that name built-in code."""
SERVERS = ("openenv:http://", "openenv:https://")
"""Prefixes of values that name a server instead of code."""
FREE_KEYS = frozenset({"arguments", "schema", "template_options"})
"""Tables with the user's own keys. They are plain data."""
ENDPOINT_TYPES = frozenset({"judge", "training_free"})
DEFAULT_KEY = "OPENAI_API_KEY"
Search = Callable[[Mapping[str, Any], str, str, Part], Iterator["Capability"]]
"""(table, its name, its key, its part of the recipe) -> what it can do."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing in a recipe that runs code or sends a secret. ``where`` is its key, ``what`` says what it does.

    Example: Capability("rewards", "rewards.short.function", "runs Python: reward.py:short")
    """

    part: Part
    where: str
    what: str

    def __str__(self) -> str:
        return f"{_printable(self.where)} {_printable(self.what)}"


def capabilities_of(recipe: Recipe) -> tuple[Capability, ...]:
    """Everything in a recipe that runs code or sends a secret."""
    return tuple(_walk(recipe.model_dump(mode="json", exclude_none=True)))


def capabilities_of_rewards(rewards: Sequence[Mapping[str, Any]]) -> tuple[Capability, ...]:
    """Everything that runs code or sends a secret in rewards, which are given as in a recipe."""
    return tuple(_walk({"rewards": list(rewards)}))


def check(run: RunFolder, *parts: Part) -> None:
    """Refuses a run whose recipe runs code or sends a secret, unless the user agreed. ``parts`` are the parts of the recipe
    that are about to be used; by default all."""
    capabilities = capabilities_of(load_recipe_of(run))
    used = [capability for capability in capabilities if not parts or capability.part in parts]
    if used and not _is_recorded(run, capabilities):
        raise _not_trusted(run, used)


def _not_trusted(run: RunFolder, used: Sequence[Capability]) -> RunError:
    started = run.state().folder
    place = "" if started is None else f" (files are looked for here and in {_printable(started)})"
    return RunError(
        str(run.path),
        f"not trusted: {'; '.join(map(str, used))}{place}",
        because="you did not start this run here, and its recipe would run code with your permissions or send your keys",
        fix="if you trust it, add --trust once; a command without that option: run `oncurve verify RUN --trust` first",
    )


def load_recipe_of(run: RunFolder, sets: Sequence[str] = ()) -> Recipe:
    """A run's recipe. Validation imports the stages and objectives that are plug-ins, so the user must have agreed to those."""
    tables = read_toml(run.recipe)
    plugins = [plugin for plugin in _walk(tables, _plugins_in) if plugin.part == "stages"]
    if plugins and not _is_recorded(run, list(_walk(tables))):
        raise _not_trusted(run, plugins)
    return parse_recipe(drop_unused_keys(tables, sets))


def run_of_target(target: str, runs_dir: Path) -> RunFolder | None:
    """The run that RUN, RUN@STAGE-STEP or RUN@best names; None if it is not a run."""
    found = find_target(target, runs_dir)
    return None if found is None else found.run


def check_recipe(path: str | Path) -> None:
    """`check` for a path that is a run's recipe.toml. Any other recipe is the user's own choice, like a script."""
    run = run_of_recipe(path)
    if run is not None:
        check(run)


def run_of_recipe(path: str | Path) -> RunFolder | None:
    """The run whose recipe.toml this is; None for any other file."""
    file = Path(path).resolve()
    run = RunFolder(file.parent)
    return run if file == run.recipe and file.is_file() and (run.path / STATE).exists() else None


def grant(run: RunFolder, recipe: Recipe | None = None, path: Path | None = None) -> None:
    """Records that the user agrees to what the run's recipe runs and sends. ``path`` is where a new run is about to be."""
    path = (path or run.path).resolve()
    if recipe is None:
        _write_record(run, path, list(_walk(read_toml(run.recipe))))
        recipe = load_recipe_of(run)
    _write_record(run, path, capabilities_of(recipe))


def _write_record(run: RunFolder, path: Path, capabilities: Sequence[Capability]) -> None:
    if not capabilities:
        return
    record = _record(path, run.state(), capabilities)
    _GRANTED.add(record)
    with contextlib.suppress(OSError):  # if the home folder is not writable, the agreement is valid for this process
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        record.write_text(f"{path}\n", encoding="utf-8")


_GRANTED: set[Path] = set()
"""Records made by this process."""


def _is_recorded(run: RunFolder, capabilities: Sequence[Capability]) -> bool:
    record = _record(run.path.resolve(), run.state(), capabilities)
    with contextlib.suppress(PermissionError):  # another user's records do not count
        return record in _GRANTED or record.is_file()
    return False


def _record(path: Path, state: RunState, capabilities: Sequence[Capability]) -> Path:
    """The file that records the user's agreement to a run. Its name is a hash of the run's folder, the run's creation time, the
    capabilities, and the folder to which the recipe's paths are relative."""
    agreed = [str(path), state.created, sorted((capability.where, capability.what) for capability in capabilities)]
    agreed += [] if state.folder is None else [state.folder]
    name = hashlib.sha256(json.dumps(agreed).encode()).hexdigest()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "oncurve" / "trusted" / name


def _walk(recipe: Mapping[str, Any], search: Search | None = None) -> Iterator[Capability]:
    """Searches every table of a recipe at any depth, so that a new section with one of these keys is covered too."""
    search = search or _capabilities_in
    tables: list[tuple[Mapping[str, Any], str, str, Part]] = [(recipe, "", "", "stages")]
    while tables:
        table, name, where, part = tables.pop()
        yield from search(table, name, where, part)
        for key, value in table.items():
            if key in FREE_KEYS:
                continue
            inside = f"{where}.{key}" if where else str(key)
            below = PART_OF_KEY.get(key, part) if part == "stages" else part
            if isinstance(value, Mapping):
                tables.append((value, key, inside, below))
            elif isinstance(value, list | tuple):
                entries = [(i, entry) for i, entry in enumerate(value) if isinstance(entry, Mapping)]
                tables += [(entry, key, f"{inside}.{_label(entry, i)}", below) for i, entry in entries]


def _plugins_in(table: Mapping[str, Any], name: str, where: str, part: Part) -> Iterator[Capability]:
    kind = str(table.get("type"))
    for plugin in declared_plugins(f"oncurve.{PLUGIN_KINDS[part]}").get(kind, ()) if part in PLUGIN_KINDS else ():
        yield Capability(part, f"{where}.type", f"runs Python of the installed package {package_name(plugin)}: {plugin.value}")
    for plugin in declared_plugins("oncurve.objectives").get(str(table.get("objective")), ()):
        what = f"runs Python of the installed package {package_name(plugin)}: {plugin.value}"
        yield Capability(part, f"{where}.objective", what)


def _capabilities_in(table: Mapping[str, Any], name: str, where: str, part: Part) -> Iterator[Capability]:
    yield from _plugins_in(table, name, where, part)
    kind = str(table.get("type"))
    for key in sorted(CODE_KEYS & table.keys()):
        values = table[key] if isinstance(table[key], list | tuple) else [table[key]]
        for value in values:
            if isinstance(value, str) and value not in BUILT_IN:
                what = f"sends tool calls and rows to {value}" if value.startswith(SERVERS) else f"runs Python: {value}"
                yield Capability(part, f"{where}.{key}", what)
    for key in ("command", "mcp"):
        if isinstance(table.get(key), str):
            yield Capability(part, f"{where}.{key}", f"runs a program: {table[key]}")
    if table.get("trust_remote_code", False) not in (False, None):
        what = f"runs Python that comes with the model {table.get('source', '')}"
        yield Capability(part, f"{where}.trust_remote_code", what.rstrip())
    if table.get("trusted", False) not in (False, None):
        what = "runs programs that a model wrote, without a sandbox if the machine has none"
        yield Capability(part, f"{where}.trusted", what)
    if {kind, name} & ENDPOINT_TYPES or "base_url" in table:
        key, address = table.get("key_env", DEFAULT_KEY), table.get("base_url") or "https://api.openai.com"
        yield Capability(part, where, f"sends prompts, completions and the key in ${key} to {address}")
    if part == "sinks" and kind == "wandb" and not table.get("offline"):
        yield Capability(part, where, "sends metrics to Weights & Biases with the key of your account")


def _label(entry: Mapping[str, Any], index: int) -> str:
    return str(entry.get("name") or entry.get("type") or index)


def _printable(text: str) -> str:
    """Text from an untrusted recipe, without control characters and shortened, so that it can't garble the question."""
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
