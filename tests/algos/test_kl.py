"""Schulman's estimators by hand, and the KL inside the reward."""

from __future__ import annotations

import math

import pytest
import torch

from oncurve.algos.kl import k1, k2, k3, kl_in_reward
from tests.algos.builders import double


def test_each_estimator_by_hand() -> None:
    logp_M, logp_ref_M = double([-1.0, -2.0, -0.5]), double([-1.5, -1.0, -0.5])
    assert k1(logp_M, logp_ref_M).tolist() == [0.5, -1.0, 0.0]
    assert k2(logp_M, logp_ref_M).tolist() == [0.125, 0.5, 0.0]
    # d = −0.5: 0.6065306597 + 0.5 − 1; d = 1: e − 2
    assert k3(logp_M, logp_ref_M).tolist() == pytest.approx([0.10653065971263342, 0.7182818284590451, 0.0], abs=1e-15)


def test_all_agree_with_the_true_kl_on_average() -> None:
    """Over the complete vocabulary, weighted by π: k1 and k3 give KL(π ‖ π_ref) exactly."""
    p_V, q_V = double([0.5, 0.3, 0.2]), double([0.2, 0.5, 0.3])
    truth = 0.5 * math.log(2.5) + 0.3 * math.log(0.6) + 0.2 * math.log(2 / 3)
    assert (p_V * k1(p_V.log(), q_V.log())).sum().item() == pytest.approx(truth, abs=1e-12)
    assert (p_V * k3(p_V.log(), q_V.log())).sum().item() == pytest.approx(truth, abs=1e-12)


def test_k3_keeps_its_digits_and_its_bounds() -> None:
    near = k3(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12]))
    assert near.item() == pytest.approx(2**-25, rel=1e-3)
    assert math.isfinite(k3(torch.tensor([-500.0]), torch.tensor([-1.0])).item())


def test_the_reward() -> None:
    assert kl_in_reward(double([1.0, 2.0]), double([1.5, 0.0]), 0.1).tolist() == pytest.approx([0.85, 2.0])
