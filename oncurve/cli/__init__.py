"""The command line: one module per subject, one function per command."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Sequence
from typing import Any

from oncurve import check_platform
from oncurve.errors import PlatformError

RETRY_S = 0.05
"""Seconds after which an interrupt that was lost is repeated."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        check_platform()
    except PlatformError as error:
        print(f"error {error}", file=sys.stderr)
        return 2
    before, sys.unraisablehook = sys.unraisablehook, _repeat_interrupt
    try:
        from oncurve.cli import app  # imported here, because `oncurve.cli` is also imported for its parts

        return app.main(arguments)
    except KeyboardInterrupt:  # during the import; later, the command handles it
        return 130
    finally:
        sys.unraisablehook = before


def _repeat_interrupt(lost: Any) -> None:
    """Python prints and drops an exception in a destructor or weakref callback, of which imports have many. If it is Ctrl-C,
    the command would carry on: interrupt it again."""
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(RETRY_S, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)
