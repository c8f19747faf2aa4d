"""Opening ``run.db``, by its one writer or by any number of readers, and saying in words what SQLite says in codes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import quote

from oncurve.errors import OncurveError, RunError
from oncurve.runs.atomic_files import disk_error, disk_errors
from oncurve.runs.database.schema import ADDED, APPLICATION_ID, FORMAT, TABLES
from oncurve.runs.environment import oncurve_version

DATABASE = "run.db"
LOCK = "run.lock"
PATIENCE_S = 30.0
"""How long to wait for another connection's lock: far longer than any transaction of ours."""

ERRNO_OF = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


def refusal(path: Path, error: sqlite3.Error) -> OncurveError | None:
    """The user's error for one of SQLite's; None where the mistake is ours and the traceback is what helps."""
    # The low byte is the kind of error; the higher ones say more than a user can use.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in ERRNO_OF:
        return disk_error(path, ERRNO_OF[code], str(error))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RunError(
            str(path),
            "locked",
            because=f"another program has held it for over {PATIENCE_S:.0f} s",
            fix="close whatever else has the database open for writing, then go on with --resume",
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return RunError(
            str(path),
            f"unreadable ({error})",
            because="it is not a run's database, was cut short, or was changed by hand",
            fix="restore it from a copy; the run's checkpoints do not depend on it",
        )
    return None


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        clear = refusal(path, error)
        if clear is None:
            raise
        raise clear from error


def take_lock(folder: Path) -> IO[bytes]:
    """Claims a run for this process until the file is closed or the process ends, however it ends.

    A POSIX record lock: it works on network disks, and children made by fork do not hold it on.
    """
    path = folder / LOCK
    with disk_errors(path):
        file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise RunError(
                str(folder),
                "in use",
                because="another process is training this run",
                fix="wait for it, or stop it with Ctrl-C, then try again",
            ) from error
        raise disk_error(path, error.errno, str(error)) from error
    return file


def create_database(path: Path) -> sqlite3.Connection:
    """A new database with empty tables; ``path`` must not exist. Nothing stays behind where this fails."""
    if path.exists():
        raise RunError(
            str(path),
            "already there",
            because="a run's database is never written over",
            fix="go on with --resume, or choose another --out",
        )
    try:
        with database_errors(path):
            connection = _connect(path, "rwc")
            try:
                connection.executescript(
                    f"PRAGMA journal_mode = WAL; BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID}; {TABLES} {ADDED}"
                )
                connection.execute("INSERT INTO meta VALUES (?, ?, ?)", (FORMAT, oncurve_version(), time.time()))
                connection.execute("COMMIT")
            except sqlite3.Error:
                connection.close()
                raise
    except OncurveError:
        for leftover in path.parent.glob(path.name + "*"):
            leftover.unlink(missing_ok=True)
        raise
    return connection


def open_database(path: Path, read_only: bool) -> sqlite3.Connection:
    """An existing database. A reader's connection can't write, whatever is asked of it."""
    if not path.is_file():
        raise RunError(
            str(path), "not there", because="every run keeps its steps in it", fix="check the run's name with `oncurve runs`"
        )
    with database_errors(path):
        connection = _connect(path, _read_mode(path) if read_only else "rw")
        try:
            _check_format(path, connection)
            if not read_only:
                connection.executescript(ADDED)
        except (OncurveError, sqlite3.Error):
            connection.close()
            raise
    return connection


def _read_mode(path: Path) -> str:
    """Readers of a WAL database keep a small file beside it. Where they can't make one, and no writer can either, the
    file is taken as it is."""
    writable = os.access(path.parent, os.W_OK)
    return "ro" if writable or path.with_name(path.name + "-wal").exists() else "ro&immutable=1"


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=PATIENCE_S, isolation_level=None)
    connection.row_factory = sqlite3.Row
    # NORMAL leaves the wait for the disk to `flush`: a step then costs milliseconds, and a killed process loses nothing.
    connection.executescript("PRAGMA foreign_keys = ON; PRAGMA synchronous = NORMAL; PRAGMA temp_store = MEMORY;")
    return connection


def _check_format(path: Path, connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise RunError(
            str(path),
            "not a run's database",
            because="its header does not carry Oncurve's mark",
            fix="check the path; `oncurve runs` lists the runs there are",
        )
    made = connection.execute("SELECT format, oncurve FROM meta").fetchone()
    if made is None or made["format"] > FORMAT:
        said = "unknown" if made is None else f"{made['format']}, by Oncurve {made['oncurve']}"
        raise RunError(
            str(path),
            f"made by a newer version (format {said})",
            because=f"this is Oncurve {oncurve_version()}, which reads formats up to {FORMAT}",
            fix="upgrade Oncurve: pip install -U oncurve",
        )
