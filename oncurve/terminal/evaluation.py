"""Held-out accuracy with its confidence interval: tables for `eval`, for a run's summary and for `probe`, and as JSON.

Without a verifiable reward there is no accuracy, and the mean reward is shown instead.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.records import EvalReport
from oncurve.terminal.text import DASH, duration, number, percent, score

if TYPE_CHECKING:
    from oncurve.operations.probe import AtTemperature, ProbeReport

Z_95 = 1.959964
"""The normal distribution's 97.5 % point."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share observed in ``count`` independent trials (Wilson 1927).

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n). Unlike p ± z √(p(1−p)/n) it is valid at 0, at 1 and for few trials.
    """
    if count == 0:
        return 0.0, 1.0
    z2 = Z_95**2 / count
    middle = share + z2 / 2
    spread = Z_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return max(0.0, (middle - spread) / (1 + z2)), min(1.0, (middle + spread) / (1 + z2))


def interval_of(solved: float, answers: int, samples: int) -> tuple[float, float]:
    """The interval of an accuracy. Trials are prompts, not answers, because answers to one prompt are not independent."""
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
    """The output of `eval`: the accuracy with its interval, then by difficulty; or the mean reward with its interval."""
    metrics = report.metrics
    facts = f"length {number(metrics.get('length_mean'))} tokens · {percent(metrics.get('cut_share'))} truncated"
    if report.accuracy is None:
        subtitle = Text(f"{facts} · no accuracy: no verifiable reward", "dim")
        return Group(Text(title, "bold"), subtitle, Text(), _mean_reward(report, samples))
    table = _table("", "accuracy", "95 % interval", "correct")
    answers = report.asked * samples
    table.add_row(*_row("all", report.accuracy * answers, answers, samples), style="bold")
    for level, (solved, asked) in report.by_difficulty.items():
        table.add_row(*_row(level, solved, asked, samples))
    for name, share in _of_k_samples(report):
        table.add_row(*_row(name, share * report.asked, report.asked, 1), style="dim")
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


def _of_k_samples(report: EvalReport) -> list[tuple[str, float]]:
    """pass@k and maj@k, if each problem was sampled several times. Trials are problems; for k below the number of samples the
    interval is wider than necessary."""
    families = {"pass_at/": "pass@", "maj_at/": "maj@"}
    return [
        (name.replace(family, label), value)
        for family, label in families.items()
        for name, value in report.metrics.items()
        if name.startswith(family)
    ]


def _row(name: str, solved: float, answers: int, samples: int) -> tuple[str, str, str, str]:
    low, high = interval_of(solved, answers, samples)
    share = percent(solved / answers, 1) if answers else DASH
    is_count = abs(solved - round(solved)) < 1e-6  # an estimate, such as pass@2 from 8 samples, is no count
    return name, share, f"{100 * low:.1f} – {100 * high:.1f} %", f"{round(solved)} of {answers}" if is_count else DASH


def eval_data(report: EvalReport, samples: int) -> dict[str, Any]:
    """An evaluation as JSON. Without a verifiable reward, `accuracy` and its interval are None; the reward has its own
    interval."""
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
    interval = None if report.accuracy is None else list(interval_of(report.accuracy * answers, answers, samples))
    ends = reward_interval(report)
    return {
        "accuracy": report.accuracy,
        "interval": interval,
        "reward": report.reward,
        "reward_interval": None if ends is None else list(ends),
        "asked": report.asked,
        "samples": samples,
        **{name: {"share": share, "interval": list(wilson(share, report.asked))} for name, share in _of_k_samples(report)},
        "by_difficulty": levels,
        "metrics": dict(report.metrics),
    }


def heldout_tables(evals: Sequence[EvalReport]) -> list[RenderableType]:
    """The results of a run's evaluations: accuracy, and reward for stages without a verifiable reward. An empty line follows
    each table."""
    with_accuracy = [report for report in evals if report.accuracy is not None]
    without = [report for report in evals if report.accuracy is None]
    tables = [accuracy_table(with_accuracy)] if with_accuracy else []
    tables += [reward_table(without)] if without else []
    return [part for table in tables for part in (table, Text())]


def reward_table(evals: Sequence[EvalReport]) -> Table:
    """Each stage's mean reward before its first step and at its last evaluation."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("held-out reward", no_wrap=True)
    by_stage: dict[str, list[EvalReport]] = {}
    for report in evals:
        by_stage.setdefault(report.stage, []).append(report)
    rewards = []
    for stage, reports in by_stage.items():
        ends = {"before": reports[0], "after": reports[-1]} if reports[0].step == 0 else {"after": reports[-1]}
        for when, report in ends.items():
            table.add_column(f"{when} {stage}", justify="right", overflow="fold", vertical="bottom")
            rewards.append(score(report.reward))
    table.add_row("mean", *rewards, style="bold")
    return table


def accuracy_table(evals: Sequence[EvalReport]) -> Table:
    """Difficulty × stage: the last evaluation of each stage."""
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


def render_probe(report: ProbeReport) -> RenderableType:
    sampled = f"{report.prompts} prompts × {report.samples} completions at temperature {report.temperature:g}"
    parts: list[RenderableType] = [Text.assemble((f"What {report.stage} would start from  ", "bold"), (sampled, "dim"))]
    if report.note:
        parts.append(Text(f"Note: {report.note}.", "yellow"))
    return Group(*parts, Text(), _results(report), Text(), _choices(report))


def _results(report: ProbeReport) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    shares = "   ".join(f"{k}: {percent(v)}" for k, v in report.pass_at.items())
    signal = "   ".join(f"{g}: {percent(v)}" for g, v in report.signal_at.items())
    if shares:
        table.add_row("pass@k", shares)
    table.add_row("groups with no signal", percent(report.no_signal))
    if report.all_right is not None:
        table.add_row("prompts", f"{percent(report.all_right)} always solved, {percent(report.all_wrong)} never")
    table.add_row("signal by group size", signal)
    table.add_row("signal by temperature", "   ".join(_at_temperature(t) for t in report.temperatures))
    table.add_row("completions", _completions(report))
    noise = f"{number(report.reward_mean)} on average; std {number(report.within_std)} within a group"
    table.add_row("reward", f"{noise}, {number(report.between_std)} between groups")
    signal = percent(1 - report.no_signal)
    parts = f"{number(report.sample_s)} s sampling + {signal} of {number(report.update_s)} s updating, for groups with a signal"
    table.add_row(
        "time per step",
        f"{number(report.step_s)} s ({parts}); {duration(report.steps * report.step_s)} for {report.steps} steps",
    )
    return table


def _at_temperature(result: AtTemperature) -> str:
    quality = f"reward {score(result.reward)}" if result.pass_1 is None else f"{percent(result.pass_1)} correct"
    return f"{result.temperature:g}: {percent(result.signal)} ({quality})"


def _completions(report: ProbeReport) -> str:
    text = f"{percent(report.cut_share)} truncated"
    if report.length_median is not None:
        text = f"half end within {report.length_median:,.0f} tokens, 99 % within {report.length_99:,.0f}; " + text
    return text + (f"; {percent(report.failure_share)} could not be rewarded" if report.failure_share else "")


def _choices(report: ProbeReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("setting", no_wrap=True)
    table.add_column("recipe", justify="right", no_wrap=True)
    table.add_column("suggested", justify="right", no_wrap=True)
    table.add_column("because", overflow="fold")
    for choice in report.choices:
        chosen = Text("–" if choice.chosen is None else f"{choice.chosen:g}", "bold" if choice.chosen != choice.current else "")
        table.add_row(choice.key, f"{choice.current:g}", chosen, choice.reason)
    return table
