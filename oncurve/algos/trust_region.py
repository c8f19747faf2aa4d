"""The natural gradient step: conjugate gradient, the length that a KL bound allows, and a line search that holds it to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Solution:
    """x with A x ≈ b. ``residual`` is |b − A x| / |b|, ``iterations`` how many products with A it took."""

    x: Tensor
    residual: float
    iterations: int


def conjugate_gradient(product: Callable[[Tensor], Tensor], b: Tensor, iterations: int, tolerance: float = 1e-10) -> Solution:
    """Solves A x = b for a positive A that is known only by its products (Hestenes and Stiefel 1952), starting from 0.

    Ends early where |b − A x|² ≤ tolerance · |b|², and where a product shows A not to be positive along the next direction
    (rounding, once the residual is small).
    """
    x, left, direction = torch.zeros_like(b), b.clone(), b.clone()
    size = first = dot(left, left)
    done = 0
    while done < iterations and size > tolerance * first:
        along = product(direction)
        curvature = dot(direction, along)
        if curvature <= 0:
            break
        done += 1
        step = size / curvature
        x.add_(direction, alpha=step)
        left.sub_(along, alpha=step)
        size, before = dot(left, left), size
        direction.mul_(size / before).add_(left)
    return Solution(x, (size / first) ** 0.5 if first else 0.0, done)


def dot(one: Tensor, other: Tensor) -> float:
    """In float64: steps hang on ratios of these."""
    return float(torch.dot(one.double(), other.double()))


def longest_step(x: Tensor, fisher_x: Tensor, max_kl: float) -> float:
    """√(2δ / xᵀF x): at this multiple of x the quadratic KL ½ sᵀF s is δ (TRPO, arXiv 1502.05477, appendix C); 0 for x = 0."""
    curvature = dot(x, fisher_x)
    return (2 * max_kl / curvature) ** 0.5 if curvature > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """What the line search took: a share of the full step (0: none was good enough), its KL, its gain, and the tries."""

    share: float
    kl: float
    gain: float
    tries: int


def line_search(try_share: Callable[[float], tuple[float, float]], max_kl: float, by: float, backtracks: int) -> Step:
    """The longest share 1, b, b², … whose KL is within the bound and which gains. ``try_share`` gives (gain, KL) of one.

    The bound holds for what is measured, not for its quadratic model: the reason why there is a search at all.
    """
    for tries in range(backtracks + 1):
        share = by**tries
        gain, kl = try_share(share)
        if kl <= max_kl and gain > 0:
            return Step(share, kl, gain, tries + 1)
    return Step(0.0, 0.0, 0.0, backtracks + 1)
