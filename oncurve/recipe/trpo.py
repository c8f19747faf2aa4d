"""The stage `trpo`: the natural gradient itself, for models that fit."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.recipe.sampled import Advantage, Sampled
from oncurve.recipe.sections import NonNegative, Optimiser, impossible


class Trpo(Sampled):
    """Trust region policy optimisation (Schulman et al. 2015) on group advantages: a natural gradient step of bounded KL."""

    type: Literal["trpo"] = "trpo"
    """The stage's type."""
    advantage: Advantage = Advantage()
    """How a group is graded."""
    max_kl: PositiveFloat = 0.01
    """δ: mean KL(π_old‖π_new) per token that a step may cost. It takes the place of a learning rate."""
    cg_iterations: PositiveInt = 10
    """Iterations of conjugate gradient for (F + damping) x = g. More come nearer to the natural gradient; each is a pass."""
    damping: NonNegative = 0.1
    """Added to the Fisher matrix's diagonal: directions that it knows nothing of are not followed without bound."""
    fisher_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of a step's groups that the Fisher matrix is measured on: the paper's. The KL bound is checked on all of them."""
    backtracks: PositiveInt = 10
    """How often the line search may shorten the step before the step is given up."""
    backtrack_by: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """By how much each time."""

    @model_validator(mode="after")
    def _no_optimiser(self) -> Trpo:
        if self.optimiser != Optimiser(guard=self.optimiser.guard):
            because = "a trpo step is as long as its KL bound allows: there is no learning rate, no moment, no schedule"
            raise impossible("optimiser", "set", because=because, fix="leave all but its guard out, and set max_kl instead")
        return self
