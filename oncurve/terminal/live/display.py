"""The display while a run trains: a live panel in a terminal or a notebook, a log line per interval anywhere else."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import EvalReport, StepReport
from oncurve.terminal.live.panel import Panel
from oncurve.terminal.live.progress import HELDOUT_PAIRS, RunProgress, StageProgress
from oncurve.terminal.text import duration, model_size, number, percent, score
from oncurve.training.listeners import Listener

REFRESH_PER_S = 4
LINE_EVERY_S = 10.0
"""Seconds between two lines in a log."""


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
        self.say(message, "yellow")

    def on_run_end(self, status: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, line: str, style: str = "") -> None:
        """Prints a line above the panel, or to the log."""
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


def step_line(stage: StageProgress, now: float) -> str:
    """A step as a log line."""
    metrics = stage.metrics
    facts = [f"{stage.name} {stage.done}/{stage.steps}"]
    if "reward" not in metrics:
        facts.append(f"loss {number(metrics.get('loss'))}")
    else:
        facts.append(f"reward {number(metrics['reward'])}")
        if stage.updates_policy:
            facts.append(f"KL {number(metrics.get('kl', metrics.get('update_kl')))}")
    if "pair_accuracy" in metrics:
        facts.append(f"pair accuracy {percent(metrics['pair_accuracy'])}")
    if HELDOUT_PAIRS in metrics:
        facts.append(f"held-out pair accuracy {percent(metrics[HELDOUT_PAIRS], 1)}")
    if "entropy" in metrics:
        facts.append(f"entropy {number(metrics['entropy'])}")
    if "length_mean" in metrics:
        facts += [f"length {number(metrics['length_mean'])}", f"no signal {percent(metrics.get('no_signal_share'))}"]
    if "samples_kept" in metrics:
        facts.append(f"kept {metrics['samples_kept']:.0f}")
    facts.append(f"{number(metrics.get('tokens_per_s'))} tokens/s")
    left = stage.left(now)
    return "  ".join(facts + ([f"{duration(left)} left"] if left is not None else []))
