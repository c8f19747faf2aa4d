"""Every error a user can meet. Each says where, what, why and how to fix it; the command line prints it and exits with 2.

OncurveError
├── RecipeError       a recipe that can't be run as written
├── DataError         a data file or task that gives nothing usable
├── ModelError        a model that can't be loaded, or that the engine can't run faithfully
├── RewardError       rewards that fail too often, or can't be built
├── RunError          a run folder: missing, foreign, interrupted, already there, made by a newer version
│   └── CheckpointError   a checkpoint that is damaged or unreadable
├── ClusterError      a cluster that does not answer, has no room, or has other code on its nodes
├── ScaleError        ranks that can't find each other, differ, or wait for one that is gone or late
├── EngineError       a sampler in a process of its own that can't be started, or is lost
├── DiskError         no room, no permission, read-only
└── MissingPackage    an optional package that a setting asks for

Errors on their way from one process to another: as JSON, and back as what they were.
"""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oncurve import errors


class OncurveError(Exception):
    """An error that the user can mend. ``where`` names the place, ``what`` was found, ``because`` and ``fix`` complete it."""

    exit_code = 2

    def __init__(self, where: str, what: object, *, because: str, fix: str) -> None:
        self.where, self.what, self.because, self.fix = where, what, because, fix
        super().__init__(f"{where}: {what}\n  because {because}\n  fix: {fix}")


class RecipeError(OncurveError):
    """A recipe that can't be run as written; ``where`` is the dotted key."""


class DataError(OncurveError):
    """A data file or task that gives nothing usable; ``where`` is the file and line."""


class ModelError(OncurveError):
    """A model that can't be loaded, or that the engine can't run faithfully."""


class RewardError(OncurveError):
    """Rewards that can't be built, or that fail too often to go on."""


class RunError(OncurveError):
    """A run folder that can't be used as asked."""


class CheckpointError(RunError):
    """A checkpoint that is damaged, or of a format this version does not read."""


class ClusterError(OncurveError):
    """A cluster that does not answer, has no room, or is not what the run needs; or an actor that others wait for in vain."""


class ScaleError(OncurveError):
    """Processes that can't work as one: they differ, can't find each other, or wait for one that is gone or late."""


class EngineError(OncurveError):
    """A sampler in a process of its own that can't be started, or that was lost and does not come back."""


class DiskError(OncurveError):
    """No room left, no permission, or a read-only disk."""


class MissingPackage(OncurveError):
    """An optional package that a setting asks for is not installed."""


def pip_install(extra: str) -> str:
    """The command that installs an optional part here: `pip` where the shell's is this environment's, else by path."""
    here, found = Path(sys.executable), shutil.which("pip")
    if found is not None and Path(found).parent == here.parent:
        pip = "pip"
    else:
        near = here.is_relative_to(Path.cwd())
        pip = f"{shlex.quote(os.path.relpath(here) if near else str(here))} -m pip"
    return f"{pip} install 'oncurve[{extra}]'"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


def no_such(where: str, kind: str, name: str, known: Iterable[str]) -> RecipeError:
    """A recipe names something of a kind that there is not: with the nearest that there is."""
    known = list(known)
    return RecipeError(
        where,
        f"there is no {kind} '{name}'{did_you_mean(name, known)}",
        because=f"there are: {', '.join(known)}",
        fix="name one of them",
    )


def error_to_json(error: BaseException, who: str) -> dict[str, Any]:
    """An error as plain data. One that is no user's error has its kind and text; its traceback stands where it was raised."""
    if isinstance(error, OncurveError):
        what = {"where": error.where, "what": str(error.what), "because": error.because, "fix": error.fix}
        return {"kind": type(error).__name__, "exit_code": error.exit_code, **what}
    return {
        "kind": "ScaleError",
        "exit_code": 1,
        "where": who,
        "what": f"ended with {type(error).__name__}",
        "because": str(error)[:400] or "it gave no reason",
        "fix": "the traceback above, in what that process wrote, says where; please report it",
    }


def error_from_json(data: dict[str, Any]) -> OncurveError:
    """The error again, of its own class where that is one of `oncurve.errors`."""
    kind = getattr(errors, str(data["kind"]), ScaleError)
    error: OncurveError = kind(data["where"], data["what"], because=data["because"], fix=data["fix"])
    error.exit_code = int(data["exit_code"])
    return error
