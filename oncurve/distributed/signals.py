"""SIGINT and SIGTERM: the first one stops a run after the current step, the second one at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = "stopping after this step; interrupt again to stop at once"


@contextmanager
def graceful_shutdown(is_stopping: Callable[[], bool], stop: Callable[[int], None]) -> Iterator[None]:
    """Within this context the first signal calls ``stop`` with its number; a signal while ``is_stopping`` kills the process.

    Only the main thread receives signals: in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int) -> None:
        if is_stopping():
            os._exit(128 + number)
        stop(number)

    with signal_handlers(on_signal):
        yield


@contextmanager
def signal_handlers(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Within this context both signals call ``on_signal`` with their number; afterwards the previous handlers are restored."""

    def handler(number: int, frame: FrameType | None) -> None:
        on_signal(number)

    previous = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)
