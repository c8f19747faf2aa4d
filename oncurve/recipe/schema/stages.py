"""The stages of a recipe, one class each. A stage's traits (does it sample, does it use or update the policy) are class
attributes, so that no other module has to list stage types.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.objective_specs import ObjectiveName
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
    """What every stage has."""

    type: str
    """The stage's type."""
    name: str | None = None
    """Unique name of the stage, used in `--set NAME.key=value`; its type when unset."""
    task: Task | None = None
    """A task of this stage's own; unset: the recipe's."""
    optimiser: Optimiser = Optimiser()
    """AdamW and its schedule."""
    tokens_per_pack: PositiveInt = 16384
    """Tokens forwarded at once (a micro-batch). Memory grows with it; the gradient does not depend on it."""
    checkpointing: Literal["auto", "on", "off"] = "auto"
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time. `auto`: on
    a GPU, for as many layers as memory asks for. The gradient is the same."""
    eval_every: Count = 0
    """Measure on held-out problems every so many steps, besides the stage's end; 0: only at the end. Where no rule says what is
    right, the mean reward is the measure, and is taken before the first step too."""
    save_every: Count = 0
    """Write a checkpoint every so many steps, besides the stage's end; 0: only at the end."""
    keep_checkpoints: PositiveInt = 3
    """How many checkpoints of a stage are kept, the newest first. The stage's last is always kept."""
    keep_best: str | None = None
    """Keep also the checkpoint with the best value of this metric: `heldout_accuracy` (measured at its step: see `eval_every`;
    the held-out reward where no rule says what is right), `reward`, or any other that the stage records; of losses, KLs and
    shares of failures the lowest is best. Unset: none."""

    samples: ClassVar[bool] = False
    """Each step samples groups of completions and rewards them (a `RolloutStage`)."""
    uses_policy: ClassVar[bool] = True
    """The stage needs the recipe's model."""
    updates_policy: ClassVar[bool] = True
    """The stage changes the policy. Only then is the policy measured on held-out prompts."""
    runs_on_all_ranks: ClassVar[bool] = True
    """If false, rank 0 runs the stage and broadcasts the result."""

    @property
    def label(self) -> str:
        return self.name or self.type

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
    def updates_in_step(self) -> int:
        """Optimiser updates that a step makes."""
        return 1


class Sft(StageBase):
    """Supervised training on worked examples: loss on the completion's tokens only."""

    type: Literal["sft"] = "sft"
    """The stage's type."""
    data: str | None = None
    """A file of worked examples, with the columns `prompt` and `completion` or whole chats; or `stage:NAME` for what a stage
    of type `rejection_sample` kept. Unset: the task's own."""
    examples: PositiveInt | None = None
    """Use only the first so many worked examples; unset: all there are."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Examples in an update. Drawn in epochs, each shuffled by (seed, epoch)."""
    seconds: PositiveFloat | None = None
    """Stop after this many seconds even if steps are left (for comparisons at equal time; such a run is not repeatable)."""
    heldout_share: Share = 0.0
    """Share of the examples kept aside: their loss is measured every `eval_every` steps and at the end (`heldout_loss`)."""
    patience: PositiveInt | None = None
    """Stop early where `heldout_loss` has not fallen below its lowest for so many measurements; needs `heldout_share` and
    `eval_every`."""
    optimiser: SftOptimiser = SftOptimiser()
    """AdamW and its schedule."""

    @property
    def time_limit_s(self) -> float | None:
        return self.seconds


class RolloutStage(StageBase):
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
    samples: ClassVar[bool] = True

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.max_new_tokens

    @property
    def time_limit_s(self) -> float | None:
        return self.seconds


class PolicyGradientStage(RolloutStage):
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

    @property
    def updates_in_step(self) -> int:
        return self.updates_per_step * self.minibatches


class Iteration(Section):
    """Iterative GRPO with a reward model that keeps up (DeepSeekMath, 2024, algorithm 1).

    Each step's groups are judged by the labeller, the best completion against the worst; every `every` steps the reward model
    is updated on these comparisons, mixed with earlier ones, and the reference of the KL term becomes the policy. Comparisons
    are kept in `comparisons/NAME.jsonl` of the run.
    """

    every: PositiveInt
    """Steps of a round."""
    reward: str = "model"
    """Name of the stage's reward of type `model` that is trained."""
    labeller: Reward | None = None
    """Who judges: any reward (a rule such as `math`, a `judge` for AI feedback, a `python` function). Unset: people, by the
    rankings they gave in the studio; then a round without rankings trains nothing."""
    updates: PositiveInt = 8
    """Optimiser updates of the reward model in a round."""
    batch_size: PositiveInt = 32
    """Comparisons in an update."""
    past_share: Share = 0.1
    """Share of each update's comparisons that comes from earlier rounds, and from the data that the reward model first learned
    from where an earlier stage trained it."""
    optimiser: RewardModelOptimiser = RewardModelOptimiser(schedule="constant")
    """AdamW of the reward model; its moments last over all rounds."""


class Grpo(PolicyGradientStage):
    """Group relative policy optimisation (DeepSeekMath, 2024) and its relatives."""

    type: Literal["grpo"] = "grpo"
    """The stage's type."""
    objective: ObjectiveName = "grpo"
    """A composition of ratio, surrogate and reduction; `oncurve recipe explain grpo.objective` shows the table."""
    advantage: Advantage = Advantage()
    """How a group is graded."""
    no_signal: Literal["drop", "keep", "resample"] = "drop"
    """Groups of equal rewards: not forwarded (`drop`; they still count in the totals), forwarded anyway (`keep`), or replaced
    by fresh prompts until the step is full (`resample`: DAPO's dynamic sampling)."""
    max_resample_rounds: PositiveInt = 4
    """With `resample`: rounds of fresh prompts before the step goes on with what it has."""
    length_budget: PositiveInt | None = None
    """The constant that dr_grpo divides by; unset: `sampling.max_new_tokens`."""
    iterate: Iteration | None = None
    """Iterative GRPO with a reward model that learns from fresh comparisons as the policy changes. Unset: it stays as it is."""

    @property
    def unsharded_reason(self) -> str | None:
        return None if self.iterate is None else "trains a second model next to the policy"


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


class Ppo(PolicyGradientStage):
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

    @property
    def unsharded_reason(self) -> str:
        return "trains a second model next to the policy"

    @model_validator(mode="after")
    def _some_steps_train_the_policy(self) -> Ppo:
        if self.critic.warmup_steps >= self.steps:
            because = f"the stage has {self.steps} steps, and none would train the policy"
            raise conflict("critic.warmup_steps", self.critic.warmup_steps, because=because, fix=f"use less than {self.steps}")
        return self


class Trpo(RolloutStage):
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

    @property
    def unsharded_reason(self) -> str:
        return "differentiates the whole model twice"

    @model_validator(mode="after")
    def _no_optimiser(self) -> Trpo:
        if self.optimiser != Optimiser(guard=self.optimiser.guard):
            because = "a trpo step is as long as its KL bound allows: there is no learning rate, no moment, no schedule"
            raise conflict("optimiser", "set", because=because, fix="leave all but its guard out, and set max_kl instead")
        return self


class Dpo(StageBase):
    """Direct preference optimisation (Rafailov et al. 2023) on pairs from a file, offline; IPO and SimPO as its variants."""

    type: Literal["dpo"] = "dpo"
    """The stage's type."""
    pairs: str
    """The file of pairs: `.jsonl`, `.json` (either with `.gz`) or `.parquet`, a row for each."""
    prompt: str = "prompt"
    """Column of the prompt: a text or a list of messages. Pairs without it may be whole dialogues that differ in the last
    answer, as messages or as `Human: … Assistant: …`."""
    chosen: str = "chosen"
    """Column of the better completion: a text, or one message."""
    rejected: str = "rejected"
    """Column of the worse completion: a text, or one message."""
    chat: bool = False
    """Send text prompts as a user's message through the model's chat template, not as they are."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Pairs in an update. Drawn in epochs, each shuffled by (seed, epoch)."""
    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """`dpo`; `ipo`, whose squared loss stops at a margin of 1/(2β) instead of pushing on; or `simpo`, without a reference."""
    beta: PositiveFloat = 0.1
    """How dear it is to leave the reference: small moves further. simpo's is 2 or more."""
    margin: NonNegative = 0.5
    """γ, of simpo alone: how much better per token the chosen one must be, in units of 1/β."""


class RewardModel(StageBase):
    """A reward model by the policy's side: its backbone with a head in place of the vocabulary. The policy itself stays as it
    is.

    The result lies in the run's folder under `reward_models/NAME` and loads in transformers and TRL. A later stage rewards with
    it by `type = "model"` and `model = "stage:NAME"`.
    """

    type: Literal["reward_model"] = "reward_model"
    """The stage's type."""
    kind: Literal["pairs", "ratings", "steps"] = "pairs"
    """What the data say: which of two completions is better (Bradley–Terry), how good one is (regression), or which of its
    steps are right (a process reward model)."""
    data: str
    """The file: `.jsonl`, `.json` (either with `.gz`) or `.parquet`."""
    prompt: str = "prompt"
    """Column of the prompt: a text or a list of messages. Pairs without it may be whole dialogues that differ in the last
    answer, as messages or as `Human: … Assistant: …`."""
    chosen: str = "chosen"
    """Pairs: column of the better completion."""
    rejected: str = "rejected"
    """Pairs: column of the worse completion."""
    margin: str | None = None
    """Pairs: column of how much better the chosen one is, 0 or more; unset: 0."""
    completion: str = "completion"
    """Ratings: column of the completion."""
    completions: str = "completions"
    """Steps: column of the list of steps, each a text."""
    labels: str = "labels"
    """Steps: column of the list of whether each step is right, true or false."""
    aspects: Annotated[tuple[str, ...], Field(max_length=32)] = ()
    """One head for each, by the column of its name: for ratings the number; for pairs above 0 where the chosen one is better in
    it, below 0 where the rejected one is, 0 or missing where neither. Unset: one head for all."""
    chat: bool = False
    """Send text prompts as a user's message through the model's chat template, not as they are."""
    source: str | None = None
    """Begin from this folder or hub id (a reward model or a language model); unset: from the policy as the stage finds it."""
    heldout_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """Share of the prompts kept aside: accuracy and calibration are measured on their rows. No prompt is on both sides."""
    max_tokens: PositiveInt = 2048
    """Rows with a longer text are left out, and counted."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Rows in an update. Drawn in epochs, each shuffled by (seed, epoch)."""
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
    """Samples groups and keeps what was rewarded well, in `samples/NAME.jsonl` of the run; the policy stays as it is.

    An sft stage imitates what was kept by `data = "stage:NAME"`. With all of it imitated at once this is rejection-sampled
    fine-tuning, or one round of expert iteration.
    """

    type: Literal["rejection_sample"] = "rejection_sample"
    """The stage's type."""
    at_least: float | None = None
    """Total reward from which a completion may be kept; unset: those that count as solved, for which a rule must say what is
    right."""
    keep: PositiveInt = 1
    """How many of a group are kept at most: the best rewarded, the shorter where rewards are equal; equal texts once."""

    updates_policy: ClassVar[bool] = False


class TrainingFree(RolloutStage):
    """Training-Free GRPO (Cai et al. 2025): no weight moves. Groups are sampled through an OpenAI-compatible endpoint and
    rewarded; what set the better answers of a group apart from the worse is put into words, and these experiences go into the
    prompt.

    The library of experiences lies in `experience/NAME.md` of the run, to be read, edited and used elsewhere.
    """

    type: Literal["training_free"] = "training_free"
    """The stage's type."""
    model: str
    """The model's name at its endpoint."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint, such as that of `oncurve serve`: `http://localhost:8000/v1`; unset: OpenAI's own."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable of the key. The key itself is never written in a recipe, and never logged."""
    teacher: str | None = None
    """The model that puts experiences into words, at the same endpoint; unset: the same."""
    library: str | None = None
    """Begin with the experiences of this file; unset: with none."""
    most: PositiveInt = 24
    """Experiences kept at most: one more takes the place of the oldest."""
    measure: bool = True
    """Ask the held-out problems with and without the library, at the end and every `eval_every` steps."""
    reply_tokens: PositiveInt = 512
    """Length limit of what the teacher says."""
    request_seconds: PositiveFloat = 120.0
    """Time limit of a request."""
    retries: Count = 4
    """Tries after a failed request, each after a longer wait."""
    at_once: Annotated[int, Field(ge=1)] = 16
    """Requests under way at the same time."""

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
"""Stage classes by `type`."""

SAMPLED_TYPES = tuple(name for name, cls in STAGE_CLASSES.items() if cls.samples and cls.updates_policy)
"""Types of the stages that train the policy on its own samples, for readers that have a run's tables and no recipe."""
