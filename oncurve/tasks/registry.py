"""The tasks that a recipe can name."""

from __future__ import annotations

from oncurve.errors import no_such
from oncurve.recipe import sections
from oncurve.recipe.problems import read_section
from oncurve.tasks.arithmetic import Arithmetic, ArithmeticOptions
from oncurve.tasks.base import Task, TaskType
from oncurve.tasks.calculator import CalculatorOptions, CalculatorTask
from oncurve.tasks.countdown import Countdown, CountdownOptions
from oncurve.tasks.files import FileOptions, build_file_task
from oncurve.tasks.guess import GuessOptions, GuessTask
from oncurve.tasks.gym import Gym, GymOptions
from oncurve.tasks.known import KnownOptions, builders

TASKS: dict[str, TaskType] = {
    "arithmetic": TaskType(ArithmeticOptions, Arithmetic),
    "countdown": TaskType(CountdownOptions, Countdown),
    "calculator": TaskType(CalculatorOptions, CalculatorTask),
    "guess": TaskType(GuessOptions, GuessTask),
    "file": TaskType(FileOptions, build_file_task),
    "reasoning_gym": TaskType(GymOptions, Gym),
    **{name: TaskType(KnownOptions, build) for name, build in builders().items()},
}


def build_task(config: sections.Task, where: str = "task") -> Task:
    """The task of a recipe, or of a stage that has its own (then `where` is `NAME.task`)."""
    kind = TASKS.get(config.type)
    if kind is None:
        raise no_such(f"{where}.type", "task", config.type, TASKS)
    return kind.build(config, read_section(kind.options, config.options, where))
