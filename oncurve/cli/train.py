"""`oncurve train --ray`: the same recipe on a Ray cluster.

Several processes behind one command: `train --gpus`, ranks that torchrun started, and `oncurve status`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import (
    RUNS,
    Json,
    Out,
    RunName,
    Runs,
    Sets,
    Trust,
    say,
    say_json,
    trust_if_asked,
)
from oncurve.cli.plan import print_plan
from oncurve.distributed import rendezvous
from oncurve.distributed.rendezvous import is_worker_rank, report_to_rank_zero, world_size
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import OncurveError
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.terminal.errors import print_advice, print_error

if TYPE_CHECKING:
    from oncurve.cli.train_target import TrainTarget
    from oncurve.training.listeners import Listener

Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="auto|HOST:PORT", help="Train on a Ray cluster: this machine's own, or the one there."),
]


def check_ray(address: str) -> None:
    """Whether a cluster answers there: first of all, as what comes then takes seconds to load."""
    from oncurve.cluster.ray_client import check_reachable

    check_reachable(address)


def train_on_ray(
    planned: TrainTarget, out: Path | None, runs: Path, minutes: float | None, address: str, listeners: Sequence[Listener]
) -> RunFolder:
    """Begins a run on the cluster at an address, or goes on with one."""
    from oncurve.cluster.driver import TrainRequest
    from oncurve.cluster.driver import train as drive

    return drive(TrainRequest(planned.recipe, planned.run, tuple(planned.sets), runs, out, minutes), address, listeners)


Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, metavar="N", help="Train on N GPUs of this machine, a process for each.")
]


def requested_ranks(gpus: int | None) -> list[str]:
    """What the command line and whoever started this process say of `scale.ranks`, as --set would."""
    ranks = world_size() if world_size() > 1 else gpus
    return [] if ranks is None else [f"scale.ranks={ranks}"]


def launch_ranks(recipe: Recipe, gpus: int | None, arguments: Sequence[str]) -> None:
    """Where the recipe wants several ranks and this is none of them: starts them, and ends as the first of them did."""
    if recipe.scale.ranks == 1 or world_size() > 1:
        return
    from oncurve.distributed.launch import check_gpus, launch

    check_gpus(recipe, gpus)
    raise typer.Exit(launch(recipe.scale.ranks, arguments))


def joined_ranks(recipe: Recipe) -> AbstractContextManager[World]:
    return rendezvous.joined_ranks(recipe, print_error)


def show_error(error: OncurveError) -> None:
    """To the terminal; or, of a rank that is not the first, to the first, which speaks for all."""
    if is_worker_rank():
        report_to_rank_zero(error)
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


def train(
    target: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A recipe; with --resume also a run.")],
    sets: Sets = None,
    out: Out = None,
    runs: Runs = RUNS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run, or with the recipe's last unfinished one.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.0, help="Save and stop after so many; --resume goes on exactly.")
    ] = None,
    gpus: Gpus = None,
    ray: Ray = None,
    trusted: Trust = False,
) -> None:
    """Train a recipe, or go on with a run that was stopped."""
    from oncurve.cli.train_target import plan

    asked = [*(sets or []), *requested_ranks(gpus)]
    trust_if_asked(trusted, trust.of_recipe(target))
    planned = plan(target, asked, out, runs, resume)
    trust_if_asked(trusted, planned.run)
    recipe = load_recipe(planned.run.recipe, planned.sets) if planned.run is not None else planned.recipe
    assert recipe is not None
    if ray is not None:
        check_ray(ray)
        return _train(planned, out, runs, minutes, SINGLE_PROCESS, ray)
    again = ["train", target, *_repeated("--set", asked), "--runs", str(runs), *(["--resume"] if resume else [])]
    again += [*_option("--out", out), *_option("--minutes", minutes), *(["--trust"] if trusted else [])]
    launch_ranks(recipe, gpus, again)
    with joined_ranks(recipe) as world:
        _train(planned, out, runs, minutes, world)
    return None


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _option(option: str, value: object) -> list[str]:
    return [] if value is None else [option, str(value)]


def _train(
    planned: TrainTarget, out: Path | None, runs: Path, minutes: float | None, world: World, ray: str | None = None
) -> None:
    if planned.advice and world.is_rank_zero:
        print_advice(planned.advice)
    began = time.monotonic()
    with Console(stderr=True).status("starting"):
        from oncurve.terminal.errors import hush
        from oncurve.terminal.live.display import LiveDisplay
        from oncurve.training import start
        from oncurve.training.trainer import TimeUp

        hush()
    if planned.recipe is not None and world.is_rank_zero and ray is None:
        print_plan(planned.recipe)
    listeners = [LiveDisplay(Console(highlight=False))] if world.is_rank_zero else []
    try:
        if ray is not None:
            run = train_on_ray(planned, out, runs, minutes, ray, listeners)
        elif planned.run is not None:
            run = start.resume(planned.run, sets=planned.sets, listeners=listeners, minutes=minutes, world=world)
        else:
            assert planned.recipe is not None
            run = start.begin(planned.recipe, runs_dir=runs, out=out, listeners=listeners, minutes=minutes, world=world)
    except TimeUp as stop:
        say(Text(f"{stop.where}: {stop.what}; {stop.fix}"))
        return
    if world.is_rank_zero:
        _end(run, time.monotonic() - began)


def _end(run: RunFolder, seconds: float) -> None:
    from oncurve.terminal.live.summary import render_summary

    say(Text())
    say(render_summary(run, seconds))


def fork(
    run: RunName,
    step: Annotated[int, typer.Option("--step", help="The checkpoint's step.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Its stage; unset: the last one.")] = None,
    sets: Sets = None,
    out: Out = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Go on from a checkpoint with something changed, on the same prompts and random numbers."""
    parent = RunFolder.open(run, runs)
    trust_if_asked(trusted, parent)
    asked = [*(sets or []), *requested_ranks(None)]
    recipe = load_recipe(parent.recipe, asked)
    again = ["fork", run, "--step", str(step), *_repeated("--set", asked), "--runs", str(runs)]
    again += ["--trust"] if trusted else []
    launch_ranks(recipe, None, [*again, *_option("--stage", stage), *_option("--out", out)])
    began = time.monotonic()
    with Console(stderr=True).status("starting"):
        from oncurve.terminal.errors import hush
        from oncurve.terminal.live.display import LiveDisplay
        from oncurve.training import start

        hush()
    with joined_ranks(recipe) as world:
        shown = [LiveDisplay(Console(highlight=False))] if world.is_rank_zero else []
        child = start.fork(parent, step, asked, stage=stage, runs_dir=runs, out=out, listeners=shown, world=world)
        if world.is_rank_zero:
            _end(child, time.monotonic() - began)
