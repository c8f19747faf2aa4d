"""Estimates of KL(π_θ ‖ π_ref) from tokens that π_θ sampled (Schulman, "Approximating KL divergence", 2020).

With d = log π_ref − log π_θ of a sampled token:  k1 = −d,  k2 = d²/2,  k3 = e^d − d − 1. k1 and k3 are unbiased in value for
samples of π_θ; k2 and k3 are never negative. In a loss, only k2's gradient is on average the gradient of this KL: k1's is 0 on
average (so k1 belongs in the reward), and k3's is that of the reversed KL. All are biased if the samples come from an older
policy, unless they are weighted by the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oncurve.algos.ratios import LOG_CAP
from oncurve.objective_specs import KlEstimator


def k1(logp_M: Tensor, logp_ref_M: Tensor) -> Tensor:
    """log π_θ − log π_ref: unbiased, of either sign."""
    return logp_M - logp_ref_M


def k2(logp_M: Tensor, logp_ref_M: Tensor) -> Tensor:
    """½ (log π_ref − log π_θ)²: biased in value, low variance."""
    return 0.5 * (logp_ref_M - logp_M).square()


def k3(logp_M: Tensor, logp_ref_M: Tensor) -> Tensor:
    """e^d − d − 1 ≥ 0 with d = log π_ref − log π_θ: GRPO's choice (DeepSeekMath, arXiv 2402.03300, eq. 4).

    d is capped as log-ratios are, so that a token whose probability has fallen to almost 0 cannot overflow the loss. ``expm1``
    keeps precision for small d, which is where training starts.
    """
    d_M = (logp_ref_M - logp_M).clamp(max=LOG_CAP)
    return torch.expm1(d_M) - d_M


KL_ESTIMATORS: Mapping[KlEstimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_in_reward(rewards: Tensor, kl_sums: Tensor, beta: float) -> Tensor:
    """r_i − β · KL_i, where KL_i is the sum over the completion (RLOO, arXiv 2402.14740). A missing reward stays NaN."""
    return rewards - beta * kl_sums
