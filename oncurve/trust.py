"""What in a recipe runs code or sends a secret, and whether the user of this machine has agreed to it.

A run's folder may come from anyone, so its own word counts for nothing: agreement is kept outside of it, in
`~/.local/share/oncurve/trusted`. A run that this user starts here is recorded there; for any other run, `--trust` records it.
The record holds for this folder at this place, for this run, and for exactly what its recipe runs and sends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oncurve.errors import RunError
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.folder import STATE, RunFolder

Part = Literal["model", "task", "rewards", "sinks", "stages"]
PARTS: tuple[Part, ...] = ("model", "task", "rewards", "sinks", "stages")

LOADED: tuple[Part, ...] = ("model", "task")
"""What loading a run's model uses: its task makes the tokenizer of the built-in model."""
GRADED: tuple[Part, ...] = ("model", "task", "rewards")
"""What measuring a run's model uses."""

CODE_KEYS = frozenset({"function", "splitter", "environment"})
"""Keys that name a function or class to import: `file.py:name` or `module:name`."""
BUILT_IN = frozenset({"calculator"})
"""Values of those keys that name something of Oncurve's own."""
FREE_KEYS = frozenset({"arguments", "schema", "template_options"})
"""Tables with the user's own keys, which are passed on as data."""
ENDPOINT_TYPES = frozenset({"judge", "training_free"})
ENDPOINT_KEYS = frozenset({"base_url", "key_env"})
DEFAULT_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Power:
    """One thing in a recipe that runs code or sends a secret. ``where`` is its key, ``what`` says what happens.

    Example: Power("rewards", "rewards.short.function", "runs Python: reward.py:short")
    """

    part: Part
    where: str
    what: str

    def __str__(self) -> str:
        return f"{_printable(self.where)} {_printable(self.what)}"


def powers_of(recipe: Recipe) -> tuple[Power, ...]:
    """Everything in a recipe that runs code or sends a secret."""
    return tuple(_walk(recipe.model_dump(mode="json", exclude_none=True)))


def powers_of_rewards(rewards: Sequence[Mapping[str, Any]]) -> tuple[Power, ...]:
    """The same for rewards alone, as a recipe writes them."""
    return tuple(_walk({"rewards": list(rewards)}))


def check(run: RunFolder, *parts: Part) -> None:
    """Refuses a run whose recipe runs code or sends a secret, unless the user has agreed. ``parts`` are those about to be used;
    none: all."""
    powers = powers_of(load_recipe(run.recipe))
    used = [power for power in powers if not parts or power.part in parts]
    if used and not _is_recorded(run, powers):
        raise RunError(
            str(run.path),
            f"not trusted: {'; '.join(map(str, used))}",
            because="the run was not started here by you, and what its recipe names would run with your rights and keys",
            fix="if you trust it, add --trust once (from Python: run `oncurve verify RUN --trust` first)",
        )


def find(target: str, runs_dir: Path) -> RunFolder | None:
    """The run that RUN or RUN@STAGE-STEP names, if it is one."""
    return RunFolder.find(target, runs_dir) or RunFolder.find(target.rpartition("@")[0] or target, runs_dir)


def check_recipe(path: str | Path) -> None:
    """The same for a path that is a run's recipe.toml. Any other recipe that the user names is their choice, like a script."""
    run = of_recipe(path)
    if run is not None:
        check(run)


def of_recipe(path: str | Path) -> RunFolder | None:
    """The run whose recipe.toml this is, if it is one."""
    found = Path(path).resolve()
    run = RunFolder(found.parent)
    return run if found == run.recipe and found.is_file() and (run.path / STATE).exists() else None


def grant(run: RunFolder, recipe: Recipe | None = None) -> None:
    """Records that the user agrees to what the run's recipe runs and sends."""
    powers = powers_of(load_recipe(run.recipe) if recipe is None else recipe)
    if not powers:
        return
    record = _record(run, powers)
    _GRANTED.add(record)
    with contextlib.suppress(OSError):  # without a writable home the agreement holds for this process
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        record.write_text(f"{run.path.resolve()}\n", encoding="utf-8")


_GRANTED: set[Path] = set()
"""Records made by this process."""


def _is_recorded(run: RunFolder, powers: Sequence[Power]) -> bool:
    record = _record(run, powers)
    return record in _GRANTED or record.is_file()


def _record(run: RunFolder, powers: Sequence[Power]) -> Path:
    """A file whose name says which folder, which run in it (by the time of its creation) and which powers."""
    agreed = [str(run.path.resolve()), run.state().created, sorted((power.where, power.what) for power in powers)]
    name = hashlib.sha256(json.dumps(agreed).encode()).hexdigest()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "oncurve" / "trusted" / name


def _walk(recipe: Mapping[str, Any]) -> Iterator[Power]:
    """Every table of a recipe, however deep: a new section that has one of these keys is covered too."""
    tables: list[tuple[Mapping[str, Any], str, str, Part]] = [(recipe, "", "", "stages")]
    while tables:
        table, name, where, part = tables.pop()
        yield from _own_powers(table, name, where, part)
        for key, value in table.items():
            if key in FREE_KEYS:
                continue
            inside = f"{where}.{key}" if where else str(key)
            below = next((known for known in PARTS if known == key), part) if part == "stages" else part
            if isinstance(value, Mapping):
                tables.append((value, key, inside, below))
            elif isinstance(value, list | tuple):
                entries = [(n, one) for n, one in enumerate(value) if isinstance(one, Mapping)]
                tables += [(one, key, f"{inside}.{_label(one, n)}", below) for n, one in entries]


def _own_powers(table: Mapping[str, Any], name: str, where: str, part: Part) -> Iterator[Power]:
    kind = str(table.get("type"))
    for key in sorted(CODE_KEYS & table.keys()):
        if isinstance(table[key], str) and table[key] not in BUILT_IN:
            yield Power(part, f"{where}.{key}", f"runs Python: {table[key]}")
    if table.get("trust_remote_code", False) not in (False, None):
        what = f"runs Python that comes with the model {table.get('source', '')}"
        yield Power(part, f"{where}.trust_remote_code", what.rstrip())
    if table.get("trusted", False) not in (False, None):
        what = "runs programs that a model wrote, without a sandbox if the machine has none"
        yield Power(part, f"{where}.trusted", what)
    if {kind, name} & ENDPOINT_TYPES or ENDPOINT_KEYS & table.keys():
        key, address = table.get("key_env", DEFAULT_KEY), table.get("base_url") or "https://api.openai.com"
        yield Power(part, where, f"sends prompts, completions and the key in ${key} to {address}")
    if part == "sinks" and kind == "wandb" and not table.get("offline"):
        yield Power(part, where, "sends metrics to Weights & Biases with the key of your account")


def _label(entry: Mapping[str, Any], index: int) -> str:
    return str(entry.get("name") or entry.get("type") or index)


def _printable(text: str) -> str:
    """Names from elsewhere, so that they can't rewrite the terminal or hide the rest of the question."""
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
