"""The sections that recipes are made of. A default lives in its section and nowhere else, with its reason under the field.

The docstrings are read by `oncurve recipe explain`, by the command line's help and by the documentation's table. Models are
strict (a key that doesn't exist is an error) and frozen. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from oncurve.objective_specs import AdvantageScale, Baseline, KlEstimator, KlPlace
from oncurve.recipe.schema.base import Count, NonNegative, Section, Share, conflict


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


class RewardModelOptimiser(Optimiser):
    """AdamW with the habits of reward models: few passes over the data, at a low rate that goes down."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate. 1e-5 suits pretrained models; the built-in one takes 1e-3."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """What follows the warm-up; linear and cosine go down to `final_share` of the peak at the stage's last step."""


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

    scale: AdvantageScale | None = None
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


class Scale(Section):
    """Past one GPU: learner processes, what they share out, and, on a Ray cluster, samplers and reward workers apart from
    them. The gradient of a step is that of one process within 1e-5, whatever stands here."""

    ranks: PositiveInt = 1
    """Learner processes, one for each GPU (or, on a CPU, each with its share of the threads). Every rank samples its share of a
    step's prompts with its own weights. `oncurve train --gpus N` sets it."""
    shard: Literal["none", "optimiser", "full"] = "none"
    """What the ranks share out in place of each holding all of it. `optimiser`: master weights and moments, with whole weights
    and gradients on each rank and all fast paths kept. `full`: weights and gradients too, by FSDP2; the model goes through its
    own modules, and weights are gathered for sampling. With one rank there is nothing to share out."""
    tensor: PositiveInt = 1
    """With `shard = "full"`: ranks that split each layer between them (tensor parallel, by the plan that transformers has for
    the model), and learn from the same groups. Must divide `ranks`, and the model's heads, key heads and widths."""
    offload: bool = False
    """With `shard = "full"`: keep shards of weights and moments in the CPU's memory, for GPUs without room; slower."""
    gather: bool = True
    """With `shard = "full"`: gather all weights once for sampling. Without it every token gathers them anew, a layer at a time:
    many times slower, and the only way where the weights alone are larger than a GPU."""
    engine: Literal["native", "vllm"] = "native"
    """What samples. `native`: with the learner's own weights, none of them copied. `vllm`: vLLM, in a process of its own, to
    which new weights are pushed after each step."""
    vllm_tensor: PositiveInt = 1
    """With `engine = "vllm"`: GPUs over which vLLM splits each layer, for models that one does not hold beside the learner. The
    learner's own is the first of them; with Ray, each sampler has so many."""
    samplers: Count = 0
    """With Ray: sampling processes apart from the learners; 0: the learners sample."""
    reward_workers: Count = 0
    """With Ray: processes that compute rewards, anywhere with CPUs; 0: those that sample do."""
    max_staleness: Count = 0
    """With `samplers`: how many updates the weights that wrote a completion may be older than those that learn from it. 0:
    synchronous, and exact."""
    timeout_s: PositiveFloat = 600.0
    """The longest that a collective or a remote call may take. Then the run stops and says which rank waited for whom."""

    @model_validator(mode="after")
    def _fits_together(self) -> Scale:
        if self.ranks % self.tensor:
            because = f"{self.tensor} ranks hold one copy of the model together, and ranks is {self.ranks}"
            raise conflict(
                "tensor",
                self.tensor,
                because=because,
                fix=f"use a divisor of {self.ranks}, or a multiple of {self.tensor} for ranks",
            )
        if self.tensor > 1 and self.shard != "full":
            because = f'layers are split where weights are shared out, and shard is "{self.shard}"'
            raise conflict("tensor", self.tensor, because=because, fix='use shard = "full", or leave it out')
        if self.offload and self.shard != "full":
            because = f'only shards of weights are kept there, and shard is "{self.shard}"'
            fix = 'use shard = "full", or optimiser.on_cpu in the stage'
            raise conflict("offload", "true", because=because, fix=fix)
        if not self.gather and (self.shard != "full" or self.engine == "vllm"):
            because = (
                "vLLM samples with whole weights"
                if self.engine == "vllm"
                else f'weights are whole where shard is "{self.shard}"'
            )
            raise conflict("gather", "false", because=because, fix='use shard = "full" and engine = "native", or leave it out')
        if self.vllm_tensor > 1 and self.engine != "vllm":
            because, fix = "the native engine samples with the learner's own weights", 'use engine = "vllm", or leave it out'
            raise conflict("vllm_tensor", self.vllm_tensor, because=because, fix=fix)
        if self.vllm_tensor > 1 and self.ranks > 1 and not self.samplers:
            because = f"each of the {self.ranks} ranks has a vLLM of its own on its GPU, and the next GPU is the next rank's"
            fix = "use ranks = 1, or samplers apart from the learners (Ray)"
            raise conflict("vllm_tensor", self.vllm_tensor, because=because, fix=fix)
        if self.max_staleness and not self.samplers:
            because = "the learners sample themselves, with the weights that they have"
            raise conflict("max_staleness", self.max_staleness, because=because, fix="set samplers (Ray), or leave it out")
        return self

    @property
    def copies(self) -> int:
        """Whole copies of the model among the ranks: each samples its own share of the prompts."""
        return self.ranks // self.tensor


class Sink(Section):
    """One more place for the curves, for those who live there already. A sink that fails never stops a run."""

    type: Literal["tensorboard", "wandb", "trackio"]
    """`tensorboard` writes RUN/tensorboard; `wandb` (Weights & Biases) and `trackio` go to their own projects. Each needs its
    package: `pip install 'oncurve[TYPE]'`."""
    project: str = "oncurve"
    """The project of wandb or trackio; the run is called there as it is here."""
    offline: bool = False
    """With wandb: keep everything in RUN/wandb, for `wandb sync` later. trackio and tensorboard are local anyway."""


class Evaluation(Section):
    """How held-out accuracy, or reward where no rule says what is right, is measured."""

    temperature: NonNegative = 0.0
    """0: greedy, the same each time."""
    samples: PositiveInt = 1
    """Completions of each held-out problem."""
    max_new_tokens: PositiveInt | None = None
    """Length limit; unset: the stage's own, or 256."""
