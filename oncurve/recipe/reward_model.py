"""The stage `reward_model`: a model of what is preferred, learned from comparisons, ratings or judged steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.recipe.sections import Optimiser, StageBase


class RewardModelOptimiser(Optimiser):
    """AdamW with the habits of reward models: few passes over the data, at a low rate that goes down."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate. 1e-5 suits pretrained models; the built-in one takes 1e-3."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """What follows the warm-up; linear and cosine go down to `final_share` of the peak at the stage's last step."""


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

    @property
    def moves_policy(self) -> bool:
        return False

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the model's outputs."""
        return ("wrong", "right") if self.kind == "steps" else self.aspects or ("reward",)
