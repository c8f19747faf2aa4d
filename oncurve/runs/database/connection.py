"""Opens ``run.db`` for its one writer or any number of readers, and turns SQLite's error codes into messages."""

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
LOCK_TIMEOUT_S = 30.0
"""How long to wait for another connection's lock: far longer than any of our transactions."""

ERRNO_OF = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


def user_error(path: Path, error: sqlite3.Error) -> OncurveError | None:
    """The user's error for a SQLite error; None if it is a bug of ours, which keeps its traceback."""
    # The low byte is the kind of error; the higher ones are details.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in ERRNO_OF:
        return disk_error(path, ERRNO_OF[code], str(error))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RunError(
            str(path),
            "locked",
            because=f"another program has locked it for over {LOCK_TIMEOUT_S:.0f} s",
            fix="close the program that has the database open for writing, then continue with --resume",
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return RunError(
            str(path),
            f"unreadable ({error})",
            because="it is not a run's database, is truncated, or was changed by hand",
            fix="restore it from a copy; the run's checkpoints do not depend on it",
        )
    return None


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        readable = user_error(path, error)
        if readable is None:
            raise
        raise readable from error


def take_lock(folder: Path) -> IO[bytes]:
    """Locks a run for this process until the file is closed or the process ends, even by a kill.

    A POSIX record lock: it works on network disks, and forked children do not inherit it.
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
    """Creates a database with empty tables; ``path`` must not exist. Leaves nothing behind if it fails."""
    if path.exists():
        raise RunError(
            str(path),
            "already exists",
            because="a run's database is never overwritten",
            fix="continue the run with --resume, or choose another --out",
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
    """Opens an existing database. A read-only connection can't write at all."""
    if not path.is_file():
        raise RunError(
            str(path), "missing", because="a run records its steps in it", fix="check the run's name with `oncurve runs`"
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
    """Readers of a WAL database need a small file next to it. If the folder is not writable, no writer can be active either,
    and the database is opened as immutable."""
    is_writable = os.access(path.parent, os.W_OK)
    return "ro" if is_writable or path.with_name(path.name + "-wal").exists() else "ro&immutable=1"


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None)
    connection.row_factory = sqlite3.Row
    # With NORMAL only `flush` waits for the disk: a commit takes milliseconds, and a killed process still loses nothing.
    connection.executescript("PRAGMA foreign_keys = ON; PRAGMA synchronous = NORMAL; PRAGMA temp_store = MEMORY;")
    return connection


def _check_format(path: Path, connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise RunError(
            str(path),
            "not a run's database",
            because="its header does not have Oncurve's application id",
            fix="check the path; `oncurve runs` lists all runs",
        )
    meta = connection.execute("SELECT format, oncurve FROM meta").fetchone()
    if meta is None or meta["format"] > FORMAT:
        theirs = "unknown" if meta is None else f"{meta['format']}, by Oncurve {meta['oncurve']}"
        raise RunError(
            str(path),
            f"made by a newer version (format {theirs})",
            because=f"this is Oncurve {oncurve_version()}, which reads formats up to {FORMAT}",
            fix="upgrade Oncurve: pip install -U oncurve",
        )
