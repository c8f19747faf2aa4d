"""Objectives as compositions of ratio, surrogate and reduction: a new one is one line in OBJECTIVES.

    loss = Σ_N share_N · (−weight_N · surrogate_N + β · KL_N) − entropy_bonus · mean token entropy

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

    ``mask_N`` is True on the loss tokens of graded completions; what stands elsewhere is ignored. ``row_N`` (int64) numbers
    each token's completion from 0. ``logp_old_N`` is the learner's own: ``logp_new_N`` detached where a batch gets one update.
    ``weight_N`` are truncated importance weights; they scale the surrogate, not the KL.
    """

    logp_new_N: Tensor
    logp_old_N: Tensor
    advantage_N: Tensor
    mask_N: Tensor
    row_N: Tensor
    rows: int
    totals: LossDenominators
    logp_ref_N: Tensor | None = None
    entropy_N: Tensor | None = None
    weight_N: Tensor | None = None


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

    ``policy_loss`` is the surrogate's part of the loss. ``clipped_N`` is where either bound took hold; ``kl_N`` is the plain
    estimate, before any ratio, and None without a reference.
    """

    loss: Tensor
    policy_loss: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    kl_N: Tensor | None

    @property
    def clipped_N(self) -> Tensor:
        return self.clipped_low_N | self.clipped_high_N


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
        rows = PackedRows.of(inputs.row_N, inputs.mask_N, inputs.rows, inputs.logp_new_N.dtype)
        logp_N = rows.mask(inputs.logp_new_N)
        ratio_N = self.ratio(logp_N - rows.mask(inputs.logp_old_N.detach()), rows)
        surrogate = self.surrogate(ratio_N, rows.mask(inputs.advantage_N), logp_N)
        weighed_N = surrogate.value_N if inputs.weight_N is None else surrogate.value_N * rows.mask(inputs.weight_N)
        share_N = self.reduction(rows, inputs.totals)
        policy_loss = -(share_N * weighed_N).sum()
        loss, kl_N = policy_loss, None
        if inputs.logp_ref_N is not None:
            kl_N = KL_ESTIMATORS[settings.kl_estimator](logp_N, rows.mask(inputs.logp_ref_N.detach()))
        if settings.beta:
            assert kl_N is not None, "beta is set, and there are no reference log-probs"
            loss = loss + settings.beta * (share_N * (kl_N * ratio_N if settings.ratio_weighted_kl else kl_N)).sum()
        if settings.entropy_bonus:
            assert inputs.entropy_N is not None, "the entropy bonus is set, and there are no entropies"
            loss = loss - settings.entropy_bonus * rows.mask(inputs.entropy_N).sum() / max(inputs.totals.tokens, 1)
        return LossOutputs(
            loss=loss,
            policy_loss=policy_loss.detach(),
            ratio_N=ratio_N.detach(),
            clipped_low_N=surrogate.clipped_low_N,
            clipped_high_N=surrogate.clipped_high_N,
            kl_N=None if kl_N is None else kl_N.detach(),
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
