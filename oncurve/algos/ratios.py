"""Importance ratios, new over old: ρ_i,t = π_θ(o_i,t | q, o_i,<t) / π_old(o_i,t | q, o_i,<t), and their sequence forms.

Each function takes the log-ratio log π_θ − log π_old of every token (0 where masked out) and returns one ratio per token.
Log-ratios are capped at LOG_CAP before the exponential. Beyond it the ratio is e^20 and passes no gradient; without the cap
float32 would overflow and turn a clipped token's gradient, 0 · ∞, into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from oncurve.algos.packed_rows import PackedRows
from oncurve.objective_specs import Correction, RatioName

LOG_CAP = 20.0

Ratio = Callable[[Tensor, PackedRows], Tensor]
"""(log-ratio of each token, rows) → ratio of each token."""


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=LOG_CAP).exp()


def token_ratio(log_ratio_M: Tensor, rows: PackedRows) -> Tensor:
    """ρ_i,t, one per token (PPO; GRPO in DeepSeekMath, arXiv 2402.03300)."""
    return _exp(log_ratio_M)


def sequence_product_ratio(log_ratio_M: Tensor, rows: PackedRows) -> Tensor:
    """π_θ(o_i | q) / π_old(o_i | q) = Π_t ρ_i,t: one unnormalised ratio per sequence (RLOO, GRPO's sequence form)."""
    return rows.broadcast(_exp(rows.sum(log_ratio_M)))


def sequence_mean_ratio(log_ratio_M: Tensor, rows: PackedRows) -> Tensor:
    """s_i = (π_θ(o_i | q) / π_old(o_i | q))^(1/|o_i|): the geometric mean of the token ratios (GSPO, arXiv 2507.18071)."""
    return rows.broadcast(_exp(rows.mean(log_ratio_M)))


def sequence_token_ratio(log_ratio_M: Tensor, rows: PackedRows) -> Tensor:
    """s_i,t = sg[s_i] · π_θ(o_i,t) / sg[π_θ(o_i,t)] (GSPO-token, arXiv 2507.18071), where sg stops the gradient.

    Its value is s_i and its gradient at token t is s_i ∇log π_θ(o_i,t), so the tokens of a sequence can have different
    advantages. π_old is a constant, so log-ratio − sg[log-ratio] equals log π_θ − sg[log π_θ]; its value is exactly 0.
    """
    sequence_M = rows.broadcast(rows.mean(log_ratio_M.detach()))
    return _exp(sequence_M + (log_ratio_M - log_ratio_M.detach()))


RATIOS: Mapping[RatioName, Ratio] = {
    "token_ratio": token_ratio,
    "sequence_product_ratio": sequence_product_ratio,
    "sequence_mean_ratio": sequence_mean_ratio,
    "sequence_token_ratio": sequence_token_ratio,
}


def mismatch_mask(logp_learner_M: Tensor, logp_sampler_M: Tensor, rows: PackedRows, limit: float) -> Tensor:
    """1 at the tokens of rows with 1/limit ≤ (π_learner/π_sampler)^(1/|o_i|) ≤ limit, else 0: drops rows on which sampler and
    learner disagree."""
    gap_R = rows.mean(logp_learner_M.detach() - logp_sampler_M.detach())
    return rows.broadcast((gap_R.abs() <= math.log(limit)).to(gap_R.dtype))


def truncated_weights(logp_learner_M: Tensor, logp_sampler_M: Tensor, cap: float) -> Tensor:
    """min(π_learner / π_sampler, cap) per token, without gradient: truncated importance sampling against sampler mismatch."""
    return _exp(logp_learner_M.detach() - logp_sampler_M.detach()).clamp(max=cap)


def correction_weights(logp_learner_M: Tensor, logp_sampler_M: Tensor, rows: PackedRows, correction: Correction) -> Tensor:
    """The weights of a named correction (`oncurve.objective_specs.CORRECTIONS`), without gradient.

    A token that the sampler could not score (NaN) counts as one on which both agree.
    """
    gap_M = (logp_learner_M.detach() - logp_sampler_M.detach()).nan_to_num(nan=0.0)
    if correction.level == "token":
        gap_M = rows.mask(gap_M)
    else:
        gap_M = rows.broadcast(rows.sum(gap_M) if correction.level == "sequence" else rows.mean(gap_M))
    ratio_M = _exp(gap_M)
    inside_M = (ratio_M >= correction.low) & (ratio_M <= correction.high)
    if not correction.is_weight:
        return inside_M.to(ratio_M.dtype)
    return ratio_M.clamp(correction.low, correction.high) if correction.outside == "clamp" else ratio_M * inside_M


def off_policy_mask(logp_M: Tensor, logp_sampler_M: Tensor, advantage_M: Tensor, rows: PackedRows, limit: float) -> Tensor:
    """0 at tokens of negative advantage in rows whose mean log π_sampler − log π_θ exceeds ``limit``, else 1: off-policy
    sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9). A token that the sampler could not score (NaN) counts as 0."""
    drift_R = rows.mean((logp_sampler_M.detach() - logp_M.detach()).nan_to_num(nan=0.0))
    return ((advantage_M >= 0) | rows.broadcast(drift_R <= limit)).to(logp_M.dtype)
