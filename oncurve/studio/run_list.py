"""The list of runs: how each stands, how far it is, how long it will take, what came of it."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from oncurve.errors import OncurveError
from oncurve.runs.database.reader import StageRow
from oncurve.runs.folder import RunEntry, RunFolder, list_runs
from oncurve.studio.open_run import finite, open_reader


def overview(runs_dir: Path) -> list[dict[str, Any]]:
    """Every folder among the runs. One that can't be read is in the list too, with the reason."""
    return [run_data(entry) for entry in list_runs(runs_dir)]


def run_data(entry: RunEntry) -> dict[str, Any]:
    state = entry.state
    told: dict[str, Any] = {"name": entry.name, "status": entry.status, "reason": entry.reason}
    told["created"] = state.created if state else None
    told["oncurve"] = state.oncurve if state else None
    told["parent"] = None
    if state and state.parent:
        parent = state.parent
        told["parent"] = {"run": parent.run, "stage": parent.stage, "step": parent.step, "changes": dict(parent.changes)}
    if state is None:
        return {**told, **_nothing()}
    try:
        return {**told, **_numbers(RunFolder(entry.path), running=entry.status == "running")}
    except OncurveError as error:
        # A run that has only just begun has no database yet; any other without one is damaged.
        fresh = entry.status == "running" and time.time() - state.created < 60
        status = entry.status if fresh else "broken"
        return {**told, **_nothing(), "status": status, "reason": None if fresh else f"{error.what}: {error.because}"}


def _nothing() -> dict[str, Any]:
    told: dict[str, Any] = {"stages": [], "eta": None, "accuracy": None, "heldout_reward": None, "evals": [], "metrics": {}}
    return {**told, "completions": 0, "failures": 0}


def _numbers(run: RunFolder, running: bool) -> dict[str, Any]:
    with open_reader(run) as store:
        summary = store.summary()
        current = next((s for s in reversed(summary.stages) if s.finished is None), None)
        pace = fmean(seconds) if running and current and (seconds := store.recent_seconds(current.name)) else None
    evals = [
        {"stage": e.stage, "step": e.step, "accuracy": finite(e.accuracy), "reward": finite(e.reward), "asked": e.asked}
        for e in summary.evals
    ]
    return {
        "stages": _stages(run, summary.stages),
        "eta": pace * max(0, current.steps - current.done) if pace is not None and current else None,
        "accuracy": evals[-1]["accuracy"] if evals else None,
        "heldout_reward": evals[-1]["reward"] if evals else None,
        "evals": evals,
        "metrics": {name: finite(value) for name, value in summary.last_metrics.items()},
        "completions": summary.completions,
        "failures": summary.failures,
    }


def _stages(run: RunFolder, begun: tuple[StageRow, ...]) -> list[dict[str, Any]]:
    """The stages there are, and after them those that the recipe still plans."""
    told = [
        {"name": s.name, "type": s.type, "steps": s.steps, "done": s.done, "finished": s.finished is not None} for s in begun
    ]
    for name, kind, steps in _planned(run)[len(begun) :]:
        told.append({"name": name, "type": kind, "steps": steps, "done": 0, "finished": False})
    return told


def _planned(run: RunFolder) -> list[tuple[str, str, int]]:
    """Stages of the recipe as written; none where it can't be read, since the list must come up all the same."""
    try:
        stages = tomllib.loads(run.recipe.read_text("utf-8"))["stages"]
        return [(str(s.get("name", s["type"])), str(s["type"]), int(s.get("steps", 0))) for s in stages]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
