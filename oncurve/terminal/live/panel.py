"""The panel of the live display: a header, a progress bar per stage, and the figures of the current stage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oncurve.terminal.live.progress import RunProgress, StageProgress
from oncurve.terminal.text import DASH, duration, is_finite, model_size, number, percent, sparkline

Figure = tuple[str, Text]
LABEL, VALUE, GAP = 9, 10, 2
"""Widths of a figure's label and number, and the gap between two columns."""


class Panel:
    """Renders the current progress, for 60 columns or more. Lines are truncated at the width and never wrap."""

    def __init__(self, progress: RunProgress, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress, self.clock = progress, clock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, 40)
        yield self._header(width)
        yield self._bars(width)
        yield Text()
        yield self._figures(width)

    def _header(self, width: int) -> Text:
        run = self.progress
        line = Text.assemble((run.name, "bold"), (f"  {model_size(run.parameters)} · {run.task} · {run.path}", "dim"))
        line.truncate(width, overflow="ellipsis")
        return line

    def _bars(self, width: int) -> Table:
        now = self.clock()
        name_width = max(len(s.name) for s in self.progress.stages)
        steps_width = max(len(f"{s.steps}/{s.steps}") for s in self.progress.stages)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, width=name_width)
        table.add_column()
        table.add_column(no_wrap=True, justify="right", width=steps_width)
        table.add_column(no_wrap=True, justify="right", width=8)
        table.add_column(no_wrap=True, width=13)
        room = max(width - name_width - steps_width - 21 - 8, 8)
        for stage in self.progress.stages:
            bar = ProgressBar(total=max(stage.steps, 1), completed=stage.done, width=min(room, 60), finished_style="green")
            begun = stage.began is not None or stage.done > 0
            table.add_row(
                Text(stage.name, "bold" if begun else "dim"),
                bar,
                Text(f"{stage.done}/{stage.steps}", "" if begun else "dim"),
                Text(duration(stage.elapsed(now)) if stage.began is not None else "", "dim"),
                _time_left(stage, now),
            )
        return table

    def _figures(self, width: int) -> Table:
        curve = 8 if width < 72 else 16 if width < 100 else 32
        room = width - 2 * LABEL - VALUE - curve - 3 * GAP
        table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        for columns in (LABEL, VALUE + curve, LABEL, room):
            table.add_column(no_wrap=True, width=columns)
        for (name, value), (other, figure) in zip(self._left(curve), self._right(), strict=True):
            value.truncate(VALUE + curve)
            figure.truncate(room, overflow="ellipsis")
            table.add_row(Text(name, "dim"), value, Text(other, "dim"), figure)
        return table

    def _left(self, curve: int) -> list[Figure]:
        stage, metrics = self.progress.current_stage, self.progress.current_stage.metrics
        first, values = (
            ("loss", stage.losses) if stage.type == "sft" or (stage.losses and not stage.rewards) else ("reward", stage.rewards)
        )
        latest = _curve(number(metrics.get(first)), values, curve)
        tokens = metrics.get("tokens_per_s")
        speed = f"{tokens:,.0f} tokens/s" if tokens is not None and math.isfinite(tokens) else DASH
        third = ("KL", Text(number(metrics.get("kl", metrics.get("update_kl")))))
        if "samples_kept" in metrics:
            third = ("kept", Text(f"{metrics['samples_kept']:.0f} in the last step"))
        return [
            (first, latest),
            ("held-out", self._heldout(curve)),
            third,
            ("speed", Text(speed)),
        ]

    def _heldout(self, curve: int) -> Text:
        if self.progress.current_stage.evaluating is not None:
            return Text(f"evaluating, {percent(self.progress.current_stage.evaluating)}")
        results = self.progress.heldout
        if not results:
            return Text(DASH)
        is_share = results[-1].what != "reward"
        values, bounds = [result.value for result in results], (0.0, 1.0) if is_share else (None, None)
        text = _curve(results[-1].shown, values, min(curve // 2, 8), *bounds)
        if len(results) > 1:
            change = (100 if is_share else 1) * (values[-1] - values[-2])
            style = "green" if change > 0 else "red" if change < 0 else "dim"
            text.append(f" {change:+.{1 if is_share else 2}f}".replace("-", "−"), style)
        return text

    def _right(self) -> list[Figure]:
        metrics = self.progress.current_stage.metrics
        entropy = f"{number(metrics.get('entropy'))} nats" if is_finite(metrics.get("entropy")) else DASH
        length = f"{number(metrics.get('length_mean'))} tokens" if is_finite(metrics.get("length_mean")) else DASH
        if metrics.get("cut_share"):
            length += f", {percent(metrics['cut_share'])} truncated"
        no_signal = percent(metrics.get("no_signal_share")) + (
            " of groups" if is_finite(metrics.get("no_signal_share")) else ""
        )
        phases = phase_shares(self.progress.current_stage.seconds)
        return [("entropy", Text(entropy)), ("length", Text(length)), ("no signal", Text(no_signal)), ("time", Text(phases))]


def phase_shares(seconds: Mapping[str, float]) -> str:
    """The share of time of each phase, largest first, without those below 2 %."""
    total = sum(seconds.values())
    if total <= 0:
        return DASH
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    return " · ".join(f"{name} {percent(value / total)}" for name, value in parts if value / total >= 0.02)


def _curve(figure: str, values: list[float], width: int, low: float | None = None, high: float | None = None) -> Text:
    return Text.assemble((f"{figure:<{VALUE}}", "bold"), (sparkline(values, width, low, high), "cyan"))


def _time_left(stage: StageProgress, now: float) -> Text:
    left = stage.left(now)
    if left is not None:
        return Text(f"{duration(left)} left", "cyan")
    return Text("done" if stage.ended is not None or stage.done >= stage.steps else "", "dim")
