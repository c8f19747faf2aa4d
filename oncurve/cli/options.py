"""Options that several commands share, and how commands print."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager, nullcontext
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
RunsOrModels = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|MODEL...",
        help="Runs (RUN@STAGE-STEP or RUN@best for a checkpoint), models as `oncurve models` lists them, or hub ids.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Allow the Python code and API keys that a run from elsewhere uses. Remembered for that run."),
]
WithTools = Annotated[
    bool,
    typer.Option("--tools", help="Run the tools or environment that the model was trained with. This runs the run's own code."),
]
RUNS = Path("runs")


class Command(TyperCommand):
    """A command whose help lists a flag without a type: `--json`, not `--json <bool>`. The message about a missing or wrong
    value ends with the command's example."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*arguments, **extra)
        except typer.BadParameter as error:
            error.message += f"\n{self.epilog}" if self.epilog else ""
            raise

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
    """Records --trust for a run. ``run`` is None if the command's target is not a run: then there is nothing to record."""
    if trusted and run is not None:
        from oncurve import trust  # reads recipes, so it is slow to import

        trust.grant(run)


def folder_of_run(run: RunFolder | None) -> AbstractContextManager[None]:
    """Works in the folder that has the files of the run's recipe. Nothing changes if there is no run."""
    if run is None:
        return nullcontext()
    from oncurve.training.inputs import folder_of_inputs

    return folder_of_inputs(run)


def is_recipe(name: str) -> bool:
    """Whether this is a file or a built-in recipe. Commands look for a run only if it is neither."""
    from oncurve.recipe.load import builtin_recipes

    return Path(name).is_file() or name in builtin_recipes()


def recipe_file(name: str, runs: Path) -> str:
    """The recipe file of a run, if ``name`` is a run. A file or built-in recipe comes first: then ``name`` itself."""
    from oncurve.runs.folder import RunFolder

    run = None if is_recipe(name) else RunFolder.find(name, runs)
    return name if run is None else str(run.recipe)


def check_target(target: str, runs: Path) -> None:
    """Refuses a path that does not exist, and a name that looks like a mistyped run, before anything slow is imported."""
    from oncurve.models.loading.local_models import check_exists
    from oncurve.runs.checkpoints.listing import find_target

    if find_target(target, runs) is None:
        _check_name(target, runs)
        check_exists(target)


def _check_name(target: str, runs: Path) -> None:
    """Refuses a recipe, and a name that is close to that of a run. Any other may be a model on the hub."""
    from oncurve.errors import RunError, closest
    from oncurve.plan.model_table import hub_folder
    from oncurve.recipe.load import builtin_recipes
    from oncurve.runs.folder import list_runs

    path, recipes = Path(target), builtin_recipes()
    if path.is_dir() or target == "tiny" or (hub_folder() / f"models--{target.replace('/', '--')}").exists():
        return
    known = [entry.name for entry in list_runs(runs) if entry.status != "broken"]
    if target in recipes or (path.suffix == ".toml" and path.is_file()):
        of_recipe = [run for run in known if run.rpartition("-")[0] == path.stem]
        fix = f"name a run of it, such as {of_recipe[0]}" if of_recipe else f"train it first: oncurve train {target}"
        raise RunError(target, "a recipe, not a model", because="a recipe has no weights before it is trained", fix=fix)
    if path.parent not in (Path(), runs):  # OWNER/NAME
        return
    name = path.name.rpartition("@")[0] or path.name
    matches = closest(name, [*known, *recipes])
    if matches or path.parent == runs or "@" in target:
        meant = f"did you mean '{matches[0]}'? " if matches else ""
        fix = f"{meant}`oncurve runs` lists the runs; a hub id is OWNER/NAME"
        raise RunError(target, "no such run or model", because=f"{runs} has no run '{name}'", fix=fix)


def output(what: RenderableType) -> None:
    SafeConsole().print(what)


def output_json(data: Any) -> None:
    output_data(json.dumps(data, ensure_ascii=False, indent=2) + "\n")


def output_data(text: str) -> None:
    """Prints JSON or TOML. Both escape control characters but for these, which some terminals execute."""
    print(re.sub("[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text), end="")
