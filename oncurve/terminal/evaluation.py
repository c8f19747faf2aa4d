"""Held-out accuracy with its uncertainty: tables for `eval`, for a run's summary, and the same as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.records import EvalReport
from oncurve.terminal.figures import DASH, number, percent

Z_95 = 1.959964
"""The normal distribution's 97.5 % point."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share seen in ``count`` independent trials (Wilson 1927).

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n). Unlike p ± z √(p(1−p)/n) it is sound at 0, at 1 and for few trials.
    """
    if count == 0:
        return 0.0, 1.0
    z2 = Z_95**2 / count
    middle = share + z2 / 2
    spread = Z_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return max(0.0, (middle - spread) / (1 + z2)), min(1.0, (middle + spread) / (1 + z2))


def interval_of(solved: float, answers: int, samples: int) -> tuple[float, float]:
    """The interval of an accuracy. Trials are prompts, not answers: several answers to one prompt are not independent."""
    return wilson(solved / answers if answers else 0.0, answers // max(samples, 1))


def render_eval(report: EvalReport, title: str, samples: int) -> RenderableType:
    """`eval`'s answer: the accuracy with its interval, then by difficulty."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for head in ("", "accuracy", "95 % interval", "solved"):
        table.add_column(head, justify="left" if not head else "right", no_wrap=True)
    answers = report.asked * samples
    table.add_row(*_row("all", report.accuracy * answers, answers, samples), style="bold")
    for level, (solved, asked) in report.by_difficulty.items():
        table.add_row(*_row(level, solved, asked, samples))
    for word, share in _several(report):
        table.add_row(*_row(word, share * report.asked, report.asked, 1), style="dim")
    metrics = report.metrics
    facts = f"reward {number(metrics.get('reward'))} · length {number(metrics.get('length_mean'))} tokens"
    return Group(Text(title, "bold"), Text(f"{facts} · {percent(metrics.get('cut_share'))} cut", "dim"), Text(), table)


def _several(report: EvalReport) -> list[tuple[str, float]]:
    """pass@k and maj@k where problems were answered several times. Trials are problems; for k below the samples of each the
    interval is wider than need be."""
    shown = {"pass_at/": "pass@", "maj_at/": "maj@"}
    return [
        (name.replace(family, word), value)
        for family, word in shown.items()
        for name, value in report.metrics.items()
        if name.startswith(family)
    ]


def _row(name: str, solved: float, answers: int, samples: int) -> tuple[str, str, str, str]:
    low, high = interval_of(solved, answers, samples)
    share = percent(solved / answers, 1) if answers else DASH
    return name, share, f"{100 * low:.1f} – {100 * high:.1f} %", f"{round(solved)} of {answers}"


def eval_data(report: EvalReport, samples: int) -> dict[str, Any]:
    """The same for a program."""
    levels = {
        level: {
            "solved": solved,
            "asked": asked,
            "accuracy": solved / asked,
            "interval": list(interval_of(solved, asked, samples)),
        }
        for level, (solved, asked) in report.by_difficulty.items()
    }
    answers = report.asked * samples
    return {
        "accuracy": report.accuracy,
        "interval": list(interval_of(report.accuracy * answers, answers, samples)),
        "asked": report.asked,
        "samples": samples,
        **{word: {"share": share, "interval": list(wilson(share, report.asked))} for word, share in _several(report)},
        "by_difficulty": levels,
        "metrics": dict(report.metrics),
    }


def accuracy_table(evals: Sequence[EvalReport]) -> Table:
    """Difficulty × stage: the last measurement of each stage, in order."""
    last = {report.stage: report for report in evals}
    levels = list(dict.fromkeys(level for report in last.values() for level in report.by_difficulty))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("held-out accuracy", no_wrap=True)
    for name in last:
        table.add_column(f"after {name}", justify="right", overflow="fold", vertical="bottom")
    for level in levels:
        counts = [report.by_difficulty.get(level) for report in last.values()]
        table.add_row(level, *(percent(c[0] / c[1], 1) if c and c[1] else DASH for c in counts))
    table.add_row("all", *(percent(report.accuracy, 1) for report in last.values()), style="bold")
    return table
