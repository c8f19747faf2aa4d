"""The list of runs: how each stands, how good it is, and which went on from which."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.errors import OncurveError
from oncurve.records import EvalReport
from oncurve.runs.database.reader import RunReader, StageRow
from oncurve.runs.folder import RunEntry
from oncurve.terminal.text import DASH, percent, score

STYLES = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red", "broken": "red"}


def run_data(entry: RunEntry) -> dict[str, Any]:
    """One run for a program. A run whose database can't be read is still a run: its numbers are None."""
    stages, last = _numbers(entry)
    parent = entry.state.parent if entry.state else None
    return {
        "name": entry.name,
        "path": str(entry.path),
        "status": entry.status,
        "created": entry.state.created if entry.state else None,
        "stages": [{"name": s.name, "type": s.type, "steps": s.steps, "done": s.done} for s in stages],
        "accuracy": last.accuracy if last else None,
        "heldout_reward": last.reward if last else None,
        "parent": None if parent is None else {"run": parent.run, "stage": parent.stage, "step": parent.step},
        "changes": dict(parent.changes) if parent else {},
        "reason": entry.reason,
    }


def _numbers(entry: RunEntry) -> tuple[list[StageRow], EvalReport | None]:
    """Its stages, and its last measurement."""
    try:
        with RunReader.open(entry.path) as store:
            return store.stages(), next(reversed(store.evals()), None)
    except OncurveError:
        return [], None


def render_runs(entries: Sequence[RunEntry]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("run", "status", "at"):
        table.add_column(head, no_wrap=True)
    table.add_column("held-out", justify="right", no_wrap=True)
    table.add_column("begun", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for entry in entries:
        data = run_data(entry)
        at = next((f"{s['name']} {s['done']}/{s['steps']}" for s in reversed(data["stages"])), DASH)
        table.add_row(
            Text(entry.name, "bold"),
            Text(entry.status, STYLES[entry.status]),
            at,
            _heldout(data),
            ago(data["created"]),
            Text(_remark(data), "dim"),
        )
    return table


def _heldout(data: dict[str, Any]) -> str:
    if data["accuracy"] is None and data["heldout_reward"] is not None:
        return f"reward {score(data['heldout_reward'])}"
    return percent(data["accuracy"], 1)


def _remark(data: dict[str, Any]) -> str:
    if data["reason"]:
        return str(data["reason"])
    if data["parent"] is None:
        return ""
    changes = ", ".join(f"{key} = {value}" for key, value in data["changes"].items()) or "nothing changed"
    return f"fork of {data['parent']['run']} at {data['parent']['stage']} {data['parent']['step']}: {changes}"


def ago(created: float | None) -> str:
    if created is None:
        return DASH
    seconds = max(0.0, time.time() - created)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} ago"
    return "just now"
