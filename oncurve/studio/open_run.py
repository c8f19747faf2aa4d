"""Opens the run that a request names. Refuses to run its code or to send a key unless the user has agreed."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oncurve.errors import RewardError, RunError
from oncurve.runs.folder import RunFolder
from oncurve.studio.queries import StudioQueries
from oncurve.trust import Capability

if TYPE_CHECKING:
    from fastapi import Request


def find_run(runs_dir: Path, name: str) -> RunFolder:
    """The run of that name. Only folders directly in ``runs_dir`` count: a name is never a path."""
    is_name = name not in ("", ".", "..") and not name.startswith(".") and not any(c in name for c in "/\\\0")
    if not is_name or not os.path.isdir(runs_dir / name):  # False also for a name that is too long for the file system
        raise RunError(name, "no such run", because=f"{runs_dir} has no folder of that name", fix="choose one from the list")
    return RunFolder.open(runs_dir / name, runs_dir)


@contextlib.contextmanager
def open_reader(run: RunFolder) -> Iterator[StudioQueries]:
    """A run's database, open for reading. Errors that a damaged database causes in the body become one RunError."""
    try:
        with StudioQueries.open(run.path) as store:
            yield store
    except (ValueError, KeyError, TypeError, IndexError, sqlite3.Error) as error:
        raise RunError(
            str(run.database),
            "damaged",
            because=f"a row in it is not what a run writes ({type(error).__name__}: {error})",
            fix="restore it from a copy; the run's checkpoints do not depend on it",
        ) from error


def check_agreed(request: Request, capabilities: Sequence[Capability], *, ticked: bool) -> None:
    """Refuses to run code or send a key unless the studio was started with --allow-code and the user ticked the box."""
    allowed: bool = request.app.state.allow_code
    if capabilities and not (allowed and ticked):
        raise RewardError(
            "trust",
            "; ".join(map(str, capabilities)),
            because="this needs your agreement" if allowed else "this studio runs no code of a run and sends no key",
            fix="tick the box if you trust this run" if allowed else "start it with --allow-code, and tick the box on the page",
        )
