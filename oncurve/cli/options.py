"""What commands have in common: the options that many of them take, and how they answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from oncurve import trust
from oncurve.runs.folder import RunFolder

Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated.")
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where runs lie.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The run's folder, in place of a numbered one.")]
Json = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output and nothing else.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")]
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="A run, or a model as `oncurve models` names it, or a hub id.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the Python and send the keys that a run from elsewhere names. Remembered for that run."),
]
RUNS = Path("runs")


def trust_if_asked(asked: bool, run: RunFolder | None) -> None:
    """Records the user's --trust for a run; of a model, which runs no code, there is nothing to record."""
    if asked and run is not None:
        trust.grant(run)


def say(what: RenderableType) -> None:
    Console(highlight=False).print(what)


def say_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, indent=2))
