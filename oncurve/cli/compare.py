"""`oncurve compare`: trains a recipe with several algorithms and writes a table and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import Json, RecipeName, Trust, grant_trust, output
from oncurve.errors import RecipeError
from oncurve.recipe.load import load_recipe
from oncurve.terminal.console import SafeConsole

COMPARISONS = Path("comparisons")


def compare(
    recipe: RecipeName,
    algorithms: Annotated[
        str, typer.Option("--algorithms", metavar="A,B,…", help="grpo or any other objective, ppo, trpo.")
    ] = "grpo,ppo,rloo,reinforce,trpo",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per algorithm.")] = 3,
    budget: Annotated[
        str, typer.Option("--budget", metavar="tokens|time", help="All algorithms get what the first one used: tokens or time.")
    ] = "tokens",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change the recipe; ALGORITHM.KEY=VALUE changes one algorithm's stage."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the comparison.")] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw curves and bars as SVG and PNG.")] = True,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare algorithms on one recipe.

    All get the same start, prompts and budget. Run the command again to continue an interrupted comparison.
    """
    from oncurve.operations.compare import Comparison, request_of
    from oncurve.recipe.variants import ALGORITHMS
    from oncurve.terminal.comparison import as_markdown, comparison_data, render_comparison

    errors = SafeConsole(stderr=True)
    grant_trust(trusted, trust.run_of_recipe(recipe))
    trust.check_recipe(recipe)
    recipe_sets, algorithm_sets = _split_sets(recipe, sets or [], set(ALGORITHMS))
    loaded = load_recipe(recipe, recipe_sets)
    folder = out or COMPARISONS / loaded.name
    comparison = Comparison.open(folder, request_of(loaded, algorithms, seeds, budget, algorithm_sets))
    comparison.on_progress = lambda line: errors.print(Text(line, "dim"))
    outcomes = comparison.run_all()
    data = json.dumps(comparison_data(outcomes), indent=2)
    (folder / "results.json").write_text(data, encoding="utf-8")
    (folder / "table.md").write_text(as_markdown(outcomes), encoding="utf-8")
    if plots:
        from oncurve.terminal.comparison import draw

        draw(outcomes, folder)
    if as_json:
        print(data)
        return
    output(render_comparison(outcomes))
    output(Text(f"\nThe runs, results.json, table.md{' and the plots' if plots else ''} are in {folder}", "dim"))


def _split_sets(recipe: str, sets: list[str], algorithms: set[str]) -> tuple[list[str], list[str]]:
    """(changes of the recipe, changes of one algorithm's stage). A name that is a stage of the recipe belongs to the recipe."""
    labels = {stage.label for stage in load_recipe(recipe).stages}
    of_algorithm = [line for line in sets if (first := line.split(".", 1)[0]) in algorithms and first not in labels]
    for line in of_algorithm:
        if "=" not in line:
            raise RecipeError(
                f"--set {line}", "no value", because="a change needs a key and a value", fix=f"--set {line}=VALUE"
            )
    return [line for line in sets if line not in of_algorithm], of_algorithm
