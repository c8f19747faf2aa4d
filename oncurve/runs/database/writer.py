"""``run.db``: every group, completion, reward aspect, advantage and token of a run, in SQLite.

One process writes, any number read, also while it writes (WAL). A step is one transaction: a kill leaves whole steps only.
A commit survives the death of the process at once, and a power cut after ``flush``. Flush before writing a checkpoint, and
no checkpoint ever knows of steps that the database has lost.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from oncurve.records import EvalReport, StepReport
from oncurve.runs.database import row_codec
from oncurve.runs.database.connection import DATABASE, create_database, database_errors, open_database, take_lock
from oncurve.runs.database.reader import SECONDS, Kind, Reader
from oncurve.runs.secrets import redact


class RunWriter(Reader):
    """A run's database. Make one with ``create`` or ``open``, and close it (it is a context manager)."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: IO[bytes] | None) -> None:
        super().__init__(path, connection)
        self._lock = lock

    @classmethod
    def create(cls, folder: Path) -> RunWriter:
        """A new, empty database in a run's folder, for writing."""
        return cls._locked(folder, new=True)

    @classmethod
    def open(cls, folder: Path, read_only: bool = True) -> RunWriter:
        """The database of a run. A reader can't write, whatever it asks; there is one writer at a time."""
        if not read_only:
            return cls._locked(folder, new=False)
        path = folder / DATABASE
        return cls(path, open_database(path, read_only=True), None)

    @classmethod
    def _locked(cls, folder: Path, new: bool) -> RunWriter:
        path, lock = folder / DATABASE, take_lock(folder)
        try:
            connection = create_database(path) if new else open_database(path, read_only=False)
        except BaseException:
            lock.close()
            raise
        return cls(path, connection, lock)

    def close(self) -> None:
        with database_errors(self.path):
            self._connection.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def begin_stage(self, name: str, type: str, position: int, steps: int) -> None:
        """Notes that a stage has begun, with the steps it plans. Begun again after a resume, it keeps its first start."""
        with self._transaction() as write:
            write.execute(
                """INSERT INTO stages (name, type, position, steps, started) VALUES (?, ?, ?, ?, ?)
                   ON CONFLICT (name) DO UPDATE
                   SET type = excluded.type, position = excluded.position, steps = excluded.steps""",
                (name, type, position, steps, time.time()),
            )

    def end_stage(self, name: str) -> None:
        with self._transaction() as write:
            write.execute("UPDATE stages SET finished = ? WHERE name = ?", (time.time(), name))

    def record_step(self, report: StepReport) -> None:
        """Writes a step with all its groups, in one transaction. Its stage must have begun; a step is recorded once."""
        stats = report.stats or [[None] * len(graded.scored.scored) for graded in report.groups]
        seconds = {SECONDS + phase: value for phase, value in report.seconds.items()}
        metrics = {**report.metrics, **seconds}
        with self._transaction() as write:
            placed = (report.stage, report.step)
            write.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (*placed, report.took, time.time()))
            write.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", [(*placed, n, float(v)) for n, v in metrics.items()])
            self._write_groups(write, report.stage, report.step, report.groups, stats)

    def record_eval(self, report: EvalReport) -> None:
        """Writes a measurement with what was answered. Measured again at the same step, it takes the earlier one's place."""
        stats = [[None] * len(scored.scored) for scored in report.groups]
        told = (report.accuracy, report.asked, row_codec.to_json(report.by_difficulty), row_codec.to_json(report.metrics))
        with self._transaction() as write:
            placed = (report.stage, report.step)
            write.execute("DELETE FROM groups WHERE stage = ? AND step = ? AND kind = 'eval'", placed)
            write.execute("INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?, ?, ?, ?)", (*placed, *told, time.time()))
            self._write_groups(write, report.stage, report.step, report.groups, stats)

    def record_event(
        self,
        kind: str,
        message: str,
        *,
        stage: str | None = None,
        step: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        with self._transaction() as write:
            told = (time.time(), kind, stage, step, redact(message), redact(row_codec.to_json(dict(data or {}))))
            write.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", (self._last_id("events") + 1, *told))

    def keep_replies(self, stage: str, step: int, kind: Kind, replies: Mapping[str, str]) -> None:
        """What came from outside while a step or a measurement was graded; kept before the step itself is recorded."""
        if replies:
            with self._transaction() as write:
                values = [(stage, step, kind, key, reply) for key, reply in replies.items()]
                write.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", values)

    def forget_replies_after(self, stage: str, step: int) -> None:
        """For a fork: what follows is graded anew, by rewards that may be others."""
        with self._transaction() as write:
            write.execute("DELETE FROM replies WHERE stage = ? AND step > ?", (stage, step))
            write.execute("DELETE FROM replies WHERE stage NOT IN (SELECT name FROM stages)")

    def forget_after(self, stage: str, step: int) -> None:
        """Deletes what a stage recorded after ``step`` and every later stage, before those steps are done again.

        Ids go on as if they had never been given out. Events stay: they tell what happened, and it did.
        """
        with self._transaction() as write:
            later = write.execute("DELETE FROM steps WHERE stage = ? AND step > ?", (stage, step)).rowcount
            write.execute("DELETE FROM evals WHERE stage = ? AND step > ?", (stage, step))
            write.execute("DELETE FROM groups WHERE stage = ? AND step > ?", (stage, step))
            write.execute("DELETE FROM stages WHERE position > (SELECT position FROM stages WHERE name = ?)", (stage,))
            if later:
                write.execute("UPDATE stages SET finished = NULL WHERE name = ?", (stage,))

    def flush(self) -> None:
        """Waits until everything recorded is on the disk, and folds the write-ahead log into the database."""
        with database_errors(self.path):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the body or nothing of it."""
        with database_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after a full disk.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _write_groups(
        self,
        write: sqlite3.Connection,
        stage: str,
        step: int,
        groups: Sequence[row_codec.Graded],
        stats: Sequence[row_codec.Stats],
    ) -> None:
        found = row_codec.group_rows(stage, step, groups, stats, self._last_id("groups"), self._last_id("completions"))
        write.executemany(f"INSERT INTO groups VALUES ({_marks(11)})", found.groups)
        write.executemany(f"INSERT INTO completions VALUES ({_marks(10)})", found.completions)
        write.executemany(f"INSERT INTO aspects VALUES ({_marks(8)})", found.aspects)
        write.executemany(f"INSERT INTO tokens VALUES ({_marks(12)})", found.tokens)
        write.executemany("INSERT INTO versions VALUES (?, ?)", found.versions)


def _marks(count: int) -> str:
    return ", ".join("?" * count)
