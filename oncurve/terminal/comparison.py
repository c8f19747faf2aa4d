"""The results of `oncurve compare`: a table for the terminal, Markdown, and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

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
