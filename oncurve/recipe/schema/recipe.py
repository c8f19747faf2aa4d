"""The section `[scale]`: over how many processes a run is spread, and who does what in them. Everything else stays as it is.

Everything a recipe can say: the stages, and the recipe that lists them. Sections are in sections.py and sampled.py.

A default lives in its section and nowhere else, with its reason in the docstring under the field.

The section of a recipe that names where else a run's numbers go. The run's own database has everything in any case.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from oncurve.recipe.schema.base import Count, Section
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.sections import Engine, Evaluation, Reward, Scale, Sink, Task
from oncurve.recipe.schema.stages import (
    RolloutStage,
    Stage,
)


class Recipe(Section):
    """One run, from the first weight to the last: the model, what is asked, what is rewarded, and the stages in order."""

    name: str = "run"
    """Runs are called by it: `runs/NAME-1`, `runs/NAME-2` …"""
    seed: Count = 0
    """Every random number of the run is a pure function of it."""
    model: Model = Model()
    """Which model is trained."""
    task: Task
    """What is asked."""
    rewards: tuple[Reward, ...] = ()
    """What is rewarded: the total is the weighted sum. The first reward of weight above 0 decides what counts as solved, unless
    one is named `answer`."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    """The stages, each starting from the one before."""
    evaluation: Evaluation = Evaluation()
    """How held-out accuracy, or reward where no rule says what is right, is measured."""
    engine: Engine = Engine()
    """The native engine's settings."""
    scale: Scale = Scale()
    """Over how many processes and machines the run is spread."""
    deterministic: bool = False
    """On a GPU: use only algorithms that give the same bits each time, and print what they cost. A CPU does so anyway."""
    threads: PositiveInt | None = None
    """CPU threads; unset: the machine's cores, frozen into the run."""
    sinks: tuple[Sink, ...] = ()
    """Where else the curves go: TensorBoard, Weights & Biases, trackio. The run's own database has everything in any case."""

    @property
    def uses_policy(self) -> bool:
        """Whether any stage needs the model; where none does it is neither loaded nor written."""
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
