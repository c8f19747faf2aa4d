"""Which checkpoints a run has, by the names of their folders alone: read without torch, and while the run is saving another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from oncurve.runs.disk import disk_errors

NAME = re.compile(r"(?P<stage>[^.].*)-(?P<step>\d{6,})")
"""Names that begin with a dot are of folders that are half-written or on their way out."""


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint in a list, by the name of its folder: it may yet prove damaged."""

    path: Path
    stage: str
    step: int


def checkpoint_path(folder: Path, stage: str, step: int) -> Path:
    """Where a checkpoint lies. Characters that a file's name can't hold are written as %XX."""
    label = quote(stage, safe=" ")
    return folder / f"{'%2E' + label[1:] if label.startswith('.') else label}-{step:06d}"


def list_checkpoints(folder: Path) -> list[Place]:
    """The checkpoints there are, by stage and step."""
    if not folder.is_dir():
        return []
    with disk_errors(folder):
        matches = [(path, NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    places = [Place(path, unquote(match["stage"]), int(match["step"])) for path, match in matches if match]
    return sorted(places, key=lambda place: (place.stage, place.step))
