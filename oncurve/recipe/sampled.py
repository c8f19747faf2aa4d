"""The sections of stages that sample completions and reward them: what grpo, ppo and trpo have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.recipe.sections import Count, NonNegative, Reward, Sampling, Section, Share, StageBase

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "whiten", "none"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]


class Clip(Section):
    """An override of the objective's own clip range."""

    low: NonNegative
    """ε_low: ratios under 1 − low are clipped where the advantage is negative."""
    high: NonNegative
    """ε_high: ratios over 1 + high are clipped where the advantage is positive."""
    dual: PositiveFloat | None = None
    """Two-sided clip: an upper bound on the ratio itself where the advantage is negative (TRL's `delta`); above 1 + high."""


class Kl(Section):
    """The pull toward the reference."""

    beta: NonNegative = 0.0
    """Weight of the KL term. 0: no reference is held and no pass is spent on it."""
    estimator: KlEstimator | None = None
    """Schulman's estimators of KL(π_θ‖π_ref) from samples; k3 is never negative. Unset: k3 in the loss, k1 in the reward, where
    the sum over a completion is then exactly its log-ratio."""
    where: KlPlace | None = None
    """In the loss (GRPO), or subtracted from each completion's reward (RLOO, PPO). Unset: the objective's own, which is the
    reward for rloo, reinforce, reinforce_pp and the stage ppo, and the loss for the others."""
    ratio_weighted: bool = False
    """Weight each token's KL by its ratio: unbiased also when μ > 1."""
    refresh_every: Count = 0
    """Iterative GRPO: every so many steps the reference becomes the policy; 0: never."""
    on_cpu: bool = False
    """Keep the reference's weights in the CPU's memory and put them into the policy's place for its pass: no second copy on a
    GPU, for the way there and back in each step. Under LoRA there is no second copy anyway."""


class Advantage(Section):
    """How a group is graded."""

    scale: Scale | None = None
    """Divide by the group's std (GRPO), by one std over the batch, or by nothing (Dr. GRPO); or `whiten`: shift and divide, so
    that the step's tokens have mean 0 and std 1 (REINFORCE++). Unset: the objective's own, which is none for dr_grpo, rloo and
    reinforce, whiten for reinforce_pp and group for the others."""
    baseline: Baseline | None = None
    """Subtract the group's mean, the mean of the others (RLOO), or nothing (REINFORCE). Unset: the objective's own, which is
    leave_one_out for rloo, none for reinforce and reinforce_pp, and mean for the others."""
    eps: PositiveFloat = 1e-4
    """Added to the std."""


class Overlong(Section):
    """DAPO's soft overlong punishment: a length beyond limit − buffer is punished linearly, down to −1 at the limit."""

    buffer: PositiveInt
    """Tokens before the limit over which the punishment grows."""
    weight: float = 1.0
    """Its weight in the total reward."""


SAMPLED_TYPES = ("grpo", "ppo", "trpo")
"""The types of such stages, for readers that have a run's tables and no recipe."""


class Sampled(StageBase):
    """A stage whose every step samples groups of completions and rewards them."""

    steps: PositiveInt = 100
    """Steps: each samples, scores, grades and updates."""
    tokens: PositiveInt | None = None
    """Stop after the step in which this many tokens have been sampled, even if steps are left: for comparisons at like cost."""
    seconds: PositiveFloat | None = None
    """Stop after the step in which this many seconds of training have passed (such a run is not repeatable)."""
    prompts_per_step: PositiveInt = 16
    """P: prompts asked in a step."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """G: completions of each prompt. More give a better baseline and more cost; 8 to 64 is usual."""
    rewards: tuple[Reward, ...] | None = None
    """Rewards of this stage's own; unset: the recipe's."""
    mask_cut: bool = False
    """Leave cut completions out of the loss (DAPO's overlong filtering)."""
    overlong: Overlong | None = None
    """Soft punishment of completions near the length limit."""
    max_failure_share: Share = 0.5
    """The run stops, with a checkpoint, when more than this share of a step's completions could not be rewarded."""
    sampling: Sampling = Sampling()
    """How completions are drawn while training."""


class Surrogate(Sampled):
    """A sampling stage that climbs a clipped surrogate by AdamW: what grpo and ppo have in common."""

    clip: Clip | None = None
    """Overrides the objective's own clip range."""
    kl: Kl = Kl()
    """The pull toward the reference."""
    updates_per_step: PositiveInt = 1
    """μ: passes over a step's samples. 1 is on-policy, and needs no pass for old log-probs."""
    minibatches: PositiveInt = 1
    """Optimiser updates per pass: the step's groups are split into so many mini-batches."""
    entropy_bonus: float = 0.0
    """Weight of the mean token entropy, added to the objective."""
    mismatch_limit: Annotated[float, Field(gt=1.0)] | None = None
    """Leave a completion out of the surrogate where sampler and learner disagree on it: where the geometric mean of
    π_learner/π_sampler over its tokens lies outside 1/limit … limit. It still counts in the totals. Unset: off."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: weight each token by min(π_learner/π_sampler, cap). Unset: off where the learner samples
    itself; 2 with `scale.engine = "vllm"` or staleness, unless `mismatch_limit` is set."""
