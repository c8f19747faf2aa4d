"""A run's curves, and the stream of updates: a page loads the complete curves once, then appends what the stream sends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncurve.errors import OncurveError
from oncurve.runs.folder import RunEntry, RunFolder
from oncurve.runs.metrics import METRICS
from oncurve.runs.views import eval_view, finite, finite_values
from oncurve.studio.open_run import find_run, open_reader
from oncurve.studio.queries import StudioQueries
from oncurve.studio.run_list import run_data

MAX_POINTS = 3000
"""Points sent per curve: more than a screen has columns. Longer curves are downsampled."""
POLL_S = 0.5


def curves(run: RunFolder) -> dict[str, Any]:
    """Every metric of every stage as (steps, values), and the evaluations."""
    with open_reader(run) as store:
        stages = [s for s in store.stages() if s.done]
        return {
            "run": run.name,
            "stages": [
                {
                    "name": s.name,
                    "type": s.type,
                    "done": s.done,
                    "steps": s.steps,
                    "metrics": _metrics(store, s.name),
                    "axes": axes(store, s.name),
                }
                for s in stages
            ],
            "evals": evals_data(store),
        }


def _metrics(store: StudioQueries, stage: str) -> dict[str, Any]:
    metrics = {}
    for name in store.metric_names(stage):
        points = downsample(store.metric(name, stage), MAX_POINTS)
        metrics[name] = {"steps": [step for step, _ in points], "values": [finite(value) for _, value in points]}
    return metrics


AXES = ("samples", "tokens", "seconds")


def axes(store: StudioQueries, stage: str) -> dict[str, Any]:
    """Other x axes than the step: completions, tokens and seconds since the stage began, each at the end of a step.

    An axis whose numbers are not recorded for every step is left out. Long ones are thinned evenly; a page interpolates.
    """
    rows = store.progress(stage)
    every = -(-len(rows) // MAX_POINTS) or 1
    found = {}
    for name in AXES:
        increments = [row[name] for row in rows]
        if not increments or any(value is None or not math.isfinite(value) for value in increments):
            continue
        sums = list(itertools.accumulate(increments))
        chosen = sorted({*range(0, len(rows), every), len(rows) - 1})
        found[name] = {"steps": [rows[i]["step"] for i in chosen], "values": [sums[i] for i in chosen]}
    return found


def evals_data(store: StudioQueries) -> list[dict[str, Any]]:
    return [
        {**eval_view(report), "by_difficulty": report.by_difficulty, "metrics": finite_values(report.metrics)}
        for report in store.evals()
    ]


def downsample(points: Sequence[tuple[int, float]], max_points: int) -> list[tuple[int, float]]:
    """At most ``max_points`` of the points: the lowest and the highest of each equal span, in order, so that spikes stay."""
    if len(points) <= max_points:
        return list(points)
    span = -(-2 * len(points) // max_points)
    sampled: list[tuple[int, float]] = []
    for start in range(0, len(points), span):
        part = points[start : start + span]
        numbers = [point for point in part if not math.isnan(point[1])] or part[:1]
        sampled += sorted({min(numbers, key=lambda point: point[1]), max(numbers, key=lambda point: point[1])})
    return sampled


def metric_texts() -> dict[str, dict[str, str]]:
    """What each metric means, for the page. A name that ends in ``/`` explains a family of metrics."""
    return {m.name: {"unit": m.unit, "says": m.one_sentence, "healthy": m.healthy} for m in METRICS.values()}


@dataclass
class Follower:
    """What a stream has sent of one run: the last step of each stage, the number of evaluations, the state."""

    runs_dir: Path
    name: str
    done: dict[str, int] = field(default_factory=dict)
    evals: int = 0
    last: str = ""

    def begin(self) -> None:
        """Takes the current state as already sent."""
        try:
            run = find_run(self.runs_dir, self.name)
            with open_reader(run) as store:
                self.done = {s.name: s.done for s in store.stages()}
                self.evals = len(store.evals())
            self.last = self._state(run)
        except OncurveError:
            self.last = ""

    def news(self) -> list[tuple[str, Any]]:
        """(event, data) of everything since the last call; empty if the run can't be read right now.

        The state is read before the steps, so that it never counts a step that has not been sent.
        """
        try:
            run = find_run(self.runs_dir, self.name)
            state = self._state(run)
            events = self._new_steps(run)
        except OncurveError:
            return []
        if state != self.last:
            events.append(("state", json.loads(state)))
            self.last = state
        return events

    def _state(self, run: RunFolder) -> str:
        return json.dumps(run_data(RunEntry(run.name, run.path, run.state().current_status, run.state())))

    def _new_steps(self, run: RunFolder) -> list[tuple[str, Any]]:
        events: list[tuple[str, Any]] = []
        with open_reader(run) as store:
            stages = store.stages()
            if any(s.done < self.done.get(s.name, 0) for s in stages) or len(stages) < len(self.done):
                # The run resumed from an earlier checkpoint and repeats steps that were already sent.
                self.done = {s.name: s.done for s in stages}
                return [("reset", {"run": self.name})]
            for stage in stages:
                known = self.done.get(stage.name, 0)
                for row in store.progress(stage.name, known) if stage.done > known else ():
                    data = {
                        "run": self.name,
                        "stage": stage.name,
                        "type": stage.type,
                        "step": row["step"],
                        "metrics": finite_values(store.metrics_of(stage.name, row["step"])),
                        "axes": {name: finite(row[name]) for name in AXES},
                    }
                    events.append(("step", data))
                self.done[stage.name] = stage.done
            evals = evals_data(store)
        events += [("eval", {"run": self.name, **report}) for report in evals[self.evals :]]
        self.evals = len(evals)
        return events


async def live(runs_dir: Path, names: Sequence[str], stopping: asyncio.Event) -> AsyncIterator[str]:
    """Server-sent events of some runs, until the page closes or the server stops.

    A page requests the complete curves after the event `ready`, so that no step is missed between the two.
    """
    followers = [Follower(runs_dir, name) for name in names]
    for follower in followers:
        await asyncio.to_thread(follower.begin)
    yield "retry: 1000\nevent: ready\ndata: {}\n\n"
    while not stopping.is_set():
        has_news = False
        for follower in followers:
            for event, data in await asyncio.to_thread(follower.news):
                yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
                has_news = True
        if not has_news:
            yield ": keep-alive\n\n"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), POLL_S)
