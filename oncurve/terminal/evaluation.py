"""Held-out accuracy with its uncertainty: tables for `eval`, for a run's summary, and the same as plain data.

Where no rule says what is right, the mean reward takes its place.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.records import EvalReport
from oncurve.terminal.text import DASH, number, percent, score

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


def reward_interval(report: EvalReport) -> tuple[float, float] | None:
    """The mean reward's 95 % interval: mean ± z s / √n over the n prompts' own means; None for fewer than two prompts."""
    graded = [[t for t in group.totals if t is not None] for group in report.groups]
    means = [math.fsum(totals) / len(totals) for totals in graded if totals]
    if len(means) < 2 or report.reward is None:
        return None
    spread = Z_95 * statistics.stdev(means) / math.sqrt(len(means))
    return report.reward - spread, report.reward + spread


def render_eval(report: EvalReport, title: str, samples: int) -> RenderableType:
    """`eval`'s answer: the accuracy with its interval, then by difficulty; or the mean reward with its own."""
    metrics = report.metrics
    facts = f"length {number(metrics.get('length_mean'))} tokens · {percent(metrics.get('cut_share'))} cut"
    if report.accuracy is None:
        told = Text(f"{facts} · no rule says what is right", "dim")
        return Group(Text(title, "bold"), told, Text(), _mean_reward(report, samples))
    table = _table("", "accuracy", "95 % interval", "solved")
    answers = report.asked * samples
    table.add_row(*_row("all", report.accuracy * answers, answers, samples), style="bold")
    for level, (solved, asked) in report.by_difficulty.items():
        table.add_row(*_row(level, solved, asked, samples))
    for word, share in _several(report):
        table.add_row(*_row(word, share * report.asked, report.asked, 1), style="dim")
    return Group(Text(title, "bold"), Text(f"reward {number(report.reward)} · {facts}", "dim"), Text(), table)


def _mean_reward(report: EvalReport, samples: int) -> Table:
    table = _table("", "reward", "95 % interval", "answers")
    ends = reward_interval(report)
    interval = DASH if ends is None else f"{score(ends[0])} – {score(ends[1])}"
    table.add_row("mean", score(report.reward), interval, str(report.asked * samples), style="bold")
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, justify="left" if not head else "right", no_wrap=True)
    return table


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
    counted = abs(solved - round(solved)) < 1e-6  # an estimate, such as pass@2 of 8 samples, is no count
    return name, share, f"{100 * low:.1f} – {100 * high:.1f} %", f"{round(solved)} of {answers}" if counted else DASH


def eval_data(report: EvalReport, samples: int) -> dict[str, Any]:
    """The same for a program. Without a rule, `accuracy` and its interval are None, and the reward is the measure."""
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
    own = None if report.accuracy is None else list(interval_of(report.accuracy * answers, answers, samples))
    ends = reward_interval(report)
    return {
        "accuracy": report.accuracy,
        "interval": own,
        "reward": report.reward,
        "reward_interval": None if ends is None else list(ends),
        "asked": report.asked,
        "samples": samples,
        **{word: {"share": share, "interval": list(wilson(share, report.asked))} for word, share in _several(report)},
        "by_difficulty": levels,
        "metrics": dict(report.metrics),
    }


def heldout_tables(evals: Sequence[EvalReport]) -> list[RenderableType]:
    """What a run's measurements came to: of stages with a rule the accuracy, of others the reward; an empty line after each."""
    ruled = [report for report in evals if report.accuracy is not None]
    free = [report for report in evals if report.accuracy is None]
    tables = [accuracy_table(ruled)] if ruled else []
    tables += [reward_table(free)] if free else []
    return [part for table in tables for part in (table, Text())]


def reward_table(evals: Sequence[EvalReport]) -> Table:
    """Of each stage the mean reward before its first step, and at its last measurement."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("held-out reward", no_wrap=True)
    by_stage: dict[str, list[EvalReport]] = {}
    for report in evals:
        by_stage.setdefault(report.stage, []).append(report)
    shown = []
    for stage, reports in by_stage.items():
        ends = {"before": reports[0], "after": reports[-1]} if reports[0].step == 0 else {"after": reports[-1]}
        for when, report in ends.items():
            table.add_column(f"{when} {stage}", justify="right", overflow="fold", vertical="bottom")
            shown.append(score(report.reward))
    table.add_row("mean", *shown, style="bold")
    return table


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
