"""The results of `oncurve compare`: a table for the terminal, Markdown, JSON, and plots as SVG and PNG (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from oncurve.errors import MissingPackage, pip_install
from oncurve.operations.compare import ArmResult
from oncurve.terminal.text import size

HEADS = (
    "algorithm",
    "held-out",
    "reward/1k samples",
    "samples",
    "tokens",
    "seconds",
    "CPU seconds",
    "peak MiB",
    "held",
    "trained",
    "passes",
)


NOTE = (
    "held-out: final accuracy, or reward if there is no verifiable reward. reward/1k samples: rise of the mean reward. held, "
    "trained: parameters in memory, parameters trained. passes: forward/backward per step's samples, without sampling. "
    "±: std over seeds."
)


def by_algorithm(outcomes: Sequence[ArmResult]) -> dict[str, list[ArmResult]]:
    """The results of each algorithm, in the order of the command line."""
    groups: dict[str, list[ArmResult]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.algorithm, []).append(outcome)
    return groups


def rows_of(outcomes: Sequence[ArmResult]) -> list[tuple[str, ...]]:
    """One row per algorithm: means over seeds, and ± the std over seeds (n − 1) if there are several."""
    return [_row(name, runs) for name, runs in by_algorithm(outcomes).items()]


def _row(name: str, runs: Sequence[ArmResult]) -> tuple[str, ...]:
    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    return (
        name,
        _heldout(runs),
        mean_and_std([r.reward_per_1k for r in runs], 3),
        f"{mean([r.samples for r in runs]):,.0f}",
        f"{mean([r.tokens for r in runs]):,.0f}",
        mean_and_std([r.seconds for r in runs], 1),
        mean_and_std([r.cpu_seconds for r in runs], 1),
        f"{max(r.memory_mib for r in runs):,.0f}",
        size(runs[0].held),
        size(runs[0].trained),
        f"{mean([r.forward for r in runs]):.3g}/{runs[0].backward:.3g}",
    )


def _heldout(runs: Sequence[ArmResult]) -> str:
    if any(math.isnan(r.accuracy) for r in runs):
        return "reward " + mean_and_std([r.heldout_reward for r in runs], 2)
    return mean_and_std([100 * r.accuracy for r in runs], 1) + " %"


def mean_and_std(values: Sequence[float], digits: int) -> str:
    shown = f"{np.mean(values):.{digits}f}"
    return f"{shown} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else shown


def render_comparison(outcomes: Sequence[ArmResult]) -> Group:
    """Two tables, which fit 80 columns: results and time, then cost."""
    rows = rows_of(outcomes)
    return Group(_table(rows, (0, 1, 2, 5, 6)), Text(), _table(rows, (0, 3, 4, 7, 8, 9, 10)), Text(f"\n{NOTE}", "dim"))


def _table(rows: Sequence[tuple[str, ...]], columns: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i in columns:
        table.add_column(HEADS[i], justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(row[i] for i in columns))
    return table


def as_markdown(outcomes: Sequence[ArmResult]) -> str:
    lines = [HEADS, ["---"] * len(HEADS), *rows_of(outcomes)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def comparison_data(outcomes: Sequence[ArmResult]) -> list[dict[str, Any]]:
    """Every run with its curve, and the figures of the table."""
    rows = []
    for outcome in outcomes:
        last = outcome.curve[-1] if outcome.curve else None
        heldout = {"accuracy": last.accuracy if last else None, "heldout_reward": last.reward if last else None}
        rows.append(asdict(outcome) | heldout | {"reward_per_1k": outcome.reward_per_1k})
    return rows


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
