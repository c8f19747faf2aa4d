"""The files and functions that a run reads besides its model: reward functions, environments and data.

A new run records the SHA-256 of each in `inputs.json`, and keeps the source of its functions in `sources/`. A resumed run must
end as if it had never stopped, so it is refused if one of them has changed, unless the user accepts the change. Runs of version
1 have no record and are not checked. What a function itself imports or reads is not recorded.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from oncurve.errors import RunError
from oncurve.recipe.load import flatten
from oncurve.recipe.schema.recipe import Recipe
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.atomic_files import disk_errors, replace_file
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.runs.secrets import redact
from oncurve.trust import CODE_KEYS

RECORD, SOURCES = "inputs.json", "sources"
DATA_KEYS = frozenset({"path", "heldout_path", "data", "pairs", "library"})
"""Keys that name a file of data."""


@dataclass(frozen=True, slots=True)
class RunInput:
    """One input: the key that names it, its file or function, and the hash of its contents. ``source`` is the copy of code.

    Example: RunInput("rewards.short.function", "reward.py", "9f86d081…", "sources/rewards.short.function.py")
    """

    key: str
    origin: str
    sha256: str
    source: str | None = None


def record_inputs(run: RunFolder, recipe: Recipe, rewards: RewardMix | None = None) -> None:
    """Writes the record of a run. ``rewards`` are those given from Python."""
    found = []
    shutil.rmtree(run.path / SOURCES, ignore_errors=True)
    for key, origin, content in _inputs_of(recipe, rewards):
        source = None
        if isinstance(content, str) or origin.endswith(".py"):
            source = f"{SOURCES}/{_file_name(key)}"
            with disk_errors(run.path):
                (run.path / SOURCES).mkdir(exist_ok=True)
            code = content if isinstance(content, str) else content.read_text("utf-8", "replace")
            replace_file(run.path / source, redact(code).encode())
        found.append(asdict(RunInput(key, origin, _digest(content), source)))
    if found:
        replace_file(run.path / RECORD, json.dumps(found, indent=2).encode() + b"\n")


def changed_inputs(run: RunFolder, recipe: Recipe, rewards: RewardMix | None = None) -> list[str]:
    """The inputs that are not what they were when the run began: `KEY (ORIGIN)`, one each."""
    try:
        recorded = [RunInput(**entry) for entry in json.loads((run.path / RECORD).read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        fix = "restore it from a copy, or delete it: then nothing is checked"
        raise RunError(str(run.path / RECORD), "unreadable", because=str(error), fix=fix) from error
    now = {key: content for key, _, content in _inputs_of(recipe, rewards)}
    checked = [entry for entry in recorded if entry.key in now or not _is_from_python(entry)]
    return [
        f"{entry.key} ({entry.origin}{'' if entry.key in now else ' is missing'})"
        for entry in checked
        if entry.key not in now or _digest(now[entry.key]) != entry.sha256
    ]


def check_inputs(run: RunFolder, recipe: Recipe, rewards: RewardMix | None = None, *, accept_changes: bool = False) -> None:
    """Raises RunError if an input has changed; if the user accepts it, the change is logged and the record renewed."""
    changed = changed_inputs(run, recipe, rewards)
    if changed and not accept_changes:
        raise RunError(
            run.name,
            f"changed since the run began: {', '.join(changed)}",
            because="a resumed run must end as if it had never stopped; it began with other contents "
            f"(its functions are in {run.path / SOURCES})",
            fix="restore them, or accept the change with --accept-changes (from Python: accept_changes=True)",
        )
    if changed and run.database.exists():
        with RunWriter.open(run.path) as store:
            store.record_event("inputs", f"continues with changed inputs: {', '.join(changed)}")
    if changed:
        record_inputs(run, recipe, rewards)


def _inputs_of(recipe: Recipe, rewards: RewardMix | None) -> Iterator[tuple[str, str, Path | str]]:
    """(key, file or function, its path or source) of each input that exists."""
    for key, value in flatten(recipe).items():
        name = key.rpartition(".")[2]
        if not isinstance(value, str):
            continue
        path = _code_file(value) if name in CODE_KEYS else Path(value) if name in DATA_KEYS else None
        if path is not None and path.is_file():
            yield key, value.rpartition(":")[0] if name in CODE_KEYS else value, path
    for reward in () if rewards is None else rewards.rewards:
        source = _source_of(reward.function) if isinstance(reward, FunctionReward) else None
        if source is not None:
            yield f"rewards.{reward.name}", FROM_PYTHON, source


FROM_PYTHON = "a Python function"


def _is_from_python(entry: RunInput) -> bool:
    """Functions given from Python are compared only where the program gives them again: `oncurve verify` can't."""
    return entry.origin == FROM_PYTHON


def _code_file(reference: str) -> Path | None:
    """The file of `file.py:name` or `module:name`; None for built-in names and for what is not there. Imports nothing."""
    source = reference.rpartition(":")[0]
    if source.endswith(".py"):
        return Path(source)
    locations: Any = None
    spec = None
    for part in source.split(".") if source else ():
        spec = PathFinder.find_spec(part, locations)
        if spec is None:
            return None
        locations = spec.submodule_search_locations
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _file_name(key: str) -> str:
    return re.sub(r"[^\w.-]", "_", key) + ".py"


def _source_of(function: Callable[..., Any]) -> str | None:
    """A function's source; None if there is none, as for what was typed into a shell."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


def _digest(content: Path | str) -> str:
    if isinstance(content, str):
        return hashlib.sha256(content.encode()).hexdigest()
    with disk_errors(content), content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
