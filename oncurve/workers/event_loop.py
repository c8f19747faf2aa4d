"""The event loop in which all `async` functions of the user run: rewards, tools and environments."""

from __future__ import annotations

import asyncio
import contextlib
import threading

BLOCKED_S = 1.0
"""A loop that does nothing for so long is blocked by a function that does not await what it waits for."""
_lock = threading.Lock()
_present: list[asyncio.AbstractEventLoop] = []


def shared_loop() -> asyncio.AbstractEventLoop:
    """One event loop in its own thread: a notebook's loop is busy, and clients stay tied to the loop that they first ran in."""
    with _lock:
        if not _present:
            _present.append(asyncio.new_event_loop())
            threading.Thread(target=_run, args=(_present[0],), name="oncurve-event-loop", daemon=True).start()
        return _present[0]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised in a task, which has them as its result
            loop.run_forever()


def replace_if_blocked(loop: asyncio.AbstractEventLoop) -> None:
    """Abandon a loop that a function blocks: later functions run in a new one."""
    has_run = threading.Event()
    loop.call_soon_threadsafe(has_run.set)
    if has_run.wait(BLOCKED_S):
        return
    with _lock:
        if _present and _present[0] is loop:
            _present.clear()
