"""`oncurve train` and `oncurve fork`: in this process, on several ranks of this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import RUNS, Out, RunOrCheckpoint, Runs, Sets, Trust, grant_trust, is_recipe, output
from oncurve.cli.plan import print_plan
from oncurve.distributed.rendezvous import joined_ranks, world_size
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import OncurveError, RecipeError, RunError
from oncurve.models.loading.local_models import check_exists
from oncurve.recipe.load import builtin_recipes, load_recipe, read_toml, smoke_sets
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.validate import reject_python_only
from oncurve.runs.checkpoints.listing import open_target
from oncurve.runs.folder import RunFolder, list_runs
from oncurve.tasks.registry import check_files
from oncurve.terminal.console import SafeConsole
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
        typer.Option(
            "--ray", metavar="auto|HOST:PORT", help="Train on a Ray cluster: this machine's (auto) or the one at HOST:PORT."
        ),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Test a recipe: two steps of each stage, each with an evaluation and a checkpoint."),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="With --resume: continue although a reward function or data file has changed."),
    ] = False,
    profile: Annotated[
        int | None,
        typer.Option("--profile", min=1, metavar="N", help="Profile N steps of the last stage; writes RUN/profile."),
    ] = None,
    trusted: Trust = False,
) -> None:
    """Train a recipe, or continue a run that was stopped."""
    overrides = [*(sets or []), *_rank_overrides(gpus)]
    if smoke and resume:
        because = "a smoke test is a short run of its own"
        raise RecipeError("--smoke", "with --resume", because=because, fix="leave one of them out")
    if smoke:
        overrides = smoke_sets(target, overrides)
    if profile is not None and ray is not None:
        because = "its steps run in other processes, on other machines"
        raise RecipeError("--profile", "with --ray", because=because, fix="leave one of them out")
    grant_trust(trusted, trust.run_of_recipe(target) or _find_run(target, runs, resume))
    chosen = choose_target(target, overrides, out, runs, resume)
    grant_trust(trusted, chosen.run)
    if chosen.recipe is not None:
        check_files(chosen.recipe)
        if chosen.recipe.uses_policy:
            check_exists(chosen.recipe.model.source)
    if ray is not None:
        from oncurve.cluster.ray_client import check_reachable

        check_reachable(ray)  # before the imports below, which take seconds

        def start_on_ray(listeners: Sequence[Listener]) -> RunFolder:
            from oncurve.cluster import driver

            request = driver.TrainRequest(chosen.recipe, chosen.run, tuple(chosen.sets), runs, out, minutes, accept_changes)
            return driver.train(request, ray, listeners)

        _run(start_on_ray, SINGLE_PROCESS, chosen.advice)
        return
    recipe = chosen.recipe if chosen.run is None else trust.load_recipe_of(chosen.run, chosen.sets)
    assert recipe is not None
    command = ["train", target, *_repeat("--set", overrides), "--runs", str(runs), *_flag("--resume", resume)]
    command += [*_option("--out", out), *_option("--minutes", minutes), *_flag("--trust", trusted)]
    command += [*_flag("--accept-changes", accept_changes), *_option("--profile", profile)]
    _launch_ranks(recipe, gpus, command)

    with joined_ranks(recipe, print_error) as world:

        def start_training(listeners: Sequence[Listener]) -> RunFolder:
            from oncurve.training import start

            if chosen.run is not None:
                parts: dict[str, Any] = {"listeners": listeners, "minutes": minutes, "world": world}
                return start.resume(chosen.run, sets=chosen.sets, accept_changes=accept_changes, **parts)
            assert chosen.recipe is not None
            if world.is_rank_zero:
                print_plan(chosen.recipe)
            return start.begin(chosen.recipe, runs_dir=runs, out=out, listeners=listeners, minutes=minutes, world=world)

        _run(start_training, world, chosen.advice, profile)


def fork(
    run: RunOrCheckpoint,
    step: Annotated[int | None, typer.Option("--step", help="Step of the checkpoint, unless RUN@… names it.")] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="Stage of the checkpoint; default: the last one.")] = None,
    sets: Sets = None,
    out: Out = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Continue from a checkpoint with changed settings.

    The fork sees the same prompts and random numbers as its parent.
    """
    source = open_target(run, runs)
    parent, checkpoint = source.run, source.checkpoint
    if (checkpoint is None) == (step is None):
        what = "missing" if step is None else f"{step}, with a checkpoint in {run}"
        fix = f"give --step N, or one of {parent.name}@STAGE-STEP and {parent.name}@best"
        raise RecipeError("--step", what, because="a fork starts from one checkpoint", fix=fix)
    if checkpoint is not None:
        step, stage = checkpoint.step, checkpoint.stage
    assert step is not None
    grant_trust(trusted, parent)
    reject_python_only(trust.load_recipe_of(parent))
    overrides = [*(sets or []), *_rank_overrides(None)]
    recipe = trust.load_recipe_of(parent, overrides)
    command = ["fork", str(parent.path), "--step", str(step), *_repeat("--set", overrides), "--runs", str(runs)]
    command += [*_option("--stage", stage), *_option("--out", out), *_flag("--trust", trusted)]
    _launch_ranks(recipe, None, command)

    with joined_ranks(recipe, print_error) as world:

        def start_training(listeners: Sequence[Listener]) -> RunFolder:
            from oncurve.training import start

            return start.fork(parent, step, overrides, stage=stage, runs_dir=runs, out=out, listeners=listeners, world=world)

        _run(start_training, world)


def _run(
    start_training: Callable[[Sequence[Listener]], RunFolder],
    world: World,
    advice: str | None = None,
    profiled_steps: int | None = None,
) -> None:
    """Trains with the live display, then prints the summary and the profile; all on rank 0 only."""
    if advice and world.is_rank_zero:
        print_advice(advice)
    began = time.monotonic()
    with SafeConsole(stderr=True).status("starting"):
        from oncurve.terminal.errors import silence_libraries
        from oncurve.terminal.live.display import LiveDisplay
        from oncurve.terminal.live.summary import render_summary
        from oncurve.training.timing import StepProfiler
        from oncurve.training.trainer import TimeUp

        silence_libraries()
    profilers = [] if profiled_steps is None else [StepProfiler(profiled_steps)]
    try:
        run = start_training([LiveDisplay(SafeConsole()), *profilers] if world.is_rank_zero else [])
    except TimeUp as stop:
        output(Text(f"{stop.where}: {stop.what}; {stop.fix}"))
        return
    if world.is_rank_zero:
        output(Text())
        output(render_summary(run, time.monotonic() - began))
        for profiler in profilers:
            none = f"no step was profiled: the last stage has no second step in this run ({run.shown})"
            output(Text(f"\n{profiler.table}\n{run.shown / 'profile'}" if profiler.table else f"\n{none}"))


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


def _repeat(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _option(option: str, value: object) -> list[str]:
    return [] if value is None else [option, str(value)]


def _flag(option: str, is_set: bool) -> list[str]:
    return [option] if is_set else []


UNFINISHED = ("interrupted", "failed")


@dataclass(frozen=True, slots=True)
class TrainTarget:
    """A recipe to start or a run to continue: exactly one is set. ``sets`` apply to the run; ``advice`` is printed first."""

    recipe: Recipe | None = None
    run: RunFolder | None = None
    sets: tuple[str, ...] = ()
    advice: str | None = None


def choose_target(target: str, sets: Sequence[str], out: Path | None, runs_dir: Path, resume: bool) -> TrainTarget:
    """What `oncurve train` must do. Without --resume, it starts a new run of a recipe. With --resume, it continues the named
    run, the run at --out, or the recipe's newest unfinished run. If --out does not exist yet, it starts a run there, so that a
    job that is restarted again and again needs only one command."""
    run = _find_run(target, runs_dir, resume)
    if run is not None:
        return _named_run(target, run, sets, resume)
    trust.check_recipe(target)
    recipe = load_recipe(target, sets)
    if not resume:
        return TrainTarget(recipe=recipe, advice=None if out else _reminder(target, recipe, runs_dir))
    if out is not None:
        if not out.exists():
            return TrainTarget(recipe=recipe, advice=f"{out} does not exist yet: starting a new run there")
        return _run_of_recipe(recipe, [RunFolder.open(out, runs_dir)], sets, target)
    return _run_of_recipe(recipe, unfinished_runs(recipe.name, runs_dir), sets, target)


def _find_run(target: str, runs_dir: Path, resume: bool) -> RunFolder | None:
    """The run of this name. A file comes first, and without --resume a built-in recipe too."""
    is_file_or_recipe = Path(target).is_file() if resume else is_recipe(target)
    return None if is_file_or_recipe else RunFolder.find(target, runs_dir)


def _named_run(target: str, run: RunFolder, sets: Sequence[str], resume: bool) -> TrainTarget:
    status = run.state().current_status
    if not resume:
        raise RecipeError(
            target,
            f"a run ({status}), not a recipe",
            because="a new run starts from a recipe",
            fix=f"continue it: oncurve train --resume {run.shown}"
            if status in UNFINISHED
            else f"start another run of its recipe: oncurve train {run.recipe}",
        )
    reject_python_only(trust.load_recipe_of(run))
    return TrainTarget(run=run, sets=tuple(sets))


def _run_of_recipe(recipe: Recipe, runs: Sequence[RunFolder], sets: Sequence[str], target: str) -> TrainTarget:
    """The newest run with exactly this recipe, else the newest of its name, which keeps the recipe it started with.

    Of ``sets`` it takes those that describe the machine; the others are refused when it is resumed."""
    if not runs:
        raise RunError(
            target,
            "nothing to resume",
            because=f"there is no unfinished run of '{recipe.name}'",
            fix="leave out --resume to start one; `oncurve runs` lists all",
        )
    for run in runs:
        if same_recipe(recipe, run):
            return TrainTarget(run=run, advice=f"continuing {run.shown}")
    newest = runs[0]
    differs = (
        "" if same_recipe(recipe, newest, sets) else f" with its original recipe, which differs from {target} as it is now"
    )
    return TrainTarget(run=newest, sets=tuple(sets), advice=f"continuing {newest.shown}{differs}")


def unfinished_runs(name: str, runs_dir: Path) -> list[RunFolder]:
    """Interrupted and failed runs of recipes of this name, newest first."""
    entries = [entry for entry in list_runs(runs_dir) if entry.status in UNFINISHED]
    return [RunFolder(entry.path) for entry in entries if _recipe_name(entry.path) == name]


def _recipe_name(path: Path) -> str | None:
    try:
        return str(read_toml(RunFolder(path).recipe).get("name"))
    except OncurveError:
        return None


def same_recipe(recipe: Recipe, run: RunFolder, sets: Sequence[str] = ()) -> bool:
    """Whether a run's recipe, changed by ``sets``, is this one. Keys that the recipe leaves to the machine are ignored."""
    try:
        resolved = trust.load_recipe_of(run, sets)
    except OncurveError:
        return False
    threads = recipe.threads or resolved.threads
    engine = recipe.engine.model_copy(update={"slots": recipe.engine.slots or resolved.engine.slots})
    return recipe.model_copy(update={"threads": threads, "engine": engine}) == resolved


def _reminder(target: str, recipe: Recipe, runs_dir: Path) -> str | None:
    """The advice to resume an unfinished run: the one that has the built-in recipe's name, or one of the same recipe."""
    if target in builtin_recipes():
        with contextlib.suppress(OncurveError):  # a run that can't be read is no reason not to start another
            run = RunFolder.find(target, runs_dir)
            if run is not None and run.state().current_status in UNFINISHED:
                return f"{run.shown} is an unfinished run; to continue it: oncurve train --resume {run.shown}"
    for run in unfinished_runs(recipe.name, runs_dir):
        if same_recipe(recipe, run):
            return f"{run.shown} of the same recipe is unfinished; to continue it: oncurve train --resume {run.shown}"
    return None
