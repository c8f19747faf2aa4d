"""A run's folder: its files, its status, and the list of runs.

runs/<name>/recipe.toml   run.json   run.db   checkpoints/   model/
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oncurve.errors import OncurveError, RunError, did_you_mean
from oncurve.runs.atomic_files import disk_error, disk_errors, read_file, replace_file, sync, sync_folder
from oncurve.runs.database.connection import DATABASE
from oncurve.runs.environment import environment, oncurve_version
from oncurve.workers.processes import is_alive, process_start

FORMAT = 1
SEMANTICS = 2
"""The version of what a recipe computes, raised if the same recipe gives other samples, updates or measurements. A run
continues only as it began (`oncurve.training.semantics`)."""
STATE = "run.json"
COMPARISON_REQUEST = "request.json"
"""The file of a comparison's folder that says what is compared."""
UNFINISHED = ".new-"
"""Prefix of hidden folders: runs that are being made or deleted."""
UNFINISHED_S = 86_400.0
"""After this time a hidden folder without a state is a leftover."""
MAX_LABEL = 100
"""Bytes of a recipe's name that its runs' folders keep: file names have at most 255."""
Status = Literal["running", "interrupted", "finished", "failed"]
STATUSES = ("running", "interrupted", "finished", "failed")


@dataclass(frozen=True, slots=True)
class Parent:
    """The run and step that a fork started from, and what it changed: dotted keys to new values."""

    run: str
    stage: str
    step: int
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunState:
    """``run.json``: what must be known of a run without opening its database.

    ``pid`` on ``host`` is the process that trains it. ``pid_started`` (clock ticks since boot) distinguishes that process from
    a later one with the same pid.
    """

    name: str
    status: Status
    created: float
    pid: int
    pid_started: int | None
    host: str
    parent: Parent | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT
    oncurve: str = field(default_factory=oncurve_version)
    semantics: int = 1
    """`SEMANTICS` when the run was created. Runs from before it was recorded have 1."""
    folder: str | None = None
    """The folder in which the run was started: relative paths in its recipe refer to it. None in older runs."""

    @classmethod
    def started(cls, name: str, parent: Parent | None = None) -> RunState:
        """The state of a run that this process starts now."""
        pid = os.getpid()
        return cls(
            name=name,
            status="running",
            created=time.time(),
            pid=pid,
            pid_started=process_start(pid),
            host=socket.gethostname(),
            parent=parent,
            environment=environment(),
            semantics=SEMANTICS,
            folder=os.getcwd(),
        )

    @property
    def current_status(self) -> Status:
        """The status, with "running" corrected to "interrupted" if the process on this machine is dead."""
        is_local = self.host == socket.gethostname()
        is_dead = self.status == "running" and is_local and not is_alive(self.pid, self.pid_started)
        return "interrupted" if is_dead else self.status


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A folder in the list of runs. ``status`` is 'broken' if it can't be read as a run; ``reason`` says why."""

    name: str
    path: Path
    status: Status | Literal["broken"]
    state: RunState | None = None
    reason: str | None = None


Fill = Callable[["RunFolder", Path], None]
"""Writes a new run's first files into its hidden folder. The path is the one that the run is about to get."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run on disk."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def shown(self) -> Path:
        """The path for messages and commands: relative if the run is below the current directory."""
        path, here = self.path.absolute(), Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The policy's tokenizer, written before the first step."""
        return self.path / "tokenizer"

    @property
    def model(self) -> Path:
        """The final model in Hugging Face format."""
        return self.path / "model"

    @classmethod
    def create(cls, runs_dir: Path, name: str, *, parent: Parent | None = None, fill: Fill = lambda *_: None) -> RunFolder:
        """Creates ``<name>-<number>`` with the next number. Two processes never get the same folder."""
        label = re.sub(r"[^\w.-]+", "-", name).encode()[:MAX_LABEL].decode(errors="ignore").strip(".-") or "run"
        with disk_errors(runs_dir):
            runs_dir.mkdir(parents=True, exist_ok=True)
            number = 1 + max((_number(path.name, label) for path in runs_dir.iterdir()), default=0)
        while True:
            path = runs_dir.absolute() / f"{label}-{number}"
            if cls._create(path, parent, fill):
                return cls(path)
            number += 1

    @classmethod
    def create_at(cls, path: Path, *, parent: Parent | None = None, fill: Fill = lambda *_: None) -> RunFolder:
        """Creates a folder at this path, for ``--out``. Refuses an existing one."""
        refuse_existing(path)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not cls._create(path.absolute(), parent, fill):
            refuse_existing(path)
        return cls(path.absolute())

    @classmethod
    def _create(cls, path: Path, parent: Parent | None, fill: Fill) -> bool:
        """Creates the run in a hidden folder and renames it in one step, so that a kill leaves a complete run or none. Returns
        False if ``path`` already exists at that point."""
        _remove_unfinished(path.parent)
        hidden = cls(path.with_name(f"{UNFINISHED}{uuid.uuid4().hex}"))
        with disk_errors(path):
            try:
                hidden.path.mkdir()
                hidden.write_state(RunState.started(path.name, parent))
                fill(hidden, path)
                sync_folder(hidden.path)
                if path.exists():
                    return False
                try:
                    hidden.path.rename(path)
                except OSError as error:
                    if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        return False
                    raise
                sync(path.parent)
                return True
            finally:
                shutil.rmtree(hidden.path, ignore_errors=True)

    def remove(self) -> None:
        """Deletes the run. It is hidden first: a kill in between leaves no half of a run under its name."""
        hidden = self.path.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):
            self.path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    @classmethod
    def find(cls, name_or_path: str | Path, runs_dir: Path) -> RunFolder | None:
        """A run by its name in ``runs_dir`` or by its path; None if there is none. Raises if its run.json can't be read."""
        for path in (runs_dir / name_or_path, Path(name_or_path)):
            if _exists(path / STATE):
                run = cls(path)
                run.state()
                return run
        return None

    @classmethod
    def open(cls, name_or_path: str | Path, runs_dir: Path) -> RunFolder:
        """A run by its name or path. Raises a RunError if there is none."""
        run = cls.find(name_or_path, runs_dir)
        if run is not None:
            return run
        for path in (runs_dir / name_or_path, Path(name_or_path)):
            if _exists(path):
                raise RunError(str(path), "not a run", because=f"it has no {STATE}", fix="`oncurve runs` lists all runs")
        known = [entry.name for entry in list_runs(runs_dir) if entry.status != "broken"]
        raise RunError(
            str(name_or_path),
            "no such run" + did_you_mean(str(name_or_path), known),
            because=f"neither {runs_dir / name_or_path} nor that path exists",
            fix="`oncurve runs` lists all runs" if known else f"{runs_dir} has no runs yet: start one with `oncurve train`",
        )

    def state(self) -> RunState:
        return _read_state(self.path / STATE)

    def write_state(self, state: RunState) -> None:
        replace_file(self.path / STATE, json.dumps(dataclasses.asdict(state), indent=2).encode() + b"\n")

    def set_status(self, status: Status) -> RunState:
        """Writes the run's status; 'running' also records this process as the one that trains it."""
        state = dataclasses.replace(self.state(), status=status)
        if status == "running":
            now = RunState.started(self.name)
            state = dataclasses.replace(
                state, pid=now.pid, pid_started=now.pid_started, host=now.host, environment=now.environment
            )
        self.write_state(state)
        return state

    def write_recipe(self, text: str) -> None:
        replace_file(self.recipe, text.encode())


def check_destination(runs_dir: Path, out: Path | None) -> None:
    """Refuses a destination in which no run can start, before anything is loaded."""
    if out is not None:
        refuse_existing(out)
    elif runs_dir.exists() and not runs_dir.is_dir():
        raise RunError(
            f"--runs {runs_dir}", "a file", because="runs are stored in a folder", fix="name a folder, or leave --runs out"
        )


def refuse_existing(path: Path) -> None:
    """Refuses a path that exists, or that lies below a file."""
    if _exists(path):
        resume = "continue it with --resume, or " if (path / STATE).exists() else ""
        raise RunError(
            f"--out {path}", "already exists", because="a run never overwrites anything", fix=f"{resume}choose another name"
        )
    parent = next(folder for folder in path.absolute().parents if _exists(folder))
    if not parent.is_dir():
        raise RunError(
            f"--out {path}", f"{parent} is a file", because="a run needs a folder to be created in", fix="choose another name"
        )


def _exists(path: Path) -> bool:
    """Whether a path that the user named exists. A path that is too long or forbidden is a user error."""
    with disk_errors(path):
        return path.exists()


def list_runs(runs_dir: Path) -> list[RunEntry]:
    """Every folder in ``runs_dir``: runs, newest first, then folders that can't be read as one, as 'broken' entries.

    Comparisons, whose runs are in a folder of their own, are left out.
    """
    if not runs_dir.is_dir():
        return []
    with disk_errors(runs_dir):
        folders = sorted(path for path in runs_dir.iterdir() if not path.name.startswith(".") and path.is_dir())
    folders = [path for path in folders if not (path / COMPARISON_REQUEST).is_file()]
    entries = [_entry(path) for path in folders]
    return sorted(entries, key=lambda entry: -entry.state.created if entry.state else 0.0)


def forks_of(run: RunFolder) -> list[RunEntry]:
    """The runs in the same folder that were forked from this one."""
    entries = list_runs(run.path.resolve().parent)
    return [e for e in entries if e.state is not None and e.state.parent is not None and e.state.parent.run == run.name]


def _entry(path: Path) -> RunEntry:
    try:
        state = _read_state(path / STATE)
    except OncurveError as error:
        return RunEntry(path.name, path, "broken", reason=f"{error.what}: {error.because}")
    return RunEntry(path.name, path, state.current_status, state)


def _remove_unfinished(runs_dir: Path) -> None:
    """Removes hidden folders of processes that were killed."""

    def is_leftover(folder: Path) -> bool:
        try:
            return _read_state(folder / STATE).current_status != "running"
        except OncurveError:
            return time.time() - folder.stat().st_mtime > UNFINISHED_S

    for folder in runs_dir.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            if is_leftover(folder):
                shutil.rmtree(folder)


def _number(folder: str, label: str) -> int:
    match = re.fullmatch(re.escape(label) + r"-(\d+)", folder)
    return int(match[1]) if match else 0


def _read_state(path: Path) -> RunState:
    try:
        data = json.loads(read_file(path))
        is_newer = int(data["format"]) > FORMAT
        state = None if is_newer else _state_from(data)
    except FileNotFoundError as error:
        raise RunError(
            str(path.parent), "not a run", because=f"it has no {STATE}", fix="`oncurve runs` lists all runs"
        ) from error
    except OSError as error:
        raise disk_error(path, error.errno, error.strerror or str(error)) from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        because = f"it is not a run.json that Oncurve wrote ({type(error).__name__}: {error})"
        raise RunError(str(path), "unreadable", because=because, fix="restore it from a copy, or start a new run") from error
    if state is None:
        theirs = f"its format is {data['format']}, by Oncurve {data.get('oncurve', '?')}"
        because = f"{theirs}; this is Oncurve {oncurve_version()}, which reads formats up to {FORMAT}"
        raise RunError(
            str(path.parent), "made by a newer version", because=because, fix="upgrade Oncurve: pip install -U oncurve"
        )
    return state


def _state_from(data: Mapping[str, Any]) -> RunState:
    """Parses run.json. A required key that is missing or wrong raises ValueError, KeyError or TypeError; unknown keys are
    ignored."""
    parent = None if data["parent"] is None else Parent(**data["parent"])
    if not all(isinstance(data[key], str) for key in ("name", "host", "oncurve")) or not math.isfinite(data["created"]):
        raise ValueError("a name or a time of the wrong type")
    if parent is not None and not (isinstance(parent.run, str) and isinstance(parent.changes, dict)):
        raise ValueError("a parent of the wrong type")
    if not isinstance(data.get("folder"), str | None):
        raise ValueError("a folder of the wrong type")
    known = {key: value for key, value in data.items() if key in RunState.__slots__}
    state = RunState(**{**known, "parent": parent, "created": float(data["created"]), "pid": int(data["pid"])})
    if state.status not in STATUSES:
        raise ValueError(f"status '{state.status}'")
    return state
