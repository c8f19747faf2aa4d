"""The checkpoints of a run by the names of their folders, the best of them by a recorded metric, and what RUN@STAGE-STEP and
RUN@best name.

Needs no torch, and can run while the trainer saves another checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from oncurve.errors import OncurveError, RecipeError, RunError, did_you_mean
from oncurve.recipe.toml_tables import parse_tables
from oncurve.runs import metrics
from oncurve.runs.atomic_files import disk_errors, read_file
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder

HELDOUT = "heldout_accuracy"
"""Selects checkpoints by held-out accuracy, or by held-out reward if there is no verifiable reward. Not a metric of a step."""


def best_step(store: RunReader, stage: str, metric: str | None, steps: Collection[int]) -> int | None:
    """The step among ``steps`` with the best value, the earliest of equals; None if no step has one."""
    if metric is None or best_value(metric) is None:
        return None
    by_step = _values_by_step(store, stage, metric)
    sign = -1.0 if best_value(metric) == "lowest" else 1.0
    values = [(sign * by_step[step], -step) for step in steps if step in by_step]
    return -max(values)[1] if values else None


def best_value(metric: str) -> Literal["highest", "lowest"] | None:
    """Which value of a metric `keep_best` looks for; None if neither is better, or if the metric is unknown."""
    if metric == HELDOUT:
        return "highest"
    known = metrics.find(metric)
    return None if known is None else known.best


def _values_by_step(store: RunReader, stage: str, metric: str) -> dict[int, float]:
    if metric != HELDOUT:
        return {step: value for step, value in store.metric(metric, stage) if not math.isnan(value)}
    results = {e.step: e.reward if e.accuracy is None else e.accuracy for e in store.evals(stage)}
    return {step: value for step, value in results.items() if value is not None and not math.isnan(value)}


def check_metric(where: str, metric: str | None) -> None:
    """Refuses a metric that no stage logs, or one that has no best value."""
    if metric is None or best_value(metric) is not None:
        return
    fix = f"use {HELDOUT}, reward, loss, or another of docs/algorithms.md"
    if metrics.find(metric) is not None:
        because = "neither a high nor a low value of this metric makes a checkpoint better"
        raise RecipeError(where, metric, because=because, fix=fix)
    raise RecipeError(
        where,
        metric + did_you_mean(metric, [HELDOUT, *metrics.METRICS]),
        because="no stage logs a metric of that name",
        fix=fix,
    )


NAME = re.compile(r"(?P<stage>[^.].*)-(?P<step>\d{6,})")
"""A name with a leading dot is a folder that is being written or deleted."""


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A checkpoint by the name of its folder. Its files have not been checked."""

    path: Path
    stage: str
    step: int


def checkpoint_path(folder: Path, stage: str, step: int) -> Path:
    """The folder of a checkpoint. In the stage's name, a leading dot and every character except ASCII letters, digits,
    spaces and `_.-~` are written as %XX."""
    label = quote(stage, safe=" ")
    return folder / f"{'%2E' + label[1:] if label.startswith('.') else label}-{step:06d}"


def list_checkpoints(folder: Path) -> list[CheckpointEntry]:
    """All checkpoints in a folder, by stage and step."""
    if not folder.is_dir():
        return []
    with disk_errors(folder):
        matches = [(path, NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    entries = [CheckpointEntry(path, unquote(match["stage"]), int(match["step"])) for path, match in matches if match]
    return sorted(entries, key=lambda entry: (entry.stage, entry.step))


BEST = "best"
"""RUN@best names the checkpoint with the best value of its stage's `keep_best`, or the best held-out result if it is unset. Of
equal values it is the earliest step that has a checkpoint."""


@dataclass(frozen=True, slots=True)
class BestStep:
    """The step of a run with the best value of a metric. ``entry`` is its checkpoint, None if none was kept.

    Example: BestStep("grpo", 150, "held-out accuracy", 0.97, entry)
    """

    stage: str
    step: int
    metric: str
    value: float
    entry: CheckpointEntry | None


def best_of_run(run: RunFolder, *, with_checkpoint: bool = False) -> BestStep | None:
    """The best step of the last stage that has a value of its `keep_best`, or a held-out result if that is unset.
    Of equal values it is the earliest step that has a checkpoint, or the earliest if none has one. With ``with_checkpoint``,
    only steps whose checkpoint was kept count."""
    entries = {(entry.stage, entry.step): entry for entry in list_checkpoints(run.checkpoints)}
    chosen = _keep_best_of(run)
    with RunReader.open(run.path) as store:
        for stage in reversed(store.stages()):
            metric = chosen.get(stage.name) or HELDOUT
            values = _values_by_step(store, stage.name, metric)
            steps = [step for step in values if step > 0 and (not with_checkpoint or (stage.name, step) in entries)]
            step = best_step(store, stage.name, metric, steps)
            if step is not None:
                equals = (other for other in steps if values[other] == values[step])
                step = min(equals, key=lambda other: ((stage.name, other) not in entries, other))
                has_accuracy = metric == HELDOUT and any(e.accuracy is not None for e in store.evals(stage.name))
                shown = metric if metric != HELDOUT else f"held-out {'accuracy' if has_accuracy else 'reward'}"
                return BestStep(stage.name, step, shown, values[step], entries.get((stage.name, step)))
    return None


def _keep_best_of(run: RunFolder) -> dict[str, str]:
    """`keep_best` of the stages that set it. Reads the resolved recipe without its schema, to stay fast in a list of runs."""
    try:
        stages = parse_tables(read_file(run.recipe).decode())["stages"]
        chosen = {str(s.get("name", s["type"])): str(s["keep_best"]) for s in stages if "keep_best" in s}
        return {stage: metric for stage, metric in chosen.items() if best_value(metric) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


@dataclass(frozen=True, slots=True)
class RunTarget:
    """What RUN, RUN@STAGE-STEP or RUN@best names: a run, and a checkpoint of it if one is named."""

    run: RunFolder
    checkpoint: CheckpointEntry | None = None

    @property
    def name(self) -> str:
        """The run's name, with the checkpoint that `best` stands for.

        Example: "arithmetic-1", "arithmetic-1@grpo-150"
        """
        return self.run.name if self.checkpoint is None else f"{self.run.name}@{_label(self.checkpoint)}"


def find_target(target: str, runs_dir: Path) -> RunTarget | None:
    """The run or checkpoint that a target names; None if it names no run. Raises RunError if the run has no such checkpoint."""
    run = RunFolder.find(target, runs_dir)
    if run is not None:
        return RunTarget(run)
    name, _, checkpoint = target.rpartition("@")
    run = RunFolder.find(name, runs_dir) if name else None
    if run is not None:
        return RunTarget(run, find_checkpoint(run, checkpoint))
    if name and Path(name).exists():
        because = f"only a run has a checkpoint '{checkpoint}'"
        raise RunError(name, "not a run", because=because, fix="`oncurve runs` lists the runs")
    return None


def open_target(target: str, runs_dir: Path) -> RunTarget:
    """Like `find_target`, for commands that need a run. Raises RunError if there is none."""
    return find_target(target, runs_dir) or RunTarget(RunFolder.open(target.rpartition("@")[0] or target, runs_dir))


STEP = re.compile(r"(?P<stage>.+)-(?P<step>\d{1,18})", re.ASCII)


def open_step(target: str, runs_dir: Path) -> tuple[RunFolder, tuple[str, int] | None]:
    """The run, and the stage and step that RUN@STAGE-STEP or RUN@best names. Its checkpoint may be deleted by now."""
    name, _, where = target.rpartition("@")
    run = RunFolder.find(name, runs_dir) if name and RunFolder.find(target, runs_dir) is None else None
    match = STEP.fullmatch(where)
    if run is not None and match is not None:
        return run, (match["stage"], int(match["step"]))
    found = open_target(target, runs_dir)
    return found.run, None if found.checkpoint is None else (found.checkpoint.stage, found.checkpoint.step)


def find_checkpoint(run: RunFolder, name: str) -> CheckpointEntry:
    """The checkpoint named STAGE-STEP, or `best`."""
    entries = list_checkpoints(run.checkpoints)
    for entry in entries:
        if name in (_label(entry), entry.path.name):
            return entry
    existing = ", ".join(map(_label, entries))
    if name == BEST and entries:
        try:
            best = best_of_run(run, with_checkpoint=True)
        except OncurveError:
            best = None
        if best is not None and best.entry is not None:
            return best.entry
        because = "no checkpoint's step was evaluated on the held-out split, and its stage has no value of `keep_best`"
        raise RunError(f"{run.name}@{name}", "unknown", because=because, fix=f"name a checkpoint: {existing}")
    raise RunError(
        f"{run.name}@{name}",
        "no such checkpoint",
        because=f"the run has {existing or 'none'}",
        fix="name one of those, or @best" if entries else f"name the run alone: {run.name}",
    )


def _label(entry: CheckpointEntry) -> str:
    return f"{entry.stage}-{entry.step}"
