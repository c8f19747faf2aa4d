"""Shared by the benchmarks: the measured commit, tables in Markdown pages, plots."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STYLE: Any = {"svg.hashsalt": "oncurve", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def commit() -> str:
    """The measured commit, with a `+` if files had changed since. A copy without a repository sets ONCURVE_COMMIT."""
    command = ("git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    description = (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    )
    return description or os.environ.get("ONCURVE_COMMIT", "unknown")


def put(page: Path, name: str, body: str) -> None:
    """Replace the text between a page's markers of that name."""
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page} has no markers for '{name}'")
    page.write_text(pattern.sub(lambda m: f"{m[1]}{body.rstrip()}\n{m[2]}", text), encoding="utf-8")


@contextmanager
def plot(file: Path, *panels: int, **how: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, like `plt.subplots`. The same numbers give the same bytes of SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(*panels, layout="constrained", **how)
        yield figure, axes
        figure.savefig(file, metadata={"Date": None})
