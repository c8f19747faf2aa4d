"""Runs in a notebook: curves and groups as data frames and as HTML, a live chart while training, the studio inline.

pandas is imported here and nowhere else, when a data frame is asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import threading
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from oncurve.errors import MissingPackage, RunError, pip_install
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import EvalReport, GradedGroup, StepReport
from oncurve.runs.metrics import CURVES
from oncurve.studio.report import chart
from oncurve.terminal.live.display import eval_line
from oncurve.training.listeners import Listener

STYLE = (
    "<style>.oncurve svg{width:340px;max-width:100%;height:auto}.oncurve svg text{fill:#7a7f87;font-size:11px}"
    ".oncurve .grid{stroke:#8a8f9740}.oncurve .line{stroke:#2b87c2;fill:none;stroke-width:1.8}.oncurve .dot{fill:#2b87c2}"
    ".oncurve{display:flex;flex-wrap:wrap;gap:1rem}.oncurve td,.oncurve th{text-align:left;vertical-align:top}"
    ".oncurve pre{margin:0;white-space:pre-wrap;background:none}</style>"
)
"""Colours that can be read on a white and on a dark page."""
REFRESH_S = 1.0
SHOWN_GROUPS = 3


def _html(parts: Iterable[str]) -> str:
    return f'{STYLE}<div class="oncurve">{"".join(parts)}</div>'


def _figure(name: str, points: list[tuple[int, float]]) -> str:
    return f"<figure><figcaption>{escape(name)}</figcaption>{chart(name, points)}</figure>"


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "to_pandas", "pandas is not installed", because="data frames are an optional extra", fix=pip_install("notebook")
        ) from error


class MetricCurve(list[tuple[int, float]]):
    """A metric's curve: a list of (step, value), which a notebook shows as a chart.

    Example: run.metrics("reward")[-1], run.metrics("reward").to_pandas().plot()
    """

    def __init__(self, name: str, points: Iterable[tuple[int, float]]) -> None:
        super().__init__(points)
        self.name = name

    def to_pandas(self) -> Any:
        """A `pandas.Series` with the steps as its index."""
        steps = _pandas().Index([step for step, _ in self], name="step", dtype="int64")
        return _pandas().Series([value for _, value in self], index=steps, name=self.name, dtype="float64")

    def _repr_html_(self) -> str:
        return _html([_figure(self.name, self)])


class MetricTable(dict[str, MetricCurve]):
    """Every metric of a stage, by name.

    Example: run.metrics().to_pandas()[["reward", "entropy"]]
    """

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`: a row for each step, a column for each metric."""
        return _pandas().DataFrame({name: curve.to_pandas() for name, curve in self.items()})

    def _repr_html_(self) -> str:
        return _html(_figure(name, self[name]) for name in CURVES if name in self)


class GroupList(tuple[GradedGroup, ...]):
    """The groups of a step: a tuple of `GradedGroup`, which a notebook shows as tables.

    Example: run.groups(step=20).to_pandas().query("reward > 1")
    """

    __slots__ = ()

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`: a row for each completion, with its rewards by aspect and its advantage."""
        return _pandas().DataFrame([row for index, group in enumerate(self) for row in _rows(index, group)])

    def _repr_html_(self) -> str:
        parts = [_group_html(index, group) for index, group in enumerate(self[:SHOWN_GROUPS])]
        more = len(self) - SHOWN_GROUPS
        return _html([*parts, f"<p>and {more} more groups</p>" if more > 0 else ""])


def _rows(index: int, group: GradedGroup) -> Iterable[dict[str, Any]]:
    for number, (scored, advantages) in enumerate(zip(group.scored.scored, group.advantages, strict=True)):
        yield {
            "group": index,
            "completion": number,
            "prompt": group.group.prompt.shown,
            "text": scored.completion.text,
            "reward": math.nan if scored.total is None else scored.total,
            "advantage": float(advantages.mean()) if len(advantages) else math.nan,
            "length": scored.completion.length,
            "stop": scored.completion.stop,
            "failure": scored.failure,
            **{f"reward/{aspect.name}": aspect.value for aspect in scored.aspects},
        }


def _group_html(index: int, group: GradedGroup) -> str:
    rows = sorted(_rows(index, group), key=lambda row: -row["advantage"] if row["advantage"] == row["advantage"] else math.inf)
    cells = "".join(
        f"<tr><td>{row['advantage']:+.2f}</td><td>{row['reward']:.2f}</td><td><pre>{escape(row['text'])}</pre></td></tr>"
        for row in rows
    )
    head = "<tr><th>advantage</th><th>reward</th><th>completion</th></tr>"
    prompt = escape(group.group.prompt.shown)
    return f"<div><b>group {index}</b><pre>{prompt}</pre><table>{head}{cells}</table></div>"


class NotebookDisplay(Listener):
    """The chart of a run while it trains, redrawn in place once a second."""

    def __init__(self) -> None:
        self.ipython = importlib.import_module("IPython.display")
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.title, self.progress, self.lines = "", "", list[str]()
        self.handle: Any = None
        self.drawn = -math.inf

    def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None:
        self.title = f"{recipe.name}: {folder}"
        self.handle = self.ipython.display(self.ipython.HTML(self._page()), display_id=True)

    def on_stage_start(self, stage: str, type: str, position: int, steps: int, done: int) -> None:
        self.curves, self.progress, self.steps = {}, f"{stage}: {done} of {steps} steps", steps

    def on_step(self, report: StepReport) -> None:
        self.progress = f"{report.stage}: {report.step} of {self.steps} steps"
        names = ("reward", "no_signal_share", "entropy") if "reward" in report.metrics else ("loss",)
        for name in names:
            if name in report.metrics:
                self.curves.setdefault(name, []).append((report.step, report.metrics[name]))
        self._draw()

    def on_eval(self, report: EvalReport) -> None:
        self._say(f"{report.stage} {report.step}: {eval_line(report)}")

    def on_event(self, kind: str, message: str, stage: str | None = None, step: int | None = None) -> None:
        self._say(message)

    def on_stage_end(self, stage: str) -> None:
        self._draw(now=True)

    def on_run_end(self, status: str) -> None:
        self.progress += f", {status}"
        self._draw(now=True)

    def _say(self, line: str) -> None:
        self.lines = [*self.lines[-4:], line]
        self._draw()

    def _draw(self, *, now: bool = False) -> None:
        if self.handle is not None and (now or time.monotonic() - self.drawn >= REFRESH_S):
            self.handle.update(self.ipython.HTML(self._page()))
            self.drawn = time.monotonic()

    def _page(self) -> str:
        lines = "".join(f"<div>{escape(line)}</div>" for line in self.lines)
        head = f"<div><b>{escape(self.title)}</b><div>{escape(self.progress)}</div>{lines}</div>"
        return head + _html(_figure(name, points) for name, points in self.curves.items())


class StudioFrame:
    """The studio in a notebook: a server on this machine, which `close` or the end of the kernel stops."""

    def __init__(self, runs_dir: Path, place: str, height: int) -> None:
        try:
            from oncurve.local_http import address_of, listen
            from oncurve.studio.server import StudioServer
        except ModuleNotFoundError as error:
            raise MissingPackage(
                "run.studio()",
                f"{error.name} is not installed",
                because="the studio is an optional extra",
                fix=pip_install("studio"),
            ) from error
        listening = listen("127.0.0.1", 0)
        self.server = StudioServer(runs_dir, embedded=True)
        self.address = f"{address_of(listening, '127.0.0.1')}/{place}"
        self.height = height
        serving = self.server.serve(sockets=[listening])
        self.thread = threading.Thread(target=lambda: asyncio.run(serving), daemon=True, name="studio")
        self.thread.start()
        while not self.server.started:
            if not self.thread.is_alive():
                raise RunError("run.studio()", "stopped", because="the server did not start", fix="oncurve studio --open")
            time.sleep(0.02)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def _repr_html_(self) -> str:
        address = escape(self.address)
        frame = f'<iframe src="{address}" width="100%" height="{self.height}" style="border:1px solid #8a8f9740"></iframe>'
        return f'{frame}<div><a href="{address}" target="_blank">{address}</a></div>'
