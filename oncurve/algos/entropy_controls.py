"""Entropy controls: which tokens keep their gradient, and how large the entropy bonus is, so that a policy does not collapse.

Tokens are selected among all loss tokens of a step, before its first update, with the policy that sampled them. The selection
is then the same on every rank, for every pack size and over all updates of the step. Each function takes flat arrays with one
value per loss token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oncurve.records import Bools, Floats, GradedGroup

Doubles = NDArray[np.float64]


class LossTokens:
    """The loss tokens of a step's graded completions, in order."""

    def __init__(self, groups: Sequence[GradedGroup]) -> None:
        self._masks = [
            [s.completion.loss_mask & graded for s, graded in zip(g.scored.scored, g.graded, strict=True)] for g in groups
        ]

    def gather(self, values: Sequence[Sequence[Floats]]) -> Doubles:
        """The values at these tokens, from one array per completion of each group."""
        pairs = [pair for row, masks in zip(values, self._masks, strict=True) for pair in zip(row, masks, strict=True)]
        return np.concatenate([np.zeros(0), *(values_T[mask_T] for values_T, mask_T in pairs)])

    def scatter(self, selected: Bools | None) -> list[tuple[Bools, ...]]:
        """One array per completion of each group, False at all other tokens; empty tuples if there is no selection."""
        if selected is None:
            return [()] * len(self._masks)
        out = [tuple(np.zeros_like(mask_T) for mask_T in masks) for masks in self._masks]
        first = 0
        for row, masks in zip(out, self._masks, strict=True):
            for array, mask_T in zip(row, masks, strict=True):
                count = int(mask_T.sum())
                array[mask_T] = selected[first : first + count]
                first += count
        return out


def high_entropy_tokens(entropies: Doubles, share: float) -> Bools:
    """The tokens in the top ``share`` by entropy (Wang et al. 2025, arXiv 2506.01939: 0.2).

    The bound is the (1 − share) quantile; tokens at or above it are selected. Share 0 selects the token of highest entropy.
    """
    if not len(entropies):
        return np.zeros(0, bool)
    first = math.ceil((len(entropies) - 1) * (1 - share) - 1e-9)  # 1e-9: 25 · 0.8 may come out above 20
    selected: Bools = entropies >= np.partition(entropies, first)[first]
    return selected


def covariances(advantages: Doubles, logps: Doubles) -> Doubles:
    """(A − mean A)(log π − mean log π) of each token (Cui et al. 2025, arXiv 2505.22617, eq. 10).

    Their mean is the covariance of A and log π, which is how fast the entropy falls under a policy gradient. A token without a
    log-prob (NaN) gets −∞, and counts in neither mean.
    """
    known = np.isfinite(logps)
    values: Doubles = np.full(len(logps), -np.inf)
    if known.any():
        values[known] = (advantages[known] - advantages[known].mean()) * (logps[known] - logps[known].mean())
    return values


def clip_cov_tokens(values: Doubles, share: float, bounds: tuple[float, float], generator: np.random.Generator) -> Bools:
    """The tokens that clip-cov detaches: ``share`` of all tokens, at least one, chosen at random among those whose covariance
    lies strictly between the bounds (arXiv 2505.22617, section 4.2; verl's ``clip_cov``)."""
    candidates = np.flatnonzero((values > bounds[0]) & (values < bounds[1]))
    selected = np.zeros(len(values), bool)
    selected[generator.permutation(candidates)[: max(int(share * len(values)), 1)]] = True
    return selected


def kl_cov_tokens(values: Doubles, share: float) -> Bools:
    """The tokens that kl-cov holds back: the ``share`` of highest covariance, at least one (arXiv 2505.22617, section 4.3;
    verl's ``kl_cov``)."""
    selected = np.zeros(len(values), bool)
    if len(values):
        selected[np.argsort(-values, kind="stable")[: max(int(share * len(values)), 1)]] = True
    return selected & np.isfinite(values)


@dataclass(frozen=True, slots=True)
class AdaptiveBonus:
    """An entropy bonus that follows a target (Skywork-OR1, He et al. 2025, arXiv 2505.22312).

    After each step the bonus grows by ``step`` if the policy's entropy is at or below the target, and shrinks by ``step``
    otherwise; it stays between 0 and ``most``. It is applied only if the entropy of the last step was at or below the target,
    so never in the first step.

    Example: ``AdaptiveBonus(0.2, 0.005, 1.0).observe(0.1).applied == 0.005``
    """

    target: float
    step: float
    most: float
    bonus: float = 0.0
    last_entropy: float = math.inf

    @property
    def applied(self) -> float:
        """The bonus of the next step."""
        return self.bonus if self.last_entropy <= self.target else 0.0

    def observe(self, entropy: float) -> AdaptiveBonus:
        """After a step of this mean entropy per token."""
        change = self.step if entropy <= self.target else -self.step
        return replace(self, bonus=min(max(self.bonus + change, 0.0), self.most), last_entropy=entropy)
