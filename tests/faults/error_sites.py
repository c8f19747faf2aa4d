"""The places in the package that create an error for users, and which of them a test has reached."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import oncurve
from oncurve import errors
from oncurve.errors import OncurveError

PACKAGE = Path(oncurve.__file__).parent
KINDS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, OncurveError)}


@contextmanager
def record_errors() -> Iterator[set[tuple[str, int]]]:
    """(file, line) of every error that is created within."""
    lines: set[tuple[str, int]] = set()
    create = OncurveError.__init__

    def recorded(self: OncurveError, *arguments: Any, **named: Any) -> None:
        frame = sys._getframe(1)
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        create(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OncurveError, "__init__", recorded)
        yield lines


def unreached(patterns: tuple[str, ...], reached: set[tuple[str, int]], elsewhere: Mapping[str, str]) -> list[str]:
    """The errors of these modules that were not created, except those ``elsewhere``: a part of their source, and their test.

    Prints a line for each module (`pytest -rP` shows it).
    """
    missed: list[str] = []
    for path in [path for pattern in patterns for path in sorted(PACKAGE.glob(pattern))]:
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        sites = [node for node in nodes if isinstance(node.func, ast.Name) and node.func.id in KINDS]
        left = [
            node
            for node in sites
            if not any(file == str(path) and node.lineno <= line <= (node.end_lineno or 0) for file, line in reached)
        ]
        untested = [node for node in left if not any(part in ast.unparse(node) for part in elsewhere)]
        if sites:
            name = path.relative_to(PACKAGE)
            print(f"{name}: {len(sites) - len(left)} of {len(sites)} errors reached, {len(left) - len(untested)} elsewhere")
            missed += [f"{name}:{node.lineno} {ast.unparse(node)}" for node in untested]
    return missed
