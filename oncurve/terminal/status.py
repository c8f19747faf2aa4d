"""`oncurve status RUN`: how a run stands, and what each of its processes is doing."""

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
"""A process writes twice a second; one that has not for so long is stopped, swapped out, or its machine is gone."""


def status_data(run: RunFolder) -> dict[str, Any]:
    state, last = run.state(), _last_step(run)
    processes = [{**dataclasses.asdict(pulse), "state": state_of(pulse)} for pulse in read_statuses(run.path)]
    place = None if last is None else {"stage": last[0], "step": last[1]}
    return {
        "run": run.name,
        "status": state.current_status,
        "host": state.host,
        "pid": state.pid,
        "last": place,
        "processes": processes,
    }


def render_status(run: RunFolder) -> RenderableType:
    state, last = run.state(), _last_step(run)
    done = f", last recorded: {last[0]} {last[1]}" if last else ", nothing recorded yet"
    head = Text(f"{run.name}: {state.current_status}{done}")
    pulses = read_statuses(run.path)
    if not pulses:
        return Group(head, Text(f"one process: {state.pid} on {state.host}", "dim"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("process", "host", "pid", "place", "phase", "for", "state"):
        table.add_column(name, justify="right" if name in ("pid", "for") else "left")
    for pulse in pulses:
        place = f"{pulse.stage} {pulse.step}" if pulse.stage else ""
        phase = f"{pulse.phase}, waiting in '{pulse.waiting}'" if pulse.waiting else pulse.phase
        seconds = f"{max(pulse.beat - pulse.since, 0.0):.0f} s"
        table.add_row(pulse.name, pulse.host, str(pulse.pid), place, phase, seconds, state_of(pulse))
    return Group(head, Text(), table, *_happened(run))


def _happened(run: RunFolder) -> list[RenderableType]:
    try:
        with RunReader.open(run.path) as store:
            return event_lines(store)
    except OncurveError:
        return []


def state_of(pulse: RankStatus) -> str:
    """`done`, `gone`, `silent for 33 s` or `alive`."""
    if pulse.phase == "done":
        return "done"
    if pulse.is_alive is False:
        return "gone"
    silent = time.time() - pulse.beat
    return f"silent for {silent:.0f} s" if silent > SILENT_S else "alive"


def _last_step(run: RunFolder) -> tuple[str, int] | None:
    """The last step on the disk, (stage, step)."""
    try:
        with RunReader.open(run.path) as store:
            return next(((stage.name, stage.done) for stage in reversed(store.stages()) if stage.done), None)
    except OncurveError:
        return None
