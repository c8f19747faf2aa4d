"""What steps of a stage leave behind in a file of the run: one JSON object a line, with the step that wrote it.

A file is written anew with each step, aside and renamed. Lines of that step and later ones are of a process that was killed
before its checkpoint: they go, and are written again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oncurve.runs.disk import put_file


def lines_of(file: Path) -> list[dict[str, Any]]:
    """All that are there; none before the first step."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def add_lines(file: Path, rows: Iterable[Mapping[str, Any]], step: int) -> None:
    """Puts a step's rows behind those of the steps before it."""
    kept = [line for line in lines_of(file) if line["step"] < step] + [{**row, "step": step} for row in rows]
    put_file(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept).encode())
