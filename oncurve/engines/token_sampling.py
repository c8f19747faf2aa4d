"""From logits to a token: temperature, top-k, top-p, min-p, and one uniform number per token.

A token is drawn by inverting the cumulative distribution at the given uniform. Two engines whose probabilities differ by
rounding draw the same token unless that uniform lies within rounding of the boundary between two tokens: a near tie.

Legend: ``S`` slots, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oncurve.recipe.schema.sections import Sampling


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The drawn tokens and their log-probs: scaled by temperature, as drawn from (truncated), and at temperature 1."""

    token_S: Tensor
    logp_S: Tensor
    sampled_logp_S: Tensor
    raw_logp_S: Tensor


def sample_tokens(logits_SV: Tensor, uniform_S: Tensor, how: Sampling, barred_SV: Tensor | None = None) -> SampledTokens:
    """One token per slot. ``barred_SV`` marks tokens that may not be drawn now (end tokens before the minimum length)."""
    raw_SV = logits_SV.log_softmax(-1)
    if how.temperature == 0:
        allowed_SV = raw_SV if barred_SV is None else raw_SV.masked_fill(barred_SV, -torch.inf)
        token_S = allowed_SV.argmax(-1)
        raw_S = _at(raw_SV, token_S)
        return SampledTokens(token_S, raw_S, torch.zeros_like(raw_S), raw_S)
    scaled_SV = raw_SV if how.temperature == 1 else (logits_SV / how.temperature).log_softmax(-1)
    kept_SV = scaled_SV if barred_SV is None else scaled_SV.masked_fill(barred_SV, -torch.inf)
    kept_SV = truncate(kept_SV, how)
    if kept_SV is not scaled_SV:
        kept_SV = kept_SV.log_softmax(-1)
    token_S = invert(kept_SV.exp(), uniform_S)
    scaled_S = _at(scaled_SV, token_S)
    sampled_S = scaled_S if kept_SV is scaled_SV else _at(kept_SV, token_S)
    raw_S = scaled_S if raw_SV is scaled_SV else _at(raw_SV, token_S)
    return SampledTokens(token_S, scaled_S, sampled_S, raw_S)


def truncate(logp_SV: Tensor, how: Sampling) -> Tensor:
    """Bar what top-k, top-p and min-p leave out; the likeliest token always stays. All three look at the same distribution."""
    if not how.truncates:
        return logp_SV
    sorted_SV, order_SV = logp_SV.sort(dim=-1, descending=True, stable=True)
    out_SV = torch.zeros_like(sorted_SV, dtype=torch.bool)
    if how.top_k:
        out_SV[:, how.top_k :] = True
    if how.top_p < 1:
        mass_before_SV = sorted_SV.exp().cumsum(-1) - sorted_SV.exp()
        out_SV |= mass_before_SV >= how.top_p
    if how.min_p > 0:
        out_SV |= sorted_SV.exp() < how.min_p * sorted_SV[:, :1].exp()
    out_SV[:, 0] = False
    return logp_SV.masked_fill(torch.zeros_like(out_SV).scatter_(1, order_SV, out_SV), -torch.inf)


def invert(probability_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """The token in whose share of [0, total) the uniform falls; summed in float64 for the sake of large vocabularies."""
    cumulative_SV = probability_SV.to(torch.float64).cumsum(-1)
    total_S = cumulative_SV[:, -1]
    token_S = torch.searchsorted(cumulative_SV, (uniform_S * total_S)[:, None], right=True)[:, 0]
    return token_S.clamp_(max=probability_SV.shape[1] - 1)


def _at(logp_SV: Tensor, token_S: Tensor) -> Tensor:
    return logp_SV.gather(1, token_S[:, None])[:, 0]
