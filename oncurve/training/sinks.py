"""TensorBoard, Weights & Biases and trackio as listeners: every metric, seconds by phase and held-out accuracy.

Steps are counted over all stages, so that the curves of a run share one axis. A resumed run continues in the same place: steps
that are done again give the same numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from oncurve.errors import MissingPackage, pip_install
from oncurve.plugins import Registry, check_subclass
from oncurve.recipe.load import flatten
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sink
from oncurve.records import EvalReport, StepReport
from oncurve.training.listeners import Listener


class SinkListener(Listener):
    """What all sinks share: names and steps of metrics, and that no sink can stop a run."""

    package: str | None = None
    """The optional dependency of a built-in sink. A plug-in's own package depends on what it needs."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        try:
            self.module: Any = None if self.package is None else import_module(self.package)
        except ImportError as error:
            raise MissingPackage(
                f"sinks.{sink.type}",
                f"{error.name or self.package} is not installed",
                because="the recipe sends its metrics there",
                fix=f"{pip_install(sink.type)}, or remove it from the recipe's sinks",
            ) from error
        self.first_step: dict[str, int] = {}
        """Steps of all stages before each stage."""
        self.failed = False
        self.notify: Listener = Listener()
        """The run's listeners, which are told if this sink fails."""

    def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None:
        total = 0
        for stage in recipe.stages:
            self.first_step[stage.label] = total
            total += stage.steps
        resumed_at = None if resumed_from is None else self.first_step[resumed_from[0]] + resumed_from[1]
        self._try(lambda: self.open(recipe, folder, resumed_at))

    def on_step(self, report: StepReport) -> None:
        values = {f"{report.stage}/{name}": value for name, value in report.metrics.items()}
        values |= {f"{report.stage}/seconds/{name}": value for name, value in report.seconds.items()}
        self._write(values, report.stage, report.step)

    def on_eval(self, report: EvalReport) -> None:
        measures = {"accuracy": report.accuracy, "reward": report.reward}
        values = {f"{report.stage}/heldout/{name}": value for name, value in measures.items() if value is not None}
        values |= {f"{report.stage}/heldout/{level}": solved / total for level, (solved, total) in report.by_difficulty.items()}
        self._write(values, report.stage, report.step)

    def on_run_end(self, status: str) -> None:
        self._try(lambda: self.close(status))

    def _write(self, values: Mapping[str, float], stage: str, step: int) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._try(lambda: self.write(finite, self.first_step[stage] + step))

    def _try(self, act: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            act()
        except Exception as error:  # no error of another package (network, disk, bug) may end a run
            self.failed = True
            self.notify.on_event("sink", f"{self.sink.type} logging is disabled for this run: {type(error).__name__}: {error}")

    def open(self, recipe: Recipe, folder: Path, resumed_at: int | None) -> None:
        raise NotImplementedError

    def write(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def close(self, status: str) -> None:
        raise NotImplementedError


class TensorboardSink(SinkListener):
    """Event files in the run's folder, written by torch's own writer."""

    package = "torch.utils.tensorboard"

    def open(self, recipe: Recipe, folder: Path, resumed_at: int | None) -> None:
        purge = None if resumed_at is None else resumed_at + 1
        self.writer = self.module.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, status: str) -> None:
        self.writer.close()


class WandbSink(SinkListener):
    """A run of Weights & Biases. Its id is derived from the folder, so that a resumed run continues it."""

    package = "wandb"

    def open(self, recipe: Recipe, folder: Path, resumed_at: int | None) -> None:
        self.run = self.module.init(
            project=self.sink.project, name=folder.name, id=f"{folder.name}-{_folder_hash(folder)}", resume="allow",
            dir=str(folder), config=dict(flatten(recipe)), mode="offline" if self.sink.offline else None,
            settings=self.module.Settings(console="off", silent=True),
        )  # fmt: skip

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        self.run.finish(exit_code=int(status == "failed"))


class TrackioSink(SinkListener):
    """A run of trackio, in trackio's folder on this machine. Its output is suppressed: it would break the live display."""

    package = "trackio"

    def open(self, recipe: Recipe, folder: Path, resumed_at: int | None) -> None:
        name = f"{folder.name}-{_folder_hash(folder)}"
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = self.module.init(
                project=self.sink.project, name=name, resume="allow", config=dict(flatten(recipe)), embed=False,
                auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.module.finish()


SINKS: Registry[type[SinkListener]] = Registry(
    "sink", {"tensorboard": TensorboardSink, "wandb": WandbSink, "trackio": TrackioSink}, check_subclass(SinkListener)
)
"""Every sink by its `type` in a recipe. A plug-in is a subclass of `SinkListener` that reads `self.sink.options`."""


def build_sinks(recipe: Recipe) -> list[SinkListener]:
    """The recipe's sinks. Raises MissingPackage before the run starts if a sink's package is not installed."""
    return [SINKS.find(sink.type, "sinks.type")(sink) for sink in recipe.sinks]


def _folder_hash(folder: Path) -> str:
    return hashlib.blake2b(str(folder.resolve()).encode(), digest_size=4).hexdigest()
