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

from oncurve.objective_specs import OBJECTIVE_SPECS, KlPlace, ObjectiveName, ObjectiveSpec
from oncurve.plugins import Registry
from oncurve.recipe.schema.base import Count, NonNegative, Section, Share, conflict
from oncurve.recipe.schema.sections import (
    Advantage,
    Clip,
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
    third more time. `auto`: on a GPU, for as many layers as the memory requires. The gradient is the same."""
    eval_every: Count = 0
    """Evaluate on the held-out split every N steps, in addition to the end of the stage; 0: only at the end. Without a
    verifiable reward the mean reward is measured, and before the first step too."""
    save_every: Count = 0
    """Write a checkpoint every N steps, in addition to the end of the stage; 0: only at the end."""
    keep_checkpoints: PositiveInt = 3
    """Number of checkpoints to keep per stage: the newest ones. The last one of a stage is always kept."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best value of this metric: `heldout_accuracy` (measured every `eval_every` steps; the
    held-out reward if there is no verifiable reward), `reward`, or any other metric of the stage. For losses, KLs and failure
    shares the lowest value is best. Unset: none."""

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
    cost)."""
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
    mismatch_limit: Annotated[float, Field(gt=1.0)] | None = None
    """Leave a completion out of the surrogate if sampler and learner disagree on it: if the geometric mean of
    π_learner/π_sampler over its tokens is outside 1/limit … limit. It still counts in the totals. Unset: off."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: weight each token by min(π_learner/π_sampler, cap). Unset: off if the learner itself
    samples; 2 with `scale.engine = "vllm"` or staleness, unless `mismatch_limit` is set."""
    corrects_stale_samples: ClassVar[bool] = True

    @property
    def needs_importance_cap(self) -> bool:
        return self.importance_cap is None and self.mismatch_limit is None

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
    """What to do with groups of equal rewards. `drop`: do not forward them, but count them in the totals. `keep`: forward them
    anyway. `resample`: replace them by fresh prompts until the step is full (DAPO's dynamic sampling)."""
    max_resample_rounds: PositiveInt = 4
    """With `resample`: rounds of fresh prompts before the step continues with the groups that it has."""
    length_budget: PositiveInt | None = None
    """The constant that dr_grpo divides by. Unset: `sampling.max_new_tokens`."""
    iterate: Iteration | None = None
    """Iterative GRPO: a reward model that learns from fresh comparisons as the policy changes. Unset: reward models are not
    trained in this stage."""

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
    def kl_place(self) -> KlPlace:
        return self.kl.where or "reward"

    @property
    def unsharded_reason(self) -> str:
        return "trains a second model next to the policy"

    @model_validator(mode="after")
    def _check_critic_warmup(self) -> Ppo:
        if self.critic.warmup_steps >= self.steps:
            because = f"the stage has {self.steps} steps, so none would train the policy"
            raise conflict("critic.warmup_steps", self.critic.warmup_steps, because=because, fix=f"use less than {self.steps}")
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
    """Fraction of a step's groups that the Fisher matrix is computed on (the paper uses 0.1). The KL bound is checked on all of
    them."""
    backtracks: PositiveInt = 10
    """Number of times that the line search may shorten the step before the step is skipped."""
    backtrack_by: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor of each shortening."""

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
    """Direct preference optimisation (Rafailov et al. 2023), offline on pairs from a file; IPO and SimPO are variants of its
    loss."""

    type: Literal["dpo"] = "dpo"
    """The stage's type."""
    pairs: str
    """The file of pairs, one per row: `.jsonl`, `.json` (either with `.gz`) or `.parquet`."""
    prompt: str = "prompt"
    """Column of the prompt: text or a list of messages. Without this column the pairs may be complete dialogues that differ in
    the last answer, as messages or as `Human: … Assistant: …`."""
    chosen: str = "chosen"
    """Column of the better completion: text or one message."""
    rejected: str = "rejected"
    """Column of the worse completion: text or one message."""
    chat: bool = False
    """Send text prompts as a user message through the model's chat template; if false, as plain text."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Pairs per update. They come in epochs, each shuffled by (seed, epoch)."""
    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """`dpo`; `ipo`, whose squared loss aims at a margin of 1/(2β) and not beyond; or `simpo`, which has no reference."""
    beta: PositiveFloat = 0.1
    """Strength of the pull toward the reference: smaller values let the policy move further. simpo needs 2 or more."""
    margin: NonNegative = 0.5
    """γ, for simpo only: how much better per token the chosen completion must be, in units of 1/β."""


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


Stage = Annotated[Sft | Grpo | Ppo | Trpo | Dpo | RewardModel | RejectionSample | TrainingFree, Field(discriminator="type")]

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
