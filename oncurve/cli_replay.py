"""`oncurve replay`: a recorded group sampled again, to show that it comes out the same."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve.cli_options import RUNS, Json, RunName, Runs, Trust, say, say_json, trust_if_asked
from oncurve.runs.folder import RunFolder


def replay(
    run: RunName,
    step: Annotated[int, typer.Option("--step", min=1, help="The step.")],
    group: Annotated[int, typer.Option("--group", min=0, help="The group, counted from 0.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Its stage; unset: the last that has such groups.")] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Sample a group again from the checkpoint before it, and show that it is identical. Ends with 2 where it is not."""
    folder = RunFolder.open(run, runs)
    trust_if_asked(trusted, folder)
    with Console(stderr=True).status("doing it again"):
        from oncurve.terminal.hush import hush
        from oncurve.terminal.replayed import render_replayed, replayed_data
        from oncurve.train import replaying

        hush()
        found = replaying.replay(folder, stage, step, group)
    if as_json:
        say_json({"run": folder.name, "group": group, **replayed_data(found)})
    else:
        say(render_replayed(found, Text(f"{folder.name}  {found.stage} step {step}  group {group}", "bold")))
    if found.differences:
        raise typer.Exit(2)
