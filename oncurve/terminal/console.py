"""The console that everything is printed with. What it prints may come from a model or from a stranger's run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from oncurve.errors import printable


class SafeConsole(Console):
    """A console that replaces control characters, which a terminal would execute, and takes square brackets literally."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_safe = segment.control is not None or segment.text.isprintable()
            yield segment if is_safe else Segment(printable(segment.text), segment.style)
