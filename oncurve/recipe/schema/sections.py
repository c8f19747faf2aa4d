"""The sections that recipes are made of. A default lives in its section and nowhere else, with its reason under the field.

The docstrings are read by `oncurve recipe explain`, by the command line's help and by the documentation's table. Models are
strict (a key that doesn't exist is an error) and frozen. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

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


def conflict(key: str, found: object, *, because: str, fix: str) -> PydanticCustomError:
    """For a section's own validators: two keys that contradict each other, told in the words of a RecipeError."""
    return PydanticCustomError("impossible", "{because}", {"key": key, "found": found, "because": because, "fix": fix})


STAGE = "stage:"
"""Begins the name of an earlier stage of the same run, in place of a file's or a model's."""


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
            raise conflict("kv_heads", self.kv_heads, because=because, fix=f"use a divisor of {self.heads}")
        return self


class Lora(Section):
    """A LoRA adapter (Hu et al. 2021): beside each target W a trained s·B·A of small rank, everything else left alone."""

    rank: PositiveInt = 16
    """r: the rank of the trained matrices. RL needs little: 8 to 32 comes close to full fine-tuning."""
    alpha: PositiveFloat = 32.0
    """α: the adapter counts with weight s = α/r."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all-linear",)
    """Which linear layers, by the ends of their names (`q_proj`, `v_proj` …); `all-linear` takes all but the head."""
    rslora: bool = False
    """s = α/√r in place of α/r (Kalajdzievski 2023): higher ranks do not learn more slowly."""
    dora: bool = False
    """Train each column's length apart from its direction (DoRA, Liu et al. 2024); slower."""


class Model(Section):
    """Which model is trained, and in what precision."""

    source: str = "tiny"
    """`tiny` for the built-in model, a folder in Hugging Face format, a hub id, a `.gguf` file, or the folder of a LoRA
    adapter. `oncurve models` lists what is on this machine."""
    lora: Lora | None = None
    """Train a LoRA adapter in place of all weights. The reference of a KL term is then the same model with the adapter off."""
    adapter: str | None = None
    """Folder of a saved LoRA adapter, put on top of `source`: trained further where `lora` is set (its rank and targets are
    then the folder's own), else merged into the weights."""
    quantise: Literal["nf4", "int8"] | None = None
    """QLoRA: hold the frozen base in 4 or 8 bits (bitsandbytes); needs `lora`."""
    tiny: TinyModel = TinyModel()
    """The shape of the built-in model; read only when `source` is `tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that sampler and learner share. With bfloat16 the optimiser keeps float32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    compiled: bool = True
    """On a CPU, sample and learn by functions compiled for the processor, where the machine has a C compiler and the model is a
    Llama, Mistral or Qwen in float32. Sampling with top-k, top-p or min-p is torch's all the same. What was found is frozen
    into the run."""
    compile_blocks: bool = False
    """Learn through norms and gated units compiled by torch, in families that have no kernels of ours (Gemma, Phi, OLMo …). The
    first update waits for the compiler, up to a minute."""
    system_prompt: str | None = None
    """Put before every prompt of a task as a system message (chat models only)."""
    template_options: dict[str, Any] = {}
    """Extra variables for the chat template, such as `enable_thinking = false`."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model's folder. Off: such a model is refused."""

    def at(self, source: str) -> Model:
        """The same settings for a whole model that lies there: with no adapter on top, and not quantised."""
        return self.model_copy(update={"source": source, "lora": None, "adapter": None, "quantise": None})


class Task(Section):
    """What is asked. `type` picks a task; the other keys are that task's own options, checked when it is built."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str
    """`arithmetic`, `countdown`; `calculator`, `guess` (in several turns); `gsm8k`, `math`, `mbpp`, `humaneval`, `hh`;
    `reasoning_gym`; or `file` (JSONL or Parquet); `oncurve recipe explain task.TYPE` lists a task's options."""
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
    """`answer`, `math`, `code`, `countdown`, `columns`, `guess`, `reasoning_gym`; `format`, `json`, `language`, `length`,
    `cosine`, `overlong`, `repetition`; `process`, `model`, `judge`; or `python` (any function: `function = "file.py:name"`)."""
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
            raise conflict("min_new_tokens", self.min_new_tokens, because=because, fix=f"use {self.max_new_tokens} or less")
        return self

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Engine(Section):
    """The native engine's own settings. Changing one may change rounding, never the random numbers."""

    slots: PositiveInt | None = None
    """Completions decoded at once. Unset: chosen for the machine and the step's size, then frozen into the run."""
    check_every: PositiveInt = 4
    """Finished completions are noticed and their slots refilled every so many tokens."""
    pool_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.8
    """On a GPU, the most of its free memory that keys and values may take while sampling; the learner has it afterwards."""


class Guard(Section):
    """Updates that are left out: a NaN always, and a spike. Their batches are kept: `oncurve show RUN --bad`."""

    spike: NonNegative = 100.0
    """An update is left out where its gradient norm, loss, KL or mean reward lies more than so many usual deviations (median
    absolute deviation, at least a tenth of the median) from the median of the last `window`; 0: only NaN and infinity are.
    100 is far outside of healthy training: clipping already bounds what a lesser spike can do."""
    window: PositiveInt = 50
    """How many updates back are looked at. Before 8 of them are known nothing counts as a spike."""
    rollback_after: Count = 0
    """After so many steps in a row with an update left out, go back to the last checkpoint and on with other samples; 0:
    never."""


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
    moments: Literal["float32", "int8"] = "float32"
    """Precision of Adam's moments. `int8`: in blocks of 128 with a scale each, a quarter of the memory and a little noise."""
    on_cpu: bool = False
    """Keep master weights and moments in the CPU's memory: a GPU then holds only weights and gradients, and an update waits for
    the way there and back."""
    guard: Guard = Guard()
    """Which updates are left out."""


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
