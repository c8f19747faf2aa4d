"""Everything a recipe can say: the stages, and the recipe that lists them. Their common sections are in sections.py.

A default lives in its section and nowhere else, with its reason in the docstring under the field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.recipe.sections import (
    Count,
    Engine,
    Model,
    NonNegative,
    Optimiser,
    Reward,
    Sampling,
    Section,
    SftOptimiser,
    Share,
    StageBase,
    Task,
)


class Sft(StageBase):
    """Supervised training on worked examples: loss on the completion's tokens only."""

    type: Literal["sft"] = "sft"
    """The stage's type."""
    examples: PositiveInt | None = None
    """Use only the first so many worked examples of the task; unset: all it has."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Examples in an update. Drawn in epochs, each shuffled by (seed, epoch)."""
    seconds: PositiveFloat | None = None
    """Stop after this many seconds even if steps are left (for comparisons at equal time; such a run is not repeatable)."""
    optimiser: SftOptimiser = SftOptimiser()
    """AdamW and its schedule."""


Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
ObjectiveName = Literal[
    "grpo", "grpo_sequence", "dapo", "dr_grpo", "bnpo", "gspo", "gspo_token", "cispo", "sapo", "rloo", "reinforce"
]


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
    reward for rloo and reinforce and the loss for the others."""
    ratio_weighted: bool = False
    """Weight each token's KL by its ratio: unbiased also when μ > 1."""
    refresh_every: Count = 0
    """Iterative GRPO: every so many steps the reference becomes the policy; 0: never."""


class Advantage(Section):
    """How a group is graded."""

    scale: Scale | None = None
    """Divide by the group's std (GRPO), by one std over the batch, or by nothing (Dr. GRPO). Unset: the objective's own, which
    is none for dr_grpo, rloo and reinforce and group for the others."""
    baseline: Baseline | None = None
    """Subtract the group's mean, the mean of the others (RLOO), or nothing (REINFORCE). Unset: the objective's own, which is
    leave_one_out for rloo, none for reinforce and mean for the others."""
    eps: PositiveFloat = 1e-4
    """Added to the std."""


class Overlong(Section):
    """DAPO's soft overlong punishment: a length beyond limit − buffer is punished linearly, down to −1 at the limit."""

    buffer: PositiveInt
    """Tokens before the limit over which the punishment grows."""
    weight: float = 1.0
    """Its weight in the total reward."""


class Grpo(StageBase):
    """Group relative policy optimisation (DeepSeekMath, 2024) and its relatives."""

    type: Literal["grpo"] = "grpo"
    """The stage's type."""
    steps: PositiveInt = 100
    """Steps: each samples, scores, grades and updates."""
    prompts_per_step: PositiveInt = 16
    """P: prompts asked in a step."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """G: completions of each prompt. More give a better baseline and more cost; 8 to 64 is usual."""
    objective: ObjectiveName = "grpo"
    """A composition of ratio, surrogate and reduction; `oncurve recipe explain grpo.objective` shows the table."""
    clip: Clip | None = None
    """Overrides the objective's own clip range."""
    kl: Kl = Kl()
    """The pull toward the reference."""
    advantage: Advantage = Advantage()
    """How a group is graded."""
    rewards: tuple[Reward, ...] | None = None
    """Rewards of this stage's own; unset: the recipe's."""
    updates_per_step: PositiveInt = 1
    """μ: passes over a step's samples. 1 is on-policy, and needs no pass for old log-probs."""
    minibatches: PositiveInt = 1
    """Optimiser updates per pass: the step's groups are split into so many mini-batches."""
    entropy_bonus: float = 0.0
    """Weight of the mean token entropy, added to the objective."""
    mask_cut: bool = False
    """Leave cut completions out of the loss (DAPO's overlong filtering)."""
    overlong: Overlong | None = None
    """Soft punishment of completions near the length limit."""
    no_signal: Literal["drop", "keep", "resample"] = "drop"
    """Groups of equal rewards: not forwarded (`drop`; they still count in the totals), forwarded anyway (`keep`), or replaced
    by fresh prompts until the step is full (`resample`: DAPO's dynamic sampling)."""
    max_resample_rounds: PositiveInt = 4
    """With `resample`: rounds of fresh prompts before the step goes on with what it has."""
    max_failure_share: Share = 0.5
    """The run stops, with a checkpoint, when more than this share of a step's completions could not be rewarded."""
    length_budget: PositiveInt | None = None
    """The constant that dr_grpo divides by; unset: `sampling.max_new_tokens`."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: weight each token by min(π_learner/π_sampler, cap). Unset: off."""
    sampling: Sampling = Sampling()
    """How completions are drawn while training."""
    optimiser: Optimiser = Optimiser()
    """AdamW and its schedule."""


Stage = Annotated[Sft | Grpo, Field(discriminator="type")]


class Evaluation(Section):
    """How held-out accuracy is measured."""

    temperature: NonNegative = 0.0
    """0: greedy, the same each time."""
    samples: PositiveInt = 1
    """Completions of each held-out problem."""
    max_new_tokens: PositiveInt | None = None
    """Length limit; unset: the stage's own, or 256."""


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
    """How held-out accuracy is measured."""
    engine: Engine = Engine()
    """The native engine's settings."""
    threads: PositiveInt | None = None
    """CPU threads; unset: the machine's cores, frozen into the run."""
