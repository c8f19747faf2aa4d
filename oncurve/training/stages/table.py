"""The one table of stage types: how each is built and checked. The trainer knows stages only by the `StageLoop` protocol.

A new stage type is a section in `recipe/schema/stages.py` (its keys, and traits such as ``updates_policy``), a module of this
package, and a row here. An installed package adds one as a plug-in: a `StageType` with its section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import (
    STAGE_TYPES,
    Distil,
    Dpo,
    Grpo,
    Ppo,
    RejectionSample,
    RewardModel,
    Sft,
    Stage,
    StageBase,
    TrainingFree,
    Trpo,
)
from oncurve.records import StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
from oncurve.training.prompt_checker import PromptChecker
from oncurve.training.stages import distil, dpo, grpo, iterative_grpo, rejection_sample, reward_model, sft, training_free, trpo
from oncurve.training.stages.carry_over import check_carry_over
from oncurve.training.stages.distil import DistilLoop
from oncurve.training.stages.dpo import DpoLoop
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.stages.iterative_grpo import IterativeLoop
from oncurve.training.stages.ppo import PpoLoop
from oncurve.training.stages.rejection_sample import RejectionLoop
from oncurve.training.stages.reward_model import RewardModelLoop
from oncurve.training.stages.sft import SftLoop
from oncurve.training.stages.training_free import TrainingFreeLoop
from oncurve.training.stages.trpo import TrpoLoop


class StageLoop(Protocol):
    """A stage as the trainer sees it: steps, and what a checkpoint must hold besides the policy's weights."""

    @property
    def is_over(self) -> bool:
        """Whether the stage ends before its last step: its budget, time or patience is spent."""

    def step(self, n: int) -> StepReport: ...

    def state(self) -> dict[str, dict[str, Tensor]]: ...

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None: ...


@dataclass(frozen=True, slots=True)
class StageContext:
    """What a stage's loop is built from, besides its section of the recipe."""

    recipe: Recipe
    task: Task
    sampler: Engine | None
    """None if no stage of the recipe uses the policy."""
    rewards: RewardMix
    folder: Path
    world: World = SINGLE_PROCESS

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def engine(self) -> Engine:
        assert self.sampler is not None, "a stage that uses the policy has an engine"
        return self.sampler

    @property
    def policy(self) -> Policy:
        return self.engine.policy


def _no_data(stage: Any, task: Task, rewards: RewardMix) -> None:
    """The stage reads nothing but its prompts."""


def _no_limits(stage: Any, task: Task, checker: PromptChecker) -> None:
    """The stage can use every policy that can read its prompts."""


@dataclass(frozen=True, slots=True)
class StageType:
    """One row of the table. ``Any`` is the stage's own section. The plug-in of a package is one, with its ``section``."""

    build: Callable[[Any, StageContext], StageLoop]
    """Builds the loop, ready for its first step."""
    check_data: Callable[[Any, Task, RewardMix], None] = _no_data
    """Raises an OncurveError for data, rewards or endpoints that the stage can't use. Needs no model."""
    check_policy: Callable[[Any, Task, PromptChecker], None] = _no_limits
    """Raises an OncurveError for data that the policy can't read, and for a policy that the stage can't train."""
    section: type[StageBase] | None = None
    """The keys of a plug-in's stage; a built-in one is found by its section."""


class StageTable(dict[type[StageBase], StageType]):
    """Rows by section. A section without a row is that of an installed package, whose entry point is the row."""

    def __missing__(self, section: type[StageBase]) -> StageType:
        row: StageType = STAGE_TYPES[section.model_fields["type"].default]
        return row


def _build_grpo(stage: Grpo, c: StageContext) -> StageLoop:
    if stage.iterate is None:
        return GrpoLoop(stage, c.seed, c.task, c.engine, c.rewards, c.world)
    return IterativeLoop(stage, c.recipe, c.task, c.engine, c.rewards, c.folder, c.world)


def _check_grpo_data(stage: Grpo, task: Task, rewards: RewardMix) -> None:
    iterative_grpo.check_data(stage)
    grpo.check_curriculum(stage, task, rewards)
    check_carry_over(stage, [] if task.train_size == 0 else [task.train_prompt(0)])


STAGES: Mapping[type[StageBase], StageType] = StageTable(
    {
        Sft: StageType(
            lambda stage, c: SftLoop(stage, c.seed, c.task, c.policy, c.folder, c.world),
            check_data=lambda stage, task, rewards: sft.check_data(stage, task),
            check_policy=sft.check_policy,
        ),
        Grpo: StageType(_build_grpo, check_data=_check_grpo_data),
        Distil: StageType(
            lambda stage, c: DistilLoop(stage, c.recipe.model, c.seed, c.task, c.engine, c.rewards, c.world),
            check_data=distil.check_data,
            check_policy=distil.check_policy,
        ),
        Ppo: StageType(lambda stage, c: PpoLoop(stage, c.seed, c.task, c.engine, c.rewards, c.world)),
        Trpo: StageType(
            lambda stage, c: TrpoLoop(stage, c.seed, c.task, c.engine, c.rewards, c.world),
            check_policy=lambda stage, task, checker: trpo.check_memory(stage, checker.policy),
        ),
        Dpo: StageType(
            lambda stage, c: DpoLoop(stage, c.seed, c.policy, world=c.world),
            check_data=lambda stage, task, rewards: dpo.check_data(stage),
            check_policy=dpo.check_policy,
        ),
        RewardModel: StageType(
            lambda stage, c: RewardModelLoop(stage, c.seed, c.policy, c.folder, world=c.world),
            check_data=lambda stage, task, rewards: reward_model.check_data(stage),
            check_policy=reward_model.check_policy,
        ),
        RejectionSample: StageType(
            lambda stage, c: RejectionLoop(stage, c.seed, c.task, c.engine, c.rewards, c.folder, c.world),
            check_data=lambda stage, task, rewards: rejection_sample.check_rewards(stage, rewards),
        ),
        TrainingFree: StageType(
            lambda stage, c: TrainingFreeLoop(stage, c.seed, c.task, c.rewards, c.folder),
            check_data=lambda stage, task, rewards: training_free.check_data(stage),
        ),
    }
)


def build_loop(stage: Stage, context: StageContext) -> StageLoop:
    """The loop of a stage, ready for its first step."""
    return STAGES[type(stage)].build(stage, context)
