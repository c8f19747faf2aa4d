"""TRL's advantages for each scaling, and RLOO's with the KL inside the reward."""

from __future__ import annotations

import math

import pytest
import torch

from oncurve.algos.advantages import outcome_advantages
from oncurve.algos.kl import k1, kl_in_reward
from oncurve.algos.packed_rows import PackedRows
from oncurve.objective_specs import AdvantageScale
from tests.parity.trl_oracle import grpo_advantages, rloo_advantages

NAN = math.nan
SCALES: tuple[AdvantageScale, ...] = ("group", "batch", "none")
REWARDS = [
    [[1.0, 0.0, 0.0, 1.0], [0.5, 0.25, -2.0, 3.0]],
    [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]],
    [[1.0, NAN, 0.0, 2.0], [NAN, NAN, 0.5, 0.25]],
    [[NAN, NAN, NAN, 0.5], [1.0, 2.0, 3.0, 5.0]],
]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", REWARDS)
def test_each_scaling(rewards: list[list[float]], scale: AdvantageScale) -> None:
    rewards_PG = torch.tensor(rewards)
    ours_PG = outcome_advantages(rewards_PG, "mean", scale, 1e-4)
    torch.testing.assert_close(ours_PG, grpo_advantages(rewards_PG, scale), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("rewards", REWARDS[:3])
def test_rloo(rewards: list[list[float]], beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards_PG, lengths = torch.tensor(rewards), [5, 3, 1, 4, 2, 5, 5, 3]
    logp_BT, ref_BT = (-torch.rand(8, 5, generator=generator) for _ in range(2))
    mask_BT = torch.arange(5) < torch.tensor(lengths)[:, None]
    rows = PackedRows.of(torch.arange(8).repeat_interleave(5), mask_BT.flatten(), 8, torch.float32)
    kl_B = rows.sum(rows.mask(k1(logp_BT.flatten(), ref_BT.flatten())))
    ours_PG = outcome_advantages(kl_in_reward(rewards_PG, kl_B.reshape(2, 4), beta), "leave_one_out", "none", 1e-4)
    theirs_PG = rloo_advantages(rewards_PG, logp_BT, ref_BT, lengths, beta)
    torch.testing.assert_close(ours_PG, theirs_PG, atol=1e-6, rtol=1e-6)
