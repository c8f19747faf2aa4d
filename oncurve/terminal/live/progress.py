"""What the display knows of a run: a few numbers per stage, brought up to date in microseconds by each step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from oncurve.errors import OncurveError
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Sft
from oncurve.records import EvalReport, StepReport
from oncurve.runs.database.reader import RunReader
from oncurve.terminal.text import percent, score

PAIRS_RIGHT = "heldout_pair_accuracy"
"""What a reward model's stage measures on what it keeps aside."""


class Heldout(NamedTuple):
    """A measurement on what is held out: of what, and how much."""

    what: Literal["accuracy", "reward", "pairs right"]
    value: float

    @property
    def shown(self) -> str:
        return score(self.value) if self.what == "reward" else percent(self.value, 1)

    @classmethod
    def of(cls, report: EvalReport) -> list[Heldout]:
        """None where no answer could be graded."""
        if report.accuracy is not None:
            return [cls("accuracy", report.accuracy)]
        return [] if report.reward is None else [cls("reward", report.reward)]


@dataclass
class StageProgress:
    """One stage. ``began`` is when this process began it, at step ``skipped``: time left is judged by what was done since."""

    name: str
    type: str
    steps: int
    limit_s: float | None = None
    moves_policy: bool = True
    done: int = 0
    skipped: int = 0
    began: float | None = None
    ended: float | None = None
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    heldout: list[Heldout] = field(default_factory=list)
    measuring: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def elapsed(self, now: float) -> float | None:
        return None if self.began is None else (self.ended or now) - self.began

    def left(self, now: float) -> float | None:
        """Seconds to go at the pace so far; None before the first step and after the last."""
        since = self.done - self.skipped
        elapsed = self.elapsed(now)
        if self.ended is not None or elapsed is None or since < 1 or self.done >= self.steps:
            return None
        at_this_pace = elapsed / since * (self.steps - self.done)
        return at_this_pace if self.limit_s is None else max(0.0, min(at_this_pace, self.limit_s - elapsed))

    def take(self, report: StepReport) -> None:
        self.done, self.metrics, self.measuring = report.step, report.metrics, None
        if PAIRS_RIGHT in report.metrics:
            self.heldout.append(Heldout("pairs right", report.metrics[PAIRS_RIGHT]))
        for curve, name in ((self.rewards, "reward"), (self.losses, "loss")):
            if name in report.metrics:
                curve.append(report.metrics[name])
        for phase, value in report.seconds.items():
            if "/" in phase:  # a part of another phase
                continue
            self.seconds[phase] = self.seconds.get(phase, 0.0) + value


@dataclass
class RunProgress:
    """A run: its stages in order, and which one is going on."""

    name: str
    path: Path
    parameters: int
    task: str
    stages: list[StageProgress]
    current: int = 0
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, recipe: Recipe, path: Path, parameters: int) -> RunProgress:
        stages = [
            StageProgress(s.label, s.type, s.steps, s.seconds if isinstance(s, Sft) else None, s.updates_policy)
            for s in recipe.stages
        ]
        return cls(path.name, path, parameters, recipe.task.type, stages)

    def remember(self) -> None:
        """What earlier processes recorded of a resumed or forked run, so that its curves go on. Not worth an error."""
        try:
            with RunReader.open(self.path) as store:
                for row in store.stages():
                    stage = self.stage(row.name)
                    stage.done = stage.skipped = row.done
                    stage.rewards = [value for _, value in store.metric("reward", row.name)]
                    stage.losses = [value for _, value in store.metric("loss", row.name)]
                    pairs = [Heldout("pairs right", value) for _, value in store.metric(PAIRS_RIGHT, row.name)]
                    stage.heldout = pairs + [one for report in store.evals(row.name) for one in Heldout.of(report)]
        except OncurveError:
            return

    def stage(self, name: str) -> StageProgress:
        return next(s for s in self.stages if s.name == name)

    @property
    def now_in(self) -> StageProgress:
        return self.stages[self.current]

    def begin(self, name: str, position: int, steps: int, done: int) -> None:
        stage, self.current = self.stages[position], position
        stage.steps, stage.done, stage.skipped, stage.began = steps, done, done, time.monotonic()

    def end(self, name: str) -> None:
        self.stage(name).ended = time.monotonic()

    def measured(self, report: EvalReport) -> None:
        stage = self.stage(report.stage)
        stage.measuring = None
        stage.heldout += Heldout.of(report)

    @property
    def heldout(self) -> list[Heldout]:
        """Every measurement of the run in order that is of the same thing as the last. What a reward model gets right says
        nothing of the policy: it is shown in that model's own stage alone."""
        found = [one for stage in self.stages for one in stage.heldout if one.what != "pairs right" or stage is self.now_in]
        return [one for one in found if one.what == found[-1].what]
