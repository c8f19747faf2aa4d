"""What each type of stage does: one line in a table. The trainer knows stages only as things that can step and be saved."""

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
from oncurve.recipe.schema.stages import Dpo, Grpo, Ppo, RejectionSample, RewardModel, Sft, Stage, TrainingFree, Trpo
from oncurve.records import StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
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
    """What the trainer asks of a stage: steps, and all that a checkpoint must hold beside the policy's weights."""

    @property
    def out_of_time(self) -> bool: ...

    def step(self, n: int) -> StepReport: ...

    def state(self) -> dict[str, dict[str, Tensor]]: ...

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None: ...


@dataclass(frozen=True, slots=True)
class StageContext:
    """What a stage is made from, beside its own section of the recipe."""

    recipe: Recipe
    task: Task
    sampler: Engine | None
    """None where no stage of the recipe uses the policy."""
    rewards: RewardMix
    folder: Path
    world: World = SINGLE_PROCESS

    @property
    def engine(self) -> Engine:
        assert self.sampler is not None, "a stage that uses the policy has one"
        return self.sampler

    @property
    def policy(self) -> Policy:
        return self.engine.policy


LOOPS: dict[type[Stage], Callable[[Any, StageContext], StageLoop]] = {
    Sft: lambda stage, parts: SftLoop(stage, parts.recipe.seed, parts.task, parts.policy, parts.folder, parts.world),
    Grpo: lambda stage, parts: (
        GrpoLoop(stage, parts.recipe.seed, parts.task, parts.engine, parts.rewards, parts.world)
        if stage.iterate is None
        else IterativeLoop(stage, parts.recipe, parts.task, parts.engine, parts.rewards, parts.folder, parts.world)
    ),
    RejectionSample: lambda stage, parts: RejectionLoop(
        stage, parts.recipe.seed, parts.task, parts.engine, parts.rewards, parts.folder, parts.world
    ),
    RewardModel: lambda stage, parts: RewardModelLoop(stage, parts.recipe.seed, parts.policy, parts.folder, world=parts.world),
    Dpo: lambda stage, parts: DpoLoop(stage, parts.recipe.seed, parts.policy, world=parts.world),
    TrainingFree: lambda stage, parts: TrainingFreeLoop(stage, parts.recipe.seed, parts.task, parts.rewards, parts.folder),
    Trpo: lambda stage, parts: TrpoLoop(stage, parts.recipe.seed, parts.task, parts.engine, parts.rewards, parts.world),
    Ppo: lambda stage, parts: PpoLoop(stage, parts.recipe.seed, parts.task, parts.engine, parts.rewards, parts.world),
}


def runs_on_all_ranks(stage: Stage) -> bool:
    """Whether all ranks take part in a stage. The others are the first rank's alone; the rest hear what came of them."""
    return not isinstance(stage, TrainingFree)


def unsharded_reason(stage: Stage) -> str | None:
    """Why a stage can't be taken by ranks of which none holds all weights; None where it can."""
    if not runs_on_all_ranks(stage):
        return "is the first rank's alone"
    if isinstance(stage, Trpo):
        return "differentiates the whole model twice"
    two = isinstance(stage, RewardModel | Ppo) or (isinstance(stage, Grpo) and stage.iterate is not None)
    return "trains a second model beside the policy" if two else None


def loop_for(stage: Stage, parts: StageContext) -> StageLoop:
    """The loop of a stage, ready for its first step."""
    return LOOPS[type(stage)](stage, parts)
