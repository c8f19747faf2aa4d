"""The table of a comparison: for the terminal, for a Markdown page, and as data."""

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
    "held-out: accuracy at the end; the reward where no rule says what is right. reward/1k samples: rise of mean reward. held, "
    "trained: parameters. passes: forward/back over a step's samples, sampling aside. ±: std over seeds."
)


def by_algorithm(outcomes: Sequence[ArmResult]) -> dict[str, list[ArmResult]]:
    """In the order in which they were asked for."""
    found: dict[str, list[ArmResult]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.algorithm, []).append(outcome)
    return found


def rows_of(outcomes: Sequence[ArmResult]) -> list[tuple[str, ...]]:
    """One row for each algorithm: means over seeds, and ± the std over seeds (n − 1) where there are several."""
    return [_row(name, runs) for name, runs in by_algorithm(outcomes).items()]


def _row(name: str, runs: Sequence[ArmResult]) -> tuple[str, ...]:
    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    return (
        name,
        _heldout(runs),
        spread([r.reward_per_1k for r in runs], 3),
        f"{mean([r.samples for r in runs]):,.0f}",
        f"{mean([r.tokens for r in runs]):,.0f}",
        spread([r.seconds for r in runs], 1),
        spread([r.cpu_seconds for r in runs], 1),
        f"{max(r.memory_mib for r in runs):,.0f}",
        size(runs[0].held),
        size(runs[0].trained),
        f"{mean([r.forward for r in runs]):.3g}/{runs[0].backward:.3g}",
    )


def _heldout(runs: Sequence[ArmResult]) -> str:
    if any(math.isnan(r.accuracy) for r in runs):
        return "reward " + spread([r.heldout_reward for r in runs], 2)
    return spread([100 * r.accuracy for r in runs], 1) + " %"


def spread(values: Sequence[float], digits: int) -> str:
    shown = f"{np.mean(values):.{digits}f}"
    return f"{shown} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else shown


def render_comparison(outcomes: Sequence[ArmResult]) -> Group:
    """Two tables, so that they fit 80 columns: what was learned and in what time, and what it took."""
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
    """Every run with its curve, and the figures that the table is made of."""
    own = {"accuracy": None, "reward": None}
    last = [asdict(o.curve[-1]) if o.curve else own for o in outcomes]
    told = [{"accuracy": one["accuracy"], "heldout_reward": one["reward"]} for one in last]
    return [asdict(o) | one | {"reward_per_1k": o.reward_per_1k} for o, one in zip(outcomes, told, strict=True)]
