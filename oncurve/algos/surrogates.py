"""Surrogates: what is maximised at each token, given its ratio ρ and advantage A, and which tokens are clipped.

A surrogate is a frozen callable; ``with_range`` returns the same surrogate with another clip range. A token counts as clipped
only if the clip changes its gradient, so tokens of advantage 0 never do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from oncurve.errors import RecipeError
from oncurve.objective_specs import SurrogateName


@dataclass(frozen=True, slots=True)
class SurrogateTokens:
    """The surrogate of each token, and whether the lower or the upper bound clipped its ratio."""

    value_M: Tensor
    clipped_low_M: Tensor
    clipped_high_M: Tensor


class Surrogate(Protocol):
    """(ratio, advantage, log π_θ) of each token → its surrogate."""

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens: ...

    def with_range(self, low: float, high: float, dual: float | None) -> Surrogate: ...


def _no_tokens(like_M: Tensor) -> Tensor:
    return torch.zeros_like(like_M, dtype=torch.bool)


def _no_range(surrogate: object) -> NoReturn:
    raise RecipeError(
        "grpo.clip",
        f"a clip range for {surrogate}",
        because="this objective's surrogate clips nothing",
        fix="remove clip, or use an objective that clips, such as grpo, dapo or gspo",
    )


@dataclass(frozen=True, slots=True)
class Clipped:
    """min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) (PPO, arXiv 1707.06347, eq. 7).

    ``dual`` = c also bounds the loss of negative advantages: min(ρ, c) replaces ρ in the first term (dual-clip PPO, arXiv
    1912.09729; TRL's two-sided ``delta``). It changes nothing for A > 0, because c > 1 + ε_high.
    """

    low: float
    high: float
    dual: float | None = None

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        inner_M = ratio_M.clamp(1 - self.low, 1 + self.high)
        outer_M = ratio_M if self.dual is None else ratio_M.clamp(max=self.dual)
        value_M = torch.minimum(outer_M * advantage_M, inner_M * advantage_M)
        rho_M, negative_M = ratio_M.detach(), advantage_M < 0
        clipped_high_M = (rho_M > 1 + self.high) & (advantage_M > 0)
        if self.dual is not None:
            clipped_high_M = clipped_high_M | ((rho_M > self.dual) & negative_M)
        return SurrogateTokens(value_M, (rho_M < 1 - self.low) & negative_M, clipped_high_M)

    def with_range(self, low: float, high: float, dual: float | None) -> Clipped:
        if dual is not None and dual <= 1 + high:
            raise RecipeError(
                "grpo.clip.dual",
                dual,
                because=f"it must be above 1 + high = {1 + high:g}, otherwise it also clips positive advantages",
                fix="remove it, or use 2 or more (3 is usual)",
            )
        return Clipped(low, high, dual)


@dataclass(frozen=True, slots=True)
class Cispo:
    """sg[clip(ρ, 1 − ε_low, 1 + ε_high)] A log π_θ (CISPO, MiniMax-M1, arXiv 2506.13585).

    Only the weight is clipped, so every token keeps its gradient. ε_low = 1 sets no lower bound, as in the paper and in TRL.
    TRL's ``epsilon_high`` for cispo is the bound itself, which is 1 + ε_high here.
    """

    low: float
    high: float

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        rho_M, has_gradient_M = ratio_M.detach(), advantage_M != 0
        value_M = rho_M.clamp(1 - self.low, 1 + self.high) * advantage_M * logp_M
        return SurrogateTokens(value_M, (rho_M < 1 - self.low) & has_gradient_M, (rho_M > 1 + self.high) & has_gradient_M)

    def with_range(self, low: float, high: float, dual: float | None) -> Cispo:
        if dual is not None:
            raise RecipeError(
                "grpo.clip.dual",
                dual,
                because="cispo bounds the ratio for both signs of the advantage, so a second bound would change nothing",
                fix="remove it and use clip.high",
            )
        return Cispo(low, high)


@dataclass(frozen=True, slots=True)
class Sapo:
    """(4/τ) σ(τ (ρ − 1)) A, with τ = τ_pos if A > 0, else τ_neg (SAPO, arXiv 2511.20347): a soft gate instead of a clip.

    At ρ = 1 its slope in ρ is A, the same as without a clip. With τ_neg > τ_pos the gradient of negative tokens fades sooner.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        tau_M = torch.full_like(ratio_M, self.tau_negative).masked_fill(advantage_M > 0, self.tau_positive)
        value_M = torch.sigmoid(tau_M * (ratio_M - 1)) * (4 / tau_M) * advantage_M
        return SurrogateTokens(value_M, _no_tokens(ratio_M), _no_tokens(ratio_M))

    def with_range(self, low: float, high: float, dual: float | None) -> Sapo:
        _no_range(self)


@dataclass(frozen=True, slots=True)
class Unclipped:
    """ρ A: importance sampling without a bound, for TRPO, which bounds the KL of a step instead."""

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        return SurrogateTokens(ratio_M * advantage_M, _no_tokens(ratio_M), _no_tokens(ratio_M))

    def with_range(self, low: float, high: float, dual: float | None) -> Unclipped:
        _no_range(self)


@dataclass(frozen=True, slots=True)
class LogLikelihood:
    """A log π_θ (REINFORCE, Williams 1992). There is no ratio: the gradient A ∇log π_θ is the exact policy gradient while the
    samples come from the current policy (μ = 1), and is not corrected for older samples."""

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        return SurrogateTokens(advantage_M * logp_M, _no_tokens(ratio_M), _no_tokens(ratio_M))

    def with_range(self, low: float, high: float, dual: float | None) -> LogLikelihood:
        _no_range(self)


def build_surrogate(name: SurrogateName, clip: tuple[float, float] | None) -> Surrogate:
    """The surrogate of an objective's row in `oncurve.objective_specs`."""
    if name == "log_likelihood":
        return LogLikelihood()
    if name == "sapo":
        return Sapo()
    assert clip is not None, f"{name} needs a clip range"
    return Clipped(*clip) if name == "clipped" else Cispo(*clip)
