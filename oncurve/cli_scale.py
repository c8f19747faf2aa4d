"""Several processes behind one command: `train --gpus`, ranks that torchrun started, and `oncurve status`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from oncurve.cli_options import RUNS, Json, RunName, Runs, say, say_json
from oncurve.errors import OncurveError
from oncurve.recipe.schema import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.scale import join
from oncurve.scale.join import is_silent, tell_first, world_size
from oncurve.scale.world import World
from oncurve.terminal.errors import print_error

Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, metavar="N", help="Train on N GPUs of this machine, a process for each.")
]


def asked_ranks(gpus: int | None) -> list[str]:
    """What the command line and whoever started this process say of `scale.ranks`, as --set would."""
    ranks = world_size() if world_size() > 1 else gpus
    return [] if ranks is None else [f"scale.ranks={ranks}"]


def launch_where_asked(recipe: Recipe, gpus: int | None, arguments: Sequence[str]) -> None:
    """Where the recipe wants several ranks and this is none of them: starts them, and ends as the first of them did."""
    if recipe.scale.ranks == 1 or world_size() > 1:
        return
    from oncurve.scale.launch import check_gpus, launch

    check_gpus(recipe, gpus)
    raise typer.Exit(launch(recipe.scale.ranks, arguments))


def joined(recipe: Recipe) -> AbstractContextManager[World]:
    return join.joined(recipe, print_error)


def show_error(error: OncurveError) -> None:
    """To the terminal; or, of a rank that is not the first, to the first, which speaks for all."""
    if is_silent():
        tell_first(error)
    else:
        print_error(error)


def status(
    run: RunName,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """What a run is doing right now: how it stands, and the phase of each of its processes."""
    from oncurve.terminal.status import render_status, status_data

    folder = RunFolder.open(run, runs)
    if as_json:
        say_json(status_data(folder))
    else:
        say(render_status(folder))
