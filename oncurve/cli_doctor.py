"""`oncurve doctor`: what will run on this machine, and what won't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

RUNS = Path("runs")


def doctor(
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where runs would lie.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output and nothing else.")] = False,
) -> None:
    """Look at this machine: versions, GPU, a training step, the sandbox, the disk. Ends with 2 where something is wrong."""
    with Console(stderr=True).status("looking"):
        from oncurve.terminal.checklist import checks_data, render_checks
        from oncurve.terminal.hush import hush
        from oncurve.train import diagnosis

        hush()
        checks = list(diagnosis.diagnose(runs))
    if as_json:
        print(json.dumps(checks_data(checks), ensure_ascii=False, indent=2))
    else:
        Console(highlight=False).print(render_checks("this machine", checks, "Oncurve can train here"))
    if any(check.mark == "wrong" for check in checks):
        raise typer.Exit(2)
