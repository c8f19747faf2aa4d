"""A run's curves, and what is new in them: the page draws all once, then adds what the stream tells it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncurve.errors import OncurveError
from oncurve.runs.folder import RunEntry, RunFolder
from oncurve.runs.metrics import METRICS
from oncurve.studio.open_run import find_run, finite, open_reader
from oncurve.studio.queries import StudioQueries
from oncurve.studio.run_list import run_data

MOST_POINTS = 3000
"""Points of one curve that are sent: more than a screen has columns. Longer curves keep each stretch's extremes."""
EVERY_S = 0.5


def curves(run: RunFolder) -> dict[str, Any]:
    """Every metric of every stage as (steps, values), and the measurements."""
    with open_reader(run) as store:
        stages = [s for s in store.stages() if s.done]
        return {
            "run": run.name,
            "stages": [
                {"name": s.name, "type": s.type, "done": s.done, "steps": s.steps, "metrics": _metrics(store, s.name)}
                for s in stages
            ],
            "evals": evals_data(store),
        }


def _metrics(store: StudioQueries, stage: str) -> dict[str, Any]:
    found = {}
    for name in store.metric_names(stage):
        points = thinned(store.metric(name, stage), MOST_POINTS)
        found[name] = {"steps": [step for step, _ in points], "values": [finite(value) for _, value in points]}
    return found


def evals_data(store: StudioQueries) -> list[dict[str, Any]]:
    return [
        {
            "stage": e.stage,
            "step": e.step,
            "accuracy": finite(e.accuracy),
            "reward": finite(e.reward),
            "asked": e.asked,
            "by_difficulty": e.by_difficulty,
        }
        for e in store.evals()
    ]


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most ``most`` of the points: of each stretch its lowest and its highest, in order, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretch = -(-2 * len(points) // most)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def metric_words() -> dict[str, dict[str, str]]:
    """What each metric means, for the page: a name that ends in ``/`` explains its family."""
    return {m.name: {"unit": m.unit, "says": m.one_sentence, "healthy": m.healthy} for m in METRICS.values()}


@dataclass
class Follower:
    """One run as a stream has told it: the last step of each stage, the number of measurements, the status."""

    runs_dir: Path
    name: str
    done: dict[str, int] = field(default_factory=dict)
    evals: int = 0
    last: str = ""

    def begin(self) -> None:
        """Takes what there is as known: only news are told."""
        try:
            run = find_run(self.runs_dir, self.name)
            with open_reader(run) as store:
                self.done = {s.name: s.done for s in store.stages()}
                self.evals = len(store.evals())
            self.last = self._state(run)
        except OncurveError:
            self.last = ""

    def news(self) -> list[tuple[str, Any]]:
        """(event, data) of all that happened since the last look; a run that can't be read at the moment has none.

        The state is read before the steps, so that it never counts a step which the page has not been told.
        """
        try:
            run = find_run(self.runs_dir, self.name)
            state = self._state(run)
            found = self._new_steps(run)
        except OncurveError:
            return []
        if state != self.last:
            found.append(("state", json.loads(state)))
            self.last = state
        return found

    def _state(self, run: RunFolder) -> str:
        return json.dumps(run_data(RunEntry(run.name, run.path, run.state().current_status, run.state())))

    def _new_steps(self, run: RunFolder) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        with open_reader(run) as store:
            stages = store.stages()
            if any(s.done < self.done.get(s.name, 0) for s in stages) or len(stages) < len(self.done):
                # Resumed from an earlier checkpoint: what was told since is being done again.
                self.done = {s.name: s.done for s in stages}
                return [("reset", {"run": self.name})]
            for stage in stages:
                for step in range(self.done.get(stage.name, 0) + 1, stage.done + 1):
                    metrics = {name: finite(value) for name, value in store.metrics_of(stage.name, step).items()}
                    told = {"run": self.name, "stage": stage.name, "type": stage.type, "step": step, "metrics": metrics}
                    found.append(("step", told))
                self.done[stage.name] = stage.done
            evals = evals_data(store)
        found += [("eval", {"run": self.name, **report}) for report in evals[self.evals :]]
        self.evals = len(evals)
        return found


async def live(runs_dir: Path, names: Sequence[str], stopping: asyncio.Event) -> AsyncIterator[str]:
    """Server-sent events of some runs, until the page goes away or the server stops.

    A page asks for the whole curves once it is told `ready`: from then on nothing can fall between the two.
    """
    followers = [Follower(runs_dir, name) for name in names]
    for follower in followers:
        await asyncio.to_thread(follower.begin)
    yield "retry: 1000\nevent: ready\ndata: {}\n\n"
    while not stopping.is_set():
        said = False
        for follower in followers:
            for event, data in await asyncio.to_thread(follower.news):
                yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
                said = True
        if not said:
            yield ": still here\n\n"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), EVERY_S)
