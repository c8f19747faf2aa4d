"""`oncurve doctor`: what will run on this machine, and what won't."""

from __future__ import annotations

import typer
from rich.console import Console

from oncurve.cli_options import RUNS, Json, Runs, say, say_json


def doctor(
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Look at this machine: versions, GPU, a training step, the sandbox, the disk. Ends with 2 where something is wrong."""
    with Console(stderr=True).status("looking"):
        from oncurve.terminal.checklist import checks_data, render_checks
        from oncurve.terminal.hush import hush
        from oncurve.train import diagnosis

        hush()
        checks = list(diagnosis.diagnose(runs))
    if as_json:
        say_json(checks_data(checks))
    else:
        say(render_checks("this machine", checks, "Oncurve can train here"))
    if any(check.mark == "wrong" for check in checks):
        raise typer.Exit(2)
