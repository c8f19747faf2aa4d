"""What is maximised at each token, given its ratio ρ and advantage A. Each says where its clip took hold.

A surrogate is a frozen value that is called; ``with_range`` gives the same surrogate with another clip range. Clipping is
reported where it changes the gradient: tokens of advantage 0 are never clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from oncurve.errors import RecipeError


@dataclass(frozen=True, slots=True)
class SurrogateTokens:
    """The surrogate of each token, and where a lower or an upper bound of the ratio took hold."""

    value_M: Tensor
    clipped_low_M: Tensor
    clipped_high_M: Tensor


class Surrogate(Protocol):
    """(ratio, advantage, log π_θ) of each token → its surrogate."""

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens: ...

    def with_range(self, low: float, high: float, dual: float | None) -> Surrogate: ...


def _nowhere(like_M: Tensor) -> Tensor:
    return torch.zeros_like(like_M, dtype=torch.bool)


def _no_range(surrogate: object) -> NoReturn:
    raise RecipeError(
        "grpo.clip",
        f"a clip range for {surrogate}",
        because="this objective's surrogate clips nothing",
        fix="leave clip unset, or choose an objective that clips, such as grpo, dapo or gspo",
    )


@dataclass(frozen=True, slots=True)
class Clipped:
    """min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) (PPO, arXiv 1707.06347, eq. 7).

    ``dual`` = c bounds the loss of negative advantages too: min(ρ, c) in the first term (dual-clip PPO, arXiv 1912.09729;
    TRL's two-sided ``delta``). For A > 0 it changes nothing, as c > 1 + ε_high.
    """

    low: float
    high: float
    dual: float | None = None

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        inner_M = ratio_M.clamp(1 - self.low, 1 + self.high)
        outer_M = ratio_M if self.dual is None else ratio_M.clamp(max=self.dual)
        value_M = torch.minimum(outer_M * advantage_M, inner_M * advantage_M)
        rho_M, down_M = ratio_M.detach(), advantage_M < 0
        clipped_high_M = (rho_M > 1 + self.high) & (advantage_M > 0)
        if self.dual is not None:
            clipped_high_M = clipped_high_M | ((rho_M > self.dual) & down_M)
        return SurrogateTokens(value_M, (rho_M < 1 - self.low) & down_M, clipped_high_M)

    def with_range(self, low: float, high: float, dual: float | None) -> Clipped:
        if dual is not None and dual <= 1 + high:
            raise RecipeError(
                "grpo.clip.dual",
                dual,
                because=f"it must lie above 1 + high = {1 + high:g}, or it clips positive advantages too",
                fix="leave it unset, or use 2 or more (3 is usual)",
            )
        return Clipped(low, high, dual)


@dataclass(frozen=True, slots=True)
class Cispo:
    """sg[clip(ρ, 1 − ε_low, 1 + ε_high)] A log π_θ (CISPO, MiniMax-M1, arXiv 2506.13585).

    The weight is clipped, never the token: every token keeps a gradient. ε_low = 1 sets no lower bound, as the paper and TRL
    do; TRL's ``epsilon_high`` for cispo is the bound itself, 1 + ε_high here.
    """

    low: float
    high: float

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        rho_M, counts_M = ratio_M.detach(), advantage_M != 0
        value_M = rho_M.clamp(1 - self.low, 1 + self.high) * advantage_M * logp_M
        return SurrogateTokens(value_M, (rho_M < 1 - self.low) & counts_M, (rho_M > 1 + self.high) & counts_M)

    def with_range(self, low: float, high: float, dual: float | None) -> Cispo:
        if dual is not None:
            raise RecipeError(
                "grpo.clip.dual",
                dual,
                because="cispo bounds the ratio whatever the advantage's sign, so a second bound has nothing to do",
                fix="leave it unset and use clip.high",
            )
        return Cispo(low, high)


@dataclass(frozen=True, slots=True)
class Sapo:
    """(4/τ) σ(τ (ρ − 1)) A, with τ = τ_pos where A > 0, else τ_neg (SAPO, arXiv 2511.20347): a soft gate for the hard clip.

    At ρ = 1 its slope is 1, as the unclipped surrogate's. τ_neg > τ_pos lets negative tokens fade sooner.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        tau_M = torch.full_like(ratio_M, self.tau_negative).masked_fill(advantage_M > 0, self.tau_positive)
        value_M = torch.sigmoid(tau_M * (ratio_M - 1)) * (4 / tau_M) * advantage_M
        return SurrogateTokens(value_M, _nowhere(ratio_M), _nowhere(ratio_M))

    def with_range(self, low: float, high: float, dual: float | None) -> Sapo:
        _no_range(self)


@dataclass(frozen=True, slots=True)
class Unclipped:
    """ρ A: importance sampling without a bound."""

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        return SurrogateTokens(ratio_M * advantage_M, _nowhere(ratio_M), _nowhere(ratio_M))

    def with_range(self, low: float, high: float, dual: float | None) -> Unclipped:
        _no_range(self)


@dataclass(frozen=True, slots=True)
class LogLikelihood:
    """A log π_θ (REINFORCE, Williams 1992). No ratio enters: the gradient A ∇log π_θ is the exact policy gradient while the
    samples are the policy's own (μ = 1), and is not corrected once they are older."""

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        return SurrogateTokens(advantage_M * logp_M, _nowhere(ratio_M), _nowhere(ratio_M))

    def with_range(self, low: float, high: float, dual: float | None) -> LogLikelihood:
        _no_range(self)
