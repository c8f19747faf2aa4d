"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by phase. Phases may be entered again; they add up. ``enter`` is told of each as it begins."""

    def __init__(self, enter: Callable[[str], None] | None = None) -> None:
        self.enter = enter
        self.seconds: dict[str, float] = {}
        self._cpu_before = time.process_time()

    @property
    def cpu_seconds(self) -> float:
        """What the process itself has computed since: on a machine shared with others, a fairer measure than the wall's."""
        return time.process_time() - self._cpu_before

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.enter is not None:
            self.enter(phase)
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
