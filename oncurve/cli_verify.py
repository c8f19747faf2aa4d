"""`oncurve verify`: a run's folder checked end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from oncurve.runs.folder import RunFolder

RUNS = Path("runs")


def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")],
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where runs lie.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output and nothing else.")] = False,
) -> None:
    """Check a run: its database, every byte of its checkpoints, its recipe, and that its model loads. Ends with 2 where
    something is wrong."""
    folder = RunFolder.open(run, runs)
    with Console(stderr=True).status("reading"):
        from oncurve.terminal.checklist import checks_data, render_checks
        from oncurve.terminal.hush import hush
        from oncurve.train import verifying

        hush()
        checks = list(verifying.verify(folder))
    if as_json:
        print(json.dumps({"run": folder.name, **checks_data(checks)}, ensure_ascii=False, indent=2))
    else:
        Console(highlight=False).print(render_checks(f"{folder.name}  {folder.path}", checks, "the run is whole"))
    if any(check.mark == "wrong" for check in checks):
        raise typer.Exit(2)
