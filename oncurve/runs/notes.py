"""What a step wants the log to say, from however deep: an update left out, memory that ran out.

Whoever runs a step collects; whoever notices something notes it. Without a collector a note goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log, with the kind of event that it becomes."""

    kind: str
    message: str


_collected: ContextVar[list[Note] | None] = ContextVar("collected", default=None)


def note(kind: str, message: str) -> None:
    notes = _collected.get()
    if notes is not None:
        notes.append(Note(kind, message))


@contextmanager
def collecting() -> Iterator[list[Note]]:
    """The notes of the body, in order."""
    notes: list[Note] = []
    before = _collected.set(notes)
    try:
        yield notes
    finally:
        _collected.reset(before)
