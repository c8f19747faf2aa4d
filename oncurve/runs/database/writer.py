"""``run.db``: every group, completion, reward aspect, advantage and token of a run, in SQLite.

One process writes and any number read, also while it writes (WAL). A step is one transaction, so a kill leaves complete steps
only. A commit survives the death of the process at once, and a power failure after ``flush``. The trainer flushes before it
writes a checkpoint, so a checkpoint never refers to steps that the database has lost.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from oncurve.records import EvalReport, StepReport
from oncurve.runs.atomic_files import disk_errors, sync
from oncurve.runs.database import row_codec
from oncurve.runs.database.connection import DATABASE, create_database, database_errors, open_database, take_lock
from oncurve.runs.database.reader import SECONDS, Kind, RunReader
from oncurve.runs.secrets import redact


class RunWriter(RunReader):
    """A run's database, open for recording. Holds the run's lock: a run has one writer at a time."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: IO[bytes]) -> None:
        super().__init__(path, connection)
        self._lock = lock

    @classmethod
    def create(cls, folder: Path) -> RunWriter:
        """Creates an empty database in a run's folder."""
        return cls._locked(folder, new=True)

    @classmethod
    def open(cls, folder: Path) -> RunWriter:
        """Opens the database of the run in ``folder`` for recording."""
        return cls._locked(folder, new=False)

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
        super().close()
        self._lock.close()

    def begin_stage(self, name: str, type: str, position: int, steps: int) -> None:
        """Records that a stage has begun, with its planned steps. After a resume the first start time is kept."""
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
        """Writes a step with all its groups in one transaction. Its stage must have begun; a step is recorded once."""
        stats = report.stats or [[None] * len(graded.scored.scored) for graded in report.groups]
        seconds = {SECONDS + phase: value for phase, value in report.seconds.items()}
        metrics = {**report.metrics, **seconds}
        with self._transaction() as write:
            key = (report.stage, report.step)
            write.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (*key, report.total_seconds, time.time()))
            write.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", [(*key, n, float(v)) for n, v in metrics.items()])
            self._write_groups(write, report.stage, report.step, report.groups, stats)

    def record_eval(self, report: EvalReport) -> None:
        """Writes an evaluation with its groups. An evaluation repeated at the same step replaces the earlier one."""
        stats = [[None] * len(scored.scored) for scored in report.groups]
        values = (report.accuracy, report.asked, row_codec.to_json(report.by_difficulty), row_codec.to_json(report.metrics))
        with self._transaction() as write:
            key = (report.stage, report.step)
            write.execute("DELETE FROM groups WHERE stage = ? AND step = ? AND kind = 'eval'", key)
            write.execute("INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?, ?, ?, ?)", (*key, *values, time.time()))
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
            values = (time.time(), kind, stage, step, redact(message), redact(row_codec.to_json(dict(data or {}))))
            write.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", (self._last_id("events") + 1, *values))

    def record_replies(self, stage: str, step: int, kind: Kind, replies: Mapping[str, str]) -> None:
        """Records results of non-deterministic rewards, before the step or evaluation that they belong to."""
        if replies:
            with self._transaction() as write:
                values = [(stage, step, kind, key, reply) for key, reply in replies.items()]
                write.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", values)

    def forget_replies_after(self, stage: str, step: int) -> None:
        """For a fork: the steps that follow are graded again, perhaps with other rewards."""
        with self._transaction() as write:
            write.execute("DELETE FROM replies WHERE stage = ? AND step > ?", (stage, step))
            write.execute("DELETE FROM replies WHERE stage NOT IN (SELECT name FROM stages)")

    def forget_rollbacks_after(self, stage: str, step: int) -> None:
        """For a fork: it has not rolled back to the steps that follow, and events of its parent must not change its samples."""
        with self._transaction() as write:
            later = "stage = ? AND step > ? OR stage NOT IN (SELECT name FROM stages)"
            write.execute(f"DELETE FROM events WHERE kind = 'rollback' AND ({later})", (stage, step))

    def forget_after(self, stage: str, step: int) -> None:
        """Deletes what a stage recorded after ``step`` and every later stage, before those steps are repeated.

        The next ids follow the last one that is left. Events are kept: what they record did happen.
        """
        with self._transaction() as write:
            later = write.execute("DELETE FROM steps WHERE stage = ? AND step > ?", (stage, step)).rowcount
            write.execute("DELETE FROM evals WHERE stage = ? AND step > ?", (stage, step))
            write.execute("DELETE FROM groups WHERE stage = ? AND step > ?", (stage, step))
            write.execute("DELETE FROM stages WHERE position > (SELECT position FROM stages WHERE name = ?)", (stage,))
            if later:
                write.execute("UPDATE stages SET finished = NULL WHERE name = ?", (stage,))

    def flush(self) -> None:
        """Waits until everything recorded is on disk, and merges the write-ahead log into the database."""
        with database_errors(self.path):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        # If a reader keeps an old state of the database open, SQLite can't merge the log, and does not sync it either.
        log = self.path.with_name(f"{self.path.name}-wal")
        with disk_errors(log):
            if log.exists():  # not on a disk that has no shared memory, where SQLite keeps another kind of log
                sync(log)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with database_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # After a full disk SQLite has already rolled back.
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
        rows = row_codec.group_rows(stage, step, groups, stats, self._last_id("groups"), self._last_id("completions"))
        write.executemany(f"INSERT INTO groups VALUES ({_marks(11)})", rows.groups)
        write.executemany(f"INSERT INTO completions VALUES ({_marks(10)})", rows.completions)
        write.executemany(f"INSERT INTO aspects VALUES ({_marks(8)})", rows.aspects)
        write.executemany(f"INSERT INTO tokens VALUES ({_marks(12)})", rows.tokens)
        write.executemany("INSERT INTO versions VALUES (?, ?)", rows.versions)
        write.executemany("INSERT INTO contexts VALUES (?, ?, ?)", rows.contexts)
        write.executemany("INSERT INTO episodes VALUES (?, ?)", rows.episodes)
        write.executemany("INSERT INTO routing VALUES (?, ?)", rows.routing)
        write.executemany("INSERT INTO prompt_routing VALUES (?, ?)", rows.prompt_routing)


def _marks(count: int) -> str:
    return ", ".join("?" * count)
