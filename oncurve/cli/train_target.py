"""What `oncurve train` should do: start a run or continue one. Decided before anything heavy is imported."""

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
    """A recipe to start or a run to continue: exactly one is set. ``sets`` apply to the run; ``advice`` is printed first."""

    recipe: Recipe | None = None
    run: RunFolder | None = None
    sets: tuple[str, ...] = ()
    advice: str | None = None


def choose_target(target: str, sets: Sequence[str], out: Path | None, runs_dir: Path, resume: bool) -> TrainTarget:
    """Without --resume, a recipe starts a new run. With --resume, continues the run that is named, the run at --out, or the
    recipe's newest unfinished run. If --out does not exist yet, starts a run there, so that a job that is restarted again and
    again needs only one command."""
    run = None if Path(target).is_file() else RunFolder.find(target, runs_dir)
    if run is not None:
        return _named_run(target, run, sets, resume)
    trust.check_recipe(target)
    recipe = load_recipe(target, sets)
    if not resume:
        return TrainTarget(recipe=recipe, advice=None if out else _reminder(recipe, runs_dir))
    if out is not None:
        if not out.exists():
            return TrainTarget(recipe=recipe, advice=f"{out} does not exist yet: starting a new run there")
        return _run_of_recipe(recipe, [RunFolder.open(out, runs_dir)], sets, str(out))
    return _run_of_recipe(recipe, unfinished_runs(recipe.name, runs_dir), sets, target)


def _named_run(target: str, run: RunFolder, sets: Sequence[str], resume: bool) -> TrainTarget:
    status = run.state().current_status
    if not resume:
        raise RecipeError(
            target,
            f"a run ({status}), not a recipe",
            because="a new run starts from a recipe",
            fix=f"continue it: oncurve train --resume {run.path}"
            if status in UNFINISHED
            else f"start another run of its recipe: oncurve train {run.recipe}",
        )
    reject_python_only(load_recipe(run.recipe))
    return TrainTarget(run=run, sets=tuple(sets))


def _run_of_recipe(recipe: Recipe, runs: Sequence[RunFolder], sets: Sequence[str], target: str) -> TrainTarget:
    """The newest run with exactly this recipe, else the newest of its name, which keeps the recipe it started with."""
    if not runs:
        raise RunError(
            target,
            "nothing to resume",
            because=f"there is no unfinished run of '{recipe.name}'",
            fix="leave out --resume to start one; `oncurve runs` lists all",
        )
    for run in runs:
        if same_recipe(recipe, run):
            return TrainTarget(run=run, advice=f"continuing {run.path}")
    if sets:
        raise RunError(
            str(runs[0].path),
            f"its recipe differs from {target} with these --set",
            because="a resumed run keeps its recipe",
            fix=f"oncurve train --resume {runs[0].path}, or leave out --resume",
        )
    return TrainTarget(
        run=runs[0],
        advice=f"continuing {runs[0].path} with its original recipe, which differs from {target} as it is now",
    )


def unfinished_runs(name: str, runs_dir: Path) -> list[RunFolder]:
    """Interrupted and failed runs of recipes of this name, newest first."""
    entries = [entry for entry in list_runs(runs_dir) if entry.status in UNFINISHED]
    return [RunFolder(entry.path) for entry in entries if _recipe_name(entry.path) == name]


def _recipe_name(path: Path) -> str | None:
    try:
        return load_recipe(RunFolder(path).recipe).name
    except OncurveError:
        return None


def same_recipe(recipe: Recipe, run: RunFolder) -> bool:
    """Whether a run started from this recipe. Keys that the recipe leaves to the machine are ignored."""
    try:
        resolved = load_recipe(run.recipe)
    except OncurveError:
        return False
    threads = recipe.threads or resolved.threads
    engine = recipe.engine.model_copy(update={"slots": recipe.engine.slots or resolved.engine.slots})
    return recipe.model_copy(update={"threads": threads, "engine": engine}) == resolved


def _reminder(recipe: Recipe, runs_dir: Path) -> str | None:
    for run in unfinished_runs(recipe.name, runs_dir):
        if same_recipe(recipe, run):
            return f"{run.path} of the same recipe is unfinished; to continue it: oncurve train --resume {run.path}"
    return None
