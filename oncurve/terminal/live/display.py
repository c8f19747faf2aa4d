"""The display while a run trains: a live panel in a terminal or a notebook, a log line per interval anywhere else."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import EvalReport, StepReport
from oncurve.runs.folder import RunFolder
from oncurve.terminal.live.progress import HELDOUT_PAIRS, RunProgress, StageProgress
from oncurve.terminal.text import DASH, duration, is_finite, model_size, number, percent, score, sparkline
from oncurve.training.listeners import Listener

REFRESH_PER_S = 4
LINE_EVERY_S = 10.0
"""Seconds between two lines in a log."""
FACTS = frozenset({"engine", "model", "deterministic"})
"""Kinds of events that only describe the run. All others are printed in yellow."""


class LiveDisplay(Listener):
    """Shows the progress of a run. A step costs microseconds: a thread of rich draws the panel four times a second."""

    def __init__(self, console: Console, line_every_s: float = LINE_EVERY_S) -> None:
        self.console, self.line_every_s = console, line_every_s
        self.live: Live | None = None
        self.progress: RunProgress | None = None
        self.last_line = self.last_eval_line = -float("inf")

    def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None:
        self.progress = run = RunProgress.of(recipe, folder, parameters)
        if resumed_from is not None:
            run.load_history()
            self.say(f"resuming from {resumed_from[0]} step {resumed_from[1]}")
        if can_redraw(self.console):
            self.live = Live(Panel(run), console=self.console, refresh_per_second=REFRESH_PER_S, vertical_overflow="crop")
            self.live.start()
        else:
            self.say(f"{run.name}: {model_size(parameters)}, task {run.task}, in {folder}")

    def on_stage_start(self, stage: str, type: str, position: int, steps: int, done: int) -> None:
        assert self.progress is not None
        self.progress.begin(stage, position, steps, done)
        self.last_line = -float("inf")

    def on_step(self, report: StepReport) -> None:
        assert self.progress is not None
        stage = self.progress.current_stage
        stage.add_step(report)
        now = time.monotonic()
        if self.live is None and (now - self.last_line >= self.line_every_s or report.step == stage.steps):
            self.last_line = now
            self.say(step_line(stage, now))

    def on_eval(self, report: EvalReport) -> None:
        assert self.progress is not None
        self.progress.add_eval(report)
        if self.live is None:
            self.say(f"{report.stage} {report.step}: {eval_line(report)}")

    def on_measuring(self, stage: str, step: int, share: float) -> None:
        assert self.progress is not None
        self.progress.current_stage.evaluating = share
        now = time.monotonic()
        if share == 0:
            self.last_eval_line = now
        elif self.live is None and now - self.last_eval_line >= self.line_every_s:
            self.last_eval_line = now
            self.say(f"{stage} {step}: evaluating on the held-out split, {percent(share)}")

    def on_stage_end(self, stage: str) -> None:
        assert self.progress is not None
        self.progress.end(stage)

    def on_event(self, kind: str, message: str, stage: str | None = None, step: int | None = None) -> None:
        if kind == "signal" and self.live is not None:
            self._stop()  # a second signal ends the process at once, which must not leave the cursor hidden
        self.say(message, "" if kind in FACTS else "yellow")

    def on_run_end(self, status: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, line: str, style: str = "") -> None:
        """Prints a line: above the panel if there is one, else as a line of the log."""
        self.console.print(Text(line, style), soft_wrap=self.live is None)


def can_redraw(console: Console) -> bool:
    """Whether the panel can be redrawn in place. In a notebook, rich needs ipywidgets for that."""
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def eval_line(report: EvalReport) -> str:
    """An evaluation as a log line."""
    if report.accuracy is None:
        return f"held-out reward {score(report.reward)}, mean of {report.asked} prompts"
    return f"held-out accuracy {percent(report.accuracy, 1)} of {report.asked} prompts"


def kl_figure(metrics: Mapping[str, float]) -> tuple[str, str]:
    """(label, value): the KL to the reference or, without a reference, the KL of the step's update."""
    label, name = ("update KL", "update_kl") if "update_kl" in metrics and "kl" not in metrics else ("KL", "kl")
    return label, number(metrics.get(name))


def entropy_of(metrics: Mapping[str, float]) -> float | None:
    """The entropy over all sampled tokens; in a stage that samples nothing, over the tokens that it trains on."""
    return metrics.get("sampled_entropy", metrics.get("entropy"))


def step_line(stage: StageProgress, now: float) -> str:
    """A step as a log line."""
    metrics = stage.metrics
    facts = [f"{stage.name} {stage.done}/{stage.steps}"]
    if "reward" not in metrics:
        facts.append(f"loss {number(metrics.get('loss'))}")
    else:
        facts.append(f"reward {number(metrics['reward'])}")
        if stage.updates_policy:
            label, value = kl_figure(metrics)
            facts.append(f"{label} {value}")
    if "pair_accuracy" in metrics:
        facts.append(f"pair accuracy {percent(metrics['pair_accuracy'])}")
    if HELDOUT_PAIRS in metrics:
        facts.append(f"held-out pair accuracy {percent(metrics[HELDOUT_PAIRS], 1)}")
    if entropy_of(metrics) is not None:
        facts.append(f"entropy {number(entropy_of(metrics))}")
    if "length_mean" in metrics:
        facts += [f"length {number(metrics['length_mean'])}", f"no signal {percent(metrics.get('no_signal_share'))}"]
    if metrics.get("failure_share"):
        facts.append(f"failed {percent(metrics['failure_share'])}")
    if "samples_kept" in metrics:
        facts.append(f"kept {metrics['samples_kept']:.0f}")
    if "draft_accepted" in metrics:
        facts.append(f"drafts accepted {percent(metrics['draft_accepted'])}")
    facts.append(f"{number(metrics.get('tokens_per_s'))} tokens/s")
    left = stage.left(now)
    return "  ".join(facts + ([f"{duration(left)} left"] if left is not None else []))


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
        about = f"  {model_size(run.parameters)} · {run.task} · {RunFolder(run.path).shown}"
        line = Text.assemble((run.name, "bold"), (about, "dim"))
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
            while len(figure) > room and " · " in figure.plain:  # drop a complete phase, not a part of one
                figure = Text(figure.plain.rpartition(" · ")[0])
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
        label, value = kl_figure(metrics)
        third = (label, Text(value))
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
        entropy = f"{number(entropy_of(metrics))} nats" if is_finite(entropy_of(metrics)) else DASH
        length = f"{number(metrics.get('length_mean'))} tokens" if is_finite(metrics.get("length_mean")) else DASH
        if metrics.get("cut_share"):
            length += f", {percent(metrics['cut_share'])} truncated"
        no_signal = percent(metrics.get("no_signal_share"))
        if metrics.get("failure_share"):
            no_signal += f", failed {percent(metrics['failure_share'])}"
        elif is_finite(metrics.get("no_signal_share")):
            no_signal += " of groups"
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
