"""PPO's advantages and critic: generalised advantage estimation, token rewards, and the value loss.

T counts only the tokens of a completion that the policy wrote: an environment's tokens are not actions, and callers leave them
out. The value of a token is that of the state before it, in which the policy sampled it.
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

    ``value_after`` is V of the state after the last token: 0 if the completion ended, the critic's estimate if it was
    truncated. λ = 1 gives the discounted sum of the following rewards minus V_t, λ = 0 the one-step error δ_t. Computed in
    float64, from the last token backwards.
    """
    advantages_T = np.zeros(len(rewards_T))
    next_value, advantage = value_after, 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        advantage = rewards_T[t] + gamma * next_value - values_T[t] + gamma * lam * advantage
        advantages_T[t] = advantage
        next_value = values_T[t]
    return advantages_T


def token_rewards(total: float, steps: Sequence[tuple[int, float]], penalty_T: Floats | None, loss_mask_T: Bools) -> Doubles:
    """r_t of each token that the policy wrote: the outcome at the last one, step rewards at the steps' ends, minus the KL.

    ``steps`` are (token, reward), counted over all tokens. A step that ends at a token of the environment is credited to the
    last token that the policy wrote before it (or to its first token).
    """
    action_index = np.cumsum(loss_mask_T) - 1
    rewards_T = np.zeros(int(loss_mask_T.sum()))
    if not len(rewards_T):
        return rewards_T
    rewards_T[-1] += total
    for end, reward in steps:
        rewards_T[max(int(action_index[end]), 0)] += reward
    if penalty_T is not None:
        rewards_T -= penalty_T[loss_mask_T]
    return rewards_T


def value_loss(value_M: Tensor, old_M: Tensor, return_M: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(½ max((V − R)², (V' − R)²), whether it was clipped) of each token, with V' = V_old + clip(V − V_old, −ε, ε).

    The clipped value loss of OpenAI's baselines (Engstrom et al. 2020, arXiv 2005.12729, section 2). It takes the larger of the
    two, so that moving a value by more than ε gains nothing. ε = 0 clips nothing.
    """
    unclipped_M = (value_M - return_M).square()
    if not clip:
        return 0.5 * unclipped_M, torch.zeros_like(unclipped_M, dtype=torch.bool)
    bounded_M = old_M + (value_M - old_M).clamp(-clip, clip)
    clipped_M = (bounded_M - return_M).square()
    return 0.5 * torch.maximum(unclipped_M, clipped_M), (clipped_M > unclipped_M).detach()


def explained_variance(values: Doubles, returns: Doubles) -> float:
    """1 − Var(R − V)/Var(R): 1 for a perfect critic, 0 for a constant one (or a constant R), below 0 for a misleading one."""
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / variance if variance > 0 else 0.0
