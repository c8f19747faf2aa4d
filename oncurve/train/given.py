"""Prompts and rewards that were given as Python objects: the run's folder does not hold them, and its recipe says so."""

from __future__ import annotations

from oncurve.errors import RecipeError
from oncurve.recipe.schema import Recipe, Stage

FROM_PYTHON = "python"
"""The task type that the recipe of such a run has."""


def is_from_python(recipe: Recipe, stage: Stage | None = None) -> bool:
    own = stage.task if stage is not None else None
    return (own or recipe.task).type == FROM_PYTHON


def refuse_from_python(recipe: Recipe, stage: Stage | None = None) -> None:
    """For what needs the prompts and rewards and can't have them."""
    if is_from_python(recipe, stage):
        raise RecipeError(
            "task.type",
            FROM_PYTHON,
            because="its prompts and rewards were given from Python, and are not in the run's folder",
            fix="go on with it there: oncurve.train(…, resume=RUN); to measure it here, name a task or recipe with --task",
        )
