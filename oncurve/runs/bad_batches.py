"""``bad/<stage>-<step>.json``: batches whose update was left out, kept for inspection also where their steps were undone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oncurve.errors import RunError
from oncurve.records import GradedGroup, StepReport
from oncurve.runs.atomic_files import disk_error, write_file_atomically
from oncurve.runs.database.row_codec import to_json

FOLDER = "bad"


@dataclass(frozen=True, slots=True)
class BadBatch:
    """A batch as it was, with why its update was left out. ``groups`` are plain data; an sft stage has none."""

    stage: str
    step: int
    why: Sequence[str]
    metrics: Mapping[str, float]
    groups: Sequence[Mapping[str, Any]]


def save_bad_batch(run: Path, report: StepReport, why: Sequence[str]) -> Path:
    """Writes a batch down, whole or not at all. One of the same step (done again after a resume) takes its place."""
    path = run / FOLDER / f"{quote(report.stage, safe='')}-{report.step:06d}.json"
    told = {
        "stage": report.stage,
        "step": report.step,
        "why": list(why),
        "metrics": dict(report.metrics),
        "groups": [_group(graded) for graded in report.groups],
    }
    write_file_atomically(path, to_json(told).encode())
    return path


def bad_batches(run: Path) -> list[BadBatch]:
    """Those there are, in order of stage and step."""
    found = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            told = json.loads(path.read_bytes())
            found.append(
                BadBatch(told["stage"], int(told["step"]), list(told["why"]), dict(told["metrics"]), list(told["groups"]))
            )
        except OSError as error:
            raise disk_error(path, error.errno, error.strerror or str(error)) from error
        except (ValueError, KeyError, TypeError) as error:
            because = f"it is not what a run writes there ({type(error).__name__}: {error})"
            raise RunError(str(path), "unreadable", because=because, fix="delete it; nothing depends on it") from error
    return sorted(found, key=lambda batch: (batch.stage, batch.step))


def _group(graded: GradedGroup) -> dict[str, Any]:
    totals = graded.scored.totals
    return {
        "prompt_id": graded.group.prompt.id,
        "prompt": graded.group.prompt.shown,
        "completions": [
            {"text": c.text, "token_ids": c.token_ids, "reward": totals[i], "advantages": graded.advantages[i]}
            for i, c in enumerate(graded.group.completions)
        ],
    }
