"""A run, its evaluations, groups and completions as JSON: the keys that `--json`, the studio and files on disk share.

Each caller adds its own keys. JSON has no NaN and no lone surrogates: a number that is not finite becomes None, and a lone
surrogate in a text becomes "?".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.records import Aspect, EvalReport, Group, ScoredCompletion
from oncurve.runs.database.reader import StageRow
from oncurve.runs.folder import RunEntry


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def finite_values(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in numbers.items()}


def json_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def run_view(entry: RunEntry, stages: Sequence[StageRow], last: EvalReport | None) -> dict[str, Any]:
    """A run in a list. ``stages`` are those that have begun, ``last`` is the last evaluation.

    Example: {"name": "arithmetic-1", "status": "finished", "created": 1.7e9, "reason": None, "parent": None,
              "stages": [{"name": "grpo", "type": "grpo", "steps": 200, "done": 200}], "accuracy": 0.9, "heldout_reward": 1.1}
    """
    parent = entry.state.parent if entry.state else None
    return {
        "name": entry.name,
        "status": entry.status,
        "created": entry.state.created if entry.state else None,
        "reason": entry.reason,
        "parent": None if parent is None else {"run": parent.run, "stage": parent.stage, "step": parent.step},
        "stages": [stage_view(stage) for stage in stages],
        "accuracy": finite(last.accuracy) if last else None,
        "heldout_reward": finite(last.reward) if last else None,
    }


def stage_view(stage: StageRow) -> dict[str, Any]:
    return {"name": stage.name, "type": stage.type, "steps": stage.steps, "done": stage.done}


def eval_view(report: EvalReport) -> dict[str, Any]:
    """An evaluation without its groups."""
    return {
        "stage": report.stage,
        "step": report.step,
        "accuracy": finite(report.accuracy),
        "reward": finite(report.reward),
        "asked": report.asked,
    }


def group_view(group: Group, completions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A group with its completions as the caller shows them."""
    return {"prompt_id": group.prompt.id, "prompt": group.prompt.shown, "completions": list(completions)}


def completion_view(scored: ScoredCompletion) -> dict[str, Any]:
    """A completion with what each reward gave it."""
    return {
        "text": json_text(scored.completion.text),
        "stop": scored.completion.stop,
        "length": scored.completion.length,
        "failure": None if scored.failure is None else json_text(scored.failure),
        "aspects": [aspect_view(aspect) for aspect in scored.aspects],
    }


def aspect_view(aspect: Aspect) -> dict[str, Any]:
    return {
        "name": aspect.name,
        "value": finite(aspect.value),
        "weight": aspect.weight,
        "failure": None if aspect.failure is None else json_text(aspect.failure),
        "reason": None if aspect.reason is None else json_text(aspect.reason),
    }
