"""The files and functions that a run reads besides its model: reward functions, environments, agents and data.

A new run records the SHA-256 of each in `inputs.json`, and keeps the source of its functions in `sources/`. A resumed run must
end as if it had never stopped, so it is refused if one of them has changed, unless the user accepts the change. Runs of version
1 have no record and are not checked. What a function itself imports or reads is not recorded.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, chdir, nullcontext
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.errors import RunError
from oncurve.recipe.load import flatten
from oncurve.recipe.schema.recipe import Recipe
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.atomic_files import disk_errors, replace_file
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.runs.secrets import redact
from oncurve.tasks.base import Task
from oncurve.tasks.data.file_task import local_file
from oncurve.trust import CODE_KEYS

RECORD, SOURCES = "inputs.json", "sources"
DATA_KEYS = frozenset({"path", "heldout_path", "data", "pairs", "library", "estimates"})
"""Keys that name a file of data."""


@dataclass(frozen=True, slots=True)
class RunInput:
    """One input: the key that names it, its file or function, and the hash of its contents. ``source`` is the run's copy, if it
    is code.

    Example: RunInput("rewards.short.function", "reward.py", "9f86d081…", "sources/rewards.short.function.py")
    """

    key: str
    origin: str
    sha256: str
    source: str | None = None


def record_inputs(run: RunFolder, recipe: Recipe, rewards: RewardMix | None = None, task: Task | None = None) -> None:
    """Writes the record of a run. ``rewards`` and ``task`` are those given from Python."""
    found = []
    shutil.rmtree(run.path / SOURCES, ignore_errors=True)
    for key, origin, content in _inputs_of(recipe, rewards, task):
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


def changed_inputs(run: RunFolder, recipe: Recipe, rewards: RewardMix | None = None, task: Task | None = None) -> list[str]:
    """The inputs that have changed since the run began, or are missing now; each as `KEY (ORIGIN)`."""
    recorded = _read_record(run)
    now = {key: content for key, _, content in _inputs_of(recipe, rewards, task)}
    checked = [entry for entry in recorded if entry.key in now or not _is_from_python(entry)]
    return [
        f"{entry.key} ({entry.origin}{'' if entry.key in now else ' is missing'})"
        for entry in checked
        if entry.key not in now or _digest(now[entry.key]) != entry.sha256
    ]


def _read_record(run: RunFolder) -> list[RunInput]:
    try:
        return [RunInput(**entry) for entry in json.loads((run.path / RECORD).read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        fix = "restore it from a copy, or delete it: then nothing is checked"
        raise RunError(str(run.path / RECORD), "unreadable", because=str(error), fix=fix) from error


def find_inputs_folder(run: RunFolder) -> Path | None:
    """The folder where the run was started, if the current folder lacks a file of its recipe and that one has it.

    A recipe's paths are relative to the folder in which `oncurve train` runs. So commands that use a run find its files
    wherever they are called. If the current folder has them all, as in a copy of the project, it stays.
    """
    started = run.state().folder
    if started is None:
        return None
    files = [name for entry in _read_record(run) for name in (entry.origin, entry.origin.replace(".", "/") + ".py")]
    is_elsewhere = any(Path(started, name).is_file() and not Path(name).is_file() for name in files)
    return Path(started) if is_elsewhere else None


def folder_of_inputs(run: RunFolder) -> AbstractContextManager[None]:
    """Works in the folder that has the files of the run's recipe."""
    folder = find_inputs_folder(run)
    return nullcontext() if folder is None else chdir(folder)


def check_inputs(
    run: RunFolder,
    recipe: Recipe,
    rewards: RewardMix | None = None,
    task: Task | None = None,
    *,
    accept_changes: bool = False,
) -> None:
    """Raises RunError if an input has changed; if the user accepts it, the change is logged and the record renewed."""
    changed = changed_inputs(run, recipe, rewards, task)
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
        record_inputs(run, recipe, rewards, task)


def _tools_of(task: Task | None) -> Iterator[tuple[str, Callable[..., Any] | str]]:
    """The tools and the environments of a task from Python, and the arguments that decide what is computed with them."""
    prompts = getattr(task, "train", ()) if task is not None else ()
    environments = {id(prompt.environment): prompt.environment for prompt in prompts}
    several = len(environments) > 1
    for environment in environments.values():
        if isinstance(environment, ToolEnvironment):
            functions = ((f"tools.{name}", tool.function) for name, tool in environment.functions.items())
            yield from ((name, function) for name, function in functions if inspect.isroutine(function))
            if environment.factory is not None and environment.kind is not None:
                yield (
                    f"environment_factory.{environment.kind.__name__}" if several else "environment_factory",
                    environment.factory,
                )
    arguments = {(e.max_turns, e.history) for e in environments.values() if isinstance(e, ToolEnvironment)}
    yield from (("tool_arguments", f"max_turns, history = {turns!r}, {history!r}\n") for turns, history in arguments)


def _inputs_of(recipe: Recipe, rewards: RewardMix | None, task: Task | None) -> Iterator[tuple[str, str, Path | str]]:
    """(key, file or function, its path or source) of each input that exists."""
    for key, values in flatten(recipe).items():
        name = key.rpartition(".")[2]
        listed = {f"{key}.{i}": value for i, value in enumerate(values)} if isinstance(values, list | tuple) else {key: values}
        for place, value in listed.items():
            program = value.get("mcp") if isinstance(value, dict) else value if name in ("command", "mcp") else None
            if isinstance(program, str):
                yield from ((f"{place}.{word}", word, Path(word)) for word in files_of_command(program))
            if not isinstance(value, str):
                continue
            path = _code_file(value) if name in CODE_KEYS else local_file(Path(value), place) if name in DATA_KEYS else None
            if path is not None and path.is_file():
                yield place, value.rpartition(":")[0] if name in CODE_KEYS else value, path
    for key, given in _tools_of(task):
        source = given if isinstance(given, str) else _source_of(given)
        if source is not None:
            yield key, FROM_PYTHON, source
    for reward in () if rewards is None else rewards.rewards:
        source = _source_of(reward.function) if isinstance(reward, FunctionReward) else None
        if source is not None:
            yield f"rewards.{reward.name}", FROM_PYTHON, source


def files_of_command(command: str) -> list[str]:
    """The words of a command that are files of the user's: not its interpreter, which is found by PATH or an absolute path."""
    words = shlex.split(command)
    return [word for i, word in enumerate(words) if Path(word).is_file() and (i or not Path(word).is_absolute())]


FROM_PYTHON = "a Python function"


def _is_from_python(entry: RunInput) -> bool:
    """Whether an input is a function given from Python. It is compared only if the program gives it again, which `oncurve
    verify` can't."""
    return entry.origin == FROM_PYTHON


def _code_file(reference: str) -> Path | None:
    """The file of `file.py:name` or `module:name`; None for built-in names and for what is not there. Imports nothing."""
    source = reference.removeprefix("openenv:").rpartition(":")[0]
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
    """A function's source; None if there is none, as for a function that was typed into an interactive shell."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


def _digest(content: Path | str) -> str:
    if isinstance(content, str):
        return hashlib.sha256(content.encode()).hexdigest()
    with disk_errors(content), content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
