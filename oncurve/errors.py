"""Every error that a user can meet. Each says where, what, why and how to fix it; the CLI prints it and exits with code 2.

OncurveError
├── RecipeError       a recipe that can't be run as written
├── DataError         a data file or task with nothing usable in it
│   └── ChangedTextError  an environment that begins differently than it did for the first completions of a group
├── ModelError        a model that can't be loaded, or that the engine can't run faithfully
├── RewardError       rewards that can't be built, or that fail too often
├── RunError          a run folder: missing, not a run, interrupted, already there, written by a newer version
│   └── CheckpointError   a checkpoint that is damaged or unreadable
├── ClusterError      a Ray cluster: no answer, no free resources, other code on its nodes, an actor that died
├── ScaleError        ranks that can't find each other, differ, died or time out
├── EngineError       a sampler process that can't be started, or died
├── DiskError         a disk: full, read-only, no permission
├── PluginError       a plug-in of an installed package that can't be used
├── MissingPackage    an optional package that a setting needs
└── PlatformError     an operating system that Oncurve does not run on

Any other exception is a bug in Oncurve: the CLI prints its traceback and exits with code 1. `error_to_json` and
`error_from_json` carry errors between processes.
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


class OncurveError(Exception):
    """An error that the user can fix.

    ``where`` is the key, file or folder at fault, ``what`` the value or state found there, ``because`` the reason why it can't
    be used and ``fix`` what to do.

    Example: ``RecipeError("grpo.group_size", 1, because="a group needs 2 completions", fix="use 2 or more")`` prints

        grpo.group_size: 1
          because a group needs 2 completions
          fix: use 2 or more
    """

    exit_code = 2

    def __init__(self, where: str, what: object, *, because: str, fix: str) -> None:
        self.where, self.what, self.because, self.fix = where, what, because, fix
        super().__init__(f"{where}: {what}\n  because {because}\n  fix: {fix}")


class RecipeError(OncurveError):
    """A recipe that can't be run as written; ``where`` is the dotted key."""


class DataError(OncurveError):
    """A data file or task with nothing usable in it; ``where`` is the file and line."""


class ChangedTextError(DataError):
    """An environment that begins with another text than it did for the first completions of a group, which a step extends;
    ``where`` is the prompt's id. The step can start again without its recorded episodes."""


class ModelError(OncurveError):
    """A model that can't be loaded, or that the engine can't run faithfully."""


class RewardError(OncurveError):
    """Rewards that can't be built, or that fail too often to continue training."""


class RunError(OncurveError):
    """A run folder that can't be used for the command: missing, interrupted, already there, or of a newer version."""


class CheckpointError(RunError):
    """A checkpoint that is damaged, or of a format that this version does not read."""


class ClusterError(OncurveError):
    """A Ray cluster that does not answer or lacks resources, a node with other code, or an actor that died or timed out."""


class ScaleError(OncurveError):
    """Ranks that can't run together: they differ, can't find each other, or one of them died or timed out."""


class EngineError(OncurveError):
    """A sampler process that can't be started, or that died and could not be restarted."""


class DiskError(OncurveError):
    """A disk that is full or read-only, or a file without permission."""


class PluginError(OncurveError):
    """A plug-in of an installed package that can't be imported, is of the wrong type, or whose name is taken."""


class MissingPackage(OncurveError):
    """An optional package that a setting needs is not installed."""


class PlatformError(OncurveError):
    """An operating system that Oncurve does not run on."""


def printable(text: str) -> str:
    """Replaces control characters: a model or a stranger may write escape codes, which a terminal would execute."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def troubleshooting(section: str) -> str:
    """A reference to a section of docs/troubleshooting.md, to be added to a fix or a warning."""
    return f"more: Troubleshooting, {section!r}, in the documentation"


def pip_install(extra: str) -> str:
    """The command that installs an optional dependency into this environment: plain `pip` if the shell's pip belongs to it."""
    python, pip_on_path = Path(sys.executable), shutil.which("pip")
    if pip_on_path is not None and Path(pip_on_path).parent == python.parent:
        pip = "pip"
    else:
        is_near = python.is_relative_to(Path.cwd())
        pip = f"{shlex.quote(os.path.relpath(python) if is_near else str(python))} -m pip"
    return f"{pip} install 'oncurve[{extra}]'"


def closest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names most similar to a word, best first; case is ignored. Names with the same letters come first, because
    swapped letters are a common typo: for `gpro`, `grpo` comes before `gspo`."""
    names = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), names, n=max(count, 3), cutoff=cutoff)
    matches.sort(key=lambda match: sorted(match) != sorted(word.lower()))
    return [names[match] for match in matches[:count]]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' (did you mean 'X'?)' for the closest known name; empty if none is close."""
    names = closest(word, known)
    return f" (did you mean '{names[0]}'?)" if names else ""


def no_such(where: str, kind: str, name: str, known: Iterable[str]) -> RecipeError:
    """The error for a name in a recipe that does not exist, with the closest name that does."""
    known = list(known)
    return RecipeError(
        where,
        f"there is no {kind} '{name}'{did_you_mean(name, known)}",
        because=f"there are: {', '.join(known)}",
        fix="name one of them",
    )


def error_to_json(error: BaseException, process: str) -> dict[str, Any]:
    """An error as JSON, to be raised again in another process. ``process`` names the one that failed ("rank 3").

    An exception that is no `OncurveError` becomes a `ScaleError` with its type and message; its traceback is in the output of
    the process that raised it.
    """
    if isinstance(error, OncurveError):
        fields = {"where": error.where, "what": str(error.what), "because": error.because, "fix": error.fix}
        return {"kind": type(error).__name__, "exit_code": error.exit_code, **fields}
    return {
        "kind": "ScaleError",
        "exit_code": 1,
        "where": process,
        "what": f"ended with {type(error).__name__}",
        "because": str(error)[:400] or "it gave no reason",
        "fix": "see the traceback in the output of that process, and please report it",
    }


def error_from_json(data: dict[str, Any]) -> OncurveError:
    """The error that `error_to_json` wrote, of the same class if it is one of this module."""
    kind = globals().get(str(data["kind"]))
    error_type = kind if isinstance(kind, type) and issubclass(kind, OncurveError) else ScaleError
    error = error_type(data["where"], data["what"], because=data["because"], fix=data["fix"])
    error.exit_code = int(data["exit_code"])
    return error
