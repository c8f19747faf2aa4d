"""What `oncurve train` is asked to do: begin a run, or go on with one. Decided before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oncurve import trust
from oncurve.errors import OncurveError, RecipeError, RunError
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.validate import reject_python_only
from oncurve.runs.folder import RunFolder, list_runs

UNFINISHED = ("interrupted", "failed")


@dataclass(frozen=True, slots=True)
class TrainTarget:
    """A recipe to begin or a run to go on with: one of them is set. ``sets`` are for the run that goes on, ``advice`` is
    something to tell the user first."""

    recipe: Recipe | None = None
    run: RunFolder | None = None
    sets: tuple[str, ...] = ()
    advice: str | None = None


def plan(target: str, sets: Sequence[str], out: Path | None, runs_dir: Path, resume: bool) -> TrainTarget:
    """Without --resume a recipe begins a new run. With it: the run that was named, the one at --out, or the recipe's newest
    unfinished one. Where --out is not there yet it is begun, so that a job that is started over and over needs one command."""
    run = None if Path(target).is_file() else RunFolder.find(target, runs_dir)
    if run is not None:
        return _named_run(target, run, sets, resume)
    trust.check_recipe(target)
    recipe = load_recipe(target, sets)
    if not resume:
        return TrainTarget(recipe=recipe, advice=None if out else _reminder(recipe, runs_dir))
    if out is not None:
        if not out.exists():
            return TrainTarget(recipe=recipe, advice=f"nothing at {out} yet: beginning there")
        return _of_recipe(recipe, [RunFolder.open(out, runs_dir)], sets, str(out))
    return _of_recipe(recipe, unfinished(recipe.name, runs_dir), sets, target)


def _named_run(target: str, run: RunFolder, sets: Sequence[str], resume: bool) -> TrainTarget:
    stands = run.state().current_status
    if not resume:
        raise RecipeError(
            target,
            f"a run ({stands}), not a recipe",
            because="a new run begins from a recipe",
            fix=f"go on with it: oncurve train --resume {run.path}"
            if stands in UNFINISHED
            else f"begin another of its recipe: oncurve train {run.recipe}",
        )
    reject_python_only(load_recipe(run.recipe))
    return TrainTarget(run=run, sets=tuple(sets))


def _of_recipe(recipe: Recipe, found: Sequence[RunFolder], sets: Sequence[str], asked: str) -> TrainTarget:
    """The newest run of just this recipe, else the newest of its name: that one goes on with the recipe it began with."""
    if not found:
        raise RunError(
            asked,
            "nothing to resume",
            because=f"there is no unfinished run of '{recipe.name}'",
            fix="leave out --resume to begin one; `oncurve runs` lists all",
        )
    for run in found:
        if same_recipe(recipe, run):
            return TrainTarget(run=run, advice=f"going on with {run.path}")
    if sets:
        raise RunError(
            str(found[0].path),
            f"has another recipe than {asked} with these --set",
            because="a run that goes on keeps its recipe",
            fix=f"oncurve train --resume {found[0].path}, or leave out --resume",
        )
    return TrainTarget(
        run=found[0], advice=f"going on with {found[0].path}; its recipe is not {asked} as it is now, and stays as it was"
    )


def unfinished(name: str, runs_dir: Path) -> list[RunFolder]:
    """Runs of recipes of this name that were stopped or failed, newest first."""
    entries = [entry for entry in list_runs(runs_dir) if entry.status in UNFINISHED]
    return [RunFolder(entry.path) for entry in entries if _recorded_name(entry.path) == name]


def _recorded_name(path: Path) -> str | None:
    try:
        return load_recipe(RunFolder(path).recipe).name
    except OncurveError:
        return None


def same_recipe(recipe: Recipe, run: RunFolder) -> bool:
    """Whether a run was begun from this recipe; what the recipe leaves to the machine does not count."""
    try:
        begun = load_recipe(run.recipe)
    except OncurveError:
        return False
    threads = recipe.threads or begun.threads
    engine = recipe.engine.model_copy(update={"slots": recipe.engine.slots or begun.engine.slots})
    return recipe.model_copy(update={"threads": threads, "engine": engine}) == begun


def _reminder(recipe: Recipe, runs_dir: Path) -> str | None:
    for run in unfinished(recipe.name, runs_dir):
        if same_recipe(recipe, run):
            return f"{run.path} of the same recipe is unfinished; to go on with it: oncurve train --resume {run.path}"
    return None
