"""`oncurve runs`: the list of runs with status, progress, last evaluation and forks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.errors import OncurveError
from oncurve.runs.checkpoints.listing import BestStep, best_of_run
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunEntry, RunFolder
from oncurve.runs.views import json_text, run_view
from oncurve.terminal.text import DASH, percent, score

STYLES = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red", "broken": "red"}


def run_data(entry: RunEntry) -> dict[str, Any]:
    """One run of `oncurve runs --json`. A run whose database can't be read is listed without its numbers."""
    try:
        with RunReader.open(entry.path) as store:
            stages, last = store.stages(), next(reversed(store.evals()), None)
            failure = store.last_failure() if entry.status == "failed" else None
    except OncurveError:
        stages, last, failure = [], None, None
    changes = dict(entry.state.parent.changes) if entry.state and entry.state.parent else {}
    view = run_view(entry, stages, last)
    reason = view["reason"] if failure is None else json_text(failure)
    return {**view, "reason": reason, "path": str(entry.path), "changes": changes}


def render_runs(entries: Sequence[RunEntry]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("run", "status", "step"):
        table.add_column(head, no_wrap=True)
    table.add_column("held-out", justify="right", no_wrap=True)
    table.add_column("best")
    table.add_column("age", justify="right", no_wrap=True)
    remarks = Table.grid(padding=(0, 2, 0, 0))
    remarks.add_column(no_wrap=True)
    for entry in entries:
        data = run_data(entry)
        at = next((f"{s['name']} {s['done']}/{s['steps']}" for s in reversed(data["stages"])), DASH)
        table.add_row(
            Text(entry.name, "bold"),
            Text(entry.status, STYLES[entry.status]),
            at,
            _heldout(data),
            _best(entry),
            _age(data["created"]),
        )
        if remark := _remark(data):
            remarks.add_row(Text(entry.name, "bold"), Text(remark, "dim"))
    return Group(table, *(("", remarks) if remarks.row_count else ()))


def _heldout(data: dict[str, Any]) -> str:
    if data["accuracy"] is None and data["heldout_reward"] is not None:
        return f"reward {score(data['heldout_reward'])}"
    return percent(data["accuracy"], 1)


def _best(entry: RunEntry) -> str:
    """The best step and its value.

    Example: "97.1 % at grpo 150"
    """
    try:
        best = best_of_run(RunFolder(entry.path))
    except OncurveError:
        return DASH
    return DASH if best is None else f"{best_value(best)} at {best.stage} {best.step}"


def best_value(best: BestStep) -> str:
    return (
        percent(best.value, 1)
        if best.metric == "held-out accuracy"
        else f"{best.metric.removeprefix('held-out ')} {score(best.value)}"
    )


def best_line(run: RunFolder) -> str | None:
    """The best step, its value, and how to name its checkpoint; None if nothing was measured.

    Example: "best held-out accuracy  97.1 % at grpo step 150: runs/arithmetic-1@best"
    """
    best = best_of_run(run)
    if best is None:
        return None
    value = percent(best.value, 1) if best.metric == "held-out accuracy" else score(best.value)
    line = f"best {best.metric}  {value} at {best.stage} step {best.step}"
    if best.entry is not None:
        return f"{line}: {run.shown}@best"
    kept = best_of_run(run, with_checkpoint=True)
    if kept is None:
        return f"{line}, whose checkpoint was not kept"
    return f"{line}, whose checkpoint was not kept; {run.shown}@best is {kept.stage} step {kept.step} ({best_value(kept)})"


def _remark(data: dict[str, Any]) -> str:
    if data["reason"]:
        return str(data["reason"]).partition("\n")[0]  # the reason of a failed run has several lines: `oncurve show`
    if data["parent"] is None:
        return ""
    changes = ", ".join(f"{key} = {value}" for key, value in data["changes"].items()) or "no changes"
    return f"fork of {data['parent']['run']} at {data['parent']['stage']} {data['parent']['step']}: {changes}"


def _age(created: float | None) -> str:
    if created is None:
        return DASH
    seconds = max(0.0, time.time() - created)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return "now"


def ago(created: float | None) -> str:
    age = _age(created)
    return {"now": "just now", DASH: DASH}.get(age, f"{age} ago")
