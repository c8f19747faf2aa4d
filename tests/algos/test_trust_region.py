"""Conjugate gradient against a dense solve, the largest step by hand, and a line search that keeps its bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.algos.trust_region import LineSearchResult, conjugate_gradient, line_search, max_step_size
from tests.algos.builders import double


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 12), seed=st.integers(0, 999))
def test_conjugate_gradient_solves(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix = root @ root.T + torch.eye(size, dtype=torch.float64)
    b = torch.randn(size, generator=generator, dtype=torch.float64)
    solution = conjugate_gradient(lambda v: matrix @ v, b, 10 * size, tolerance=1e-24)
    assert torch.allclose(solution.x, torch.linalg.solve(matrix, b), atol=1e-8)
    assert solution.residual == pytest.approx(float((b - matrix @ solution.x).norm() / b.norm()), abs=1e-8)


def test_it_ends_early_without_a_gradient_or_without_curvature() -> None:
    nothing = conjugate_gradient(lambda v: v, double([0.0, 0.0]), 5)
    assert (nothing.x.tolist(), nothing.iterations, nothing.residual) == ([0.0, 0.0], 0, 0.0)
    flat = conjugate_gradient(lambda v: 0 * v, double([1.0, 2.0]), 5)
    assert (flat.x.tolist(), flat.iterations, flat.residual) == ([0.0, 0.0], 0, 1.0)


def test_the_max_step_size_by_hand() -> None:
    """x = (1, 2), F x = (2, 1): xᵀF x = 4, so δ = 0.02 allows √(0.04 / 4) = 0.1."""
    assert max_step_size(double([1.0, 2.0]), double([2.0, 1.0]), 0.02) == pytest.approx(0.1)
    assert max_step_size(double([0.0]), double([0.0]), 0.02) == 0.0


def test_the_search_takes_the_first_share_that_gains_within_the_bound() -> None:
    """Gain peaks at 0.4 and the KL is the square of the share: 1 loses, ½ costs 0.25, ¼ is within 0.1 and gains."""
    tried: list[float] = []

    def measure(share: float) -> tuple[float, float]:
        tried.append(share)
        return 0.16 - (share - 0.4) ** 2, share**2

    assert line_search(measure, 0.1, 0.5, 5) == LineSearchResult(0.25, 0.0625, pytest.approx(0.1375), 3)  # type: ignore[arg-type]
    assert tried == [1.0, 0.5, 0.25]
    assert line_search(lambda share: (-share, 0.0), 0.1, 0.5, 3) == LineSearchResult(0.0, 0.0, 0.0, 4)
