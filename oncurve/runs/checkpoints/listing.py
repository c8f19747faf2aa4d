"""Which checkpoint of a stage is its best, by a metric that the run recorded.

Which checkpoints a run has, by the names of their folders alone: read without torch, and while the run is saving another.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from oncurve.errors import RecipeError, did_you_mean
from oncurve.runs import metrics
from oncurve.runs.atomic_files import disk_errors
from oncurve.runs.database.reader import RunReader

HELDOUT = "heldout_accuracy"
"""The name under which held-out accuracy, which is no metric of a step, is asked for; where no rule says what is right, the
held-out reward."""
LOWER = ("loss", "policy_loss", "heldout_loss", "kl", "failure_share", "cut_share", "no_signal_share", "mismatch_kl")
"""Metrics of which less is better; of all others more is."""


def best_step(store: RunReader, stage: str, metric: str | None, steps: Collection[int]) -> int | None:
    """The step among ``steps`` with the best value, the earliest of equals; None where none has one."""
    if metric is None:
        return None
    known = _measured(store, stage) if metric == HELDOUT else dict(store.metric(metric, stage))
    sign = -1.0 if metric in LOWER else 1.0
    values = [(sign * known[step], -step) for step in steps if step in known and known[step] == known[step]]
    return -max(values)[1] if values else None


def _measured(store: RunReader, stage: str) -> dict[int, float]:
    found = {e.step: e.reward if e.accuracy is None else e.accuracy for e in store.evals(stage)}
    return {step: value for step, value in found.items() if value is not None}


def check_metric(where: str, metric: str | None) -> None:
    """Refuses a name that no stage records."""
    if metric is None or metric == HELDOUT or metrics.find(metric) is not None:
        return
    raise RecipeError(
        where,
        metric + did_you_mean(metric, [HELDOUT, *metrics.METRICS]),
        because="no stage records a metric of that name",
        fix=f"use {HELDOUT}, reward, loss, or another of docs/algorithms.md",
    )


NAME = re.compile(r"(?P<stage>[^.].*)-(?P<step>\d{6,})")
"""Names that begin with a dot are of folders that are half-written or on their way out."""


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A checkpoint in a list, by the name of its folder: it may yet prove damaged."""

    path: Path
    stage: str
    step: int


def checkpoint_path(folder: Path, stage: str, step: int) -> Path:
    """Where a checkpoint lies. Characters that a file's name can't hold are written as %XX."""
    label = quote(stage, safe=" ")
    return folder / f"{'%2E' + label[1:] if label.startswith('.') else label}-{step:06d}"


def list_checkpoints(folder: Path) -> list[CheckpointEntry]:
    """The checkpoints there are, by stage and step."""
    if not folder.is_dir():
        return []
    with disk_errors(folder):
        matches = [(path, NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    places = [CheckpointEntry(path, unquote(match["stage"]), int(match["step"])) for path, match in matches if match]
    return sorted(places, key=lambda place: (place.stage, place.step))
