"""Advantages: how much better a completion, or a step of it, is than the rest of its group.

G is the size of the largest group; smaller groups are padded with NaN. A NaN reward is missing, not 0: it does not count in
mean and std, and its completion is not graded. Shape letters: `oncurve.records`.

PPO's advantages and critic: generalised advantage estimation, token rewards, and the value loss.

In PPO's functions T counts only the tokens of a completion that the policy wrote: an environment's tokens are not actions, and
callers leave them out. The value of a token is that of the state before it, in which the policy sampled it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.kl import kl_in_reward
from oncurve.errors import RewardError
from oncurve.objective_specs import AdvantageScale, Baseline
from oncurve.records import Bools, Floats, GradedGroup, ScoredCompletion, ScoredGroup


@dataclass(frozen=True, slots=True)
class _GroupStats:
    """Count, mean and std (n − 1) of each row without its missing values, and whether all its values are equal (``is_flat``).

    Values are equal if they differ by at most 16 units in the last place: the mean of eight times 0.1 is not exactly 0.1, and
    0.1 + 0.2 is not 0.3, but no completion is better than another.
    """

    count: Tensor
    mean: Tensor
    std: Tensor
    is_flat: Tensor

    @classmethod
    def of(cls, values: Tensor) -> _GroupStats:
        is_valid = values.isfinite()
        count = is_valid.sum(-1, keepdim=True)
        mean = values.masked_fill(~is_valid, 0).sum(-1, keepdim=True) / count.clamp(min=1)
        deviation = (values - mean).masked_fill(~is_valid, 0)
        std = (deviation.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        highest = values.masked_fill(~is_valid, -math.inf).amax(-1, keepdim=True)
        lowest = values.masked_fill(~is_valid, math.inf).amin(-1, keepdim=True)
        rounding = 16 * torch.finfo(values.dtype).eps * torch.maximum(highest.abs(), lowest.abs())
        return cls(count, mean, std, (highest - lowest <= rounding) | (count < 2))


def gradable_mask(rewards_PG: Tensor, baseline: Baseline, scale: AdvantageScale) -> Tensor:
    """True for completions that can be graded: those with a reward, and, if baseline or scale use the group, with at least one
    other reward in their group."""
    is_valid_PG = rewards_PG.isfinite()
    if baseline == "none" and scale not in ("group", "per_reward"):
        return is_valid_PG
    return is_valid_PG & (is_valid_PG.sum(-1, keepdim=True) >= 2)


def outcome_advantages(
    rewards_PG: Tensor,
    baseline: Baseline,
    scale: AdvantageScale,
    eps: float,
    *,
    lengths_PG: Tensor | None = None,
    k: int | None = None,
) -> Tensor:
    """A_i = (r_i − b_i) / (s + eps) (GRPO, DeepSeekMath, arXiv 2402.03300, 4.1.2).

    b_i is the group's mean, the mean of the others in the group (``leave_one_out``: RLOO, arXiv 2402.14740), the group's mean
    weighted by ``lengths_PG`` (``length_weighted``: OPO, arXiv 2505.23585), or 0; for ``best_of_others`` see
    `pass_at_k_advantages`. s is the group's std (n − 1), or one std over all rewards of the batch, not centred by group (TRL's
    ``batch``). ``mean`` divides by the group's mean reward, without eps (MaxRL, arXiv 2602.02710), ``signal_share`` by the
    fraction of rewards that lie in groups of unequal rewards (1/α of GPG, arXiv 2504.02546). ``none`` divides by nothing (Dr.
    GRPO, arXiv 2503.20783), and so does ``whiten``, which normalises tokens afterwards (see `whiten`). The advantage is exactly
    0 for missing rewards, for groups too small to be graded, and for equal rewards if baseline or scale depend on them.
    """
    group = _GroupStats.of(rewards_PG)
    centred_PG = rewards_PG
    zero_PG = ~gradable_mask(rewards_PG, baseline, scale)
    if baseline == "mean":
        centred_PG = rewards_PG - group.mean
    elif baseline == "leave_one_out":
        # r_i − (Σr − r_i)/(n − 1) equals the deviation from the mean times n/(n − 1), which rounds only once.
        centred_PG = (rewards_PG - group.mean) * (group.count.to(rewards_PG.dtype) / (group.count - 1).clamp(min=1))
    elif baseline == "length_weighted":
        assert lengths_PG is not None, "the baseline needs the completions' lengths"
        weights_PG = lengths_PG.masked_fill(~rewards_PG.isfinite(), 0)
        weighted_PG = (weights_PG * rewards_PG.nan_to_num()).sum(-1, keepdim=True)
        centred_PG = rewards_PG - weighted_PG / weights_PG.sum(-1, keepdim=True).clamp(min=1)
    elif baseline == "best_of_others":
        centred_PG = torch.stack([pass_at_k_advantages(rewards_G, k) for rewards_G in rewards_PG])
    if baseline != "none" or scale == "group":
        zero_PG = zero_PG | group.is_flat
    if scale == "group":
        centred_PG = centred_PG / (group.std + eps)
    elif scale == "batch":
        batch = _GroupStats.of(rewards_PG.reshape(1, -1))
        centred_PG = centred_PG / (batch.std + eps)
        zero_PG = zero_PG | batch.is_flat
    elif scale == "mean":
        centred_PG = centred_PG / _positive_means(rewards_PG, group.mean)
    elif scale == "signal_share":
        count = group.count.sum()
        centred_PG = centred_PG * (count / (group.count * ~group.is_flat).sum().clamp(min=1))
    return centred_PG.masked_fill(zero_PG, 0.0)


def _positive_means(rewards_PG: Tensor, mean_P1: Tensor) -> Tensor:
    """The groups' means, and 1 for groups whose rewards are all 0."""
    if bool((rewards_PG < 0).any()):
        raise RewardError(
            "advantage.scale",
            f"a reward of {float(rewards_PG[rewards_PG < 0].min()):g} with scale = mean",
            because="an advantage is divided by the group's mean reward, and a negative mean would turn its sign around",
            fix="use rewards of 0 and more, such as 0 for wrong and 1 for right, or another scale",
        )
    return mean_P1.masked_fill(mean_P1 <= 0, 1.0)


def pass_at_k_advantages(rewards_G: Tensor, k: int | None) -> Tensor:
    """A_i = mean over all sets S of k − 1 others of max(r_i − max(S), 0): how much completion i raises the best of k.

    k is the number of rewards if it is None or larger. Then only the best completion has an advantage: its distance from the
    second best (arXiv 2503.19595). k Σ_i A_i ∇log π(o_i) / n is an unbiased gradient of the expected best of k, because max(S)
    does not depend on o_i. NaN rewards are left out and stay NaN.
    """
    is_valid_G = rewards_G.isfinite()
    values, order = rewards_G[is_valid_G].sort()
    n = len(values)
    k = n if k is None else min(k, n)
    if n < 2:
        return torch.where(is_valid_G, 0.0, math.nan).to(rewards_G.dtype)
    # In ascending order, C(j, k − 2) of the C(n − 1, k − 1) sets S have j as their largest element; with j above i they give 0.
    chance = [math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)]
    raised = (values[:, None] - values[None, :]).clamp(min=0.0) @ torch.tensor(chance, dtype=rewards_G.dtype)
    advantages = torch.empty_like(values)
    advantages[order] = raised
    return torch.full_like(rewards_G, math.nan).masked_scatter(is_valid_G, advantages)


def decoupled_advantages(rewards_APG: Tensor, weights_A: Sequence[float], eps: float) -> Tensor:
    """Each reward normalised in its group, their weighted sum, and that normalised over the batch (GDPO, arXiv 2601.05242).

    Â_i = Σ_a w_a (r_ai − mean_a) / (std_a + eps) over the group, then A_i = (Â_i − mean) / (std + eps) over the batch; both std
    divide by n − 1. A reward that does not apply (NaN) adds nothing; a completion without any stays NaN. Groups in which every
    reward is flat get exactly 0. TRL does the same (`normalize_then_sum`); verl normalises the second time over tokens.
    """
    total_PG = torch.zeros_like(rewards_APG[0])
    has_signal_P1 = torch.zeros(len(total_PG), 1, dtype=torch.bool)
    for rewards_PG, weight in zip(rewards_APG, weights_A, strict=True):
        group = _GroupStats.of(rewards_PG)
        normalised_PG = ((rewards_PG - group.mean) / (group.std + eps)).masked_fill(group.is_flat, 0.0)
        total_PG = total_PG + weight * normalised_PG.nan_to_num(nan=0.0)
        has_signal_P1 |= ~group.is_flat
    total_PG = total_PG.masked_fill(~rewards_APG.isfinite().any(0), math.nan)
    batch = _GroupStats.of(total_PG.reshape(1, -1))
    return ((total_PG - batch.mean) / (batch.std + eps)).masked_fill(~has_signal_P1 | batch.is_flat, 0.0)


def process_advantages(
    step_rewards: Sequence[Sequence[float]], step_ends: Sequence[Sequence[int]], lengths: Sequence[int], eps: float
) -> list[Tensor]:
    """A_i,t = Σ of r~ over the steps of o_i that end at or after token t, r~ = (r − mean(R)) / (std(R) + eps).

    R holds all step rewards of the group; std divides by |R| − 1 (DeepSeekMath, arXiv 2402.03300, 4.1.3). ``step_ends`` are the
    indices of the steps' last tokens. Fewer than two step rewards, or equal ones, give exactly 0.
    """
    pooled = torch.tensor([r for rewards in step_rewards for r in rewards], dtype=torch.float64)
    stats = _GroupStats.of(pooled) if len(pooled) else None
    if stats is None or bool(stats.is_flat):
        return [torch.zeros(length, dtype=torch.float64) for length in lengths]
    normalised = (pooled - stats.mean) / (stats.std + eps)
    parts = torch.split_with_sizes(normalised, [len(rewards) for rewards in step_rewards])
    return [_reward_to_go(part, ends, length) for part, ends, length in zip(parts, step_ends, lengths, strict=True)]


def _reward_to_go(rewards: Tensor, ends: Sequence[int], length: int) -> Tensor:
    """At each token, the sum of the rewards at this token and later."""
    rewards_T = torch.zeros(length, dtype=rewards.dtype)
    rewards_T.index_add_(0, torch.tensor(ends, dtype=torch.int64), rewards)
    return rewards_T.flip(0).cumsum(0).flip(0)


def grade(
    scored: Sequence[ScoredGroup],
    *,
    baseline: Baseline,
    scale: AdvantageScale,
    eps: float,
    mask_cut: bool,
    kl_sums: Sequence[Sequence[float]] | None = None,
    beta: float = 0.0,
    k: int | None = None,
) -> list[GradedGroup]:
    """Grade each group: the outcome advantage at every token, plus the process advantage if steps were rewarded.

    Completions that are not graded get advantage 0: those whose reward failed, those with nothing to compare with, and, with
    ``mask_cut``, truncated ones (their reward still counts in the mean and std of the group). ``kl_sums``, one per completion,
    subtracts the KL from the reward with weight ``beta``.
    """
    if not scored:
        return []
    rewards_PG = _padded([[_outcome(s, kl_sums is not None) for s in group.scored] for group in scored])
    if kl_sums is not None:
        rewards_PG = kl_in_reward(rewards_PG, _padded(kl_sums), beta)
    gradable_PG = gradable_mask(rewards_PG, baseline, scale)
    if scale == "per_reward":
        rewards_APG, weights_A = _rewards_by_aspect(scored)
        outcome_PG = decoupled_advantages(rewards_APG, weights_A, eps).masked_fill(~gradable_PG, 0.0)
    else:
        lengths_PG = _padded([[s.completion.length for s in group.scored] for group in scored])
        outcome_PG = outcome_advantages(rewards_PG, baseline, scale, eps, lengths_PG=lengths_PG, k=k)
    groups = [_grade_group(group, outcome_PG[i], gradable_PG[i], eps, mask_cut) for i, group in enumerate(scored)]
    return whiten(groups, eps) if scale == "whiten" else groups


def whiten(groups: Sequence[GradedGroup], eps: float) -> list[GradedGroup]:
    """A ← (A − mean(A)) / (std(A) + eps), over every token that the policy wrote in the step's graded completions.

    Used by REINFORCE++ (Hu et al. 2025, arXiv 2501.03262, eq. 8) and PPO. Mean and std (n − 1) run over tokens, so a long
    completion counts more. Equal advantages give exactly 0, and completions that are not graded stay at 0.
    """
    tokens = [
        advantages[scored.completion.loss_mask]
        for group in groups
        for advantages, scored, is_graded in zip(group.advantages, group.scored.scored, group.graded, strict=True)
        if is_graded
    ]
    stats = _GroupStats.of(torch.from_numpy(np.concatenate(tokens or [np.zeros(0, np.float32)])).double()[None])
    scale = 0.0 if bool(stats.is_flat) else 1 / (float(stats.std) + eps)
    return [replace(group, advantages=_whiten_group(group, float(stats.mean), scale)) for group in groups]


def _whiten_group(group: GradedGroup, mean: float, scale: float) -> tuple[Floats, ...]:
    return tuple(
        ((a.astype(np.float64) - mean) * scale).astype(np.float32) if is_graded else a
        for a, is_graded in zip(group.advantages, group.graded, strict=True)
    )


def _grade_group(group: ScoredGroup, outcome_G: Tensor, gradable_G: Tensor, eps: float, mask_cut: bool) -> GradedGroup:
    lengths = [len(s.completion.token_ids) for s in group.scored]
    steps = [weighted_step_rewards(s) for s in group.scored]
    ends, rewards = [[end for end, _ in pairs] for pairs in steps], [[reward for _, reward in pairs] for pairs in steps]
    has_process = sum(map(len, rewards)) >= 2
    process = process_advantages(rewards, ends, lengths, eps) if has_process else None
    advantages, graded = [], []
    outcomes, gradable = (row_G[: len(lengths)].tolist() for row_G in (outcome_G, gradable_G))  # without the padding
    for i, (s, outcome, has_outcome) in enumerate(zip(group.scored, outcomes, gradable, strict=True)):
        has_steps = has_process and any(a.steps is not None and a.weight != 0 for a in s.aspects)
        graded.append((has_outcome or has_steps) and is_graded(s, mask_cut))
        step_advantage = 0.0 if process is None else process[i].numpy()
        advantages.append(np.full(lengths[i], (step_advantage + outcome) if graded[i] else 0.0, np.float32))
    return GradedGroup(group, tuple(advantages), tuple(graded))


def is_graded(scored: ScoredCompletion, mask_cut: bool) -> bool:
    """Whether a completion is trained on: its reward did not fail, and it is not truncated if ``mask_cut`` is set."""
    return scored.failure is None and not (mask_cut and scored.completion.is_truncated)


def _outcome(scored: ScoredCompletion, has_kl: bool) -> float:
    """The total of the outcome aspects. Without any it is NaN, or 0 if a KL is subtracted from it."""
    total = scored.total
    if total is None or not (has_kl or any(a.value is not None and a.weight != 0 for a in scored.aspects)):
        return math.nan
    return total


def weighted_step_rewards(scored: ScoredCompletion) -> list[tuple[int, float]]:
    """(index of the last token, weighted reward) of every step of a completion; empty if the completion failed."""
    if scored.failure is not None:
        return []
    counted = [(a, end, reward) for a in scored.aspects if a.weight != 0 for end, reward in a.steps or ()]
    for aspect, end, reward in counted:
        if not (0 <= end < len(scored.completion.token_ids) and math.isfinite(reward)):
            raise RewardError(
                f"reward '{aspect.name}'",
                f"step reward {reward} ending at token {end} of {len(scored.completion.token_ids)}",
                because="a step must end at a token of the completion, and its reward must be finite",
                fix="count tokens from 0, including the end token; report a step that can't be scored as a failure",
            )
    return [(end, aspect.weight * reward) for aspect, end, reward in counted]


def _rewards_by_aspect(scored: Sequence[ScoredGroup]) -> tuple[Tensor, list[float]]:
    """The outcome of each reward of nonzero weight as [A, P, G], and the weights. Completions that failed are NaN."""
    weights = {a.name: a.weight for group in scored for s in group.scored for a in s.aspects if a.weight != 0}
    by_aspect = [
        _padded(
            [
                [
                    next((a.value for a in s.aspects if a.name == name and a.value is not None), math.nan)
                    if s.failure is None
                    else math.nan
                    for s in group.scored
                ]
                for group in scored
            ]
        )
        for name in weights
    ]
    return torch.stack(by_aspect), list(weights.values())


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """Rows of different lengths as one float64 matrix, padded with NaN."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[math.nan] * (width - len(row))] for row in rows], dtype=torch.float64)


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

    ``steps`` are (index of the step's last token, reward). The index counts all tokens, those of the environment included. A
    step that ends at a token of the environment is credited to the last token that the policy wrote before it (or, if there
    is none, to the policy's first token).
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
