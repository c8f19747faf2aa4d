"""Surrogates: what is maximised at each token, given its ratio ρ and advantage A, and which tokens are clipped.

A surrogate is a frozen callable; ``with_range`` returns the same surrogate with another clip range. A token counts as clipped
only if the clip changes its gradient, so a token of advantage 0 never counts as clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from oncurve.algos.packed_rows import PackedRows
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


@runtime_checkable
class RowSurrogate(Surrogate, Protocol):
    """A surrogate that is not a function of single tokens: it also needs to know which tokens form a completion."""

    def over_rows(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor, rows: PackedRows) -> SurrogateTokens: ...


def _log_ratio(ratio_M: Tensor, logp_M: Tensor) -> Tensor:
    """log ρ with the gradient of log π_θ, for a ratio per token. A ratio that has underflowed to 0 gets the smallest log-ratio
    that the type can hold."""
    log_M = ratio_M.detach().clamp(min=torch.finfo(ratio_M.dtype).tiny).log()
    return log_M + (logp_M - logp_M.detach())


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


def _no_dual(name: str, dual: float | None) -> None:
    if dual is not None:
        raise RecipeError(
            "grpo.clip.dual",
            dual,
            because=f"{name} has no second bound",
            fix="remove it, or use an objective with a clipped ratio, such as grpo, dapo or gspo",
        )


@dataclass(frozen=True, slots=True)
class GeometricMean:
    """A exp(mean_t c_t), with c_t = min(log ρ_t, high) if A > 0, else max(log ρ_t, −low) (GMPO, arXiv 2507.20673).

    The clip is PPO's in log-space, on each token before the mean.
    The value is the completion's; its gradient at a token that is not clipped is A exp(mean_t c_t) ∇log π_θ / |o_i|.
    """

    low: float
    high: float

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> NoReturn:
        raise AssertionError("the geometric mean is over the tokens of a completion: use over_rows")

    def over_rows(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor, rows: PackedRows) -> SurrogateTokens:
        log_M, positive_M = _log_ratio(ratio_M, logp_M), advantage_M > 0
        bounded_M = torch.where(positive_M, log_M.clamp(max=self.high), log_M.clamp(min=-self.low))
        value_M = rows.broadcast(rows.mean(bounded_M).exp()) * advantage_M
        fixed_M = log_M.detach()
        return SurrogateTokens(value_M, (fixed_M < -self.low) & (advantage_M < 0), (fixed_M > self.high) & positive_M)

    def with_range(self, low: float, high: float, dual: float | None) -> GeometricMean:
        _no_dual("gmpo", dual)
        return GeometricMean(low, high)


@dataclass(frozen=True, slots=True)
class DppoTv:
    """sg[min(ρ, c)] A log π_θ, and 0 if π_θ − π_old > high and A > 0, or π_old − π_θ > low and A < 0 (DPPO with the binary
    total variation, arXiv 2602.04879).

    The trust region bounds the change of the token's probability instead of its ratio, so a rare token may change by a large
    factor. c bounds the weight of a single token; `clip.dual` sets it.
    """

    low: float
    high: float
    cap: float = 20.0

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        new_M, rho_M, positive_M = logp_M.detach().exp(), ratio_M.detach(), advantage_M > 0
        old_M = (logp_M.detach() - rho_M.clamp(min=torch.finfo(rho_M.dtype).tiny).log()).exp()
        outside_low_M, outside_high_M = self._outside(new_M, old_M)
        low_M, high_M = outside_low_M & (advantage_M < 0), outside_high_M & positive_M
        value_M = (rho_M.clamp(max=self.cap) * advantage_M * logp_M).masked_fill(low_M | high_M, 0.0)
        return SurrogateTokens(value_M, low_M, high_M)

    def _outside(self, new_M: Tensor, old_M: Tensor) -> tuple[Tensor, Tensor]:
        return new_M - old_M < -self.low, new_M - old_M > self.high

    def with_range(self, low: float, high: float, dual: float | None) -> DppoTv:
        return type(self)(low, high) if dual is None else type(self)(low, high, dual)


@dataclass(frozen=True, slots=True)
class DppoKl(DppoTv):
    """`DppoTv` with the binary KL, π_old log(π_old/π_θ) + (1 − π_old) log((1 − π_old)/(1 − π_θ)), as the distance. 1e-8 is
    added to both parts of the second quotient, as in verl."""

    def _outside(self, new_M: Tensor, old_M: Tensor) -> tuple[Tensor, Tensor]:
        tiny = torch.finfo(new_M.dtype).tiny
        kl_M = old_M * (old_M.clamp(min=tiny) / new_M.clamp(min=tiny)).log()
        kl_M = kl_M + (1 - old_M) * ((1 - old_M + 1e-8) / (1 - new_M + 1e-8)).log()
        return (kl_M > self.low) & (new_M < old_M), (kl_M > self.high) & (new_M > old_M)


@dataclass(frozen=True, slots=True)
class Vespo:
    """sg[φ(ρ)] A log π_θ with φ(ρ) = ρ^k e^(λ(1 − ρ)), where k, λ depend on the sign of A (VESPO, arXiv 2602.10693).

    ρ is the ratio of the completion. φ(1) = 1; φ falls to 0 for ρ → 0 and ρ → ∞, so a completion that the policy has left
    behind has no gradient. k and λ are TRL's.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        rho_M, negative_M = ratio_M.detach(), advantage_M < 0
        k_M = torch.full_like(rho_M, self.k_positive).masked_fill(negative_M, self.k_negative)
        lambda_M = torch.full_like(rho_M, self.lambda_positive).masked_fill(negative_M, self.lambda_negative)
        phi_M = (lambda_M + k_M * rho_M.log() - lambda_M * rho_M).exp()
        return SurrogateTokens(phi_M * advantage_M * logp_M, _no_tokens(ratio_M), _no_tokens(ratio_M))

    def with_range(self, low: float, high: float, dual: float | None) -> Vespo:
        _no_range(self)


@dataclass(frozen=True, slots=True)
class Dro:
    """A log π_θ − (τ/2) (log ρ)² (DRO, arXiv 2405.19107, in verl's form: ρ is against the old policy).

    Its gradient is (A − τ log ρ) ∇log π_θ: it stops where the log-ratio has reached A/τ.
    """

    tau: float = 1.0

    def __call__(self, ratio_M: Tensor, advantage_M: Tensor, logp_M: Tensor) -> SurrogateTokens:
        value_M = advantage_M * logp_M - 0.5 * self.tau * _log_ratio(ratio_M, logp_M).square()
        return SurrogateTokens(value_M, _no_tokens(ratio_M), _no_tokens(ratio_M))

    def with_range(self, low: float, high: float, dual: float | None) -> Dro:
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


_WITHOUT_RANGE: Mapping[SurrogateName, Callable[[], Surrogate]] = {
    "log_likelihood": LogLikelihood,
    "sapo": Sapo,
    "vespo": Vespo,
    "dro": Dro,
}
_WITH_RANGE: Mapping[SurrogateName, Callable[[float, float], Surrogate]] = {
    "clipped": Clipped,
    "cispo": Cispo,
    "geometric_mean": GeometricMean,
    "dppo_tv": DppoTv,
    "dppo_kl": DppoKl,
}


def build_surrogate(name: SurrogateName, clip: tuple[float, float] | None) -> Surrogate:
    """The surrogate of an objective's row in `oncurve.objective_specs`."""
    if name in _WITHOUT_RANGE:
        return _WITHOUT_RANGE[name]()
    assert clip is not None, f"{name} needs a clip range"
    return _WITH_RANGE[name](*clip)
