"""TensorBoard, Weights & Biases and trackio as listeners: every metric, time by phase and held-out accuracy, as they come.

Steps are counted through all stages, so that curves of one run lie on one axis. A run that is resumed goes on in the same
place: the steps that are done again give the same numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from oncurve.errors import MissingPackage, pip_install
from oncurve.recipe.load import flatten
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sink
from oncurve.records import EvalReport, StepReport
from oncurve.training.listeners import Listener


class SinkListener(Listener):
    """What all sinks share: names, steps, and that none of them can stop a run."""

    package = ""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        try:
            self.door: Any = import_module(self.package)
        except ImportError as error:
            raise MissingPackage(
                f"sinks.{sink.type}",
                f"{error.name or self.package} is not installed",
                because="the recipe sends its numbers there",
                fix=f"{pip_install(sink.type)}, or take it out of the recipe's sinks",
            ) from error
        self.before: dict[str, int] = {}
        self.failed = False

    def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None:
        total = 0
        for stage in recipe.stages:
            self.before[stage.label] = total
            total += stage.steps
        at = None if resumed_from is None else self.before[resumed_from[0]] + resumed_from[1]
        self._try(lambda: self.open(recipe, folder, at))

    def on_step(self, report: StepReport) -> None:
        values = {f"{report.stage}/{name}": value for name, value in report.metrics.items()}
        values |= {f"{report.stage}/seconds/{name}": value for name, value in report.seconds.items()}
        self._write(values, report.stage, report.step)

    def on_eval(self, report: EvalReport) -> None:
        told = {"accuracy": report.accuracy, "reward": report.reward}
        values = {f"{report.stage}/heldout/{name}": value for name, value in told.items() if value is not None}
        values |= {f"{report.stage}/heldout/{level}": solved / asked for level, (solved, asked) in report.by_difficulty.items()}
        self._write(values, report.stage, report.step)

    def on_run_end(self, status: str) -> None:
        self._try(lambda: self.close(status))

    def _write(self, values: Mapping[str, float], stage: str, step: int) -> None:
        known = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._try(lambda: self.write(known, self.before[stage] + step))

    def _try(self, act: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            act()
        except Exception as error:  # whatever another's package meets (a network, a disk, itself) must not cost a run
            self.failed = True
            print(f"{self.sink.type} gets no more of this run: {type(error).__name__}: {error}", file=sys.stderr)

    def open(self, recipe: Recipe, folder: Path, resumed_at: int | None) -> None:
        raise NotImplementedError

    def write(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def close(self, status: str) -> None:
        raise NotImplementedError


class TensorboardSink(SinkListener):
    """Event files in the run's folder, by the writer that torch brings along."""

    package = "torch.utils.tensorboard"

    def open(self, recipe: Recipe, folder: Path, resumed_at: int | None) -> None:
        purge = None if resumed_at is None else resumed_at + 1
        self.writer = self.door.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, status: str) -> None:
        self.writer.close()


class WandbSink(SinkListener):
    """A run of Weights & Biases. Its id follows from the folder, so that a resumed run is the same one there."""

    package = "wandb"

    def open(self, recipe: Recipe, folder: Path, resumed_at: int | None) -> None:
        self.run = self.door.init(
            project=self.sink.project, name=folder.name, id=f"{folder.name}-{_mark(folder)}", resume="allow", dir=str(folder),
            config=dict(flatten(recipe)), mode="offline" if self.sink.offline else None,
            settings=self.door.Settings(console="off", silent=True),
        )  # fmt: skip

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        self.run.finish(exit_code=int(status == "failed"))


class TrackioSink(SinkListener):
    """A run of trackio, in its own folder on this machine. What it prints would tear the live display apart."""

    package = "trackio"

    def open(self, recipe: Recipe, folder: Path, resumed_at: int | None) -> None:
        name = f"{folder.name}-{_mark(folder)}"
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = self.door.init(
                project=self.sink.project, name=name, resume="allow", config=dict(flatten(recipe)), embed=False,
                auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.door.finish()


SINKS: dict[str, type[SinkListener]] = {"tensorboard": TensorboardSink, "wandb": WandbSink, "trackio": TrackioSink}


def sinks_of(recipe: Recipe) -> list[SinkListener]:
    """The recipe's sinks; a package that is missing is told before anything is begun."""
    return [SINKS[sink.type](sink) for sink in recipe.sinks]


def _mark(folder: Path) -> str:
    return hashlib.blake2b(str(folder.resolve()).encode(), digest_size=4).hexdigest()
