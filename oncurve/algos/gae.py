"""Generalised advantage estimation, and the critic's loss: PPO's half that GRPO does without.

Shapes: ``T`` tokens of one completion that the policy wrote (an environment's tokens are no actions: they are left out before),
``N`` tokens of a micro-batch. A token's value is that of the state before it: what the policy saw when it wrote the token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oncurve.records import Bools, Floats

Doubles = np.ndarray[tuple[int], np.dtype[np.float64]]


def gae(rewards_T: Doubles, values_T: Doubles, value_after: float, gamma: float, lam: float) -> Doubles:
    """A_t = δ_t + γλ A_{t+1}, with δ_t = r_t + γ V_{t+1} − V_t (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    ``value_after`` is V of the state after the last token: 0 where the completion ended, the critic's own estimate where it was
    cut. λ = 1 gives the discounted sum of what follows minus V_t, λ = 0 the one-step error δ_t. In float64, last token first.
    """
    advantages_T = np.zeros(len(rewards_T))
    after, carried = value_after, 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        carried = rewards_T[t] + gamma * after - values_T[t] + gamma * lam * carried
        advantages_T[t] = carried
        after = values_T[t]
    return advantages_T


def token_rewards(total: float, steps: Sequence[tuple[int, float]], penalty_T: Floats | None, loss_mask_T: Bools) -> Doubles:
    """r_t at each token that the policy wrote: the outcome at the last, step rewards where steps end, minus the KL penalty.

    ``steps`` are (token, reward) counted over all tokens; one that ends on a token of the environment goes to the last token
    that the policy had written by then (or to its first).
    """
    number_of = np.cumsum(loss_mask_T) - 1
    rewards_T = np.zeros(int(loss_mask_T.sum()))
    if not len(rewards_T):
        return rewards_T
    rewards_T[-1] += total
    for end, reward in steps:
        rewards_T[max(int(number_of[end]), 0)] += reward
    if penalty_T is not None:
        rewards_T -= penalty_T[loss_mask_T]
    return rewards_T


def value_loss(value_M: Tensor, old_M: Tensor, return_M: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(½ max((V − R)², (V' − R)²), where the clip took hold), V' = V_old + clip(V − V_old, −ε, ε), for each token.

    The clipped value loss of OpenAI's baselines (Engstrom et al. 2020, arXiv 2005.12729, section 2): the worse of the two, so
    that nothing is won by leaving the old value by more than ε. ε = 0 clips nothing.
    """
    plain_M = (value_M - return_M).square()
    if not clip:
        return 0.5 * plain_M, torch.zeros_like(plain_M, dtype=torch.bool)
    near_M = old_M + (value_M - old_M).clamp(-clip, clip)
    clipped_M = (near_M - return_M).square()
    return 0.5 * torch.maximum(plain_M, clipped_M), (clipped_M > plain_M).detach()


def explained_variance(values: Doubles, returns: Doubles) -> float:
    """1 − Var(R − V)/Var(R): 1 for a perfect critic, 0 for a constant one (or a constant R), below 0 for one that misleads."""
    spread = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / spread if spread > 0 else 0.0
