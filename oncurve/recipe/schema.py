"""Everything a recipe can say. A default lives here and nowhere else, with its reason in the docstring under the field.

The docstrings are read by `oncurve recipe explain`, by the command line's help and by the documentation's table. Models are
strict (a key that doesn't exist is an error) and frozen. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


def types_in(annotation: Any) -> set[Any]:
    """The plain types that an annotation is made of: `PositiveInt | None` gives {int, NoneType}, a Literal its values'."""
    if get_origin(annotation) is Annotated:
        return types_in(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) is tuple or get_origin(annotation) is dict:
        return {get_origin(annotation)}
    inner = get_args(annotation)
    return set().union(*map(types_in, inner)) if inner else {annotation}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def impossible(key: str, found: object, *, because: str, fix: str) -> PydanticCustomError:
    """For a section's own validators: two keys that contradict each other, told in the words of a RecipeError."""
    return PydanticCustomError("impossible", "{because}", {"key": key, "found": found, "because": because, "fix": fix})


class Section(BaseModel):
    """A part of a recipe: strict, frozen, documented by the docstrings under its fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, strict=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_as_tuples(cls, data: Any) -> Any:
        """Strict: TOML has types of its own, so `"16"` for 16 or `true` for 1 is a slip. But its lists are our tuples."""
        if not isinstance(data, dict):
            return data
        tuples = {name for name, field in cls.model_fields.items() if tuple in types_in(field.annotation)}
        return {key: _as_tuples(value) if key in tuples else value for key, value in data.items()}


class TinyModel(Section):
    """The built-in model: a small Qwen3 decoder with random weights and a tokenizer made from the task's own characters."""

    layers: PositiveInt = 4
    """Decoder layers."""
    width: PositiveInt = 128
    """Hidden size."""
    heads: PositiveInt = 4
    """Query heads."""
    kv_heads: PositiveInt = 2
    """Key and value heads; must divide `heads`."""
    head_size: PositiveInt = 32
    """Size of one head."""
    mlp_width: PositiveInt = 384
    """Width of the gated MLP: 3 × `width` is usual for small models."""
    context: PositiveInt = 512
    """Positions the model can address."""

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyModel:
        if self.heads % self.kv_heads:
            because = f"every key and value head serves the same number of query heads, and heads is {self.heads}"
            raise impossible("kv_heads", self.kv_heads, because=because, fix=f"use a divisor of {self.heads}")
        return self


class Model(Section):
    """Which model is trained, and in what precision."""

    source: str = "tiny"
    """`tiny` for the built-in model, a folder in Hugging Face format, or a hub id."""
    tiny: TinyModel = TinyModel()
    """The shape of the built-in model; read only when `source` is `tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that sampler and learner share. With bfloat16 the optimiser keeps float32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    system_prompt: str | None = None
    """Put before every prompt of a task as a system message (chat models only)."""
    template_options: dict[str, Any] = {}
    """Extra variables for the chat template, such as `enable_thinking = false`."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model's folder. Off: such a model is refused."""


class Task(Section):
    """What is asked. `type` picks a task; the other keys are that task's own options, checked when it is built."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str
    """`arithmetic`, `countdown`, `gsm8k`, `math`, `mbpp`, `humaneval`, or `file` (JSONL or Parquet);
    `oncurve recipe explain task.TYPE` lists a task's options."""
    heldout: PositiveInt = 200
    """Problems kept aside for measuring: none of them ever occurs in training."""
    seed: Count = 0
    """Seed of the problems, apart from the run's seed, so that runs with other seeds are measured on the same ones."""

    @property
    def options(self) -> dict[str, Any]:
        """The keys beyond those above, for the task's own schema."""
        return dict(self.model_extra or {})


class Reward(Section):
    """One reward. `type` picks it; keys beyond those here are the reward's own options, checked when it is built."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str
    """`answer`, `math`, `code`, `countdown`; `format`, `json`, `language`, `length`, `cosine`, `overlong`, `repetition`;
    `process`, `model`, `judge`; or `python` (any function: `function = "file.py:name"`)."""
    name: str | None = None
    """What the aspect is called in tables and in `--set rewards.NAME.key=value`; its type when unset."""
    weight: float = 1.0
    """Its weight in the total. 0: watched, not trained on."""

    @property
    def label(self) -> str:
        return self.name or self.type

    @property
    def options(self) -> dict[str, Any]:
        """The keys beyond those above, for the reward's own schema."""
        return dict(self.model_extra or {})


class Sampling(Section):
    """How completions are drawn."""

    temperature: NonNegative = 1.0
    """1 samples the policy itself, which is what the formulas assume. 0 is greedy, for evaluation only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus: keep the likeliest tokens up to this mass. 1 keeps all; training on a truncated distribution is biased."""
    top_k: Count = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 drops none."""
    max_new_tokens: PositiveInt = 256
    """Length limit of a completion; one that reaches it is *cut*."""
    min_new_tokens: Count = 0
    """No end token before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion once it contains one of them."""

    @model_validator(mode="after")
    def _lengths(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            because = f"a completion is cut at max_new_tokens, {self.max_new_tokens}, before it may end"
            raise impossible("min_new_tokens", self.min_new_tokens, because=because, fix=f"use {self.max_new_tokens} or less")
        return self


class Engine(Section):
    """The native engine's own settings. Changing one may change rounding, never the random numbers."""

    slots: PositiveInt | None = None
    """Completions decoded at once. Unset: chosen for the machine and the step's size, then frozen into the run."""
    check_every: PositiveInt = 4
    """Finished completions are noticed and their slots refilled every so many tokens."""


class Optimiser(Section):
    """AdamW, its schedule, and gradient clipping."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate. 1e-6 suits full fine-tuning of a pretrained model; small models from scratch take 1e-4 to 3e-3."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up; linear and cosine go down to `final_share` of the peak at the stage's last step."""
    final_share: Share = 0.0
    """Where linear and cosine schedules end, as a share of the peak."""
    warmup_steps: Count = 0
    """Updates over which the rate rises linearly from 0."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: NonNegative = 1.0
    """Gradients longer than this are scaled down to it; 0 leaves them."""


class SftOptimiser(Optimiser):
    """AdamW with the habits of supervised training: a higher rate, going down."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate. 1e-3 suits the built-in model; pretrained ones take 1e-5 to 1e-4."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """What follows the warm-up; linear and cosine go down to `final_share` of the peak at the stage's last step."""


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
    eval_every: Count = 0
    """Measure on held-out problems every so many steps, besides the stage's end; 0: only at the end."""
    save_every: Count = 0
    """Write a checkpoint every so many steps, besides the stage's end; 0: only at the end."""
    keep_checkpoints: PositiveInt = 3
    """How many checkpoints of a stage are kept, the newest first. The stage's last is always kept."""

    @property
    def label(self) -> str:
        return self.name or self.type


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
