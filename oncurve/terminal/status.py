"""`oncurve status RUN`: the status of a run, and what each of its processes is doing."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.distributed.rank_status import RankStatus, read_statuses
from oncurve.errors import OncurveError
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.terminal.show import event_lines

SILENT_S = 10.0
"""A process writes its status twice a second. A longer silence: it is stopped or swapped out, or its machine is down."""


def status_data(run: RunFolder) -> dict[str, Any]:
    state, last = run.state(), _last_step(run)
    processes = [{**dataclasses.asdict(process), "state": state_of(process)} for process in read_statuses(run.path)]
    return {
        "run": run.name,
        "status": state.current_status,
        "host": state.host,
        "pid": state.pid,
        "last": None if last is None else {"stage": last[0], "step": last[1]},
        "processes": processes,
    }


def render_status(run: RunFolder) -> RenderableType:
    state, last = run.state(), _last_step(run)
    done = f", last recorded step: {last[0]} {last[1]}" if last else ", no step recorded yet"
    head = Text(f"{run.name}: {state.current_status}{done}")
    processes = read_statuses(run.path)
    if not processes:
        return Group(head, Text(f"one process: {state.pid} on {state.host}", "dim"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("process", "host", "pid", "step", "phase", "for", "state"):
        table.add_column(name, justify="right" if name in ("pid", "for") else "left")
    for process in processes:
        step = f"{process.stage} {process.step}" if process.stage else ""
        phase = f"{process.phase}, waiting in '{process.waiting}'" if process.waiting else process.phase
        seconds = f"{max(process.beat - process.since, 0.0):.0f} s"
        table.add_row(process.name, process.host, str(process.pid), step, phase, seconds, state_of(process))
    return Group(head, Text(), table, *_events(run))


def _events(run: RunFolder) -> list[RenderableType]:
    try:
        with RunReader.open(run.path) as store:
            return event_lines(store)
    except OncurveError:
        return []


def state_of(process: RankStatus) -> str:
    """`done`, `gone`, `silent for 33 s` or `alive`."""
    if process.phase == "done":
        return "done"
    if process.is_alive is False:
        return "gone"
    silent = time.time() - process.beat
    return f"silent for {silent:.0f} s" if silent > SILENT_S else "alive"


def _last_step(run: RunFolder) -> tuple[str, int] | None:
    """The last recorded step as (stage, step)."""
    try:
        with RunReader.open(run.path) as store:
            return next(((stage.name, stage.done) for stage in reversed(store.stages()) if stage.done), None)
    except OncurveError:
        return None
