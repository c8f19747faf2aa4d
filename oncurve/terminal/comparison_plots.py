"""Learning curves and memory bars of a comparison, as SVG and PNG. The only module that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oncurve.errors import MissingPackage, pip_install
from oncurve.operations.compare import ArmResult
from oncurve.terminal.comparison import by_algorithm

COLOURS = ("#1f5f8b", "#b4501e", "#2b7a4b", "#8a3f8f", "#9a7400", "#a1242b", "#3f6f76", "#5b5b8f")
MARKS = "osD^vPX*"
STYLE = {"svg.hashsalt": "oncurve", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
"""The fixed salt makes the SVG reproducible to the byte."""


def draw(outcomes: Sequence[ArmResult], folder: Path) -> list[Path]:
    """Writes the plots and returns their files."""
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figures = {
            "by-samples": _curves(plt, outcomes, "samples", "completions sampled"),
            "by-seconds": _curves(plt, outcomes, "seconds", "seconds of training"),
            "memory": _bars(plt, outcomes),
        }
        files = [_save(figure, folder / f"{name}.{kind}") for name, figure in figures.items() for kind in ("svg", "png")]
    for figure in figures.values():
        plt.close(figure)
    return files


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve compare",
            "matplotlib is not installed",
            because="plots are drawn with it",
            fix=f"{pip_install('plots')}, or use --no-plots",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, file: Path) -> Path:
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return file


def _curves(plt: Any, outcomes: Sequence[ArmResult], along: str, label: str) -> Any:
    """Mean held-out accuracy over seeds, or reward if there is no accuracy, with the range over seeds as a band."""
    has_accuracy = all(p.accuracy is not None for outcome in outcomes for p in outcome.curve)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for i, (name, runs) in enumerate(by_algorithm(outcomes).items()):
        length = min(len(r.curve) for r in runs)
        if not length:
            continue
        x = np.mean([[getattr(p, along) for p in r.curve[:length]] for r in runs], axis=0)
        y = np.array([[p.accuracy if has_accuracy else p.reward for p in r.curve[:length]] for r in runs], float) * (
            100 if has_accuracy else 1
        )
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(x, y.mean(0), color=colour, marker=MARKS[i % len(MARKS)], markersize=4, label=name)
        if len(runs) > 1:
            axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel=label, ylabel="held-out accuracy, %" if has_accuracy else "held-out reward", xlim=(0, None))
    if has_accuracy:
        axes.set_ylim(0, None)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def _bars(plt: Any, outcomes: Sequence[ArmResult]) -> Any:
    """Parameters in memory and trained, next to the peak memory: what an algorithm adds to the model itself."""
    groups = by_algorithm(outcomes)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 0.9 + 0.42 * len(groups)), layout="constrained")
    names, positions = list(groups), np.arange(len(groups))
    left.barh(positions - 0.19, [r[0].held / 1e6 for r in groups.values()], 0.36, color=COLOURS[0], label="held")
    left.barh(positions + 0.19, [r[0].trained / 1e6 for r in groups.values()], 0.36, color=COLOURS[1], label="trained")
    left.set(xlabel="parameters, millions", yticks=positions, yticklabels=names)
    left.legend(frameon=False)
    right.barh(positions, [max(r.memory_mib for r in runs) for runs in groups.values()], 0.5, color=COLOURS[2])
    right.set(xlabel="peak memory of the run, MiB", yticks=positions, yticklabels=names)
    for axes in (left, right):
        axes.invert_yaxis()
    return figure
