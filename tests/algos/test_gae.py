"""GAE against its definition as a double sum in float64, token rewards and the value loss by hand, and its tie to GRPO."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.algos.advantages import Doubles, explained_variance, gae, outcome_advantages, token_rewards, value_loss
from tests.algos.builders import double

NUMBERS = st.floats(-5, 5, allow_subnormal=False)


def by_definition(rewards: Doubles, values: Doubles, after: float, gamma: float, lam: float) -> list[float]:
    """A_t = Σ_l (γλ)^l δ_{t+l}, each δ from its own two values."""
    result = []
    for t in range(len(rewards)):
        total = 0.0
        for at in range(t, len(rewards)):
            following = values[at + 1] if at + 1 < len(rewards) else after
            total += (gamma * lam) ** (at - t) * (rewards[at] + gamma * following - values[at])
        result.append(total)
    return result


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20),
    after=NUMBERS,
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_gae_is_its_double_sum(steps: list[tuple[float, float]], after: float, gamma: float, lam: float) -> None:
    rewards, values = (np.array([pair[i] for pair in steps], dtype=np.float64) for i in (0, 1))
    result = gae(rewards, values, after, gamma, lam)
    assert result.tolist() == pytest.approx(by_definition(rewards, values, after, gamma, lam), abs=1e-9)


def test_lambda_one_is_what_follows_and_lambda_zero_is_the_next_value() -> None:
    rewards, values = np.array([0.0, 1.0, 4.0]), np.array([3.0, 2.0, 1.0])
    assert gae(rewards, values, 8.0, 0.5, 1.0).tolist() == [0.5 + 1 + 1 - 3.0, 1 + 2 + 2 - 2.0, 4 + 4 - 1.0]
    assert gae(rewards, values, 8.0, 0.5, 0.0).tolist() == [0 + 1 - 3.0, 1 + 0.5 - 2.0, 4 + 4 - 1.0]


def test_rewards_stand_at_the_policys_tokens() -> None:
    """Tokens 0 and 3 are an environment's: a step that ends there counts where the policy last wrote, or first writes."""
    mask = np.array([False, True, True, False, True])
    penalty = np.array([9.0, 0.5, 0.25, 9.0, 0.125], dtype=np.float32)
    result = token_rewards(10.0, [(0, 1.0), (2, 2.0), (3, 4.0)], penalty, mask)
    assert result.tolist() == [1 - 0.5, 2 + 4 - 0.25, 10 - 0.125]
    assert token_rewards(1.0, [], None, np.zeros(2, bool)).tolist() == []


def test_the_value_loss_by_hand() -> None:
    """Return 1, old value 0, ε 0.2. At 0.5 the clip holds (½·0.8²); at 3 the plain loss is worse; at 0.1 they are the same."""
    value = double([0.5, 3.0, 0.1]).requires_grad_()
    loss, clipped = value_loss(value, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 0.2)
    assert loss.tolist() == pytest.approx([0.32, 2.0, 0.405])
    assert clipped.tolist() == [True, False, False]
    (slope,) = torch.autograd.grad(loss.sum(), value)
    assert slope.tolist() == pytest.approx([0.0, 2.0, -0.9])
    plain, none = value_loss(value, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 0.0)
    assert plain.tolist() == pytest.approx([0.125, 2.0, 0.405])
    assert not none.any()


def test_explained_variance() -> None:
    returns = np.array([0.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 7.0), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(3)) == 0.0


@pytest.mark.parametrize("size", [2, 3, 4])
def test_with_the_true_mean_as_critic_grpo_is_ppo_in_expectation_up_to_its_own_share(size: int) -> None:
    """Three answers, every group of G of them: E[GRPO's gradient] = (G − 1)/G · E[PPO's], to rounding.

    The group's mean holds r_i itself once in G, so the baseline takes that share of the signal along; the critic's does not.
    """
    p, reward = double([0.2, 0.5, 0.3]), double([1.0, 0.0, 4.0])
    score = torch.eye(3, dtype=torch.float64) - p  # ∇ log p of each answer, over the three logits
    true_mean = float(p @ reward)
    by_group, by_critic = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for answers in product(range(3), repeat=size):
        chosen = list(answers)
        weight = float(p[chosen].prod()) / size
        grpo = outcome_advantages(reward[chosen][None], "mean", "none", 1e-4)[0]
        ppo = [float(gae(np.array([float(r)]), np.array([true_mean]), 0.0, 1.0, 1.0)[0]) for r in reward[chosen]]
        by_group += weight * (grpo[:, None] * score[chosen]).sum(0)
        by_critic += weight * (double(ppo)[:, None] * score[chosen]).sum(0)
    assert float(by_critic.norm()) > 0.1
    assert torch.allclose(by_group, by_critic * (size - 1) / size, atol=1e-12)
