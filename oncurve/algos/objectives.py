"""Objectives as compositions of ratio, surrogate and reduction: a new one is one line in OBJECTIVES.

    loss = Σ_M share_M · (−weight_M · surrogate_M + β · KL_M) − entropy_bonus · mean token entropy

Everything is flat over the ``N`` packed completion tokens of a micro-batch; summed over micro-batches it is the step's loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from oncurve.algos.kl import KL_ESTIMATORS, KlEstimator
from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.ratios import Ratio, sequence_mean_ratio, sequence_product_ratio, sequence_token_ratio, token_ratio
from oncurve.algos.reductions import (
    LossDenominators,
    Reduction,
    mean_of_completion_means,
    mean_of_completion_sums,
    mean_over_length_budget,
    mean_over_step_tokens,
)
from oncurve.algos.surrogates import Cispo, Clipped, LogLikelihood, Sapo, Surrogate


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch: ``rows`` completions of ``N`` tokens in all, each completion whole.

    ``mask_M`` is True on the loss tokens of graded completions; what stands elsewhere is ignored. ``row_M`` (int64) numbers
    each token's completion from 0. ``logp_old_M`` is the learner's own: ``logp_new_M`` detached where a batch gets one update.
    ``weight_M`` are truncated importance weights; they scale the surrogate, not the KL.
    """

    logp_new_M: Tensor
    logp_old_M: Tensor
    advantage_M: Tensor
    mask_M: Tensor
    row_M: Tensor
    rows: int
    totals: LossDenominators
    logp_ref_M: Tensor | None = None
    entropy_M: Tensor | None = None
    weight_M: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The terms beside the surrogate. ``ratio_weighted_kl`` multiplies each token's KL by its ratio (unbiased at μ > 1)."""

    beta: float
    kl_estimator: KlEstimator
    ratio_weighted_kl: bool
    entropy_bonus: float


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """``loss`` is to be differentiated; all else is detached. Token tensors are meaningful where the mask is True.

    ``policy_loss`` is the surrogate's part of the loss. ``clipped_M`` is where either bound took hold; ``kl_M`` is the plain
    estimate, before any ratio, and None without a reference.
    """

    loss: Tensor
    policy_loss: Tensor
    ratio_M: Tensor
    clipped_low_M: Tensor
    clipped_high_M: Tensor
    kl_M: Tensor | None

    @property
    def clipped_M(self) -> Tensor:
        return self.clipped_low_M | self.clipped_high_M


@dataclass(frozen=True, slots=True)
class Objective:
    """One ratio, one surrogate, one reduction."""

    ratio: Ratio
    surrogate: Surrogate
    reduction: Reduction

    def __str__(self) -> str:
        return f"{self.ratio.__name__} · {self.surrogate} · {self.reduction.__name__}"

    def loss(self, inputs: LossInputs, settings: LossSettings) -> LossOutputs:
        """The micro-batch's part of the step's loss, and what each token did in it."""
        rows = PackedRows.of(inputs.row_M, inputs.mask_M, inputs.rows, inputs.logp_new_M.dtype)
        logp_M = rows.mask(inputs.logp_new_M)
        ratio_M = self.ratio(logp_M - rows.mask(inputs.logp_old_M.detach()), rows)
        surrogate = self.surrogate(ratio_M, rows.mask(inputs.advantage_M), logp_M)
        weighed_M = surrogate.value_M if inputs.weight_M is None else surrogate.value_M * rows.mask(inputs.weight_M)
        share_M = self.reduction(rows, inputs.totals)
        policy_loss = -(share_M * weighed_M).sum()
        loss, kl_M = policy_loss, None
        if inputs.logp_ref_M is not None:
            kl_M = KL_ESTIMATORS[settings.kl_estimator](logp_M, rows.mask(inputs.logp_ref_M.detach()))
        if settings.beta:
            assert kl_M is not None, "beta is set, and there are no reference log-probs"
            loss = loss + settings.beta * (share_M * (kl_M * ratio_M if settings.ratio_weighted_kl else kl_M)).sum()
        if settings.entropy_bonus:
            assert inputs.entropy_M is not None, "the entropy bonus is set, and there are no entropies"
            loss = loss - settings.entropy_bonus * rows.mask(inputs.entropy_M).sum() / max(inputs.totals.tokens, 1)
        return LossOutputs(
            loss=loss,
            policy_loss=policy_loss.detach(),
            ratio_M=ratio_M.detach(),
            clipped_low_M=surrogate.clipped_low_M,
            clipped_high_M=surrogate.clipped_high_M,
            kl_M=None if kl_M is None else kl_M.detach(),
        )


def with_clip(objective: Objective, low: float, high: float, dual: float | None = None) -> Objective:
    """The objective with the recipe's clip range instead of its own; a RecipeError where its surrogate has none."""
    return replace(objective, surrogate=objective.surrogate.with_range(low, high, dual))


OBJECTIVES: Mapping[str, Objective] = {
    "grpo": Objective(token_ratio, Clipped(0.2, 0.2), mean_of_completion_means),
    "grpo_sequence": Objective(sequence_product_ratio, Clipped(0.2, 0.2), mean_of_completion_means),
    "dapo": Objective(token_ratio, Clipped(0.2, 0.28), mean_over_step_tokens),
    "dr_grpo": Objective(token_ratio, Clipped(0.2, 0.2), mean_over_length_budget),
    "bnpo": Objective(token_ratio, Clipped(0.2, 0.2), mean_over_step_tokens),
    "gspo": Objective(sequence_mean_ratio, Clipped(3e-4, 4e-4), mean_of_completion_means),
    "gspo_token": Objective(sequence_token_ratio, Clipped(3e-4, 4e-4), mean_of_completion_means),
    "cispo": Objective(token_ratio, Cispo(1.0, 4.0), mean_over_step_tokens),
    "sapo": Objective(token_ratio, Sapo(), mean_of_completion_means),
    "rloo": Objective(sequence_product_ratio, Clipped(0.2, 0.2), mean_of_completion_means),
    "reinforce": Objective(token_ratio, LogLikelihood(), mean_of_completion_sums),
    "reinforce_pp": Objective(token_ratio, Clipped(0.2, 0.2), mean_over_step_tokens),
}
"""Each with its paper's clip range (cispo's upper bound of 5 is TRL's reading; the paper leaves it to be tuned). rloo's loss is
grpo_sequence's, whose mean over a completion of one number per sequence is that number: what makes it RLOO is a
leave-one-out baseline without scaling, and the k1 KL inside the reward."""
