"""What a step wants the log to say, from however deep: an update left out, memory that ran out, how far a measurement is.

Whoever runs a step collects, or watches; whoever notices something notes it. Without a collector a note goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log, with the kind of event that it becomes."""

    kind: str
    message: str


_collected: ContextVar[list[Note] | None] = ContextVar("collected", default=None)
_watcher: ContextVar[Callable[[float], None] | None] = ContextVar("watcher", default=None)


def note(kind: str, message: str) -> None:
    notes = _collected.get()
    if notes is not None:
        notes.append(Note(kind, message))


@contextmanager
def collect_notes() -> Iterator[list[Note]]:
    """The notes of the body, in order."""
    notes: list[Note] = []
    before = _collected.set(notes)
    try:
        yield notes
    finally:
        _collected.reset(before)


def report_progress(share: float) -> None:
    """So much of a measurement on held-out data is done: for whoever shows it while it goes on."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(share)


@contextmanager
def watch_progress(watcher: Callable[[float], None]) -> Iterator[None]:
    """Hears how far measurements of the body are."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)
