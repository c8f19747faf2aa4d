"""``run.db``: its tables, opening it for its one writer or any number of readers, and messages for SQLite's errors."""

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
from oncurve.runs.environment import oncurve_version

FORMAT = 1
"""Version of these tables. A reader refuses a larger one."""

APPLICATION_ID = 0x4F6E6376
"""'Oncv' in the file's header: identifies a run's database."""

TABLES = """
CREATE TABLE meta (
    format INTEGER NOT NULL, oncurve TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE stages (
    name TEXT PRIMARY KEY, type TEXT NOT NULL, position INTEGER NOT NULL UNIQUE, steps INTEGER NOT NULL,
    started REAL NOT NULL, finished REAL
) WITHOUT ROWID;
CREATE TABLE steps (
    stage TEXT NOT NULL REFERENCES stages(name) ON DELETE CASCADE, step INTEGER NOT NULL,
    seconds REAL NOT NULL, created REAL NOT NULL, PRIMARY KEY (stage, step)
) WITHOUT ROWID;
CREATE TABLE metrics (
    stage TEXT NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
    PRIMARY KEY (stage, name, step), FOREIGN KEY (stage, step) REFERENCES steps(stage, step) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX metrics_by_step ON metrics (stage, step);
CREATE TABLE evals (
    stage TEXT NOT NULL REFERENCES stages(name) ON DELETE CASCADE, step INTEGER NOT NULL, accuracy REAL, asked INTEGER NOT NULL,
    by_difficulty TEXT NOT NULL, metrics TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (stage, step)
) WITHOUT ROWID;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, stage TEXT NOT NULL REFERENCES stages(name) ON DELETE CASCADE, step INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('train', 'eval')), position INTEGER NOT NULL,
    prompt_id TEXT NOT NULL, prompt TEXT, messages TEXT, columns TEXT NOT NULL, prompt_ids BLOB NOT NULL, has_signal INTEGER
);
CREATE UNIQUE INDEX groups_by_step ON groups (stage, step, kind, position);
CREATE INDEX groups_by_prompt ON groups (prompt_id);
CREATE TABLE completions (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL REFERENCES groups(id) ON DELETE CASCADE, position INTEGER NOT NULL,
    text TEXT NOT NULL, stop TEXT NOT NULL, length INTEGER NOT NULL, total REAL, graded INTEGER, failure TEXT, advantage REAL
);
CREATE UNIQUE INDEX completions_by_group ON completions (group_id, position);
CREATE INDEX completions_by_failure ON completions (failure, id) WHERE failure IS NOT NULL;
CREATE TABLE aspects (
    completion_id INTEGER NOT NULL REFERENCES completions(id) ON DELETE CASCADE, position INTEGER NOT NULL, name TEXT NOT NULL,
    value REAL, weight REAL NOT NULL, failure TEXT, reason TEXT, steps TEXT, PRIMARY KEY (completion_id, position)
) WITHOUT ROWID;
CREATE TABLE tokens (
    completion_id INTEGER PRIMARY KEY REFERENCES completions(id) ON DELETE CASCADE,
    token_ids BLOB NOT NULL, loss_mask BLOB, logps BLOB NOT NULL, sampled_logps BLOB, raw_logps BLOB,
    advantages BLOB, learner_logps BLOB, ratio BLOB, entropy BLOB, clipped BLOB, kl BLOB
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, stage TEXT, step INTEGER,
    message TEXT NOT NULL, data TEXT NOT NULL
);
"""
"""The tables. Plain SQLite: any tool can read a run, with or without Oncurve.

- Ids are dense and in the order of recording: the number of rows is the largest id, one page out of a million completions is
  read by a range scan, and a resumed run assigns the same ids as an uninterrupted one.
- Times are only in columns called ``created``, ``started``, ``finished``, ``seconds``, in ``events``, and as the seconds of
  calls in ``episodes`` and ``replies``. Everything else is the same for two identical runs, except metrics that measure the
  machine (``oncurve.runs.metrics``: ``repeatable``).
- Token arrays are little-endian blobs, one row per completion, in a table of their own, so that lists of completions don't read
  them. NULL stands for the usual value: no ``loss_mask`` means all True; no ``sampled_logps`` or ``raw_logps`` means equal to
  ``logps``; one number in ``advantages`` means that number at every token. An eval without ``accuracy`` had no verifiable
  reward; its mean reward is in its ``metrics``.
- ``replies`` holds the results of non-deterministic rewards for the groups of a step, including groups that dynamic sampling
  dropped. They survive a resume, so that a repeated step gets the same rewards. What stateful environments answer is there too,
  from the moment it arrives, with the seconds that it took (``oncurve.agents.episode_record``).
- ``versions`` has a row only if the weights may have changed while a completion was sampled (asynchronous runs, `carry_over`):
  JSON pairs of the first token and the number of updates of the weights that sampled it and the tokens after it.
- ``contexts`` has a row for each further sequence of an agent's rollout: from token ``first`` on, the completion follows these
  token ids instead of its group's prompt.
- ``episodes`` has a row for each completion that talked to a stateful environment, or that an agent wrote: JSON of its turns,
  each with its tokens [start, end) and the answer to it, and of its outcome.
- ``routing`` has a row for each completion of a mixture of experts whose experts were recorded (`routing_replay`), and
  ``prompt_routing`` one for each prompt: 16-bit integers, for each token the experts that it took, layer by layer.
"""

ADDED = """
CREATE TABLE IF NOT EXISTS replies (
    stage TEXT NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, reply TEXT NOT NULL,
    PRIMARY KEY (stage, step, kind, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (
    completion_id INTEGER PRIMARY KEY REFERENCES completions(id) ON DELETE CASCADE, versions TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS contexts (
    completion_id INTEGER NOT NULL REFERENCES completions(id) ON DELETE CASCADE, first INTEGER NOT NULL,
    token_ids BLOB NOT NULL, PRIMARY KEY (completion_id, first)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS episodes (
    completion_id INTEGER PRIMARY KEY REFERENCES completions(id) ON DELETE CASCADE, episode TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS routing (
    completion_id INTEGER PRIMARY KEY REFERENCES completions(id) ON DELETE CASCADE, routing BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS prompt_routing (
    group_id INTEGER PRIMARY KEY REFERENCES groups(id) ON DELETE CASCADE, routing BLOB NOT NULL
);
"""
"""Tables that are newer than the first runs. A writer creates them if they are missing."""


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
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_MISMATCH) or "no such " in str(error):
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
        # A FIFO in place of the file must not block.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666), "ab")
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
    """Creates a database with empty tables, in an empty file if there is one. Leaves nothing behind if it fails."""
    if not is_empty_database(path):
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


def is_empty_database(path: Path) -> bool:
    """Whether there is no database, or one whose process was killed before it had created the tables."""
    if not path.exists():
        return True
    with database_errors(path), contextlib.closing(_connect(path, _read_mode(path))) as connection:
        return connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None


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
    if meta is not None and not isinstance(meta["format"], int):
        raise RunError(
            str(path),
            "unreadable",
            because=f"its format is {meta['format']!r:.40}, not a number",
            fix="restore it from a copy; the run's checkpoints do not depend on it",
        )
    if meta is None or meta["format"] > FORMAT:
        theirs = "unknown" if meta is None else f"{meta['format']}, by Oncurve {meta['oncurve']}"
        raise RunError(
            str(path),
            f"made by a newer version (format {theirs})",
            because=f"this is Oncurve {oncurve_version()}, which reads formats up to {FORMAT}",
            fix="upgrade Oncurve: pip install -U oncurve",
        )
