"""The results of `oncurve probe` as tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.operations.probe import AtTemperature, ProbeReport
from oncurve.terminal.text import duration, number, percent, score


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
    parts = f"{number(report.sample_s)} s sampling, up to {number(report.update_s)} s updating"
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
        text = f"half end within {number(report.length_median)} tokens, 99 % within {number(report.length_99)}; " + text
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
