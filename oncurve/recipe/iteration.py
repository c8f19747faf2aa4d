"""Iterative GRPO: every so many steps the reward model learns from fresh comparisons, and the reference becomes the policy."""

from __future__ import annotations

from pydantic import PositiveInt

from oncurve.recipe.reward_model import RewardModelOptimiser
from oncurve.recipe.sections import Reward, Section, Share


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
