"""The stage `rejection_sample`: the policy's own best answers, kept for an sft stage to imitate."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from oncurve.recipe.sampled import Sampled


class RejectionSample(Sampled):
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

    @property
    def moves_policy(self) -> bool:
        return False
