"""Token sampling with torch: temperature, top-k, top-p, min-p, and one uniform number per token.

A token is sampled by inverting the cumulative distribution at the slot's uniform. Two engines whose probabilities differ by
rounding sample the same token unless the uniform lies within rounding of the boundary between two tokens: a near tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oncurve.recipe.schema.sections import Sampling


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens and their log-probs: at the sampling temperature, as sampled (truncated), and at temperature 1."""

    token_S: Tensor
    logp_S: Tensor
    sampled_logp_S: Tensor
    raw_logp_S: Tensor


def sample_tokens(logits_SV: Tensor, uniform_S: Tensor, sampling: Sampling, banned_SV: Tensor | None = None) -> SampledTokens:
    """Sample one token per slot. ``banned_SV`` marks tokens that may not be sampled now (end tokens before the minimum
    length)."""
    raw_SV = logits_SV.log_softmax(-1)
    if sampling.temperature == 0:
        allowed_SV = raw_SV if banned_SV is None else raw_SV.masked_fill(banned_SV, -torch.inf)
        token_S = allowed_SV.argmax(-1)
        raw_S = _select(raw_SV, token_S)
        return SampledTokens(token_S, raw_S, torch.zeros_like(raw_S), raw_S)
    scaled_SV = raw_SV if sampling.temperature == 1 else (logits_SV / sampling.temperature).log_softmax(-1)
    truncated_SV = scaled_SV if banned_SV is None else scaled_SV.masked_fill(banned_SV, -torch.inf)
    truncated_SV = truncate(truncated_SV, sampling, is_complete=banned_SV is None)
    if truncated_SV is not scaled_SV:
        truncated_SV = truncated_SV.log_softmax(-1)
    token_S = invert(truncated_SV.exp(), uniform_S)
    scaled_S = _select(scaled_SV, token_S)
    sampled_S = scaled_S if truncated_SV is scaled_SV else _select(truncated_SV, token_S)
    raw_S = scaled_S if raw_SV is scaled_SV else _select(raw_SV, token_S)
    return SampledTokens(token_S, scaled_S, sampled_S, raw_S)


def truncate(logp_SV: Tensor, sampling: Sampling, *, is_complete: bool = True) -> Tensor:
    """Set to −inf what top-k, top-p and min-p drop, in the order of transformers: top-p applies to what top-k leaves, as a
    distribution of its own. The likeliest token always stays. Set ``is_complete`` to False if tokens are banned already, so
    that probabilities do not add up to 1."""
    if not sampling.truncates:
        return logp_SV
    sorted_SV, order_SV = logp_SV.sort(dim=-1, descending=True, stable=True)
    dropped_SV = torch.zeros_like(sorted_SV, dtype=torch.bool)
    probability_SV = sorted_SV.exp()
    if sampling.top_k:
        dropped_SV[:, sampling.top_k :] = True
        probability_SV = probability_SV.masked_fill(dropped_SV, 0.0)
    if sampling.top_p < 1:
        mass_before_SV = probability_SV.cumsum(-1) - probability_SV
        is_normalised = is_complete and not sampling.top_k
        dropped_SV |= mass_before_SV >= (1.0 if is_normalised else probability_SV.sum(-1, keepdim=True)) * sampling.top_p
    if sampling.min_p > 0:
        dropped_SV |= sorted_SV.exp() < sampling.min_p * sorted_SV[:, :1].exp()
    dropped_SV[:, 0] = False
    return logp_SV.masked_fill(torch.zeros_like(dropped_SV).scatter_(1, order_SV, dropped_SV), -torch.inf)


def invert(probability_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """The token in whose part of [0, total) the uniform falls. Sums are float64, for large vocabularies."""
    cumulative_SV = probability_SV.to(torch.float64).cumsum(-1)
    total_S = cumulative_SV[:, -1]
    token_S = torch.searchsorted(cumulative_SV, (uniform_S * total_S)[:, None], right=True)[:, 0]
    return token_S.clamp_(max=probability_SV.shape[1] - 1)


def _select(logp_SV: Tensor, token_S: Tensor) -> Tensor:
    return logp_SV.gather(1, token_S[:, None])[:, 0]
