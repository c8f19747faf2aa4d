"""Log lines and progress from deep inside a step: a skipped update, an out-of-memory retry, the progress of an evaluation.

`note` adds a line to the current step's log and `collect_notes` returns them; `report_progress` and `watch_progress` do the
same for progress. Outside of a step, notes and progress are dropped. `mark_update` says that the step now changes what a
checkpoint holds: if it fails afterwards, its changes are incomplete, and the state before them is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log, and the kind of event that it is recorded as."""

    kind: str
    message: str


class Notes(list[Note]):
    """The notes of a step, in order, and whether it has begun to change what a checkpoint holds."""

    has_update = False


_collected: ContextVar[Notes | None] = ContextVar("collected", default=None)
_watcher: ContextVar[Callable[[float], None] | None] = ContextVar("watcher", default=None)


def note(kind: str, message: str) -> None:
    notes = _collected.get()
    if notes is not None:
        notes.append(Note(kind, message))


def mark_update() -> None:
    """The step is about to change weights, an optimiser, or other state of a checkpoint."""
    notes = _collected.get()
    if notes is not None:
        notes.has_update = True


@contextmanager
def collect_notes() -> Iterator[Notes]:
    """Collects the notes made in the body."""
    notes = Notes()
    before = _collected.set(notes)
    try:
        yield notes
    finally:
        _collected.reset(before)


def report_progress(share: float) -> None:
    """Reports which share of an evaluation is done, for the display."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(share)


@contextmanager
def watch_progress(watcher: Callable[[float], None]) -> Iterator[None]:
    """Calls ``watcher`` with the progress of evaluations in the body."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)
