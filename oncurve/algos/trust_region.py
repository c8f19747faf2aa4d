"""The natural gradient step of TRPO: conjugate gradient, the step size that a KL bound allows, and the line search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Solution:
    """x with A x ≈ b. ``residual`` is |b − A x| / |b|, ``iterations`` the number of products with A."""

    x: Tensor
    residual: float
    iterations: int


def conjugate_gradient(product: Callable[[Tensor], Tensor], b: Tensor, iterations: int, tolerance: float = 1e-10) -> Solution:
    """Solve A x = b for a positive definite A that is only known by its products (Hestenes and Stiefel 1952), starting from 0.

    Stops early if |b − A x|² ≤ tolerance · |b|², or if a product shows that A is not positive along the next direction (which
    rounding can cause once the residual is small).
    """
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    norm = initial = dot(residual, residual)
    done = 0
    while done < iterations and norm > tolerance * initial:
        image = product(direction)
        curvature = dot(direction, image)
        if curvature <= 0:
            break
        done += 1
        step = norm / curvature
        x.add_(direction, alpha=step)
        residual.sub_(image, alpha=step)
        norm, previous = dot(residual, residual), norm
        direction.mul_(norm / previous).add_(residual)
    return Solution(x, (norm / initial) ** 0.5 if initial else 0.0, done)


def dot(a: Tensor, b: Tensor) -> float:
    """The dot product in float64, because step sizes are ratios of these."""
    return float(torch.dot(a.double(), b.double()))


def max_step_size(x: Tensor, fisher_x: Tensor, max_kl: float) -> float:
    """√(2δ / xᵀF x): the multiple of x at which the quadratic KL ½ sᵀF s is δ (TRPO, arXiv 1502.05477, appendix C); 0 for
    x = 0."""
    curvature = dot(x, fisher_x)
    return (2 * max_kl / curvature) ** 0.5 if curvature > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LineSearchResult:
    """The accepted fraction of the full step (0: none was accepted), its KL, its gain, and the number of tries."""

    share: float
    kl: float
    gain: float
    tries: int


def line_search(
    try_share: Callable[[float], tuple[float, float]], max_kl: float, by: float, backtracks: int
) -> LineSearchResult:
    """The largest of the fractions 1, b, b², … whose KL is within the bound and whose gain is positive. ``try_share`` returns
    (gain, KL) of a fraction.

    The bound is checked on the measured KL, not on its quadratic model. That is why a search is needed at all.
    """
    for tries in range(backtracks + 1):
        share = by**tries
        gain, kl = try_share(share)
        if kl <= max_kl and gain > 0:
            return LineSearchResult(share, kl, gain, tries + 1)
    return LineSearchResult(0.0, 0.0, 0.0, backtracks + 1)
