"""SIGINT and SIGTERM: the first asks a run to stop in good order, the next one does not wait."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = "stopping after this step; once more stops at once"


@contextmanager
def graceful_shutdown(is_stopping: Callable[[], bool], stop: Callable[[int], None]) -> Iterator[None]:
    """Within, a signal calls ``stop`` with its number; where that was so already, it ends the process at once. Signals reach
    the main thread alone: elsewhere nothing is done."""
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
    """Within, both signals go to ``on_signal``, by number; then to whom they went before."""

    def handler(number: int, frame: FrameType | None) -> None:
        on_signal(number)

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
