"""Objectives as compositions of ratio, surrogate and reduction.

    loss = Σ_m share_m · (−weight_m · (surrogate_m − anchor_m · |log ρ_m|) + β · KL_m) − entropy_bonus · mean token entropy

The sum runs over the predicted tokens of a micro-batch; summed over micro-batches it is the step's loss. What each
objective is composed of is in `oncurve.objective_specs`. Shape letters: `oncurve.records`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from oncurve.algos.kl import KL_ESTIMATORS
from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.ratios import RATIOS, Ratio
from oncurve.algos.reductions import REDUCTIONS, LossDenominators, Reduction
from oncurve.algos.surrogates import RowSurrogate, Surrogate, SurrogateTokens, build_surrogate
from oncurve.objective_specs import BUILT_IN_OBJECTIVES, KlEstimator, ObjectiveSpec


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch: ``rows`` complete completions, with M predicted tokens in all.

    ``mask_M`` is True at the loss tokens of graded completions; values elsewhere are ignored. ``row_M`` (int64) is the index of
    each token's completion, from 0. ``logp_old_M`` comes from the learner, not the sampler; it is ``logp_new_M`` detached if
    the batch gets a single update. ``weight_M`` holds truncated importance weights, which scale the surrogate and not the KL.
    ``kept_M`` is False at tokens whose surrogate an entropy control drops; ``anchor_M`` is the weight of each token's |log ρ|.
    ``logp_untruncated_M`` is the log-prob before truncated sampling, which the KL term compares; None if nothing is truncated.
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
    kept_M: Tensor | None = None
    anchor_M: Tensor | None = None
    logp_untruncated_M: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The terms besides the surrogate. ``ratio_weighted_kl`` multiplies each token's KL by its ratio (unbiased at μ > 1)."""

    beta: float
    kl_estimator: KlEstimator
    ratio_weighted_kl: bool
    entropy_bonus: float


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """``loss`` carries the gradient; everything else is detached. Token tensors are meaningful where the mask is True.

    ``policy_loss`` is the surrogate's part of the loss. ``clipped_M`` marks tokens clipped at either bound. ``kl_M`` is the
    plain estimate, before it is weighted by the ratio, and None without a reference. ``divergence_M`` is the divergence from a
    teacher, which the stage `distil` adds to the loss. ``balance`` is the balance loss of a mixture of experts, before its
    weight.
    """

    loss: Tensor
    policy_loss: Tensor
    ratio_M: Tensor
    clipped_low_M: Tensor
    clipped_high_M: Tensor
    kl_M: Tensor | None
    divergence_M: Tensor | None = None
    balance: Tensor | None = None

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
        """The micro-batch's part of the step's loss, with each token's ratio, clipping and KL."""
        rows = PackedRows.of(inputs.row_M, inputs.mask_M, inputs.rows, inputs.logp_new_M.dtype)
        logp_M = rows.mask(inputs.logp_new_M)
        log_ratio_M = logp_M - rows.mask(inputs.logp_old_M.detach())
        ratio_M = self.ratio(log_ratio_M, rows)
        surrogate = self._surrogate_tokens(ratio_M, rows.mask(inputs.advantage_M), logp_M, rows)
        value_M = surrogate.value_M
        if inputs.anchor_M is not None:
            value_M = value_M - inputs.anchor_M * log_ratio_M.abs()
        if inputs.kept_M is not None:
            value_M = value_M.masked_fill(~inputs.kept_M, 0.0)
        weighted_M = value_M if inputs.weight_M is None else value_M * rows.mask(inputs.weight_M)
        share_M = self.reduction(rows, inputs.totals)
        policy_loss = -(share_M * weighted_M).sum()
        loss, kl_M = policy_loss, None
        if inputs.logp_ref_M is not None:
            compared_M = logp_M if inputs.logp_untruncated_M is None else rows.mask(inputs.logp_untruncated_M)
            kl_M = KL_ESTIMATORS[settings.kl_estimator](compared_M, rows.mask(inputs.logp_ref_M.detach()))
        if settings.beta:
            assert kl_M is not None, "beta is set, but there are no reference log-probs"
            loss = loss + settings.beta * (share_M * (kl_M * ratio_M if settings.ratio_weighted_kl else kl_M)).sum()
        if settings.entropy_bonus:
            assert inputs.entropy_M is not None, "the entropy bonus is set, but there are no entropies"
            loss = loss - settings.entropy_bonus * rows.mask(inputs.entropy_M).sum() / max(inputs.totals.tokens, 1)
        return LossOutputs(
            loss=loss,
            policy_loss=policy_loss.detach(),
            ratio_M=ratio_M.detach(),
            clipped_low_M=surrogate.clipped_low_M,
            clipped_high_M=surrogate.clipped_high_M,
            kl_M=None if kl_M is None else kl_M.detach(),
        )

    def _surrogate_tokens(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor, rows: PackedRows) -> SurrogateTokens:
        if isinstance(self.surrogate, RowSurrogate):
            return self.surrogate.over_rows(ratio_M, advantage_M, logp_M, rows)
        return self.surrogate(ratio_M, advantage_M, logp_M)


def with_clip(objective: Objective, low: float, high: float, dual: float | None = None) -> Objective:
    """The objective with the recipe's clip range instead of its own. Raises RecipeError if its surrogate clips nothing."""
    return replace(objective, surrogate=objective.surrogate.with_range(low, high, dual))


def build_objective(spec: ObjectiveSpec) -> Objective:
    """The formulas of an objective's row. A plug-in's row may hold formulas instead of their names."""
    return Objective(
        RATIOS[spec.ratio] if isinstance(spec.ratio, str) else spec.ratio,
        spec.surrogate if callable(spec.surrogate) else build_surrogate(spec.surrogate, spec.clip),
        REDUCTIONS[spec.reduction] if isinstance(spec.reduction, str) else spec.reduction,
    )


OBJECTIVES: Mapping[str, Objective] = {name: build_objective(spec) for name, spec in BUILT_IN_OBJECTIVES.items()}
"""The built-in objectives."""
