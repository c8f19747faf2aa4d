"""`oncurve plan`: the verdict, memory bars of the algorithms, memory by part and phase, step time, and scaling."""

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

PART_STYLES: dict[str, tuple[str, str]] = {
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
    "teacher": ("T", "black on grey58"),
    "reward model": ("R", "black on plum1"),
    "critic": ("c", "white on red3"),
    "cuda context": ("x", "white on grey37"),
}
"""A letter and a colour for each part of memory, so that bars are readable without colours."""

NO_FIT = "✗"
"""Instead of the times of a plan that does not fit: they would be those of a run that can't happen."""


def render_plan(job: Job, plan: Plan, plans: Sequence[Plan], assumed: str) -> RenderableType:
    """The plan of a job, next to the plans of other algorithms."""
    points = scaling_points(job)
    some_fail = not all(row.fits for row in points) or not all(other.fits for other in plans)
    return Group(
        _heading(job, assumed),
        Text(),
        _verdict(plan),
        Text(),
        Bars(plans, job.gpu.memory),
        Text(f"\n{plan.title}: peak memory of each phase by part, GiB", "bold"),
        _by_phase(plan),
        Text("\nseconds per step by phase", "bold"),
        _times(plans),
        Text("\nscaling, one setting changed at a time; other models are Qwen3", "bold"),
        *_growth_tables(points),
        *([Text(f"{NO_FIT} does not fit", "dim")] if some_fail else []),
        *([] if job.gpu.is_cpu else [Text("a peak includes the KV cache and activations that fit into free memory", "dim")]),
    )


def _heading(job: Job, assumed: str) -> Text:
    shape = job.shape
    active = f", {count(shape.active_parameters)} of them active" if shape.experts else ""
    name = f"{shape.name}, {count(shape.parameters)} parameters{active}"
    device = "this machine's CPU" if job.gpu.is_cpu else f"{job.gpus} × {job.gpu.name}"
    lengths = f"{job.prompt_tokens} + {job.new_tokens} tokens"
    batch = f"{job.prompts} prompts × {job.sequences}, {lengths}, packs of {job.pack_tokens}, {job.dtype}"
    return Text.assemble((name, "bold"), f" on {device}\n", (batch + (f"\n{assumed}" if assumed else ""), "dim"))


def _verdict(plan: Plan) -> RenderableType:
    mark, style = ("✓", "bold green") if plan.fits else (NO_FIT, "bold red")
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column()
    lines.add_row(Text(mark, style), Text(f"{plan.title} {plan.verdict}", style))
    if plan.memory_note:
        lines.add_row("", Text(plan.memory_note))
    if not plan.fits and not plan.fixes:
        lines.add_row("", Text("no change that was tried makes it fit, up to 64 GPUs", "red"))
    for i, fix in enumerate(plan.fixes):
        lines.add_row("", _fix_line(fix, ("cheapest change: ", "green") if i == 0 else ("or ", "dim")))
    if plan.largest is not None:
        text = f"{plan.job.algorithm} fits up to {count(plan.largest)} parameters here at this width"
        lines.add_row("", Text(text if plan.fits else f"{text}; {plan.job.shape.name} has {count(plan.job.shape.parameters)}"))
    if not plan.job.gpu.is_cpu:
        lines.add_row("", Text(_longest_line(plan), "dim"))
    gpus = smallest_gpus(plan.job)
    if plan.job.gpus == 1 and not plan.job.gpu.is_cpu:
        lines.add_row("", Text(f"single GPUs that it fits on unchanged: {', '.join(gpus) if gpus else 'none known'}", "dim"))
    return lines


def _longest_line(plan: Plan) -> str:
    longest, context = plan.longest_completion, plan.job.shape.context
    if not longest:
        return "no completion fits, however short"
    limit = f"; the model's context is {context:,}" if context and longest > context else ""
    return f"longest completion that fits with these settings: {longest:,} tokens{limit}"


def _fix_line(fix: Fix, lead: tuple[str, str]) -> Text:
    host = f", {fix.host / GIB:.0f} GiB of CPU memory" if fix.host else ""
    return Text.assemble(lead, f"{fix.words}: {fix.peak / GIB:.1f} GiB{host}, {seconds_text(fix.step_seconds)} per step")


class Bars:
    """One bar for each plan at its peak, all to one scale, with a mark at the device's memory."""

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
            line.append(f"{'✓' if plan.fits else NO_FIT} {peak.name}", "green" if plan.fits else "red")
            if not plan.job.gpu.is_cpu and plan.least < peak.total - GIB // 20:
                line.append(f", at least {plan.least / GIB:.1f}", "dim")
            yield line
        used = {part for plan in self.plans for part in plan.memory.peak.parts}
        yield from _legend([part for part in PARTS if part in used], names + 2, options.max_width)


def _legend(parts: Sequence[str], indent: int, width: int) -> list[Text]:
    """Letters and their parts; a line never breaks between the two."""
    entries = [Text.assemble((PART_STYLES[part][0], PART_STYLES[part][1]), f" {part}") for part in parts]
    lines = [Text(" " * indent)]
    for entry in (*entries, Text("│ device memory", "dim")):
        if len(lines[-1]) + len(entry) > width and len(lines[-1]) > indent:
            lines.append(Text(" " * indent))
        lines[-1].append_text(entry).append("  " if len(lines[-1]) + 2 <= width else "")
    return lines


def bar(phase: Phase, largest: int, device: int, width: int) -> Text:
    """A phase's parts as cells of their letters. Cells come from running totals, so that rounding errors don't accumulate."""
    out, done, cells = Text(), 0, 0
    for part, amount in phase.parts.items():
        done += amount
        upto = round(width * done / largest)
        out.append(PART_STYLES[part][0] * (upto - cells), PART_STYLES[part][1])
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
    table.add_row("total", *(_gib(phase.total) for phase in plan.memory.phases), style="bold")
    if plan.memory.host:
        table.caption = f"and {_gib(plan.memory.host)} GiB of CPU memory"
    return table


def _gib(amount: float) -> str:
    return "–" if amount == 0 else (f"{amount / GIB:.1f}" if amount >= GIB / 20 else f"{amount / GIB:.3f}")


def _times(plans: Sequence[Plan]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for plan in plans:
        table.add_column(plan.title, justify="right")
    for name in dict.fromkeys(name for plan in plans for name in plan.seconds.phases):
        table.add_row(name, *(_seconds(plan.seconds.phases.get(name) if plan.fits else None) for plan in plans))
    table.add_row("step", *(_seconds(plan.seconds.step) if plan.fits else NO_FIT for plan in plans), style="bold")
    table.add_row("samples per day", *(number(plan.seconds.samples_per_day) if plan.fits else NO_FIT for plan in plans))
    table.add_row("trained parameters", *(count(plan.trained) for plan in plans))
    table.add_row("parameters in memory", *(count(plan.resident_parameters) for plan in plans))
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else (f"{value:,.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else "0.00")


def render_cluster(sizes: Sequence[Size], staleness: int, measured: str | None) -> RenderableType:
    """Synchronous and asynchronous throughput by number of GPUs, and the break-even point."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("GPUs", "sync/s", "idle", "async/s", "idle", "staleness", "learners", "gain"):
        table.add_column(name, justify="right")
    for size in sizes:
        together, apart = size.together, size.apart
        row = [str(size.gpus), number(together.samples_per_second), percent(together.idle)]
        if apart is not None:
            stale = f"{apart.staleness_mean:.1f}, ≤ {apart.staleness_max}"
            row += [number(apart.samples_per_second), percent(apart.idle), stale, str(apart.learners), f"{size.gain:.2f} ×"]
        table.add_row(*row)
    break_even = async_break_even(sizes)
    verdict = (
        "synchronous steps are faster at every size"
        if break_even is None
        else f"from {break_even} GPUs on, asynchronous sampling is worth its staleness"
    )
    source = f"times and lengths measured in {measured}" if measured else "planned times, lengths spread around their mean"
    lag = "1 step" if staleness == 1 else f"{staleness} steps"
    title = f"\nseveral GPUs, simulated: completions per second, synchronous and asynchronous (at most {lag} stale)"
    return Group(Text(title, "bold"), table, Text(f"{verdict} ({source})", "dim"))


def _growth_tables(rows: Sequence[ScalingPoint]) -> list[RenderableType]:
    return [_growth([row for row in rows if row.what == what]) for what in dict.fromkeys(row.what for row in rows)]


def _growth(rows: Sequence[ScalingPoint]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    family = "Qwen3-" if rows[0].what == "model" else ""  # the heading names the family, so that seven models fit 80 columns
    table.add_column(rows[0].what, style="bold", min_width=10)
    for row in rows:
        table.add_column(row.value.removeprefix(family), justify="right", style="bold" if row.asked else "")
    table.add_row("peak, GiB", *(_gib(row.peak) for row in rows))
    table.add_row("step", *(seconds_text(row.step_seconds) if row.fits else NO_FIT for row in rows))
    return table
