"""A run's folder: what lies where, which runs there are, and how each of them stands.

runs/<name>/recipe.toml   run.json   run.db   checkpoints/   model/
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oncurve.errors import OncurveError, RunError, did_you_mean
from oncurve.runs.atomic_files import disk_error, disk_errors, replace_file
from oncurve.runs.database.connection import DATABASE
from oncurve.runs.environment import environment, oncurve_version
from oncurve.workers.processes import is_alive, process_start

FORMAT = 1
STATE = "run.json"
Status = Literal["running", "interrupted", "finished", "failed"]
STATUSES = ("running", "interrupted", "finished", "failed")


@dataclass(frozen=True, slots=True)
class Parent:
    """The run and step that a fork went on from, and what it changed: dotted keys to new values."""

    run: str
    stage: str
    step: int
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunState:
    """``run.json``: the little that must be known of a run without opening its database.

    ``pid`` on ``host`` trains it, and ``pid_started`` (clock ticks since boot) tells that process from a later one of the same
    number.
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

    @classmethod
    def started(cls, name: str, parent: Parent | None = None) -> RunState:
        """The state of a run that this process begins now."""
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
        )

    @property
    def current_status(self) -> Status:
        """The status as it really is: a run whose process is gone without a word was interrupted."""
        here = self.host == socket.gethostname()
        gone = self.status == "running" and here and not is_alive(self.pid, self.pid_started)
        return "interrupted" if gone else self.status


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A folder among the runs. ``status`` is 'broken' where it can't be read as one, and ``reason`` says why."""

    name: str
    path: Path
    status: Status | Literal["broken"]
    state: RunState | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run on disk."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        """What was asked, fully resolved."""
        return self.path / "recipe.toml"

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The policy's tokenizer, there from before the first step on."""
        return self.path / "tokenizer"

    @property
    def model(self) -> Path:
        """The final model in Hugging Face format."""
        return self.path / "model"

    @classmethod
    def create(cls, runs_dir: Path, name: str, *, parent: Parent | None = None) -> RunFolder:
        """A new folder ``<name>-<number>``, numbered on from the largest. Two processes never get the same: mkdir decides."""
        label = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
        with disk_errors(runs_dir):
            runs_dir.mkdir(parents=True, exist_ok=True)
            number = 1 + max((_number(path.name, label) for path in runs_dir.iterdir()), default=0)
            while True:
                path = runs_dir / f"{label}-{number}"
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    break
                number += 1
        return cls(path)._begin(parent)

    @classmethod
    def create_at(cls, path: Path, *, parent: Parent | None = None) -> RunFolder:
        """A new folder just there, for ``--out``; one that exists is refused."""
        refuse_taken(path)
        try:
            with disk_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except OSError as error:
            refuse_taken(path)
            raise disk_error(path, error.errno, error.strerror or str(error)) from error
        return cls(path)._begin(parent)

    def _begin(self, parent: Parent | None) -> RunFolder:
        try:
            self.write_state(RunState.started(self.name, parent))
        except OncurveError:
            self.path.rmdir()
            raise
        return self

    @classmethod
    def find(cls, name_or_path: str | Path, runs_dir: Path) -> RunFolder | None:
        """A run by its name among ``runs_dir``, or by its path; None where there is none. Its state has been read and
        understood."""
        for path in (runs_dir / name_or_path, Path(name_or_path)):
            if (path / STATE).exists():
                run = cls(path)
                run.state()
                return run
        return None

    @classmethod
    def open(cls, name_or_path: str | Path, runs_dir: Path) -> RunFolder:
        """The same; where there is none, an error that says so."""
        found = cls.find(name_or_path, runs_dir)
        if found is not None:
            return found
        for path in (runs_dir / name_or_path, Path(name_or_path)):
            if path.exists():
                raise RunError(
                    str(path), "not a run", because=f"it has no {STATE}", fix="`oncurve runs` lists the runs there are"
                )
        known = [entry.name for entry in list_runs(runs_dir) if entry.status != "broken"]
        raise RunError(
            str(name_or_path),
            "no such run" + did_you_mean(str(name_or_path), known),
            because=f"neither {runs_dir / name_or_path} nor that path exists",
            fix="`oncurve runs` lists the runs there are"
            if known
            else f"there is no run in {runs_dir} yet: start one with `oncurve train`",
        )

    def state(self) -> RunState:
        return _read_state(self.path / STATE)

    def write_state(self, state: RunState) -> None:
        replace_file(self.path / STATE, json.dumps(dataclasses.asdict(state), indent=2).encode() + b"\n")

    def set_status(self, status: Status) -> RunState:
        """Writes down how the run stands; 'running' claims it for this process."""
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


def check_place(runs_dir: Path, out: Path | None) -> None:
    """Refuses where no run could begin, before anything is loaded for it."""
    if out is not None:
        refuse_taken(out)
    elif runs_dir.exists() and not runs_dir.is_dir():
        raise RunError(f"--runs {runs_dir}", "a file", because="runs lie in a folder", fix="name a folder, or leave it out")


def refuse_taken(path: Path) -> None:
    """A run begins where nothing is yet, and in folders alone."""
    if path.exists():
        resume = "go on with it by --resume, or " if (path / STATE).exists() else ""
        raise RunError(
            f"--out {path}", "already there", because="a run never writes over anything", fix=f"{resume}choose another name"
        )
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise RunError(
            f"--out {path}", f"{above} is a file", because="a run is a folder, in a folder", fix="choose another name"
        )


def list_runs(runs_dir: Path) -> list[RunEntry]:
    """Every folder among the runs, newest first, and last those that can't be read as one. Never raises for one of them."""
    if not runs_dir.is_dir():
        return []
    with disk_errors(runs_dir):
        folders = sorted(path for path in runs_dir.iterdir() if not path.name.startswith(".") and path.is_dir())
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


def _number(folder: str, label: str) -> int:
    match = re.fullmatch(re.escape(label) + r"-(\d+)", folder)
    return int(match[1]) if match else 0


def _read_state(path: Path) -> RunState:
    try:
        found = json.loads(path.read_bytes())
        newer = int(found["format"]) > FORMAT
        state = None if newer else _state_from(found)
    except FileNotFoundError as error:
        raise RunError(
            str(path.parent), "not a run", because=f"it has no {STATE}", fix="`oncurve runs` lists the runs there are"
        ) from error
    except OSError as error:
        raise disk_error(path, error.errno, error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        because = f"it is not what a run writes there ({type(error).__name__}: {error})"
        raise RunError(str(path), "unreadable", because=because, fix="restore it from a copy, or start a new run") from error
    if state is None:
        theirs = f"its format is {found['format']}, by Oncurve {found.get('oncurve', '?')}"
        because = f"{theirs}; this is Oncurve {oncurve_version()}, which reads formats up to {FORMAT}"
        raise RunError(
            str(path.parent), "made by a newer version", because=because, fix="upgrade Oncurve: pip install -U oncurve"
        )
    return state


def _state_from(found: Mapping[str, Any]) -> RunState:
    """Strict about what is relied on: anything wrong raises ValueError, KeyError or TypeError. The rest is passed over."""
    parent = None if found["parent"] is None else Parent(**found["parent"])
    known = {key: value for key, value in found.items() if key in RunState.__slots__}
    state = RunState(**{**known, "parent": parent, "created": float(found["created"]), "pid": int(found["pid"])})
    if state.status not in STATUSES:
        raise ValueError(f"status '{state.status}'")
    return state
