"""``bad/<stage>-<step>.json``: batches whose update was skipped, saved for inspection even if their steps are rolled back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oncurve.errors import RunError
from oncurve.records import GradedGroup, StepReport
from oncurve.runs.atomic_files import disk_error, read_file, write_file_atomically
from oncurve.runs.database.row_codec import to_json
from oncurve.runs.views import group_view

FOLDER = "bad"


@dataclass(frozen=True, slots=True)
class BadBatch:
    """A batch, and why its update was skipped. ``groups`` are plain data; a stage that does not sample has none."""

    stage: str
    step: int
    why: Sequence[str]
    metrics: Mapping[str, float]
    groups: Sequence[Mapping[str, Any]]


def save_bad_batch(run: Path, report: StepReport, why: Sequence[str]) -> Path:
    """Writes a batch atomically. If a resumed run repeats the step, its batch replaces the earlier one."""
    path = run / FOLDER / f"{quote(report.stage, safe='')}-{report.step:06d}.json"
    batch = {
        "stage": report.stage,
        "step": report.step,
        "why": list(why),
        "metrics": dict(report.metrics),
        "groups": [group_view(graded.group, _completions(graded)) for graded in report.groups],
    }
    write_file_atomically(path, to_json(batch).encode())
    return path


def _completions(graded: GradedGroup) -> list[dict[str, Any]]:
    totals = graded.scored.totals
    return [
        {"text": c.text, "token_ids": c.token_ids, "reward": totals[i], "advantages": graded.advantages[i]}
        for i, c in enumerate(graded.group.completions)
    ]


def bad_batches(run: Path) -> list[BadBatch]:
    """The saved batches, by stage and step."""
    batches = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            data = json.loads(read_file(path))
            batches.append(
                BadBatch(data["stage"], int(data["step"]), list(data["why"]), dict(data["metrics"]), list(data["groups"]))
            )
        except OSError as error:
            raise disk_error(path, error.errno, error.strerror or str(error)) from error
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            because = f"it is not a batch that a run saved ({type(error).__name__}: {error})"
            raise RunError(str(path), "unreadable", because=because, fix="delete it; nothing depends on it") from error
    return sorted(batches, key=lambda batch: (batch.stage, batch.step))
