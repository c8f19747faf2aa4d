"""How benchmarks tell what they found: of which commit, in which page, in which plot."""

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
    """What was measured, with a `+` where files had been changed since. A copy without a repository has ONCURVE_COMMIT."""
    ask = ("git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    told = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    return told or os.environ.get("ONCURVE_COMMIT", "unknown")


def put(page: Path, name: str, body: str) -> None:
    """Between a page's marks of that name."""
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page} has no place for '{name}'")
    page.write_text(pattern.sub(lambda m: f"{m[1]}{body.rstrip()}\n{m[2]}", text), encoding="utf-8")


@contextmanager
def plot(file: Path, *panels: int, **how: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, as `plt.subplots` gives them; the same numbers make the same bytes of SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(*panels, layout="constrained", **how)
        yield figure, axes
        figure.savefig(file, metadata={"Date": None})
