"""The sections of a recipe other than the model and the stages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from oncurve.errors import did_you_mean
from oncurve.objective_specs import AdvantageScale, Baseline, KlEstimator, KlPlace, defaults_in_words
from oncurve.plugins import declared_plugins
from oncurve.recipe.schema.base import Count, NonNegative, Section, Share, conflict


class Task(Section):
    """The source of prompts. `type` picks a task; the other keys are that task's options, which are checked when it is
    built."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str
    """Which task, such as `arithmetic`, or `file` for your own file. `oncurve recipe explain task.type` lists all."""
    heldout: PositiveInt = 200
    """Size of the held-out split: prompts for evaluation, none of which is trained on."""
    seed: Count = 0
    """Seed of the generated problems. It is separate from the run's seed, so that runs with other seeds are evaluated on the
    same prompts."""

    @property
    def options(self) -> dict[str, Any]:
        """The task's own keys, for its schema."""
        return dict(self.model_extra or {})


class Reward(Section):
    """One reward. `type` picks it; keys other than those below are the reward's options, which are checked when it is built."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str
    """Which reward, such as `answer`, or `python` for your own function. `oncurve recipe explain rewards.type` lists all."""
    name: str | None = None
    """Name of the aspect in tables and in `--set rewards.NAME.key=value`. Unset: its type."""
    weight: float = 1.0
    """Weight in the total. 0: recorded, not trained on."""
    task: str | None = None
    """With the task `mix`: score only the prompts of the task of this name. Unset: those of all."""

    @property
    def label(self) -> str:
        return self.name or self.type

    @property
    def options(self) -> dict[str, Any]:
        """The reward's own keys, for its schema."""
        return dict(self.model_extra or {})


class Sampling(Section):
    """How completions are sampled."""

    temperature: NonNegative = 1.0
    """1 samples the policy itself, which the formulas assume. 0 is greedy, for evaluation only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: of the tokens that `top_k` keeps, renormalised, keep the most likely ones up to this probability mass.
    1 keeps all. grpo and ppo train the truncated policy: the learner renormalises its log-probs over the tokens that were
    kept."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Drop tokens less likely than this fraction of the most likely one; 0 drops none."""
    max_new_tokens: PositiveInt = 256
    """Length limit of a completion. A completion that reaches it is truncated (metrics and keys call it *cut*)."""
    min_new_tokens: Count = 0
    """No end token is sampled before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion as soon as it contains one of them."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            because = f"max_new_tokens is {self.max_new_tokens}, so no completion could end"
            raise conflict("min_new_tokens", self.min_new_tokens, because=because, fix=f"use {self.max_new_tokens} or less")
        if "" in self.stop:
            because = "every text contains the empty string, so each completion would end after its first token"
            raise conflict("stop", list(self.stop), because=because, fix='name the texts that end a completion: ["\\n"]')
        return self

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p truncate the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


Draft = Literal["auto", "group", "own", "off"]
KVDtype = Literal["auto", "fp8"]


class Engine(Section):
    """Settings of the native sampling engine. They may change rounding, but never the random numbers."""

    slots: PositiveInt | None = None
    """Sequences decoded at the same time. Unset: chosen for the machine and the size of a step when a new run starts, and
    recorded in it."""
    check_every: PositiveInt = 4
    """Finished sequences are detected and their slots refilled every N tokens."""
    pool_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.8
    """On a GPU: largest fraction of the free memory that the KV cache may use while sampling. The learner gets it back
    afterwards."""
    draft: Draft = "auto"
    """Speculative sampling without a draft model: the engine finds an earlier occurrence of the completion's last tokens,
    drafts the tokens that followed it, and verifies them in the same pass. A drafted token is accepted only if it is the token
    that is sampled anyway. `own` searches the prompt and the completion; `group` also searches the other completions of the
    group and the prompt's last answers. `auto` is `group` for models that C decodes, where drafts use rows that are computed in
    any case, and `off` on a GPU and in torch. Drafts are not used with recurrent layers, on the general path, with
    `task.history = "template"`, for samples whose experts `routing_replay` or `balance_loss` records, or with more than 16
    slots in torch on a CPU or 256 on a GPU. With `own` or `group`, the run's log says how many rows each slot has, or why there
    are no drafts."""
    kv_dtype: KVDtype = "auto"
    """Numbers in the KV cache: `auto` uses the model's dtype. `fp8` rounds keys and values to e4m3, with one scale for each
    position and KV head. On a GPU this halves the KV cache in 16 bits, so that longer or more completions fit and a decode step
    reads less; it has not been run on a GPU yet. Sampled log-probs then differ from the learner's, so `importance_cap` is on by
    default. On a CPU, and wherever torch decodes on a GPU, numbers are rounded in the same way, but no memory is saved."""


class Guard(Section):
    """Skips bad updates: those with a NaN, and spikes. Their batches are kept: `oncurve show RUN --bad`."""

    spike: NonNegative = 100.0
    """Skip an update if its gradient norm, loss, KL or mean reward is more than this many deviations from the median of the
    last `window` updates. One deviation is 1.48 times the median absolute deviation, but at least a tenth of the median, and at
    least 0.01 for the gradient norm and KL, 0.1 for the loss and 1 for the reward. 0: skip only NaN and infinity. 100 is far
    outside of healthy training: gradient clipping already limits smaller spikes."""
    window: PositiveInt = 50
    """Number of past updates that a spike is measured against. With fewer than 8, nothing counts as a spike."""
    rollback_after: Count = 0
    """After this many consecutive steps with a skipped update, return to the last checkpoint and continue with other samples;
    0: never."""


class Optimiser(Section):
    """AdamW, its learning-rate schedule, and gradient clipping."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate. 1e-6 suits full fine-tuning of a pretrained model; small models trained from scratch need 1e-4 to
    3e-3."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up. `linear` and `cosine` decay to `final_share` of the peak at the stage's last step."""
    final_share: Share = 0.0
    """Final learning rate of the linear and cosine schedules, as a fraction of the peak."""
    warmup_steps: Count = 0
    """Updates over which the learning rate rises linearly from 0."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, applied to matrices only."""
    max_grad_norm: NonNegative = 1.0
    """Clip the gradient to this norm; 0 does not clip."""
    moments: Literal["float32", "int8"] = "float32"
    """Precision of Adam's moments. `int8` stores blocks of 128 with one scale each, in a quarter of the memory. It adds a
    little noise to updates and does not change their mean size."""
    on_cpu: bool = False
    """Keep master weights and moments in CPU memory. The GPU then holds only weights and gradients, and each update waits for
    the transfer."""
    guard: Guard = Guard()
    """Which updates are skipped."""


class SftOptimiser(Optimiser):
    """AdamW for supervised training: a higher learning rate that decays."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate. 1e-3 suits the built-in model; pretrained models need 1e-5 to 1e-4."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Schedule after the warm-up. `linear` and `cosine` decay to `final_share` of the peak at the stage's last step."""


class RewardModelOptimiser(Optimiser):
    """AdamW for reward models: a low learning rate that decays, for few passes over the data."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate. 1e-5 suits pretrained models; the built-in one needs 1e-3."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Schedule after the warm-up. `linear` and `cosine` decay to `final_share` of the peak at the stage's last step."""


class Clip(Section):
    """A clip range instead of the objective's own."""

    low: NonNegative
    """ε_low: ratios below 1 − low are clipped if the advantage is negative."""
    high: NonNegative
    """ε_high: ratios above 1 + high are clipped if the advantage is positive."""
    dual: PositiveFloat | None = None
    """Two-sided clip: an upper bound on the ratio if the advantage is negative (TRL's `delta`); must be above 1 + high."""


class Kl(Section):
    """The KL penalty toward the reference."""

    beta: NonNegative = 0.0
    """Weight of the KL term. 0: there is no reference, and no forward pass for it."""
    estimator: KlEstimator | None = None
    """Schulman's estimators of KL(π_θ‖π_ref) from samples. Unset: k3 in the loss, where it is never negative; k1 in the reward,
    where its sum over a completion is exactly the log-ratio."""
    where: KlPlace | None = Field(
        default=None,
        description="In the loss (GRPO), or subtracted from each completion's reward (RLOO, PPO). Unset: the reward in ppo; "
        f"in grpo the objective's default, which is {defaults_in_words('kl_place')}.",
    )
    ratio_weighted: bool = False
    """Weight each token's KL by its ratio, which makes it unbiased also for μ > 1."""
    refresh_every: Count = 0
    """Iterative GRPO: the reference becomes the current policy every N steps; 0: never."""
    refresh_mix: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Fraction of the policy in a refreshed reference; the rest is the previous reference. With `refresh_every = 1` and 0.01
    the reference is an exponential moving average of the policy's weights over about 100 steps. 1: it becomes the policy."""
    on_cpu: bool = False
    """Keep the reference's weights in CPU memory, and swap them with the policy's for its forward pass. This saves a second
    copy on the GPU and costs two transfers per step. With LoRA there is no second copy anyway."""


class EntropyControls(Section):
    """Controls that keep the policy's entropy from collapsing. Tokens are selected among all loss tokens of a step, before its
    first update. A token that is left out still counts in the totals by which the loss is divided."""

    top_share: Share = 1.0
    """Top-entropy tokens: only this fraction of the tokens, those of highest entropy, is in the surrogate (arXiv 2506.01939
    uses 0.2). It costs a forward pass. 1: all."""
    clip_cov: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Clip-cov: leave this fraction of the tokens out of the surrogate, at least one, chosen at random among those whose
    covariance of advantage and log-prob is within `clip_cov_range` (arXiv 2505.22617 uses 0.0002). Unset: none."""
    clip_cov_range: tuple[float, float] = (1.0, 5.0)
    """With `clip_cov`: the covariances from which tokens are chosen."""
    kl_cov: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """KL-cov: penalise |log ratio| at this fraction of the tokens, those of highest covariance, at least one (arXiv 2505.22617
    uses 0.0002 to 0.002). It needs more than one update per step, because every ratio is 1 at the first. Unset: none."""
    kl_cov_weight: PositiveFloat = 1.0
    """With `kl_cov`: weight of the penalty."""
    target: PositiveFloat | None = None
    """Adaptive entropy bonus (arXiv 2505.22312): a target in nats per token. The bonus starts at `entropy_bonus`. After each
    step it grows by `bonus_step` if the entropy was at or below the target, and shrinks by it otherwise. It is applied only in
    steps that follow one with an entropy at or below the target. Unset: the bonus is fixed."""
    bonus_step: PositiveFloat = 0.005
    """With `target`: change of the bonus after a step."""
    max_bonus: PositiveFloat = 1.0
    """With `target`: the largest bonus; the smallest is 0."""

    @property
    def selects_tokens(self) -> bool:
        return self.top_share < 1 or self.clip_cov is not None or self.kl_cov is not None

    @model_validator(mode="after")
    def _check_unused(self) -> EntropyControls:
        if self.clip_cov_range[0] >= self.clip_cov_range[1]:
            because = "no covariance lies between the bounds"
            raise conflict("clip_cov_range", list(self.clip_cov_range), because=because, fix="use [1, 5]")
        owners = {"clip_cov_range": "clip_cov", "kl_cov_weight": "kl_cov", "bonus_step": "target", "max_bonus": "target"}
        for key, owner in owners.items():
            value = getattr(self, key)
            if getattr(self, owner) is None and value != type(self).model_fields[key].default:
                shown = list(value) if isinstance(value, tuple) else value
                raise conflict(key, shown, because=f"it belongs to {owner}, which is not set", fix=f"set {owner}, or remove it")
        return self


class Advantage(Section):
    """How a group is graded."""

    scale: AdvantageScale | None = Field(
        default=None,
        description="Divide by the group's std (GRPO), by one std over the batch, or by nothing (Dr. GRPO). `whiten` "
        "normalises the advantages of all tokens of the step to mean 0 and std 1 (REINFORCE++). `mean` divides by the group's "
        "mean reward (MaxRL), `signal_share` by the fraction of completions in groups with signal (GPG). `per_reward` "
        "normalises each reward by itself before they are summed (GDPO). Unset: the objective's default, which is "
        f"{defaults_in_words('scale')}.",
    )
    baseline: Baseline | None = Field(
        default=None,
        description="Subtract the group's mean, the mean of the others in the group (RLOO), the mean weighted by length "
        "(`length_weighted`: OPO), the best of the others (`best_of_others`: pass@k; an advantage is then never negative), or "
        f"nothing (REINFORCE). Unset: the objective's default, which is {defaults_in_words('baseline')}.",
    )
    k: Annotated[int, Field(ge=2)] | None = None
    """k of pass@k, for `baseline = "best_of_others"`: a completion is graded by how much it raises the best of k. Unset: the
    group's size."""
    eps: PositiveFloat = 1e-4
    """Added to the std."""


class Overlong(Section):
    """DAPO's soft overlong penalty: it grows linearly from 0 at a length of limit − buffer to −1 at the limit."""

    buffer: PositiveInt
    """Tokens before the limit over which the penalty grows."""
    weight: float = 1.0
    """Its weight in the total reward."""


class Scale(Section):
    """Training on more than one GPU: learner ranks and what they shard, and, on a Ray cluster, separate samplers and reward
    workers. The gradient of a step equals that of one process within 1e-5, whatever is set here."""

    ranks: PositiveInt = 1
    """Learner processes, one per GPU (on a CPU, each with its share of the threads). Every rank samples its share of a step's
    prompts with its own weights. `oncurve train --gpus N` sets it."""
    backend: Literal["auto", "gloo"] = "auto"
    """How ranks exchange tensors. `auto`: NCCL between GPUs, gloo between CPUs. `gloo`: through CPU memory, which is slow, but
    ranks may share a GPU, so that a recipe for several GPUs can be tried on one."""
    shard: Literal["none", "optimiser", "full"] = "none"
    """What the ranks shard instead of each holding a copy. `optimiser`: master weights and moments; each rank keeps complete
    weights and gradients, and all fast paths work. `full`: weights and gradients too (FSDP2); the model runs through its own
    modules, and weights are gathered for sampling. With one rank nothing is sharded."""
    tensor: PositiveInt = 1
    """With `shard = "full"`: number of ranks that split each layer between them (tensor parallel, by transformers' plan for the
    model) and learn from the same groups. Must divide `ranks`, and the model's heads, KV heads and widths."""
    offload: bool = False
    """With `shard = "full"`: keep the shards of weights and moments in CPU memory: slower, with less GPU memory."""
    gather: bool = True
    """With `shard = "full"`: gather all weights once for sampling. If false, every token gathers them again, layer by layer:
    many times slower, and the only way if the weights alone do not fit on a GPU."""
    engine: Literal["native", "vllm"] = "native"
    """The sampling engine. `native` samples with the learner's own weights, without a copy. `vllm` runs vLLM in a separate
    process, which gets the new weights after each step."""
    vllm_tensor: PositiveInt = 1
    """With `engine = "vllm"`: GPUs over which vLLM splits each layer, for models that do not fit on one next to the learner.
    The learner's GPU is the first of them; on Ray, each sampler has this many."""
    samplers: Count = 0
    """On Ray: sampling processes separate from the learners; 0: the learners sample."""
    reward_workers: Count = 0
    """On Ray: processes that compute rewards, on any node with CPUs; 0: the sampling processes do."""
    max_staleness: Count = 0
    """With `samplers`: how many updates the weights that sampled a completion may be behind those that learn from it. 0:
    synchronous and exact."""
    timeout_s: PositiveFloat = 600.0
    """The longest time that a collective or a remote call may take. After that the run stops and reports which rank waited for
    which."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Scale:
        if self.ranks % self.tensor:
            because = f"{self.tensor} ranks hold one copy of the model, and ranks is {self.ranks}"
            raise conflict(
                "tensor",
                self.tensor,
                because=because,
                fix=f"use a divisor of {self.ranks}, or a multiple of {self.tensor} for ranks",
            )
        if self.tensor > 1 and self.shard != "full":
            because = f'layers are split only if weights are sharded, and shard is "{self.shard}"'
            raise conflict("tensor", self.tensor, because=because, fix='use shard = "full", or remove it')
        if self.offload and self.shard != "full":
            because = f'only sharded weights can be offloaded, and shard is "{self.shard}"'
            fix = 'use shard = "full", or optimiser.on_cpu in the stage'
            raise conflict("offload", "true", because=because, fix=fix)
        if not self.gather and (self.shard != "full" or self.engine == "vllm"):
            because = (
                "vLLM samples with complete weights"
                if self.engine == "vllm"
                else f'each rank has complete weights if shard is "{self.shard}"'
            )
            raise conflict("gather", "false", because=because, fix='use shard = "full" and engine = "native", or remove it')
        if self.vllm_tensor > 1 and self.engine != "vllm":
            because, fix = "the native engine samples with the learner's own weights", 'use engine = "vllm", or remove it'
            raise conflict("vllm_tensor", self.vllm_tensor, because=because, fix=fix)
        if self.vllm_tensor > 1 and self.ranks > 1 and not self.samplers:
            because = f"each of the {self.ranks} ranks runs its own vLLM on its GPU, and the next GPU belongs to the next rank"
            fix = "use ranks = 1, or separate samplers (Ray)"
            raise conflict("vllm_tensor", self.vllm_tensor, because=because, fix=fix)
        if self.max_staleness and not self.samplers:
            because = "the learners sample themselves, with their current weights"
            raise conflict("max_staleness", self.max_staleness, because=because, fix="set samplers (Ray), or remove it")
        return self

    @property
    def copies(self) -> int:
        """Complete copies of the model among the ranks. Each samples its own share of the prompts."""
        return self.ranks // self.tensor


BUILT_IN_SINKS = ("tensorboard", "wandb", "trackio")


class Sink(Section):
    """A logger that also gets the run's curves. A sink that fails never stops a run."""

    type: str
    """`tensorboard` writes to RUN/tensorboard; `wandb` (Weights & Biases) and `trackio` log to their own projects. Each needs
    its package: `pip install 'oncurve[TYPE]'`. Or the name of a plug-in."""
    project: str = "oncurve"
    """Project in wandb or trackio. The run has the same name there."""
    offline: bool = False
    """With wandb: write to RUN/wandb for a later `wandb sync`. trackio and tensorboard are always local."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a plug-in. The built-in sinks have none."""

    @model_validator(mode="after")
    def _exists(self) -> Sink:
        known = (*BUILT_IN_SINKS, *sorted(declared_plugins("oncurve.sinks")))
        if self.type not in known:
            fix = f"name one of them{did_you_mean(self.type, known)}"
            raise conflict("type", self.type, because=f"the sinks are: {', '.join(known)}", fix=fix)
        if self.options and self.type in BUILT_IN_SINKS:
            because = f"the sink {self.type} is built in and has no options"
            raise conflict("options", self.options, because=because, fix="remove it")
        return self


class Evaluation(Section):
    """How the held-out split is evaluated: accuracy, or mean reward if there is no verifiable reward."""

    temperature: NonNegative = 0.0
    """0: greedy, with the same result every time."""
    samples: PositiveInt = 1
    """Completions per held-out prompt."""
    max_new_tokens: PositiveInt | None = None
    """Length limit. Unset: the stage's `sampling.max_new_tokens`; after a stage that does not sample, the largest of the
    recipe's stages, or without one 256, or less if the model has fewer positions."""
