"""Options that several commands share, and how commands print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from oncurve import trust
from oncurve.runs.folder import RunFolder

Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; can be repeated.")
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of the runs.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run, instead of a numbered one in --runs.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only, for programs.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")]
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")]
RunOrCheckpoint = Annotated[
    str,
    typer.Argument(metavar="RUN[@STAGE-STEP]", help="Name or folder of a run; RUN@STAGE-STEP or RUN@best for a checkpoint."),
]
RunOrModel = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="A run (RUN@STAGE-STEP or RUN@best for a checkpoint), a model as `oncurve models` lists it, or a hub id.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Allow the Python code and API keys that a run from elsewhere uses. Remembered for that run."),
]
RUNS = Path("runs")


def grant_trust(trusted: bool, run: RunFolder | None) -> None:
    """Records --trust for a run. A model runs no code, so there is nothing to record for one."""
    if trusted and run is not None:
        trust.grant(run)


def output(what: RenderableType) -> None:
    Console(highlight=False).print(what)


def output_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, indent=2))
