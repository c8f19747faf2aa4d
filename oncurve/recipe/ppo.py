"""The stage `ppo`: what GRPO is measured against."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, model_validator

from oncurve.recipe.sampled import Surrogate
from oncurve.recipe.sections import Count, NonNegative, Section, Share, impossible


class Critic(Section):
    """The network that guesses the reward to come, and how it is trained."""

    trunk: Literal["separate", "shared"] = "separate"
    """A backbone of the policy's size for itself, or the policy's own with one more head: less memory, but two masters."""
    learning_rate: PositiveFloat | None = None
    """Unset: as the policy's. A critic starts from nothing, so five to ten times as much is usual."""
    clip: NonNegative = 0.2
    """A value moves at most this far in one step before its loss is cut off; 0: no bound. In units of reward."""
    loss_weight: PositiveFloat = 0.5
    """Weight of the value loss beside the policy's in a shared trunk."""
    warmup_steps: Count = 0
    """The stage's first steps that train the critic alone, so that the policy is not led by a critic that knows nothing."""


class Ppo(Surrogate):
    """Proximal policy optimisation (Schulman et al. 2017): advantages from a learned critic instead of the group."""

    type: Literal["ppo"] = "ppo"
    """The stage's type."""
    gamma: Share = 1.0
    """γ: discount of later rewards by token. 1 is usual for completions, which end by themselves."""
    gae_lambda: Share = 0.95
    """λ of generalised advantage estimation: 1 trusts rewards (no bias), 0 trusts the critic (little variance)."""
    whiten: bool = True
    """Shift and divide advantages so that the step's tokens have mean 0 and std 1."""
    reduction: Literal["tokens", "completions"] = "tokens"
    """The loss is a mean over all tokens of the step, or over completions of their means (as GRPO's)."""
    critic: Critic = Critic()
    """The network that guesses the reward to come."""

    @model_validator(mode="after")
    def _some_steps_train_the_policy(self) -> Ppo:
        if self.critic.warmup_steps >= self.steps:
            because = f"the stage has {self.steps} steps, and none would train the policy"
            raise impossible(
                "critic.warmup_steps", self.critic.warmup_steps, because=because, fix=f"use less than {self.steps}"
            )
        return self
