"""Checks made before anything is written: a bad row, or a prompt that is too long, must not end a run hours later."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oncurve.errors import DataError
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Sft, Stage
from oncurve.records import Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.prompt_checker import PromptChecker
from oncurve.training.stages.table import STAGES


def check_stage_data(stage: Stage, task: Task, rewards: RewardMix) -> None:
    """Reads what a stage will read. Raises an OncurveError for the first row that can't be used. Needs no model."""
    if stage.samples and task.train_size == 0:
        raise DataError(
            "task.path",
            "no training prompts",
            because=f"the stage '{stage.label}' samples training prompts, and all prompts of the task are held out",
            fix="set task.path to a file of training prompts, or hold out fewer of its rows (task.heldout_share)",
        )
    if stage.heldout_patience is not None and not task.heldout:
        raise DataError(
            f"{stage.label}.patience",
            stage.heldout_patience,
            because="it counts evaluations on the held-out split, and the task has no held-out prompts",
            fix="hold out prompts, or remove it",
        )
    first = [] if task.train_size == 0 else [task.train_prompt(0)]
    rewards.check_columns([*first, *(task.train if isinstance(task, PromptList) else ()), *task.heldout])
    STAGES[type(stage)].check_data(stage, task, rewards)


def check_policy(policy: Policy, recipe: Recipe, task_of: Callable[[Stage], Task]) -> None:
    """Raises an OncurveError for the first prompt, example or pair that the model can't read or has no positions for, and for
    a model that a stage can't train. Stages that do not use the policy send their prompts elsewhere. Sets the warnings of the
    policy.

    The training prompts of an endless task can't be listed; its held-out prompts stand for them.
    """
    checker = PromptChecker(policy)
    for stage in recipe.stages:
        if stage.uses_policy:
            task = task_of(stage)
            for prompt in _prompts_of(task, stage):
                checker.check_prompt(prompt, stage.max_new_tokens or 1)
            STAGES[type(stage)].check_policy(stage, task, checker)
    warning = checker.check_tools(has_demonstrations=any(isinstance(stage, Sft) for stage in recipe.stages))
    policy.warnings = () if warning is None else (warning,)


def _prompts_of(task: Task, stage: Stage) -> Iterator[Prompt]:
    if stage.updates_policy:
        yield from task.heldout
    if stage.samples:
        yield from (task.train_prompt(i) for i in range(task.train_size or 0))
