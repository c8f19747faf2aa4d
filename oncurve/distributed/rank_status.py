"""What each process of a run is doing, in small files of the run's folder that `oncurve status RUN` reads.

A run of one process writes none. Files are replaced whole, so that a reader never sees half of one.
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
    """One process, as it last said: since when it is in which phase, and in which exchange it waits, if it does."""

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
    """The exchange in which it waits for others."""
    exchanges: int = 0
    """Exchanges that it has entered: of two ranks, the one with the smaller number is behind."""
    beat: float = 0.0
    """When this was written."""

    @classmethod
    def of_this_process(cls, name: str) -> RankStatus:
        return cls(name, socket.gethostname(), os.getpid(), since=time.time())

    @property
    def as_text(self) -> str:
        """In words, for a message: `in 'sample' of grpo 12 for 33 s`."""
        place = f" of {self.stage} {self.step}" if self.stage else ""
        waits = f", waiting in '{self.waiting}'" if self.waiting else ""
        return f"in '{self.phase}'{place} for {max(self.beat - self.since, 0.0):.0f} s{waits}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        return cls(**json.loads(text))

    @property
    def is_alive(self) -> bool | None:
        """Whether its process is there; None where it is another machine's."""
        if self.host != socket.gethostname():
            return None
        return is_alive(self.pid)


def write_status(run: Path, pulse: RankStatus) -> None:
    """Replaces the process's file. A disk that refuses is passed over: the run itself will meet it where it matters."""
    with contextlib.suppress(OSError):
        folder = run / FOLDER
        folder.mkdir(exist_ok=True)
        aside = folder / f".{pulse.name}"
        aside.write_text(pulse.to_json())
        aside.replace(folder / f"{pulse.name}.json")


def read_statuses(run: Path) -> list[RankStatus]:
    """Every process that has written, by name; numbers in names count as numbers."""
    found = []
    for path in (run / FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(RankStatus.from_json(path.read_bytes()))
    return sorted(found, key=lambda pulse: [(len(part), part) for part in pulse.name.split("-")])


def clear_statuses(run: Path) -> None:
    """Before a run goes on, perhaps with fewer processes than before."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)
