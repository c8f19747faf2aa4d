"""`oncurve verify`: a run's folder checked end to end."""

from __future__ import annotations

import typer
from rich.console import Console

from oncurve.cli_options import RUNS, Json, RunName, Runs, Trust, say, say_json, trust_if_asked
from oncurve.runs.folder import RunFolder


def verify(
    run: RunName,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Check a run: its database, every byte of its checkpoints, its recipe, and that its model loads. Ends with 2 where
    something is wrong."""
    folder = RunFolder.open(run, runs)
    trust_if_asked(trusted, folder)
    with Console(stderr=True).status("reading"):
        from oncurve.terminal.checklist import checks_data, render_checks
        from oncurve.terminal.hush import hush
        from oncurve.train import verifying

        hush()
        checks = list(verifying.verify(folder))
    if as_json:
        say_json({"run": folder.name, **checks_data(checks)})
    else:
        say(render_checks(f"{folder.name}  {folder.path}", checks, "the run is whole"))
    if any(check.mark == "wrong" for check in checks):
        raise typer.Exit(2)
