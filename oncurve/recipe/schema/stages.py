"""The stages of a recipe, one class each. A stage's traits (does it sample, does it use or update the policy) are class
attributes, so that no other module has to list stage types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from oncurve.objective_specs import (
    CORRECTIONS,
    OBJECTIVE_SPECS,
    CorrectionName,
    DivergenceName,
    KlPlace,
    ObjectiveName,
    ObjectiveSpec,
)
from oncurve.plugins import Registry
from oncurve.recipe.schema.base import Count, NonNegative, Section, Share, conflict
from oncurve.recipe.schema.sections import (
    Advantage,
    Clip,
    EntropyControls,
    Kl,
    Optimiser,
    Overlong,
    Reward,
    RewardModelOptimiser,
    Sampling,
    SftOptimiser,
    Task,
)


class StageBase(Section):
    """The keys of every stage."""

    type: str
    """The stage's type."""
    name: str | None = None
    """Unique name of the stage, for `--set NAME.key=value`. Unset: its type."""
    task: Task | None = None
    """A task for this stage only. Unset: the recipe's."""
    optimiser: Optimiser = Optimiser()
    """AdamW and its schedule."""
    tokens_per_pack: PositiveInt = 16384
    """Tokens per forward pass (one micro-batch). It sets the memory; the gradient does not depend on it."""
    checkpointing: Literal["auto", "on", "off"] = "auto"
    """Activation checkpointing: recompute activations in the backward pass instead of keeping them, for less memory and about a
    third more time. `auto`: on a GPU, for as many layers of the policy as the memory requires. The gradient is the same."""
    eval_every: Count = 0
    """Evaluate on the held-out split every N steps, in addition to the end of the stage; 0: only at the end. Without a
    verifiable reward, the mean reward is measured instead, also once before the first step."""
    save_every: Count = 0
    """Write a checkpoint every N steps, in addition to the end of the stage; 0: only at the end."""
    keep_checkpoints: PositiveInt = 3
    """Number of checkpoints to keep per stage: the newest ones. The last one of a stage is always kept."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best value of this metric: `heldout_accuracy` (measured every `eval_every` steps; the
    held-out reward if there is no verifiable reward), `reward`, or another metric of the stage. Of losses, KLs, errors and
    failure shares the lowest value is best, of rewards and accuracies the highest; metrics that are neither, such as lengths,
    are refused. Unset: none."""

    samples: ClassVar[bool] = False
    """Each step samples groups of completions and scores them (a `RolloutStage`)."""
    uses_policy: ClassVar[bool] = True
    """The stage needs the recipe's model."""
    updates_policy: ClassVar[bool] = True
    """The stage changes the policy. Only then is the policy evaluated on the held-out split."""
    runs_on_all_ranks: ClassVar[bool] = True
    """If false, rank 0 runs the stage and broadcasts the result."""
    corrects_stale_samples: ClassVar[bool] = False
    """The stage can weight samples of older weights by their importance (`importance_cap`)."""

    @property
    def label(self) -> str:
        return self.name or self.type

    @property
    def algorithm(self) -> str:
        """The name in `oncurve compare` and `oncurve plan`: the stage's type, or the objective of a grpo stage."""
        return self.type

    @property
    def optimisers(self) -> tuple[Optimiser, ...]:
        """The settings of every optimiser that the stage runs."""
        return (self.optimiser,)

    @property
    def needs_importance_cap(self) -> bool:
        """Whether the stage has no correction for a sampler that differs from the learner."""
        return False

    @property
    def unsharded_reason(self) -> str | None:
        """Why the stage needs every weight on each rank (`scale.shard = "full"` is refused); None if it does not."""
        return None

    @property
    def max_new_tokens(self) -> int | None:
        """The length limit of completions; None if the stage does not sample."""
        return None

    @property
    def time_limit_s(self) -> float | None:
        """Seconds after which the stage ends even if steps are left."""
        return None

    @property
    def heldout_patience(self) -> int | None:
        """Evaluations on the held-out split without a better result after which the stage ends; None: it does not."""
        return None

    @property
    def updates_in_step(self) -> int:
        """Optimiser updates that a step makes."""
        return 1


class Sft(StageBase):
    """Supervised fine-tuning on demonstrations, with the loss on the completion's tokens only."""

    type: Literal["sft"] = "sft"
    """The stage's type."""
    data: str | None = None
    """A file of demonstrations with the columns `prompt` and `completion`, or with complete chats; or `stage:NAME` for the
    samples that a `rejection_sample` stage kept. Unset: the task's own demonstrations."""
    examples: PositiveInt | None = None
    """Use only the first N demonstrations. Unset: all."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Examples per update. They come in epochs, each shuffled by (seed, epoch)."""
    seconds: PositiveFloat | None = None
    """Stop after this many seconds even if steps are left (for comparisons at equal time; such a run is not repeatable)."""
    heldout_share: Share = 0.0
    """Fraction of the examples held out: their loss is measured every `eval_every` steps and at the end (`heldout_loss`)."""
    patience: PositiveInt | None = None
    """Stop early if `heldout_loss` has not improved for this many evaluations; needs `heldout_share` and `eval_every`."""
    optimiser: SftOptimiser = SftOptimiser()
    """AdamW and its schedule."""

    @property
    def time_limit_s(self) -> float | None:
        return self.seconds


class RolloutStage(StageBase):
    """The keys of every stage that samples groups of completions and scores them."""

    steps: PositiveInt = 100
    """Steps, each of which samples, scores, grades and updates."""
    tokens: PositiveInt | None = None
    """Stop after the step in which this many tokens have been sampled, even if steps are left (for comparisons at equal
    cost). training_free counts words: an endpoint returns texts."""
    seconds: PositiveFloat | None = None
    """Stop after the step in which this many seconds of training have passed (such a run is not repeatable)."""
    patience: PositiveInt | None = None
    """Stop early if the held-out result (accuracy, or mean reward if there is no verifiable reward) has not improved for this
    many evaluations; needs `eval_every`. Unset: all steps are made."""
    prompts_per_step: PositiveInt = 16
    """P: prompts per step."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """G: completions of each prompt. Larger groups give a better baseline and cost more; 8 to 64 is usual."""
    rewards: tuple[Reward, ...] | None = None
    """Rewards for this stage only. Unset: the recipe's."""
    mask_cut: bool = False
    """Leave truncated completions out of the loss (DAPO's overlong filtering)."""
    overlong: Overlong | None = None
    """Soft penalty for completions close to the length limit."""
    max_failure_share: Share = 0.5
    """Write a checkpoint and stop the run if more than this fraction of a step's completions could not be scored."""
    sampling: Sampling = Sampling()
    """How completions are sampled while training."""
    samples: ClassVar[bool] = True

    @property
    def records_routing(self) -> bool:
        """Whether the sampler must record which experts each token took."""
        return False

    @property
    def spec(self) -> ObjectiveSpec:
        """The objective whose defaults the stage has: GRPO's, unless the stage has a key for it."""
        return OBJECTIVE_SPECS["grpo"]

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.max_new_tokens

    @property
    def heldout_patience(self) -> int | None:
        return self.patience

    @property
    def time_limit_s(self) -> float | None:
        return self.seconds


class PolicyGradientStage(RolloutStage):
    """The keys of the stages that maximise a clipped surrogate with AdamW: grpo and ppo."""

    clip: Clip | None = None
    """A clip range instead of the objective's own."""
    kl: Kl = Kl()
    """The KL penalty toward the reference."""
    updates_per_step: PositiveInt = 1
    """μ: passes over a step's samples. 1 is on-policy and needs no extra forward pass for the old log-probs."""
    minibatches: PositiveInt = 1
    """Optimiser updates per pass: the step's groups are split into this many mini-batches."""
    entropy_bonus: float = 0.0
    """Weight of the mean token entropy in the objective."""
    entropy: EntropyControls = EntropyControls()
    """Controls that keep the policy's entropy from collapsing."""
    mismatch_limit: Annotated[float, Field(gt=1.0)] | None = None
    """Leave a completion out of the surrogate if sampler and learner disagree on it: if the geometric mean of
    π_learner/π_sampler over its tokens is outside 1/limit … limit. It still counts in the totals by which the loss is
    divided. Unset: off."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: weight each token by min(π_learner/π_sampler, cap). Unset: off if the learner itself
    samples; 2 with `scale.engine = "vllm"`, `engine.kv_dtype = "fp8"`, staleness or `carry_over`, unless `mismatch_limit` or
    `correction` is set."""
    correction: CorrectionName | None = Field(
        default=None,
        description="A named correction for a sampler that differs from the learner, instead of `importance_cap` and "
        "`mismatch_limit`, with w = π_learner/π_sampler: "
        + "; ".join(f"`{name}`: {c.sentence} ({c.paper})" for name, c in CORRECTIONS.items())
        + ". What is dropped still counts in the totals by which the loss is divided. Unset: none.",
    )
    off_policy_kl: PositiveFloat | None = None
    """Off-policy sequence mask (DeepSeek-V3.2): leave tokens of negative advantage out of the surrogate if the mean of log
    π_sampler − log π over their completion exceeds this (0.5 is usual). They still count in the totals by which the loss is
    divided. Unset: off."""
    corrects_stale_samples: ClassVar[bool] = True

    @property
    def needs_importance_cap(self) -> bool:
        return self.importance_cap is None and self.mismatch_limit is None and self.correction is None

    @property
    def kl_place(self) -> KlPlace:
        """Where the KL term goes: as the recipe says, else as the objective's paper does."""
        return self.kl.where or self.spec.kl_place

    @property
    def updates_in_step(self) -> int:
        return self.updates_per_step * self.minibatches


class Iteration(Section):
    """Iterative GRPO with a reward model that follows the policy (DeepSeekMath, 2024, algorithm 1).

    In each step the labeller compares the best completion of every group with the worst. After each round of `every` steps the
    reward model is updated on these comparisons, mixed with earlier ones, and the reference of the KL term becomes the policy.
    The comparisons are written to `comparisons/NAME.jsonl` in the run's folder.
    """

    every: PositiveInt
    """Steps per round."""
    reward: str = "model"
    """Name of the stage's reward of type `model` that is trained."""
    labeller: Reward | None = None
    """The reward that labels the comparisons: a verifiable one such as `math`, a `judge` for AI feedback, or a `python`
    function. Unset: people, by their rankings and disputed rewards in the studio; a round without labels then trains
    nothing."""
    updates: PositiveInt = 8
    """Optimiser updates of the reward model per round."""
    batch_size: PositiveInt = 32
    """Comparisons per update."""
    past_share: Share = 0.1
    """Fraction of each update's comparisons that comes from earlier rounds, and from the reward model's first training data if
    an earlier stage trained it."""
    optimiser: RewardModelOptimiser = RewardModelOptimiser(schedule="constant")
    """AdamW of the reward model. Its moments are kept across rounds."""


class Curriculum(Section):
    """Selects prompts by how often the policy solves them, instead of one shuffled epoch after the other.

    A group whose completions are all right or all wrong teaches nothing. Prompts that were sampled before are selected in
    proportion to p(1 − p), where p is their running pass rate; this needs a verifiable reward. Unseen prompts of a task with
    levels of difficulty are selected by the pass rate of their level, so that difficulty rises as levels are solved.
    """

    unseen: Share = 0.25
    """Fraction of each step's prompts that have not been sampled before, as long as there are any."""
    memory: Share = 0.5
    """How much a prompt's earlier results count each time it is sampled again: 1 counts all alike, 0 only the newest."""
    pools: tuple[NonNegative, NonNegative, NonNegative] | None = None
    """Weights of hard, medium and easy prompts, instead of p(1 − p). A pool of weight 0 is used if the others are empty."""
    medium: tuple[Share, Share] = (0.2, 0.8)
    """With `pools`: pass rates of the medium pool. Prompts below are hard, prompts above are easy."""
    estimates: str | None = None
    """A file of first pass rates, written by `oncurve probe RECIPE --estimates FILE`. Unset: none are known."""
    first_samples: PositiveInt | None = None
    """Adaptive group size: sample this many completions of each prompt first. The rest of the step's `prompts_per_step ×
    group_size` completions are divided evenly among the prompts whose first completions disagree. Unset: every group has
    `group_size`."""
    max_group_size: PositiveInt | None = None
    """With `first_samples`: the largest group. What no group can take goes to the prompts whose first completions agree. Unset:
    4 × `group_size`."""

    @model_validator(mode="after")
    def _check_pools(self) -> Curriculum:
        if self.medium[0] > self.medium[1]:
            because, fix = "the lower bound is above the upper one", f"use [{self.medium[1]:g}, {self.medium[0]:g}]"
            raise conflict("medium", list(self.medium), because=because, fix=fix)
        if self.pools is None and self.medium != type(self).model_fields["medium"].default:
            because = "it divides prompts into pools, and pools is not set"
            raise conflict("medium", list(self.medium), because=because, fix="set pools = [0.1, 1, 0.1], or remove it")
        if self.pools is not None and not any(self.pools):
            because = "no prompt would ever be preferred"
            raise conflict("pools", list(self.pools), because=because, fix="give the medium pool a weight: [0.1, 1, 0.1]")
        if self.max_group_size is not None and self.first_samples is None:
            because = "groups have different sizes only if first_samples is set"
            raise conflict("max_group_size", self.max_group_size, because=because, fix="set first_samples, or remove it")
        return self


def _accept_plugin(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """A built-in objective, or the plug-in of an installed package, which is imported here."""
    if isinstance(value, str) and value not in OBJECTIVE_SPECS.built_in and value in OBJECTIVE_SPECS:
        assert OBJECTIVE_SPECS[value] is not None
        return value
    return validate(value)


class Grpo(PolicyGradientStage):
    """Group relative policy optimisation (DeepSeekMath, 2024) and its variants."""

    type: Literal["grpo"] = "grpo"
    """The stage's type."""
    objective: Annotated[ObjectiveName, WrapValidator(_accept_plugin)] = "grpo"
    """A combination of ratio, surrogate and reduction; `oncurve recipe explain grpo.objective` shows the table."""
    advantage: Advantage = Advantage()
    """How a group is graded."""
    no_signal: Literal["drop", "keep", "resample"] = "drop"
    """What to do with groups without signal, whose advantages are all 0, such as those of equal rewards. `drop`: do not forward
    them, but count them in the totals. `keep`: forward them anyway. `resample`: replace them by fresh prompts until the step
    is full (DAPO's dynamic sampling)."""
    max_resample_rounds: PositiveInt = 4
    """With `resample`: rounds of fresh prompts before the step continues with the groups that it has."""
    length_budget: PositiveInt | None = None
    """The constant that dr_grpo divides by. Unset: `sampling.max_new_tokens`."""
    dro_tau: PositiveFloat | None = None
    """τ of dro: weight of the squared log-ratio to the old policy. Unset: 1."""
    iterate: Iteration | None = None
    """Iterative GRPO: a reward model that learns from fresh comparisons as the policy changes. Unset: reward models are not
    trained in this stage."""
    curriculum: Curriculum | None = None
    """Selects prompts by their pass rate. Unset: prompts come in epochs, each shuffled by (seed, epoch)."""
    carry_over: Count = 0
    """A step ends as soon as only this many groups are unfinished. They continue in the next step, with its weights, so that a
    few long answers don't hold up a step. The run records which weights sampled which token, and `importance_cap` corrects for
    older ones. The last step finishes all. 0: every step finishes its groups."""
    routing_replay: bool = False
    """Mixtures of experts: in the learner, route each token to the experts that it took in the sampler, so that both compute
    the same log-prob. Routers keep their gradient. Useful in 16 bits, where a router near a tie may choose differently in the
    two; the recorded choices take memory (2 bytes for each token, layer and chosen expert)."""
    balance_loss: NonNegative = 0.0
    """Mixtures of experts: weight of the balance loss (Switch Transformer), which keeps the load of experts even; 0.001 is
    usual. It counts the tokens that the policy sampled."""

    @property
    def records_routing(self) -> bool:
        """Whether the sampler must record which experts each token took."""
        return self.routing_replay or self.balance_loss > 0

    @property
    def algorithm(self) -> str:
        return self.objective

    @property
    def optimisers(self) -> tuple[Optimiser, ...]:
        return (self.optimiser,) if self.iterate is None else (self.optimiser, self.iterate.optimiser)

    @property
    def spec(self) -> ObjectiveSpec:
        return OBJECTIVE_SPECS[self.objective]

    @property
    def unsharded_reason(self) -> str | None:
        return None if self.iterate is None else "trains a second model next to the policy"


SELF = "self"
"""`teacher.model` of a policy that teaches itself."""


class Teacher(Section):
    """A teacher: a model with the policy's vocabulary, an endpoint, or the policy itself with more context."""

    model: str
    """A folder in Hugging Face format or a hub id; with an endpoint, the model's name there. `self`: the policy's own
    weights, which needs `context`. If it is `model.source` of a LoRA policy, no second copy is loaded: the adapter is disabled
    for the teacher's pass."""
    name: str | None = None
    """The value of `teacher_column` that selects this teacher. Unset: `model`."""
    context: str | None = None
    """The prompt that the teacher reads instead of the policy's, with `{prompt}` and the row's columns in braces, such as
    `{prompt}\\nHint: {answer}`. `{feedback}` stands for the reasons that the rewards gave for the completion's scores. For
    chats the context replaces the last message's text. Unset: the policy's prompt."""
    on_cpu: bool = False
    """Keep the teacher's weights in CPU memory, and copy them to the GPU for its pass."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint that returns log-probs of the prompt (`echo`), such as that of `oncurve serve`:
    `http://localhost:8000/v1`. Unset: the model runs in this process."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's API key. The key itself is never written to a recipe or a log."""
    top: Annotated[int, Field(ge=1, le=20)] = 20
    """Endpoint: log-probs of this many most likely tokens are requested at each position."""
    request_seconds: PositiveFloat = 120.0
    """Endpoint: time limit of a request."""
    retries: Count = 4
    """Endpoint: retries of a failed request, with growing delays."""
    at_once: Annotated[int, Field(ge=1)] = 16
    """Endpoint: number of concurrent requests."""

    @property
    def label(self) -> str:
        return self.name or self.model

    @model_validator(mode="after")
    def _check_self(self) -> Teacher:
        if self.model == SELF and self.base_url is None and self.context is None:
            because = "without more context the policy has nothing to teach itself"
            raise conflict("context", "unset", because=because, fix='set it, such as "{prompt}\\nHint: {answer}"')
        return self


class Distil(Grpo):
    """Distillation on the policy's own samples (Agarwal et al. 2023): in each step the policy samples, and learns to predict
    the tokens of its samples as a teacher does; optionally from rewards too.

    The keys of `grpo` apply to the part that learns from rewards.
    """

    type: Literal["distil"] = "distil"  # type: ignore[assignment]
    """The stage's type."""
    teacher: Teacher
    """The teacher."""
    teachers: tuple[Teacher, ...] = ()
    """Further teachers, for rows whose `teacher_column` names them."""
    teacher_column: str | None = None
    """Column of the task that names each row's teacher. Unset, or a row without it: `teacher`."""
    divergence: DivergenceName = "reverse_kl"
    """Between policy and teacher at each token: `reverse_kl` KL(policy‖teacher), which concentrates on the teacher's likely
    tokens; `forward_kl` KL(teacher‖policy), which covers all of them; or `jsd` between the two."""
    jsd_beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """β of jsd: towards 0 it behaves like the forward, towards 1 like the reverse KL."""
    teach_by: Literal["gradient", "advantage"] = "gradient"
    """`gradient`: the divergence over the complete vocabulary is a term of the loss. `advantage`: each sampled token gets log
    π_teacher − log π as an advantage, which needs the teacher's log-prob of that token only."""
    teacher_weight: PositiveFloat = 1.0
    """Weight of the divergence, or of the teacher's advantages."""
    reward_weight: NonNegative = 0.0
    """Weight of the rewards' advantages. 0: distillation alone; rewards are recorded only."""

    @property
    def algorithm(self) -> str:
        return self.type

    @property
    def all_teachers(self) -> tuple[Teacher, ...]:
        return (self.teacher, *self.teachers)

    @property
    def needs_importance_cap(self) -> bool:
        return bool(self.reward_weight or self.teach_by == "advantage") and super().needs_importance_cap


class Critic(Section):
    """The value network, and how it is trained."""

    trunk: Literal["separate", "shared"] = "separate"
    """`separate`: a backbone of the policy's size for the critic alone. `shared`: the policy's backbone with a value head,
    which saves memory but trains one backbone for two losses."""
    learning_rate: PositiveFloat | None = None
    """Unset: the policy's. The value head starts at 0, so five to ten times the policy's is usual."""
    clip: NonNegative = 0.2
    """Clip range of the value loss around the old value, in units of reward; 0: no clip."""
    loss_weight: PositiveFloat = 0.5
    """Weight of the value loss relative to the policy loss in a shared trunk."""
    warmup_steps: Count = 0
    """First steps of the stage that train only the critic, so that the policy does not learn from an untrained one."""
    normalise: bool = False
    """Values are mean + std × the head's output, with mean and std of the rewards of the stage's first step. The critic then
    starts at the mean reward; otherwise it starts at 0 and has to learn the mean first."""
    updates_per_step: PositiveInt | None = None
    """The critic's passes over a step's samples, at least as many as the policy's; the extra ones run after the policy's
    updates. Unset: as many as the policy's."""


class Ppo(PolicyGradientStage):
    """Proximal policy optimisation (Schulman et al. 2017): advantages come from a learned critic instead of the group."""

    type: Literal["ppo"] = "ppo"
    """The stage's type."""
    gamma: Share = 1.0
    """γ: discount per token. 1 is usual for completions, which have an end."""
    gae_lambda: Share = 0.95
    """λ of generalised advantage estimation. 1 uses rewards only (no bias); 0 relies on the critic (low variance)."""
    whiten: bool = True
    """Normalise advantages so that the step's tokens have mean 0 and std 1."""
    reduction: Literal["tokens", "completions"] = "tokens"
    """The loss is a mean over all tokens of the step (`tokens`), or over completions of their means (`completions`, as
    GRPO's)."""
    critic: Critic = Critic()
    """The value network."""

    @property
    def critic_passes(self) -> int:
        """The critic's passes over a step's samples."""
        return self.critic.updates_per_step or self.updates_per_step

    @property
    def kl_place(self) -> KlPlace:
        return self.kl.where or "reward"

    @property
    def unsharded_reason(self) -> str:
        return "trains a second model next to the policy"

    @model_validator(mode="after")
    def _check_critic(self) -> Ppo:
        if self.critic.trunk != "shared" and self.critic.loss_weight != Critic.model_fields["loss_weight"].default:
            because = "a separate critic has its own optimiser: its loss is not added to the policy's, so it needs no weight"
            fix = 'remove it and set critic.learning_rate, or use critic.trunk = "shared"'
            raise conflict("critic.loss_weight", self.critic.loss_weight, because=because, fix=fix)
        if self.critic.warmup_steps >= self.steps:
            because = f"the stage has {self.steps} steps, so none would train the policy"
            raise conflict("critic.warmup_steps", self.critic.warmup_steps, because=because, fix=f"use less than {self.steps}")
        if self.critic_passes < self.updates_per_step:
            because = f"each of the policy's {self.updates_per_step} passes (updates_per_step) trains the critic too"
            fix = f"use {self.updates_per_step} or more, or remove it"
            raise conflict("critic.updates_per_step", self.critic.updates_per_step, because=because, fix=fix)
        return self


class Trpo(RolloutStage):
    """Trust region policy optimisation (Schulman et al. 2015) with group advantages: a natural gradient step with bounded
    KL."""

    type: Literal["trpo"] = "trpo"
    """The stage's type."""
    advantage: Advantage = Advantage()
    """How a group is graded."""
    max_kl: PositiveFloat = 0.01
    """δ: largest mean KL(π_old‖π_new) per token of a step. It replaces the learning rate."""
    cg_iterations: PositiveInt = 10
    """Conjugate gradient iterations for (F + damping) x = g. More iterations come closer to the natural gradient; each costs a
    pass."""
    damping: NonNegative = 0.1
    """Added to the diagonal of the Fisher matrix, which bounds the step along directions of little curvature."""
    fisher_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Fraction of a step's groups that the Fisher matrix is computed on, rounded up to complete groups (the paper uses 0.1).
    The KL bound is checked on all of them."""
    backtracks: PositiveInt = 10
    """Number of times that the line search may shorten the step before the step is skipped."""
    backtrack_by: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor by which the line search shortens the step each time."""

    @property
    def unsharded_reason(self) -> str:
        return "differentiates the complete model twice"

    @model_validator(mode="after")
    def _check_no_optimiser(self) -> Trpo:
        if self.optimiser != Optimiser(guard=self.optimiser.guard):
            because = "max_kl sets the size of a trpo step: there is no learning rate, no moment and no schedule"
            raise conflict("optimiser", "set", because=because, fix="remove all but its guard, and set max_kl instead")
        return self


class Dpo(StageBase):
    """Direct preference optimisation (Rafailov et al. 2023), offline on pairs from a file; IPO, SimPO and KTO are variants of
    its loss."""

    type: Literal["dpo"] = "dpo"
    """The stage's type."""
    pairs: str
    """The file of pairs, one per row: `.jsonl`, `.json` (either with `.gz`) or `.parquet`. With `label_column`, each row is
    a single completion."""
    prompt: str = "prompt"
    """Column of the prompt: text or a list of messages. Without this column the pairs may be complete dialogues that differ in
    the last answer, as messages or as `Human: … Assistant: …`."""
    chosen: str = "chosen"
    """Column of the better completion: text or one message."""
    rejected: str = "rejected"
    """Column of the worse completion: text or one message."""
    label_column: str | None = None
    """For kto: rows are single completions, and this column is true if the completion is desirable, else false. Unset: rows are
    pairs."""
    completion: str = "completion"
    """With `label_column`: column of the completion: text or one message."""
    chat: bool = False
    """Send text prompts as a user message through the model's chat template; if false, as plain text."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Pairs, or single completions, per update. They come in epochs, each shuffled by (seed, epoch)."""
    loss: Literal["dpo", "ipo", "simpo", "kto"] = "dpo"
    """`dpo`; `ipo`, whose squared loss aims at a margin of 1/(2β) and not beyond; `simpo`, which has no reference; or `kto`,
    which grades each completion by itself, against the policy's KL to the reference (a second pass without gradient)."""
    beta: PositiveFloat = 0.1
    """Strength of the pull toward the reference: smaller values let the policy move further. simpo needs 2 or more."""
    margin: NonNegative = 0.5
    """γ, for simpo only: how much better per token the chosen completion must be, in units of 1/β."""
    desirable_weight: PositiveFloat = 1.0
    """For kto: weight of desirable completions. The paper chooses both weights so that weight × number of desirable completions
    is between 1 and 4/3 times weight × number of undesirable ones."""
    undesirable_weight: PositiveFloat = 1.0
    """For kto: weight of undesirable completions."""

    @model_validator(mode="after")
    def _check_loss(self) -> Dpo:
        because, fix = f"only kto grades completions one by one, and the loss is {self.loss}", 'remove it, or use loss = "kto"'
        if self.loss != "kto" and self.label_column is not None:
            raise conflict("label_column", self.label_column, because=because, fix=fix)
        for key in ("desirable_weight", "undesirable_weight"):
            if self.loss != "kto" and getattr(self, key) != 1:
                raise conflict(key, getattr(self, key), because=because, fix=fix)
        if self.loss != "simpo" and self.margin != type(self).model_fields["margin"].default:
            because, fix = f"only simpo has a margin, and the loss is {self.loss}", 'remove it, or use loss = "simpo"'
            raise conflict("margin", self.margin, because=because, fix=fix)
        return self


class RewardModel(StageBase):
    """Trains a reward model: the policy's backbone with a scalar head instead of the LM head. The policy itself does not
    change.

    The result is written to `reward_models/NAME` in the run's folder, and loads in transformers and TRL. A later stage uses it
    as a reward with `type = "model"` and `model = "stage:NAME"`.
    """

    type: Literal["reward_model"] = "reward_model"
    """The stage's type."""
    kind: Literal["pairs", "ratings", "steps"] = "pairs"
    """What the data contain: which of two completions is better (`pairs`, Bradley–Terry), how good one is (`ratings`,
    regression), or which of its steps are right (`steps`, a process reward model)."""
    data: str
    """The file: `.jsonl`, `.json` (either with `.gz`) or `.parquet`."""
    prompt: str = "prompt"
    """Column of the prompt: text or a list of messages. Without this column the pairs may be complete dialogues that differ in
    the last answer, as messages or as `Human: … Assistant: …`."""
    chosen: str = "chosen"
    """Pairs: column of the better completion."""
    rejected: str = "rejected"
    """Pairs: column of the worse completion."""
    margin: str | None = None
    """Pairs: column of how much better the chosen completion is, 0 or more. Unset: 0."""
    completion: str = "completion"
    """Ratings: column of the completion."""
    completions: str = "completions"
    """Steps: column of the list of steps, each of them text."""
    labels: str = "labels"
    """Steps: column of the list of labels, true for each step that is right."""
    aspects: Annotated[tuple[str, ...], Field(max_length=32)] = ()
    """One head per aspect, each with a column of this name. For ratings the column holds the number. For pairs it is above 0 if
    the chosen completion is better in this aspect, below 0 if the rejected one is, and 0 or missing if neither. Unset: one
    head."""
    chat: bool = False
    """Send text prompts as a user message through the model's chat template; if false, as plain text."""
    source: str | None = None
    """Start from this folder or hub id (a reward model or a language model). Unset: from the current policy."""
    heldout_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """Fraction of the prompts held out: accuracy and calibration are measured on their rows. No prompt is in both splits."""
    max_tokens: PositiveInt = 2048
    """Rows with a longer text are left out and counted."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Rows per update. They come in epochs, each shuffled by (seed, epoch)."""
    optimiser: RewardModelOptimiser = RewardModelOptimiser()
    """AdamW and its schedule."""

    updates_policy: ClassVar[bool] = False

    @property
    def unsharded_reason(self) -> str:
        return "trains a second model next to the policy"

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the model's outputs."""
        return ("wrong", "right") if self.kind == "steps" else self.aspects or ("reward",)


class RejectionSample(RolloutStage):
    """Samples groups and writes the best completions to `samples/NAME.jsonl` in the run's folder. The policy does not change.

    An sft stage with `data = "stage:NAME"` trains on them. Together they are rejection-sampled fine-tuning, or one round of
    expert iteration.
    """

    type: Literal["rejection_sample"] = "rejection_sample"
    """The stage's type."""
    at_least: float | None = None
    """Smallest total reward of a completion to keep. Unset: only solved completions, which needs a verifiable reward."""
    keep: PositiveInt = 1
    """Largest number of completions to keep per group: those with the highest reward, shorter ones first on ties, without
    duplicates."""

    updates_policy: ClassVar[bool] = False


class TrainingFree(RolloutStage):
    """Training-Free GRPO (Cai et al. 2025): no weights change. Groups are sampled from an OpenAI-compatible endpoint and
    scored. A teacher model then describes what the better answers of a group did differently, and these experiences are added
    to the prompt.

    The library of experiences is `experience/NAME.md` in the run's folder. It can be read, edited and used elsewhere.
    """

    type: Literal["training_free"] = "training_free"
    """The stage's type."""
    model: str
    """Name of the model at its endpoint."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint, such as that of `oncurve serve`: `http://localhost:8000/v1`. Unset: OpenAI's."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key. The key itself is never written to a recipe or a log."""
    teacher: str | None = None
    """The model that writes experiences, at the same endpoint. Unset: `model`."""
    library: str | None = None
    """Start with the experiences in this file. Unset: with none."""
    most: PositiveInt = 24
    """Largest number of experiences; a new one then replaces the oldest."""
    measure: bool = True
    """Evaluate the held-out split with and without the library, at the end and every `eval_every` steps."""
    reply_tokens: PositiveInt = 512
    """Length limit of the teacher's replies."""
    request_seconds: PositiveFloat = 120.0
    """Time limit of a request."""
    retries: Count = 4
    """Retries of a failed request, with growing delays."""
    at_once: Annotated[int, Field(ge=1)] = 16
    """Number of concurrent requests."""

    uses_policy: ClassVar[bool] = False
    updates_policy: ClassVar[bool] = False
    runs_on_all_ranks: ClassVar[bool] = False

    @property
    def unsharded_reason(self) -> str:
        return "runs on rank 0 only"


Stage = Annotated[
    Sft | Grpo | Distil | Ppo | Trpo | Dpo | RewardModel | RejectionSample | TrainingFree, Field(discriminator="type")
]

STAGE_CLASSES: dict[str, type[StageBase]] = {
    cls.model_fields["type"].default: cls for cls in get_args(get_args(Stage)[0]) if issubclass(cls, StageBase)
}
"""The built-in stage classes by `type`."""


@dataclass(frozen=True, slots=True)
class BuiltInStage:
    """A built-in stage in the registry of stages. A plug-in's entry is an `oncurve.training.stages.table.StageType`."""

    section: type[StageBase]


def _check_stage_plugin(plugin: Any) -> str | None:
    section = getattr(plugin, "section", None)
    if not (isinstance(section, type) and issubclass(section, StageBase)):
        return "it has no `section` that extends StageBase"
    return None if callable(getattr(plugin, "build", None)) else "it has no function `build`"


STAGE_TYPES: Registry[Any] = Registry(
    "stage", {name: BuiltInStage(cls) for name, cls in STAGE_CLASSES.items()}, _check_stage_plugin
)
"""Every stage by `type`, each with its ``section``: those above, and the plug-ins of installed packages."""


def _accept_stage_plugin(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """A built-in stage, or one of an installed package, which is imported here."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if not isinstance(kind, str) or kind in STAGE_CLASSES or kind not in STAGE_TYPES:
        return validate(value)
    try:
        return STAGE_TYPES[kind].section.model_validate(value)
    except ValidationError as error:
        raise ValidationError.from_exception_data(error.title, [_at_stage(kind, line) for line in error.errors()]) from None


def _at_stage(kind: str, line: ErrorDetails) -> InitErrorDetails:
    """An error with the stage's type in its location, as a built-in stage's has it."""
    context = line.get("ctx", {})
    name = PydanticCustomError("conflict", "{because}", context) if line["type"] == "conflict" else line["type"]
    return InitErrorDetails(type=name, loc=(kind, *line["loc"]), input=line["input"], ctx=context)


AnyStage = Annotated[Stage, WrapValidator(_accept_stage_plugin)]
"""A stage in a recipe. For type checkers a plug-in's section is one of the built-in ones: both extend `StageBase`."""

SAMPLED_TYPES = tuple(name for name, cls in STAGE_CLASSES.items() if cls.samples and cls.updates_policy)
"""Types of the stages that train the policy on its own samples, for readers that have a run's tables and no recipe."""
