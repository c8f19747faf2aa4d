"""Everything a recipe can say: the stages, and the recipe that lists them. Sections are in sections.py and sampled.py.

A default lives in its section and nowhere else, with its reason in the docstring under the field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.recipe.dpo import Dpo
from oncurve.recipe.iteration import Iteration
from oncurve.recipe.ppo import Ppo
from oncurve.recipe.rejection import RejectionSample
from oncurve.recipe.reward_model import RewardModel
from oncurve.recipe.sampled import Advantage, Surrogate
from oncurve.recipe.scale import Scale
from oncurve.recipe.sections import Count, Engine, Model, NonNegative, Reward, Section, SftOptimiser, Share, StageBase, Task
from oncurve.recipe.sinks import Sink
from oncurve.recipe.training_free import TrainingFree
from oncurve.recipe.trpo import Trpo


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


class Grpo(Surrogate):
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
