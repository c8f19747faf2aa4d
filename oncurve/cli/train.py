"""`oncurve train` and `oncurve fork`: in this process, on several ranks of this machine, or on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import RUNS, Out, RunName, Runs, Sets, Trust, grant_trust, output
from oncurve.cli.plan import print_plan
from oncurve.cli.train_target import TrainTarget, choose_target
from oncurve.distributed import rendezvous
from oncurve.distributed.rendezvous import world_size
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.terminal.errors import print_advice, print_error

if TYPE_CHECKING:
    from oncurve.training.listeners import Listener


def train(
    target: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A recipe; with --resume also a run.")],
    sets: Sets = None,
    out: Out = None,
    runs: Runs = RUNS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run, or the newest unfinished run of the recipe.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=0.0, help="Save and stop after this many minutes; --resume continues bit for bit."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, metavar="N", help="Train on N GPUs of this machine, one process each.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="auto|HOST:PORT", help="Train on a Ray cluster: a local one (auto), or the one there."),
    ] = None,
    trusted: Trust = False,
) -> None:
    """Train a recipe, or continue a run that was stopped."""
    overrides = [*(sets or []), *_rank_overrides(gpus)]
    grant_trust(trusted, trust.run_of_recipe(target))
    chosen = choose_target(target, overrides, out, runs, resume)
    grant_trust(trusted, chosen.run)
    if ray is not None:
        _train_on_ray(chosen, out, runs, minutes, ray)
        return
    recipe = chosen.recipe if chosen.run is None else load_recipe(chosen.run.recipe, chosen.sets)
    assert recipe is not None
    command = ["train", target, *_repeat("--set", overrides), "--runs", str(runs), *_flag("--resume", resume)]
    command += [*_option("--out", out), *_option("--minutes", minutes), *_flag("--trust", trusted)]
    _launch_ranks(recipe, gpus, command)

    with _joined_ranks(recipe) as world:

        def start_training(listeners: Sequence[Listener]) -> RunFolder:
            from oncurve.training import start

            if chosen.run is not None:
                return start.resume(chosen.run, sets=chosen.sets, listeners=listeners, minutes=minutes, world=world)
            assert chosen.recipe is not None
            if world.is_rank_zero:
                print_plan(chosen.recipe)
            return start.begin(chosen.recipe, runs_dir=runs, out=out, listeners=listeners, minutes=minutes, world=world)

        _run(start_training, world, chosen.advice)


def _train_on_ray(chosen: TrainTarget, out: Path | None, runs: Path, minutes: float | None, address: str) -> None:
    from oncurve.cluster.ray_client import check_reachable

    check_reachable(address)  # before the imports below, which take seconds

    def start_training(listeners: Sequence[Listener]) -> RunFolder:
        from oncurve.cluster import driver

        request = driver.TrainRequest(chosen.recipe, chosen.run, tuple(chosen.sets), runs, out, minutes)
        return driver.train(request, address, listeners)

    _run(start_training, SINGLE_PROCESS, chosen.advice)


def fork(
    run: RunName,
    step: Annotated[int, typer.Option("--step", help="Step of the checkpoint.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Stage of the checkpoint; default: the last one.")] = None,
    sets: Sets = None,
    out: Out = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Continue from a checkpoint with changed settings.

    The fork sees the same prompts and random numbers as its parent.
    """
    parent = RunFolder.open(run, runs)
    grant_trust(trusted, parent)
    overrides = [*(sets or []), *_rank_overrides(None)]
    recipe = load_recipe(parent.recipe, overrides)
    command = ["fork", run, "--step", str(step), *_repeat("--set", overrides), "--runs", str(runs)]
    command += [*_option("--stage", stage), *_option("--out", out), *_flag("--trust", trusted)]
    _launch_ranks(recipe, None, command)

    with _joined_ranks(recipe) as world:

        def start_training(listeners: Sequence[Listener]) -> RunFolder:
            from oncurve.training import start

            return start.fork(parent, step, overrides, stage=stage, runs_dir=runs, out=out, listeners=listeners, world=world)

        _run(start_training, world)


def _run(start_training: Callable[[Sequence[Listener]], RunFolder], world: World, advice: str | None = None) -> None:
    """Trains with the live display, then prints the summary; both on rank 0 only."""
    if advice and world.is_rank_zero:
        print_advice(advice)
    began = time.monotonic()
    with Console(stderr=True).status("starting"):
        from oncurve.terminal.errors import silence_libraries
        from oncurve.terminal.live.display import LiveDisplay
        from oncurve.terminal.live.summary import render_summary
        from oncurve.training.trainer import TimeUp

        silence_libraries()
    try:
        run = start_training([LiveDisplay(Console(highlight=False))] if world.is_rank_zero else [])
    except TimeUp as stop:
        output(Text(f"{stop.where}: {stop.what}; {stop.fix}"))
        return
    if world.is_rank_zero:
        output(Text())
        output(render_summary(run, time.monotonic() - began))


def _rank_overrides(gpus: int | None) -> list[str]:
    """`scale.ranks` as --set would write it: from torchrun's environment, else from --gpus."""
    ranks = world_size() if world_size() > 1 else gpus
    return [] if ranks is None else [f"scale.ranks={ranks}"]


def _launch_ranks(recipe: Recipe, gpus: int | None, command: Sequence[str]) -> None:
    """If the recipe has several ranks and this process is not one of them, starts them all and exits as rank 0 does."""
    if recipe.scale.ranks == 1 or world_size() > 1:
        return
    from oncurve.distributed.launch import check_gpus, launch

    check_gpus(recipe, gpus)
    raise typer.Exit(launch(recipe.scale.ranks, command))


def _joined_ranks(recipe: Recipe) -> AbstractContextManager[World]:
    return rendezvous.joined_ranks(recipe, print_error)


def _repeat(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _option(option: str, value: object) -> list[str]:
    return [] if value is None else [option, str(value)]


def _flag(option: str, is_set: bool) -> list[str]:
    return [option] if is_set else []
