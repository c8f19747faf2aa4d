"""The checkpoints of a run by the names of their folders, and the best of them by a recorded metric.

Needs no torch, and can run while the trainer saves another checkpoint.
"""

from __future__ import annotations

import math
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
"""Selects checkpoints by held-out accuracy, or by held-out reward if there is no verifiable reward. Not a metric of a step."""
LOWER_IS_BETTER = ("loss", "policy_loss", "heldout_loss", "kl", "failure_share", "cut_share", "no_signal_share", "mismatch_kl")
"""Metrics of which the lowest value is the best; of all others the highest."""


def best_step(store: RunReader, stage: str, metric: str | None, steps: Collection[int]) -> int | None:
    """The step among ``steps`` with the best value, the earliest of equals; None if no step has one."""
    if metric is None:
        return None
    by_step = _heldout_by_step(store, stage) if metric == HELDOUT else dict(store.metric(metric, stage))
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    values = [(sign * by_step[step], -step) for step in steps if step in by_step and not math.isnan(by_step[step])]
    return -max(values)[1] if values else None


def _heldout_by_step(store: RunReader, stage: str) -> dict[int, float]:
    results = {e.step: e.reward if e.accuracy is None else e.accuracy for e in store.evals(stage)}
    return {step: value for step, value in results.items() if value is not None}


def check_metric(where: str, metric: str | None) -> None:
    """Refuses a metric that no stage logs."""
    if metric is None or metric == HELDOUT or metrics.find(metric) is not None:
        return
    raise RecipeError(
        where,
        metric + did_you_mean(metric, [HELDOUT, *metrics.METRICS]),
        because="no stage logs a metric of that name",
        fix=f"use {HELDOUT}, reward, loss, or another of docs/algorithms.md",
    )


NAME = re.compile(r"(?P<stage>[^.].*)-(?P<step>\d{6,})")
"""A name with a leading dot is a folder that is being written or deleted."""


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A checkpoint by the name of its folder. Its files have not been checked."""

    path: Path
    stage: str
    step: int


def checkpoint_path(folder: Path, stage: str, step: int) -> Path:
    """The folder of a checkpoint. Characters that a file name can't contain are written as %XX."""
    label = quote(stage, safe=" ")
    return folder / f"{'%2E' + label[1:] if label.startswith('.') else label}-{step:06d}"


def list_checkpoints(folder: Path) -> list[CheckpointEntry]:
    """All checkpoints in a folder, by stage and step."""
    if not folder.is_dir():
        return []
    with disk_errors(folder):
        matches = [(path, NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    entries = [CheckpointEntry(path, unquote(match["stage"]), int(match["step"])) for path, match in matches if match]
    return sorted(entries, key=lambda entry: (entry.stage, entry.step))
