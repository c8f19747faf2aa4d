"""`oncurve compare`: a recipe under several algorithms, with a table and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import Json, RecipeName, Trust, say, trust_if_asked
from oncurve.errors import RecipeError
from oncurve.recipe.load import load_recipe

COMPARISONS = Path("comparisons")


def compare(
    recipe: RecipeName,
    algorithms: Annotated[
        str, typer.Option("--algorithms", metavar="A,B,…", help="grpo and any other objective, ppo, trpo.")
    ] = "grpo,ppo,rloo,reinforce,trpo",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each algorithm.")] = 3,
    budget: Annotated[
        str, typer.Option("--budget", metavar="tokens|time", help="What the first algorithm used, and all others get.")
    ] = "tokens",
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; ALGORITHM.key=value changes that one's stage."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The comparison's folder.")] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw curves and bars, as SVG and PNG.")] = True,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare algorithms on one recipe: same start, same prompts, same budget. Stopped, it goes on when asked again."""
    from oncurve.operations.compare import Comparison, request_of
    from oncurve.recipe.variants import ALGORITHMS
    from oncurve.terminal.comparison import as_markdown, comparison_data, render_comparison

    errors = Console(stderr=True, highlight=False)
    trust_if_asked(trusted, trust.of_recipe(recipe))
    trust.check_recipe(recipe)
    plain, own = _parted(recipe, sets or [], set(ALGORITHMS))
    asked = load_recipe(recipe, plain)
    folder = out or COMPARISONS / asked.name
    made = Comparison.ask(folder, request_of(asked, algorithms, seeds, budget, own))
    made.tell = lambda line: errors.print(Text(line, "dim"))
    outcomes = made.go()
    data = json.dumps(comparison_data(outcomes), indent=2)
    (folder / "results.json").write_text(data, encoding="utf-8")
    (folder / "table.md").write_text(as_markdown(outcomes), encoding="utf-8")
    if plots:
        from oncurve.terminal.comparison_plots import draw

        draw(outcomes, folder)
    if as_json:
        print(data)
        return
    say(render_comparison(outcomes))
    say(Text(f"\nruns, results.json, table.md{' and plots' if plots else ''} are in {folder}", "dim"))


def _parted(recipe: str, sets: list[str], algorithms: set[str]) -> tuple[list[str], list[str]]:
    """Changes of the recipe itself, and those of a single algorithm's stage: a name that the recipe has is the recipe's."""
    labels = {stage.label for stage in load_recipe(recipe).stages}
    own = [line for line in sets if (first := line.split(".", 1)[0]) in algorithms and first not in labels]
    for line in own:
        if "=" not in line:
            raise RecipeError(f"--set {line}", "no value", because="a change has a key and a value", fix=f"--set {line}=VALUE")
    return [line for line in sets if line not in own], own
