"""`oncurve recipe`: explain, show and convert recipes."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from oncurve.cli.options import RUNS, Command, CommandGroup, RecipeOrRun, Runs, Sets, output, output_data, recipe_file
from oncurve.errors import PluginError, RecipeError
from oncurve.recipe.load import builtin_recipes, dump_recipe, load_recipe
from oncurve.recipe.schema.base import Section
from oncurve.terminal.errors import print_advice
from oncurve.trust import load_recipe_of, run_of_recipe

recipes = typer.Typer(
    cls=CommandGroup, add_completion=False, help="List, explain, show and convert recipes.", no_args_is_help=True
)


@recipes.command("explain", cls=Command, epilog="Example: oncurve recipe explain grpo.group_size")
def explain_key(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="A key, as in --set. Without one: all keys.")] = None,
) -> None:
    """List every recipe key, or explain one in full."""
    from oncurve.recipe.explain import explain
    from oncurve.rewards.registry import REWARDS
    from oncurve.tasks.registry import TASKS

    options: dict[str, type[Section]] = {}
    for section, registry in (("task", TASKS), ("rewards", REWARDS)):
        for name in registry:
            try:
                options[f"{section}.{name}"] = registry[name].options
            except PluginError as error:  # one broken package must not hide the rest
                if key is not None and f"{key}.".startswith(f"{section}.{name}."):
                    raise
                print_advice(f"{section}.{name} is not listed: {error.what}, because {error.because}; fix: {error.fix}")
    output(explain(key, options))


@recipes.command("show", cls=Command, epilog="Example: oncurve recipe show arithmetic --set seed=1")
def show_recipe(recipe: RecipeOrRun, sets: Sets = None, runs: Runs = RUNS) -> None:
    """Print the recipe as TOML with every default written out."""
    file = recipe_file(recipe, runs)
    run = run_of_recipe(file)
    output_data(dump_recipe(load_recipe(file, sets or []) if run is None else load_recipe_of(run, sets or [])))


@recipes.command("list", cls=Command, epilog="Example: oncurve recipe list")
def list_recipes() -> None:
    """List the built-in recipes."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, file in builtin_recipes().items():
        comments = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
        about = " ".join(line.lstrip("# ") for line in comments)
        table.add_row(Text(name, "bold"), Text(about.partition(". ")[0].rstrip(".")))
    output(table)
    output(Text("\nTo train one: oncurve train NAME; to see it: oncurve recipe show NAME", "dim"))


@recipes.command("from-trl", cls=Command, epilog="Example: oncurve recipe from-trl grpo_config.yaml -o mine.toml")
def convert(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="A config of TRL's GRPOTrainer.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the recipe to this file, which must not exist.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Number of devices that TRL ran on: its batch sizes are per device.")
    ] = 1,
) -> None:
    """Convert a TRL config to a recipe, with notes on what differs."""
    from oncurve.recipe.trl.convert import from_trl

    text, notes = from_trl(config, processes)
    for note in notes:
        print_advice(f"note: {note}")
    if out is None:
        output_data(text)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(
            str(out), "already exists", because="from-trl never overwrites a file", fix="choose another name with -o"
        ) from None
    output(Text(f"{out}: check it, then run oncurve train {out}"))
