"""The command line: one module per subject, one function per command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from oncurve.cli import app  # imported here, because `oncurve.cli` is also imported for its parts

    return app.main(arguments)
