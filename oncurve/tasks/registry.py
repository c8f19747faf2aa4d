"""The tasks that a recipe can name."""

from __future__ import annotations

from pathlib import Path

from oncurve.errors import RecipeError
from oncurve.plugins import Registry, check_instance
from oncurve.recipe.defaults import task_for_stage
from oncurve.recipe.error_messages import read_section
from oncurve.recipe.keys import short_toml
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import STAGE_PREFIX
from oncurve.recipe.schema.recipe import Recipe
from oncurve.tasks.agent_task import AgentOptions, build_agent_task
from oncurve.tasks.base import Task, TaskType
from oncurve.tasks.data.file_task import FileOptions, build_file_task, check_file
from oncurve.tasks.data.public_datasets import PublicDatasetOptions, builders
from oncurve.tasks.puzzles.arithmetic import Arithmetic, ArithmeticOptions
from oncurve.tasks.puzzles.calculator import CalculatorOptions, CalculatorTask
from oncurve.tasks.puzzles.countdown import Countdown, CountdownOptions
from oncurve.tasks.puzzles.guess import GuessOptions, GuessTask
from oncurve.tasks.reasoning_gym import ReasoningGymOptions, ReasoningGymTask
from oncurve.tasks.task_mix import MixOptions, TaskMix, build_mix


def _build_mix(config: sections.Task, options: MixOptions) -> TaskMix:
    return build_mix(config, options, build_task)


TASKS: Registry[TaskType] = Registry(
    "task",
    {
        "arithmetic": TaskType(ArithmeticOptions, Arithmetic),
        "countdown": TaskType(CountdownOptions, Countdown),
        "calculator": TaskType(CalculatorOptions, CalculatorTask),
        "guess": TaskType(GuessOptions, GuessTask),
        "file": TaskType(FileOptions, build_file_task),
        "agent": TaskType(AgentOptions, build_agent_task),
        "reasoning_gym": TaskType(ReasoningGymOptions, ReasoningGymTask),
        "mix": TaskType(MixOptions, _build_mix),
        **{name: TaskType(PublicDatasetOptions, build) for name, build in builders().items()},
    },
    check_instance(TaskType),
)
"""Every task by its `type` in a recipe. A new one is a module with its options and its class, and a row here."""


def check_files(recipe: Recipe) -> None:
    """Refuses a recipe whose data files do not exist. It is quick, so that it can be called before slow imports."""
    for stage in recipe.stages:
        options = task_for_stage(recipe, stage).options
        files = {f"task.{key}": options.get(key) for key in ("path", "heldout_path")}
        files |= {f"{stage.label}.{key}": getattr(stage, key, None) for key in ("data", "pairs")}
        for key, path in files.items():
            if isinstance(path, str) and not path.startswith(STAGE_PREFIX):
                check_file(Path(path), key)


def build_task(config: sections.Task, where: str = "task") -> Task:
    """The task of a recipe, or of a stage that has its own (``where`` is then `NAME.task`)."""
    kind = TASKS.find(config.type, f"{where}.type")
    for key, value in config.options.items():
        others = [name for name, task in TASKS.built_in.items() if key in task.options.model_fields]
        if others and key not in kind.options.model_fields:
            because = f"the task {config.type} has no key '{key}'"
            fix = f"remove it, or use a task that has it: {', '.join(others)}"
            raise RecipeError(f"{where}.{key}", short_toml(value), because=because, fix=fix)
    return kind.build(config, read_section(kind.options, config.options, where))
