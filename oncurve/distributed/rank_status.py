"""What each process of a run is doing, in small files of the run's folder that `oncurve status RUN` reads.

A run of one process writes none. Files are replaced atomically, so a reader never sees a partial write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from oncurve.workers.processes import is_alive

FOLDER = "actors"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last published status of a rank or actor. Its fields are the keys of its file and of `oncurve status --json`."""

    name: str
    """`rank-0`, `sampler-3` …"""
    host: str
    pid: int
    phase: str = "starting"
    stage: str = ""
    step: int = 0
    since: float = 0.0
    """When the phase began, in seconds since 1970 by the clock of its host."""
    waiting: str | None = None
    """The collective in which it waits for other ranks."""
    exchanges: int = 0
    """Collectives that it has entered: of two ranks, the one with the smaller count is behind."""
    beat: float = 0.0
    """When this status was published."""

    @classmethod
    def of_this_process(cls, name: str) -> RankStatus:
        return cls(name, socket.gethostname(), os.getpid(), since=time.time())

    @property
    def as_text(self) -> str:
        """For error messages: `in 'sample' of grpo 12 for 33 s`."""
        step = f" of {self.stage} {self.step}" if self.stage else ""
        collective = f", waiting in '{self.waiting}'" if self.waiting else ""
        return f"in '{self.phase}'{step} for {max(self.beat - self.since, 0.0):.0f} s{collective}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        return cls(**json.loads(text))

    @property
    def is_alive(self) -> bool | None:
        """Whether its process runs; None if it belongs to another machine."""
        if self.host != socket.gethostname():
            return None
        return is_alive(self.pid)


def write_status(run: Path, status: RankStatus) -> None:
    """Replaces the process's status file. Disk errors are ignored here: the run itself reports them when it saves."""
    with contextlib.suppress(OSError):
        folder = run / FOLDER
        folder.mkdir(exist_ok=True)
        temporary = folder / f".{status.name}"
        temporary.write_text(status.to_json())
        temporary.replace(folder / f"{status.name}.json")


def read_statuses(run: Path) -> list[RankStatus]:
    """The status of every process, sorted by name: rank-2 before rank-10."""
    statuses = []
    for path in (run / FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            if path.is_file():
                statuses.append(RankStatus.from_json(path.read_bytes()))
    return sorted(statuses, key=lambda status: [(len(part), part) for part in status.name.split("-")])


def clear_statuses(run: Path) -> None:
    """Called before a run resumes, perhaps with fewer processes than before."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)
