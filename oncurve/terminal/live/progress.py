"""The progress of a run that the display shows: a few numbers per stage, updated by each step in microseconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from oncurve.errors import OncurveError
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import EvalReport, StepReport
from oncurve.runs.database.reader import RunReader
from oncurve.terminal.text import percent, score

HELDOUT_PAIRS = "heldout_pair_accuracy"
"""The held-out metric of a reward_model stage."""


class Heldout(NamedTuple):
    """One result on the held-out split."""

    what: Literal["accuracy", "reward", "pair accuracy"]
    value: float

    @property
    def shown(self) -> str:
        return score(self.value) if self.what == "reward" else percent(self.value, 1)

    @classmethod
    def of(cls, report: EvalReport) -> list[Heldout]:
        """The accuracy, or the reward if there is none; nothing if no answer could be scored."""
        if report.accuracy is not None:
            return [cls("accuracy", report.accuracy)]
        return [] if report.reward is None else [cls("reward", report.reward)]


@dataclass
class StageProgress:
    """One stage. This process began it at time ``began`` after step ``skipped``; later steps give the estimate of time left."""

    name: str
    type: str
    steps: int
    limit_s: float | None = None
    updates_policy: bool = True
    done: int = 0
    skipped: int = 0
    began: float | None = None
    ended: float | None = None
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    heldout: list[Heldout] = field(default_factory=list)
    evaluating: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def elapsed(self, now: float) -> float | None:
        return None if self.began is None else (self.ended or now) - self.began

    def left(self, now: float) -> float | None:
        """Seconds left at the pace so far; None before the first step and after the last."""
        since = self.done - self.skipped
        elapsed = self.elapsed(now)
        if self.ended is not None or elapsed is None or since < 1 or self.done >= self.steps:
            return None
        estimate = elapsed / since * (self.steps - self.done)
        return estimate if self.limit_s is None else max(0.0, min(estimate, self.limit_s - elapsed))

    def add_step(self, report: StepReport) -> None:
        self.done, self.metrics, self.evaluating = report.step, report.metrics, None
        if HELDOUT_PAIRS in report.metrics:
            self.heldout.append(Heldout("pair accuracy", report.metrics[HELDOUT_PAIRS]))
        for curve, name in ((self.rewards, "reward"), (self.losses, "loss")):
            if name in report.metrics:
                curve.append(report.metrics[name])
        for phase, value in report.seconds.items():
            if "/" in phase:  # part of another phase
                continue
            self.seconds[phase] = self.seconds.get(phase, 0.0) + value


@dataclass
class RunProgress:
    """A run: its stages in order, and the index of the current one."""

    name: str
    path: Path
    parameters: int
    task: str
    stages: list[StageProgress]
    current: int = 0
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, recipe: Recipe, path: Path, parameters: int) -> RunProgress:
        stages = [StageProgress(s.label, s.type, s.steps, s.time_limit_s, s.updates_policy) for s in recipe.stages]
        return cls(path.name, path, parameters, recipe.task.type, stages)

    def load_history(self) -> None:
        """Loads what earlier processes recorded of a resumed or forked run, so that its curves continue. Ignores errors."""
        try:
            with RunReader.open(self.path) as store:
                for row in store.stages():
                    stage = self.stage(row.name)
                    stage.done = stage.skipped = row.done
                    stage.rewards = [value for _, value in store.metric("reward", row.name)]
                    stage.losses = [value for _, value in store.metric("loss", row.name)]
                    pairs = [Heldout("pair accuracy", value) for _, value in store.metric(HELDOUT_PAIRS, row.name)]
                    stage.heldout = pairs + [result for report in store.evals(row.name) for result in Heldout.of(report)]
        except OncurveError:
            return

    def stage(self, name: str) -> StageProgress:
        return next(s for s in self.stages if s.name == name)

    @property
    def current_stage(self) -> StageProgress:
        return self.stages[self.current]

    def begin(self, name: str, position: int, steps: int, done: int) -> None:
        stage, self.current = self.stages[position], position
        stage.steps, stage.done, stage.skipped, stage.began = steps, done, done, time.monotonic()

    def end(self, name: str) -> None:
        self.stage(name).ended = time.monotonic()

    def add_eval(self, report: EvalReport) -> None:
        stage = self.stage(report.stage)
        stage.evaluating = None
        stage.heldout += Heldout.of(report)

    @property
    def heldout(self) -> list[Heldout]:
        """The held-out results of the run, in order, of the same kind as the last. A reward model's pair accuracy says nothing
        about the policy, so it is shown only during the model's own stage."""
        current = self.current_stage
        results = [r for stage in self.stages for r in stage.heldout if r.what != "pair accuracy" or stage is current]
        return [r for r in results if r.what == results[-1].what]
