"""Listeners hear what happens in a run: the run's database, the live display and sinks. A stage's loop knows none of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import EvalReport, StepReport
from oncurve.runs.database.writer import RunWriter


class Listener:
    """Override the events that you need. They come in order, on the training thread."""

    @property
    def wants_stop(self) -> bool:
        """Whether the stage should end after this step, as if it had no more steps."""
        return False

    def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None: ...

    def on_stage_start(self, stage: str, type: str, position: int, steps: int, done: int) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_measuring(self, stage: str, step: int, share: float) -> None:
        """During a measurement on held-out data: the fraction that is done."""

    def on_eval(self, report: EvalReport) -> None: ...

    def on_checkpoint(self, stage: str, step: int, path: Path) -> None: ...

    def on_stage_end(self, stage: str) -> None: ...

    def on_event(self, kind: str, message: str, stage: str | None = None, step: int | None = None) -> None: ...

    def on_run_end(self, status: str) -> None: ...


class Listeners(Listener):
    """Several listeners as one."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.all = tuple(listeners)

    @property
    def wants_stop(self) -> bool:
        return any(listener.wants_stop for listener in self.all)

    def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None:
        for listener in self.all:
            listener.on_run_start(recipe, folder, parameters, resumed_from)

    def on_stage_start(self, stage: str, type: str, position: int, steps: int, done: int) -> None:
        for listener in self.all:
            listener.on_stage_start(stage, type, position, steps, done)

    def on_step(self, report: StepReport) -> None:
        for listener in self.all:
            listener.on_step(report)

    def on_measuring(self, stage: str, step: int, share: float) -> None:
        for listener in self.all:
            listener.on_measuring(stage, step, share)

    def on_eval(self, report: EvalReport) -> None:
        for listener in self.all:
            listener.on_eval(report)

    def on_checkpoint(self, stage: str, step: int, path: Path) -> None:
        for listener in self.all:
            listener.on_checkpoint(stage, step, path)

    def on_stage_end(self, stage: str) -> None:
        for listener in self.all:
            listener.on_stage_end(stage)

    def on_event(self, kind: str, message: str, stage: str | None = None, step: int | None = None) -> None:
        for listener in self.all:
            listener.on_event(kind, message, stage, step)

    def on_run_end(self, status: str) -> None:
        for listener in self.all:
            listener.on_run_end(status)


class Recorder(Listener):
    """Writes everything to the run's database."""

    def __init__(self, store: RunWriter) -> None:
        self.store = store

    def on_stage_start(self, stage: str, type: str, position: int, steps: int, done: int) -> None:
        self.store.begin_stage(stage, type, position, steps)

    def on_step(self, report: StepReport) -> None:
        self.store.record_step(report)

    def on_eval(self, report: EvalReport) -> None:
        self.store.record_eval(report)

    def on_checkpoint(self, stage: str, step: int, path: Path) -> None:
        self.store.record_event("checkpoint", f"saved {path.name}", stage=stage, step=step)

    def on_stage_end(self, stage: str) -> None:
        self.store.end_stage(stage)

    def on_event(self, kind: str, message: str, stage: str | None = None, step: int | None = None) -> None:
        self.store.record_event(kind, message, stage=stage, step=step)

    def on_run_end(self, status: str) -> None:
        self.store.record_event("run", status)
