"""The section `[scale]`: over how many processes a run is spread, and who does what in them. Everything else stays as it is.

Everything a recipe can say: the stages, and the recipe that lists them. Sections are in sections.py and sampled.py.

A default lives in its section and nowhere else, with its reason in the docstring under the field.

The section of a recipe that names where else a run's numbers go. The run's own database has everything in any case.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.recipe.schema.sections import (
    Count,
    Engine,
    Model,
    NonNegative,
    Reward,
    Section,
    SftOptimiser,
    Share,
    StageBase,
    Task,
    conflict,
)
from oncurve.recipe.schema.stages import (
    Advantage,
    Dpo,
    Iteration,
    PolicyGradientStage,
    Ppo,
    RejectionSample,
    RewardModel,
    RolloutStage,
    TrainingFree,
    Trpo,
)


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


ObjectiveName = Literal[
    "grpo",
    "grpo_sequence",
    "dapo",
    "dr_grpo",
    "bnpo",
    "gspo",
    "gspo_token",
    "cispo",
    "sapo",
    "rloo",
    "reinforce",
    "reinforce_pp",
]


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


Stage = Annotated[Sft | Grpo | Ppo | Trpo | Dpo | RewardModel | RejectionSample | TrainingFree, Field(discriminator="type")]


class Evaluation(Section):
    """How held-out accuracy, or reward where no rule says what is right, is measured."""

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
    """How held-out accuracy, or reward where no rule says what is right, is measured."""
    engine: Engine = Engine()
    """The native engine's settings."""
    scale: Scale = Scale()
    """Over how many processes and machines the run is spread."""
    deterministic: bool = False
    """On a GPU: use only algorithms that give the same bits each time, and print what they cost. A CPU does so anyway."""
    threads: PositiveInt | None = None
    """CPU threads; unset: the machine's cores, frozen into the run."""
    sinks: tuple[Sink, ...] = ()
    """Where else the curves go: TensorBoard, Weights & Biases, trackio. The run's own database has everything in any case."""

    @property
    def uses_policy(self) -> bool:
        """Whether any stage needs the model; where none does it is neither loaded nor written."""
        return any(stage.uses_policy for stage in self.stages)

    @property
    def rollout_stages(self) -> tuple[RolloutStage, ...]:
        """The stages that sample and reward completions, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, RolloutStage))

    def stage_to_grade(self, name: str | None = None) -> Stage:
        """The stage whose rewards grade a text: the one of this name, else the last that trains on samples, else the last that
        samples, else the last."""
        order = (lambda s: s.label == name, lambda s: s.samples and s.updates_policy, lambda s: s.samples, lambda s: True)
        return next(stage for chosen in order for stage in reversed(self.stages) if chosen(stage))
