"""Bradley–Terry and calibration by hand."""

from __future__ import annotations

import math

import pytest
import torch

from oncurve.algos.preference_losses import bradley_terry, calibration_error


def test_bradley_terry_by_hand() -> None:
    """σ(1) = 0.7310586; with margin 1 the same gap gives log 2; a head without a say gives 0; sign −1 turns the gap around."""
    chosen = torch.tensor([[2.0, 5.0], [2.0, 0.0]])
    rejected = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    sign = torch.tensor([[1.0, 0.0], [1.0, -1.0]])
    loss = bradley_terry(chosen, rejected, sign, torch.tensor([0.0, 1.0]))
    assert loss.tolist() == [
        [pytest.approx(-math.log(0.7310586)), 0.0],
        [pytest.approx(math.log(2)), pytest.approx(math.log(2))],
    ]


def test_calibration_by_hand() -> None:
    """Confidence 0.75 for four pairs of which three are right is perfect; 0.95 for two of which one is right is 0.45 off, and
    those are a third of all pairs."""
    assert calibration_error(torch.tensor([0.75, 0.75, 0.75, 0.25])) == pytest.approx(0.0, abs=1e-6)
    both = torch.tensor([0.75, 0.75, 0.75, 0.25, 0.95, 0.05])
    assert calibration_error(both) == pytest.approx(0.45 / 3, abs=1e-6)
    assert calibration_error(torch.tensor([0.5, 0.5])) == pytest.approx(0.0)
