"""The list of runs: status, progress, evaluations, tags and notes; the settings of their recipes; verdicts on a run."""

from __future__ import annotations

import threading
import time
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from oncurve.errors import OncurveError
from oncurve.runs.atomic_files import read_file, write_file_atomically
from oncurve.runs.checkpoints.listing import best_of_run, list_checkpoints
from oncurve.runs.database.reader import StageRow
from oncurve.runs.folder import RunEntry, RunFolder, list_runs
from oncurve.runs.views import eval_view, finite, finite_values, json_text, run_view, stage_view
from oncurve.studio.open_run import open_reader
from oncurve.studio.rewards import audit_data

UNRECORDED_FAILURE = "It stopped with an error that was not recorded. The terminal that it ran in shows the error."
"""Version 1 did not record why a run failed."""
NOTES = "notes.json"
"""A file in a run's folder with the tags and the note that people gave it on the Runs page."""


class RunNotes(BaseModel):
    """What people wrote about a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tags: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=40, pattern=r"^[^,\n]+$")], ...], Field(max_length=20)
    ] = ()
    note: Annotated[str, StringConstraints(max_length=4000)] = ""


def read_notes(run: RunFolder) -> RunNotes:
    """A file that is missing or can't be read counts as empty: notes must never hide a run."""
    try:
        return RunNotes.model_validate_json(read_file(run.path / NOTES))
    except (OncurveError, OSError, ValidationError):
        return RunNotes()


_NOTES_LOCK = threading.Lock()


def update_notes(run: RunFolder, changes: RunNotes) -> RunNotes:
    """Stores the fields that `changes` sets and leaves the others, so that two edits at once don't undo each other."""
    with _NOTES_LOCK:
        notes = read_notes(run).model_copy(update=changes.model_dump(include=changes.model_fields_set))
        write_file_atomically(run.path / NOTES, notes.model_dump_json().encode())
    return notes


def overview(runs_dir: Path) -> list[dict[str, Any]]:
    """Every folder in the runs folder. One that can't be read as a run is listed with the reason."""
    return [run_data(entry) for entry in list_runs(runs_dir)]


def run_data(entry: RunEntry) -> dict[str, Any]:
    state = entry.state
    if state is None:
        return {**run_view(entry, (), None), **_no_numbers(), "oncurve": None, "notes": RunNotes().model_dump()}
    try:
        data = _numbers(entry)
    except OncurveError as error:
        # A run that began less than a minute ago may have no database yet; any other run without one is damaged.
        fresh = entry.status == "running" and time.time() - state.created < 60
        reason = {} if fresh else {"status": "broken", "reason": f"{error.what}: {error.because}"}
        data = {**run_view(entry, (), None), **_no_numbers(), **reason}
    if state.parent is not None:
        data["parent"] = {**data["parent"], "changes": dict(state.parent.changes)}
    return {**data, "oncurve": state.oncurve, "notes": read_notes(RunFolder(entry.path)).model_dump()}


def _no_numbers() -> dict[str, Any]:
    return {
        "eta": None,
        "evals": [],
        "best": None,
        "checkpoint": None,
        "metrics": {},
        "completions": 0,
        "failures": 0,
        "seconds": None,
    }


def _numbers(entry: RunEntry) -> dict[str, Any]:
    run = RunFolder(entry.path)
    with open_reader(run) as store:
        summary = store.summary()
        current = next((s for s in reversed(summary.stages) if s.finished is None), None)
        is_timed = entry.status == "running" and current is not None
        recent = store.recent_seconds(current.name) if current is not None and is_timed else []
        failure = store.last_failure() if entry.status == "failed" else None
        seconds = store.total_seconds()
    view = run_view(entry, summary.stages, summary.evals[-1] if summary.evals else None)
    if entry.status == "failed":
        view["reason"] = UNRECORDED_FAILURE if failure is None else json_text(failure)
    return {
        **view,
        "stages": _stages(run, summary.stages),
        "eta": fmean(recent) * max(0, current.steps - current.done) if recent and current is not None else None,
        "evals": [{**eval_view(report), "by_difficulty": report.by_difficulty} for report in summary.evals],
        "best": _best(run),
        "checkpoint": _newest_checkpoint(run, summary.stages),
        "metrics": finite_values(summary.last_metrics),
        "seconds": seconds,
        "completions": summary.completions,
        "failures": summary.failures,
    }


def _best(run: RunFolder) -> dict[str, Any] | None:
    """The step that RUN@best and the command line name.

    Example: {"stage": "grpo", "step": 150, "metric": "held-out accuracy", "value": 0.97}
    """
    best = best_of_run(run)
    if best is None:
        return None
    return {"stage": best.stage, "step": best.step, "metric": best.metric, "value": finite(best.value)}


def _newest_checkpoint(run: RunFolder, begun: tuple[StageRow, ...]) -> dict[str, Any] | None:
    """The newest checkpoint of the stages that have begun: the one that a command copied from the page forks.

    Example: {"stage": "grpo", "step": 150}
    """
    order = {stage.name: stage.position for stage in begun}
    entries = [entry for entry in list_checkpoints(run.checkpoints) if entry.stage in order]
    newest = max(entries, key=lambda entry: (order[entry.stage], entry.step), default=None)
    return None if newest is None else {"stage": newest.stage, "step": newest.step}


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


def settings_of_runs(runs_dir: Path) -> dict[str, dict[str, Any]]:
    """Each run's recipe as dotted keys, without recipes that can't be read.

    Example: {"arithmetic-1": {"seed": 0, "model.source": "tiny", "grpo.group_size": 16}}
    """
    settings = {}
    for entry in list_runs(runs_dir):
        try:
            recipe = tomllib.loads(RunFolder(entry.path).recipe.read_text("utf-8"))
            settings[entry.name] = flatten(recipe)
        except (OSError, ValueError):
            continue
    return settings


def flatten(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe's values by dotted key. A stage's keys start with its name, a reward's with its position: `rewards.0.type`."""
    values: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else key, inner)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                add(str(item.get("name", item.get("type", index))) if prefix == "stages" else f"{prefix}.{index}", item)
        elif isinstance(value, str | int | float | bool | list):
            values[prefix] = value
        else:
            values[prefix] = str(value)  # TOML has dates too

    add("", recipe)
    return values


SERIOUS = ("failed", "rollback", "warning", "bad", "memory")
"""The kinds of events that a verdict reports."""


def verdicts(run: RunFolder) -> list[dict[str, Any]]:
    """What the trainer and the audit found, one sentence each, with where the evidence is. Of similar events, the last."""
    with open_reader(run) as store:
        events = [event for event in store.events() if event.kind in SERIOUS]
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        text = json_text(event.message)
        head = f"{event.stage} {event.step}: "
        text = text.removeprefix(head)
        sentence, _, advice = text.partition(". ")
        subject = f"{event.kind} {sentence.split(' is ')[0][:60]}"
        found[subject] = {
            "source": "trainer",
            "kind": event.kind,
            "what": sentence.rstrip(".") + ".",
            "advice": advice,
            "stage": event.stage,
            "step": event.step,
            "group": None,
        }
    audited = audit_data(run)
    for signal in audited["signals"]:
        example = signal["examples"][0] if signal["examples"] else None
        place = {"step": example["step"], "group": example["group"]} if example else {"step": None, "group": None}
        what = f"{signal['name'][:1].upper()}{signal['name'][1:]}: {signal['what']}"
        found[f"audit {signal['name']} {signal['what']}"] = {
            "source": "audit", "kind": "audit", "what": what, "advice": "", "stage": audited["stage"], **place,
        }  # fmt: skip
    return list(found.values())
