"""Environments that a recipe can name for a task: built in, from a plug-in, or a class of the user's."""

from __future__ import annotations

from collections.abc import Callable

from oncurve.errors import RecipeError, did_you_mean
from oncurve.plugins import Registry, load_function
from oncurve.records import Environment
from oncurve.tasks.puzzles.calculator import Calculator

EnvironmentType = Callable[[], Environment]


def _environment_fault(plugin: object) -> str | None:
    if isinstance(plugin, type) and callable(getattr(plugin, "reply", None)):
        return None
    return "an environment is a class with `calls`, a tuple of texts, and a method `reply(prompt, turns, dice)`"


ENVIRONMENTS: Registry[EnvironmentType] = Registry("environment", {"calculator": Calculator}, _environment_fault)
"""Every environment by its name in `task.environment`; each is created without arguments."""


def load_environment(name: str | None, where: str) -> Environment | None:
    """The environment that a recipe names under ``where``: one of `ENVIRONMENTS`, or `file.py:Class`."""
    if name is None:
        return None
    if name in ENVIRONMENTS:
        environment_type = ENVIRONMENTS[name]
    elif ":" in name:
        environment_type = load_function(name, where)
    else:
        raise RecipeError(
            where,
            f"there is no environment '{name}'{did_you_mean(name, ENVIRONMENTS)}",
            because=f"there are: {', '.join(ENVIRONMENTS)}",
            fix="name one of them, or a class of yours as file.py:Class",
        )
    try:
        environment = environment_type()
    except Exception as error:  # creating one runs the user's code, which may raise anything
        raise RecipeError(
            where,
            name,
            because=f"creating it failed: {type(error).__name__}: {error}",
            fix="give a class that takes no arguments",
        ) from error
    if not callable(getattr(environment, "reply", None)) or not isinstance(getattr(environment, "calls", None), tuple):
        because = "an environment has `calls`, a tuple of texts, and a method `reply(prompt, turns, dice)`"
        raise RecipeError(where, name, because=because, fix="add what is missing")
    return environment
