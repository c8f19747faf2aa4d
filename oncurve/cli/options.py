"""Options that several commands share, and how commands print."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from typer.core import TyperCommand, TyperGroup

from oncurve.terminal.console import SafeConsole

if TYPE_CHECKING:
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
RecipeOrRun = Annotated[
    str, typer.Argument(metavar="RECIPE|RUN", help="A recipe file, the name of a built-in recipe, or a run.")
]
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


class Command(TyperCommand):
    """A command whose help lists a flag without a type: `--json`, not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """The same for a group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


def _without_flag_types(options: list[Any]) -> list[Any]:
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options


def grant_trust(trusted: bool, run: RunFolder | None) -> None:
    """Records --trust for a run. A model runs no code, so there is nothing to record for one."""
    if trusted and run is not None:
        from oncurve import trust  # reads recipes, so it is slow to import

        trust.grant(run)


def recipe_file(name: str, runs: Path) -> str:
    """The recipe file of a run, if the name is a run's; else the name itself, which is a file or a built-in recipe."""
    from oncurve.runs.folder import RunFolder

    run = None if Path(name).is_file() else RunFolder.find(name, runs)
    return name if run is None else str(run.recipe)


def check_target(target: str, runs: Path) -> None:
    """Refuses a path that does not exist, before anything slow is imported."""
    from oncurve.models.loading.local_models import check_exists
    from oncurve.runs.checkpoints.listing import find_target

    if find_target(target, runs) is None:
        check_exists(target)


def output(what: RenderableType) -> None:
    SafeConsole().print(what)


def output_json(data: Any) -> None:
    output_data(json.dumps(data, ensure_ascii=False, indent=2) + "\n")


def output_data(text: str) -> None:
    """Prints JSON or TOML. Both escape control characters but for these, which some terminals execute."""
    print(re.sub("[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text), end="")
