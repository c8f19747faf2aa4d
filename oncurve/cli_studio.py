"""The commands that show runs outside the terminal: `oncurve studio` and `oncurve report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve.cli_options import RUNS, RunName, Runs
from oncurve.errors import MissingPackage, RunError, pip_install
from oncurve.runs.folder import RunFolder


def say(line: str) -> None:
    Console(highlight=False, soft_wrap=True).print(Text(line))


def studio(
    runs: Runs = RUNS,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any that is free.")] = 8765,
    host: Annotated[str, typer.Option("--host", help="Another than this machine's own asks for a token.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code", help="Let the page run Python of runs you tick, and send their judges' keys. Asks for a token."
        ),
    ] = False,
) -> None:
    """Look at runs in a browser, live: curves, every group, and GRPO explained."""
    try:
        from oncurve.studio.server import serve
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve studio",
            f"{error.name} is not installed",
            because="the studio's server is an optional part",
            fix=pip_install("studio"),
        ) from error
    if not runs.is_dir():
        raise RunError(f"--runs {runs}", "not a folder", because="runs are read from there", fix="name the folder of the runs")

    def told(address: str) -> None:
        say(f"Studio of {runs.resolve()}\n  {address}\nCtrl-C ends it; runs go on.")

    serve(runs.resolve(), host, port, say=told, open_browser=open_browser, allow_code=allow_code)


def report(
    run: RunName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where to write it.")] = Path("report.html"),
    runs: Runs = RUNS,
) -> None:
    """Write a run as one HTML file to send to someone: curves, best and worst groups, the recipe."""
    from oncurve.runs.disk import replace_file
    from oncurve.studio.report import report_html

    text = report_html(RunFolder.open(run, runs))
    replace_file(out, text.encode())
    say(f"{out}: {len(text.encode()) / 1024:,.0f} kB, complete in itself")
