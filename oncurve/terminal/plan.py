"""A plan in a terminal: the verdict, algorithms side by side as bars, memory by part and phase, time, and growth."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from oncurve.plan.cluster_simulation import Size, async_break_even
from oncurve.plan.fixes import Fix
from oncurve.plan.hardware import GIB
from oncurve.plan.job import Job
from oncurve.plan.memory import PARTS, Phase
from oncurve.plan.plan import Plan, ScalingPoint, scaling_points, seconds_text, smallest_gpus
from oncurve.terminal.text import number, percent
from oncurve.terminal.text import size as count

LOOKS: dict[str, tuple[str, str]] = {
    "weights": ("w", "white on blue"),
    "adapter": ("t", "black on bright_cyan"),
    "master weights": ("M", "white on dark_blue"),
    "moments": ("m", "white on purple4"),
    "gradients": ("g", "black on green"),
    "activations": ("a", "black on dark_orange"),
    "lm head": ("h", "black on khaki1"),
    "kv pool": ("k", "black on cyan"),
    "sampling": ("s", "black on light_cyan1"),
    "reference": ("r", "black on grey70"),
    "reward model": ("R", "black on plum1"),
    "critic": ("c", "white on red3"),
    "cuda context": ("x", "white on grey37"),
}
"""A letter and a colour for each part: bars are read without colours too."""


def render_plan(job: Job, own: Plan, plans: Sequence[Plan], assumed: str) -> RenderableType:
    """All of it, for the job as asked (`own`) and beside its alternatives."""
    return Group(
        _heading(job, assumed),
        Text(),
        _verdict(own),
        Text(),
        Bars(plans, job.gpu.memory),
        Text(f"\n{own.title}: GiB by part at the worst moment of each phase", "bold"),
        _by_phase(own),
        Text("\nseconds a step by phase", "bold"),
        _times(plans),
        Text("\nhow it grows, one thing changed at a time; other models are Qwen3's", "bold"),
        *_growth_tables(scaling_points(job)),
    )


def _heading(job: Job, assumed: str) -> Text:
    shape = job.shape
    name = f"{shape.name}, {count(shape.parameters)} parameters"
    where = "this machine's CPU" if job.gpu.is_cpu else f"{job.gpus} × {job.gpu.name}"
    lengths = f"{job.prompt_tokens} + {job.new_tokens} tokens"
    asked = f"{job.prompts} prompts × {job.sequences}, {lengths}, packs of {job.pack_tokens}, {job.dtype}"
    return Text.assemble((name, "bold"), f" on {where}\n", (asked + (f"\n{assumed}" if assumed else ""), "dim"))


def _verdict(plan: Plan) -> RenderableType:
    mark, style = ("✓", "bold green") if plan.fits else ("✗", "bold red")
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column()
    lines.add_row(Text(mark, style), Text(f"{plan.title} {plan.verdict}", style))
    if not plan.fits and not plan.fixes:
        lines.add_row("", Text("nothing that was tried makes it fit, up to 64 GPUs", "red"))
    for i, fix in enumerate(plan.fixes):
        lines.add_row("", _fix_line(fix, ("cheapest change: ", "green") if i == 0 else ("or ", "dim")))
    if plan.largest is not None:
        word = f"{plan.job.algorithm} has room here for {count(plan.largest)} parameters at this width"
        lines.add_row(
            "", Text(word if plan.fits else f"{word}, and {plan.job.shape.name} has {count(plan.job.shape.parameters)}")
        )
    on = smallest_gpus(plan.job)
    if plan.job.gpus == 1 and not plan.job.gpu.is_cpu:
        lines.add_row("", Text(f"one GPU that holds it as asked: {', '.join(on) if on else 'none of those known'}", "dim"))
    return lines


def _fix_line(fix: Fix, lead: tuple[str, str]) -> Text:
    host = f", {fix.host / GIB:.0f} in the CPU's memory" if fix.host else ""
    return Text.assemble(lead, f"{fix.words}: {fix.peak / GIB:.1f} GiB{host}, {seconds_text(fix.step_seconds)} a step")


class Bars:
    """One bar for each plan at its worst moment, drawn to one scale, with a mark where the device ends."""

    def __init__(self, plans: Sequence[Plan], device: int) -> None:
        self.plans, self.device = plans, device

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max(len(plan.title) for plan in self.plans)
        width = max(10, options.max_width - names - 41)
        largest = max(self.device, *(plan.memory.peak.total for plan in self.plans))
        for plan in self.plans:
            peak = plan.memory.peak
            line = Text(f"{plan.title:<{names}}  ")
            line.append_text(bar(peak, largest, self.device, width))
            line.append(f" {peak.total / GIB:>7.1f} GiB ")
            line.append(f"{'✓' if plan.fits else '✗'} {peak.name}", "green" if plan.fits else "red")
            if not plan.job.gpu.is_cpu and plan.least < peak.total - GIB // 20:
                line.append(f", {plan.least / GIB:.1f} at least", "dim")
            yield line
        used = {part for plan in self.plans for part in plan.memory.peak.parts}
        yield from _legend([part for part in PARTS if part in used], names + 2, options.max_width)


def _legend(parts: Sequence[str], indent: int, width: int) -> list[Text]:
    """Letters and what they stand for, in lines that never part the two."""
    entries = [Text.assemble((LOOKS[part][0], LOOKS[part][1]), f" {part}") for part in parts]
    lines = [Text(" " * indent)]
    for entry in (*entries, Text("│ end of the device", "dim")):
        if len(lines[-1]) + len(entry) > width and len(lines[-1]) > indent:
            lines.append(Text(" " * indent))
        lines[-1].append_text(entry).append("  " if len(lines[-1]) + 2 <= width else "")
    return lines


def bar(phase: Phase, largest: int, device: int, width: int) -> Text:
    """A phase's parts as cells of their letters. Cells are given by running totals, so that rounding never adds up."""
    out, done, cells = Text(), 0, 0
    for part, amount in phase.parts.items():
        done += amount
        upto = round(width * done / largest)
        out.append(LOOKS[part][0] * (upto - cells), LOOKS[part][1])
        cells = upto
    out.append(" " * (width - cells))
    end = min(round(width * device / largest), width - 1)
    return Text.assemble(out[:end], ("│", "bold"), out[end + 1 :])


def _by_phase(plan: Plan) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, caption_justify="left")
    table.add_column("")
    peak = plan.memory.peak.name
    for phase in plan.memory.phases:
        table.add_column(phase.name, justify="right", style="bold" if phase.name == peak else "")
    for part in PARTS:
        amounts = [phase.parts.get(part, 0) for phase in plan.memory.phases]
        if any(amounts):
            table.add_row(part, *(_gib(amount) for amount in amounts))
    table.add_row("in all", *(_gib(phase.total) for phase in plan.memory.phases), style="bold")
    if plan.memory.host:
        table.caption = f"and {_gib(plan.memory.host)} GiB in the CPU's memory"
    return table


def _gib(amount: float) -> str:
    return "–" if amount == 0 else (f"{amount / GIB:.1f}" if amount >= GIB / 20 else f"{amount / GIB:.3f}")


def _times(plans: Sequence[Plan]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for plan in plans:
        table.add_column(plan.title, justify="right")
    for name in dict.fromkeys(name for plan in plans for name in plan.seconds.phases):
        table.add_row(name, *(_seconds(plan.seconds.phases.get(name)) for plan in plans))
    table.add_row("a step", *(_seconds(plan.seconds.step) for plan in plans), style="bold")
    table.add_row("samples a day", *(number(plan.seconds.samples_per_day) for plan in plans))
    table.add_row("trained", *(count(plan.trained) for plan in plans))
    table.add_row("held", *(count(plan.resident_parameters) for plan in plans))
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else (f"{value:,.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else "0.00")


def render_cluster(sizes: Sequence[Size], staleness: int, measured: str | None) -> RenderableType:
    """Synchronous and asynchronous by number of GPUs, and where the one stops paying."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("GPUs", "together/s", "idle", "apart/s", "idle", "staleness", "learners", "gain"):
        table.add_column(name, justify="right")
    for size in sizes:
        together, apart = size.together, size.apart
        row = [str(size.gpus), number(together.samples_per_second), percent(together.idle)]
        if apart is not None:
            stale = f"{apart.staleness_mean:.1f}, ≤ {apart.staleness_max}"
            row += [number(apart.samples_per_second), percent(apart.idle), stale, str(apart.learners), f"{size.gain:.2f} ×"]
        table.add_row(*row)
    turning = async_break_even(sizes)
    word = (
        "synchronous steps pay at every size"
        if turning is None
        else f"from {turning} GPUs on, asynchronous sampling is worth its staleness"
    )
    source = f"as {measured} had them" if measured else "planned times, lengths spread about their mean"
    lag = "1 step" if staleness == 1 else f"{staleness} steps"
    title = f"\nmany GPUs, simulated: completions a second, together or apart (samples at most {lag} behind)"
    return Group(Text(title, "bold"), table, Text(f"{word} ({source})", "dim"))


def _growth_tables(rows: Sequence[ScalingPoint]) -> list[RenderableType]:
    return [_growth([row for row in rows if row.what == what]) for what in dict.fromkeys(row.what for row in rows)]


def _growth(rows: Sequence[ScalingPoint]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    family = "Qwen3-" if rows[0].what == "model" else ""  # the heading says it, or seven names do not fit 80 columns
    table.add_column(rows[0].what, style="bold", min_width=10)
    for row in rows:
        table.add_column(row.value.removeprefix(family), justify="right", style="bold" if row.asked else "")
    table.add_row("peak, GiB", *(_gib(row.peak) for row in rows))
    table.add_row("a step", *(seconds_text(row.step_seconds) for row in rows))
    return table
