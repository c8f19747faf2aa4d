"""The tasks that a recipe can name."""

from __future__ import annotations

from oncurve.errors import no_such
from oncurve.recipe.error_messages import read_section
from oncurve.recipe.schema import sections
from oncurve.tasks.base import Task, TaskType
from oncurve.tasks.data.file_task import FileOptions, build_file_task
from oncurve.tasks.data.public_datasets import PublicDatasetOptions, builders
from oncurve.tasks.puzzles.arithmetic import Arithmetic, ArithmeticOptions
from oncurve.tasks.puzzles.calculator import CalculatorOptions, CalculatorTask
from oncurve.tasks.puzzles.countdown import Countdown, CountdownOptions
from oncurve.tasks.puzzles.guess import GuessOptions, GuessTask
from oncurve.tasks.reasoning_gym import ReasoningGymOptions, ReasoningGymTask

TASKS: dict[str, TaskType] = {
    "arithmetic": TaskType(ArithmeticOptions, Arithmetic),
    "countdown": TaskType(CountdownOptions, Countdown),
    "calculator": TaskType(CalculatorOptions, CalculatorTask),
    "guess": TaskType(GuessOptions, GuessTask),
    "file": TaskType(FileOptions, build_file_task),
    "reasoning_gym": TaskType(ReasoningGymOptions, ReasoningGymTask),
    **{name: TaskType(PublicDatasetOptions, build) for name, build in builders().items()},
}


def build_task(config: sections.Task, where: str = "task") -> Task:
    """The task of a recipe, or of a stage that has its own (then `where` is `NAME.task`)."""
    kind = TASKS.get(config.type)
    if kind is None:
        raise no_such(f"{where}.type", "task", config.type, TASKS)
    return kind.build(config, read_section(kind.options, config.options, where))
