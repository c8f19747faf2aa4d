"""The list of runs: status, progress, time left, and the last evaluation of each."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from oncurve.errors import OncurveError
from oncurve.runs.database.reader import StageRow
from oncurve.runs.folder import RunEntry, RunFolder, list_runs
from oncurve.runs.views import eval_view, finite_values, json_text, run_view, stage_view
from oncurve.studio.open_run import open_reader

UNRECORDED_FAILURE = "It stopped with an error that was not recorded. The terminal that it ran in shows the error."
"""Version 1 did not record why a run failed."""


def overview(runs_dir: Path) -> list[dict[str, Any]]:
    """Every folder in the runs folder. One that can't be read as a run is listed with the reason."""
    return [run_data(entry) for entry in list_runs(runs_dir)]


def run_data(entry: RunEntry) -> dict[str, Any]:
    state = entry.state
    if state is None:
        return {**run_view(entry, (), None), **_no_numbers(), "oncurve": None}
    try:
        data = _numbers(entry)
    except OncurveError as error:
        # A run that began less than a minute ago may have no database yet; any other run without one is damaged.
        fresh = entry.status == "running" and time.time() - state.created < 60
        reason = {} if fresh else {"status": "broken", "reason": f"{error.what}: {error.because}"}
        data = {**run_view(entry, (), None), **_no_numbers(), **reason}
    if state.parent is not None:
        data["parent"] = {**data["parent"], "changes": dict(state.parent.changes)}
    return {**data, "oncurve": state.oncurve}


def _no_numbers() -> dict[str, Any]:
    return {"eta": None, "evals": [], "metrics": {}, "completions": 0, "failures": 0}


def _numbers(entry: RunEntry) -> dict[str, Any]:
    run = RunFolder(entry.path)
    with open_reader(run) as store:
        summary = store.summary()
        current = next((s for s in reversed(summary.stages) if s.finished is None), None)
        is_timed = entry.status == "running" and current is not None
        recent = store.recent_seconds(current.name) if current is not None and is_timed else []
        failures = store.events("failed") if entry.status == "failed" else []
    view = run_view(entry, summary.stages, summary.evals[-1] if summary.evals else None)
    if entry.status == "failed":
        view["reason"] = json_text(failures[-1].message) if failures else UNRECORDED_FAILURE
    return {
        **view,
        "stages": _stages(run, summary.stages),
        "eta": fmean(recent) * max(0, current.steps - current.done) if recent and current is not None else None,
        "evals": [eval_view(report) for report in summary.evals],
        "metrics": finite_values(summary.last_metrics),
        "completions": summary.completions,
        "failures": summary.failures,
    }


def _stages(run: RunFolder, begun: tuple[StageRow, ...]) -> list[dict[str, Any]]:
    """The stages that have begun, then those that the recipe still plans."""
    stages = [{**stage_view(stage), "finished": stage.finished is not None} for stage in begun]
    for name, kind, steps in _planned(run)[len(begun) :]:
        stages.append({"name": name, "type": kind, "steps": steps, "done": 0, "finished": False})
    return stages


def _planned(run: RunFolder) -> list[tuple[str, str, int]]:
    """(name, type, steps) of the recipe's stages; empty if the recipe can't be read, so that the list is shown anyway."""
    try:
        stages = tomllib.loads(run.recipe.read_text("utf-8"))["stages"]
        return [(str(s.get("name", s["type"])), str(s["type"]), int(s.get("steps", 0))) for s in stages]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
