"""Attention to what is stored, against all scores in float64."""

from __future__ import annotations

import pytest
import torch

from oncurve.engines.native.kv_cache import attend_by_scores, attend_to_stored
from oncurve.models.attention_interface import ScoreRule


@pytest.mark.parametrize("window", [None, 5, 60, 200])
@pytest.mark.parametrize(("n", "stored"), [(1, 0), (1, 70), (33, 0), (33, 32), (33, 33), (33, 70), (100, 1)])
def test_the_last_positions_attend_to_all_before_them(n: int, stored: int, window: int | None) -> None:
    torch.manual_seed(n + stored)
    H, K, d, positions = 4, 2, 8, stored + n
    q, k, v = torch.randn(1, H, n, d), torch.randn(1, K, positions, d), torch.randn(1, K, positions, d)
    distance = torch.arange(stored, positions)[:, None] - torch.arange(positions)[None, :]
    visible = (distance >= 0) & (distance < (window or positions))
    expected = attend_by_scores(q.double(), k.double(), v.double(), visible, ScoreRule(0.3))
    result = attend_to_stored(q, k, v, ScoreRule(0.3, window))
    assert result.shape == (1, n, H, d)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
