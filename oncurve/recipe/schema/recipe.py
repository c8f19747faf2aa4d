"""The recipe: everything that one run needs to know."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, SerializeAsAny

from oncurve.recipe.schema.base import Count, Section
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.sections import Engine, Evaluation, Reward, Scale, Sink, Task
from oncurve.recipe.schema.stages import AnyStage, RolloutStage, Stage


class Recipe(Section):
    """One complete run: the model, the task, the rewards, and the stages in order."""

    name: str = "run"
    """Prefix of the run folders: `runs/NAME-1`, `runs/NAME-2` …"""
    seed: Count = 0
    """Every random number of the run is a pure function of it."""
    model: Model = Model()
    """The model that is trained."""
    task: Task
    """The source of prompts."""
    rewards: tuple[Reward, ...] = ()
    """The rewards; the total is their weighted sum. Accuracy is defined by the reward named `answer`, else by the first
    verifiable one with a weight above 0."""
    stages: Annotated[tuple[SerializeAsAny[AnyStage], ...], Field(min_length=1)]
    """The stages, each of which starts from the result of the one before."""
    evaluation: Evaluation = Evaluation()
    """How the held-out split is evaluated: accuracy, or mean reward if there is no verifiable reward."""
    engine: Engine = Engine()
    """Settings of the native sampling engine."""
    scale: Scale = Scale()
    """Processes and machines that the run uses."""
    deterministic: bool = False
    """On a GPU: use only deterministic algorithms, which give the same bits every time, and print what they cost. A CPU always
    does."""
    threads: PositiveInt | None = None
    """CPU threads. Unset: the number of cores when a new run starts, recorded in it."""
    sinks: tuple[Sink, ...] = ()
    """Loggers that also get the curves: TensorBoard, Weights & Biases, trackio. The run's own database always has
    everything."""

    @property
    def uses_policy(self) -> bool:
        """Whether any stage needs the model. If none does, the model is neither loaded nor saved."""
        return any(stage.uses_policy for stage in self.stages)

    @property
    def rollout_stages(self) -> tuple[RolloutStage, ...]:
        """The stages that sample and reward completions, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, RolloutStage))

    def stage_to_grade(self, name: str | None = None) -> Stage:
        """The stage whose rewards grade a text: the one of this name, else the last that trains on samples, else the last that
        samples, else the last."""
        order = (lambda s: s.label == name, lambda s: s.samples and s.updates_policy, lambda s: s.samples, lambda s: True)
        return next(stage for chosen in order for stage in reversed(self.stages) if chosen(stage))
