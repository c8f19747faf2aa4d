"""Environments that a recipe can name, for prompts from files: the calculator, or a class of your own."""

from __future__ import annotations

from typing import Any

from oncurve.errors import RecipeError
from oncurve.plugins import load_function
from oncurve.records import Environment
from oncurve.tasks.puzzles.calculator import Calculator


def load_environment(name: str | None, where: str) -> Environment | None:
    """`calculator`, or `file.py:Class`: a class that can be made without arguments, with `calls` and `reply`."""
    if name is None:
        return None
    if name == "calculator":
        return Calculator()
    made: Any = load_function(name, where)
    try:
        environment = made()
    except Exception as error:  # making one runs the user's code, which may raise anything
        raise RecipeError(
            where,
            name,
            because=f"it can't be made: {type(error).__name__}: {error}",
            fix="give a class that needs no arguments",
        ) from error
    calls = getattr(environment, "calls", None)
    if not callable(getattr(environment, "reply", None)) or not isinstance(calls, tuple):
        because = "an environment has `calls`, a tuple of texts, and a method `reply(prompt, turns, dice)`"
        raise RecipeError(where, name, because=because, fix="give it both")
    return environment  # type: ignore[no-any-return]
