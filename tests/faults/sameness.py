"""Everything that two identical runs have in common, to be compared with ==."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.folder import RunFolder
from oncurve.runs.metrics import is_repeatable

TIMES = {"created", "started", "finished", "seconds"}


def everything(run: RunFolder) -> dict[str, str]:
    """Digests by name: each table's rows but for times, memory and events; every other file; the checkpoints' tensors."""
    result = dict(_tables(run.database))
    tensors = [file for index in list_checkpoints(run.checkpoints) for file in index.path.glob("*.safetensors")]
    others = [file for file in run.path.rglob("*") if file.is_file() and not _is_apart(file.relative_to(run.path))]
    return result | {
        str(file.relative_to(run.path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in tensors + others
    }


def _is_apart(file: Path) -> bool:
    """Compared in another way, or specific to this machine and time."""
    return (
        file.parts[0] in ("checkpoints", "bad", "run.json", "run.lock")
        or file.parts[0].startswith("run.db")
        or file.suffix.startswith(".sqlite")
    )


def _tables(database: Path) -> Iterator[tuple[str, str]]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as store:
        names = [row[0] for row in store.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        for name in set(names) - {"events", "meta"}:
            columns = [row[1] for row in store.execute(f"PRAGMA table_info({name})") if row[1] not in TIMES]
            rows = store.execute(f"SELECT {', '.join(columns)} FROM {name} ORDER BY {', '.join(columns)}").fetchall()
            kept = [row for row in rows if name != "metrics" or is_repeatable(row[2])]
            yield name, hashlib.sha256(repr(kept).encode()).hexdigest()
