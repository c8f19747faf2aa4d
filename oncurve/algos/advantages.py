"""Advantages: how much better a completion, or a step of it, is than its group.

Shapes: ``P`` groups, ``G`` completions each (the largest group's; smaller ones are filled with NaN), ``M`` step rewards of a
group. A reward that is NaN is missing, not 0: it leaves mean and std, and its completion is not graded.
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
from oncurve.records import Floats, GradedGroup, ScoredCompletion, ScoredGroup


@dataclass(frozen=True, slots=True)
class _GroupStats:
    """Count, mean and std (n − 1) of each line of a table, missing values aside; ``flat`` where all its values are equal.

    Equal means up to 16 units in the last place: the mean of eight times 0.1 is not 0.1, and 0.1 + 0.2 is not 0.3, but no
    completion was better than another.
    """

    count: Tensor
    mean: Tensor
    std: Tensor
    flat: Tensor

    @classmethod
    def of(cls, values: Tensor) -> _GroupStats:
        has = values.isfinite()
        count = has.sum(-1, keepdim=True)
        mean = values.masked_fill(~has, 0).sum(-1, keepdim=True) / count.clamp(min=1)
        deviation = (values - mean).masked_fill(~has, 0)
        std = (deviation.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        highest = values.masked_fill(~has, -math.inf).amax(-1, keepdim=True)
        lowest = values.masked_fill(~has, math.inf).amin(-1, keepdim=True)
        rounding = 16 * torch.finfo(values.dtype).eps * torch.maximum(highest.abs(), lowest.abs())
        return cls(count, mean, std, (highest - lowest <= rounding) | (count < 2))


def has_spread(rewards_PG: Tensor, baseline: Baseline, scale: AdvantageScale) -> Tensor:
    """Which completions can be graded: those with a reward, in a group of at least 2 such wherever the group is the curve."""
    has_PG = rewards_PG.isfinite()
    if baseline == "none" and scale != "group":
        return has_PG
    return has_PG & (has_PG.sum(-1, keepdim=True) >= 2)


def outcome_advantages(rewards_PG: Tensor, baseline: Baseline, scale: AdvantageScale, eps: float) -> Tensor:
    """A_i = (r_i − b_i) / (s + eps) (GRPO, DeepSeekMath, arXiv 2402.03300, 4.1.2).

    b_i is the group's mean, the mean of the others (``leave_one_out``: RLOO, arXiv 2402.14740), or 0. s is the group's std
    dividing by G − 1, or one std over all rewards of the batch, not centred by group (as TRL's ``batch``); ``none`` divides
    by nothing (Dr. GRPO, arXiv 2503.20783), and so does ``whiten``, which is done afterwards, over tokens (``whiten``). Equal
    rewards give exactly 0 wherever their group or std grades them; so do missing rewards, and groups too small to be graded.
    """
    group = _GroupStats.of(rewards_PG)
    centred_PG = rewards_PG
    zero_PG = ~has_spread(rewards_PG, baseline, scale)
    if baseline == "mean":
        centred_PG = rewards_PG - group.mean
    elif baseline == "leave_one_out":
        # r_i − (Σr − r_i)/(n − 1) is the deviation from the mean, n/(n − 1) times: one subtraction, one rounding.
        centred_PG = (rewards_PG - group.mean) * (group.count.to(rewards_PG.dtype) / (group.count - 1).clamp(min=1))
    if baseline != "none" or scale == "group":
        zero_PG = zero_PG | group.flat
    if scale == "group":
        centred_PG = centred_PG / (group.std + eps)
    elif scale == "batch":
        batch = _GroupStats.of(rewards_PG.reshape(1, -1))
        centred_PG = centred_PG / (batch.std + eps)
        zero_PG = zero_PG | batch.flat
    return centred_PG.masked_fill(zero_PG, 0.0)


def process_advantages(
    step_rewards: Sequence[Sequence[float]], step_ends: Sequence[Sequence[int]], lengths: Sequence[int], eps: float
) -> list[Tensor]:
    """A_i,t = Σ of r~ over the steps of o_i that end at or after token t, r~ = (r − mean(R)) / (std(R) + eps).

    R holds every step reward of the whole group; std divides by |R| − 1 (DeepSeekMath, arXiv 2402.03300, 4.1.3). ``step_ends``
    are the indices of the steps' last tokens. Fewer than two step rewards, or equal ones, give exactly 0.
    """
    pooled = torch.tensor([r for rewards in step_rewards for r in rewards], dtype=torch.float64)
    curve = _GroupStats.of(pooled) if len(pooled) else None
    if curve is None or bool(curve.flat):
        return [torch.zeros(length, dtype=torch.float64) for length in lengths]
    normalised = (pooled - curve.mean) / (curve.std + eps)
    parts = torch.split_with_sizes(normalised, [len(rewards) for rewards in step_rewards])
    return [_reward_to_go(part, ends, length) for part, ends, length in zip(parts, step_ends, lengths, strict=True)]


def _reward_to_go(rewards: Tensor, ends: Sequence[int], length: int) -> Tensor:
    """At each of the tokens, the sum of the rewards that stand at it or after it."""
    at_T = torch.zeros(length, dtype=rewards.dtype)
    at_T.index_add_(0, torch.tensor(ends, dtype=torch.int64), rewards)
    return at_T.flip(0).cumsum(0).flip(0)


def grade(
    scored: Sequence[ScoredGroup],
    *,
    baseline: Baseline,
    scale: AdvantageScale,
    eps: float,
    mask_cut: bool,
    kl_sums: Sequence[Sequence[float]] | None = None,
    beta: float = 0.0,
) -> list[GradedGroup]:
    """Each group on its own curve: the outcome advantage at every token, plus the process advantage where steps were rewarded.

    Not graded, at advantage 0: completions whose reward failed, those without anything to be compared with, and cut ones where
    ``mask_cut`` (their reward still shapes the curve of the others: being cut is an outcome too). ``kl_sums``, one per
    completion, puts the KL inside the reward with weight ``beta``.
    """
    if not scored:
        return []
    rewards_PG = _table([[_outcome(s, kl_sums is not None) for s in group.scored] for group in scored])
    if kl_sums is not None:
        rewards_PG = kl_in_reward(rewards_PG, _table(kl_sums), beta)
    outcome_PG = outcome_advantages(rewards_PG, baseline, scale, eps)
    gradable_PG = has_spread(rewards_PG, baseline, scale)
    groups = [_grade_group(group, outcome_PG[i], gradable_PG[i], eps, mask_cut) for i, group in enumerate(scored)]
    return whiten(groups, eps) if scale == "whiten" else groups


def whiten(groups: Sequence[GradedGroup], eps: float) -> list[GradedGroup]:
    """A ← (A − mean(A)) / (std(A) + eps), over every token that the policy wrote in the step's graded completions.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262, eq. 8) and, as is usual, PPO. Mean and std (n − 1) are of tokens, so a long
    completion counts more. Equal advantages give exactly 0, and completions that are not graded stay at 0.
    """
    tokens = [
        advantages[scored.completion.loss_mask]
        for group in groups
        for advantages, scored, counts in zip(group.advantages, group.scored.scored, group.graded, strict=True)
        if counts
    ]
    curve = _GroupStats.of(torch.from_numpy(np.concatenate(tokens or [np.zeros(0, np.float32)])).double()[None])
    scale = 0.0 if bool(curve.flat) else 1 / (float(curve.std) + eps)
    return [replace(group, advantages=_whitened_group(group, float(curve.mean), scale)) for group in groups]


def _whitened_group(group: GradedGroup, mean: float, scale: float) -> tuple[Floats, ...]:
    return tuple(
        ((a.astype(np.float64) - mean) * scale).astype(np.float32) if counts else a
        for a, counts in zip(group.advantages, group.graded, strict=True)
    )


def _grade_group(group: ScoredGroup, outcome_G: Tensor, gradable_G: Tensor, eps: float, mask_cut: bool) -> GradedGroup:
    lengths = [len(s.completion.token_ids) for s in group.scored]
    steps = [counted_steps(s) for s in group.scored]
    ends, rewards = [[end for end, _ in of] for of in steps], [[r for _, r in of] for of in steps]
    compared = sum(map(len, rewards)) >= 2
    process = process_advantages(rewards, ends, lengths, eps) if compared else None
    advantages, graded = [], []
    outcomes, comparables = (of_G[: len(lengths)].tolist() for of_G in (outcome_G, gradable_G))  # others may have more
    for i, (s, outcome, comparable) in enumerate(zip(group.scored, outcomes, comparables, strict=True)):
        counts = comparable or (compared and any(a.steps is not None and a.weight != 0 for a in s.aspects))
        graded.append(counts and is_graded(s, mask_cut))
        of_steps = 0.0 if process is None else process[i].numpy()
        advantages.append(np.full(lengths[i], (of_steps + outcome) if graded[i] else 0.0, np.float32))
    return GradedGroup(group, tuple(advantages), tuple(graded))


def is_graded(scored: ScoredCompletion, mask_cut: bool) -> bool:
    """Whether a completion can be learned from: its reward did not fail, and it is whole where cut ones are masked."""
    return scored.failure is None and not (mask_cut and scored.completion.cut)


def _outcome(scored: ScoredCompletion, penalised: bool) -> float:
    """The total of the outcome aspects; NaN where there is none, unless a KL is to be subtracted from 0."""
    total = scored.total
    if total is None or not (penalised or any(a.value is not None and a.weight != 0 for a in scored.aspects)):
        return math.nan
    return total


def counted_steps(scored: ScoredCompletion) -> list[tuple[int, float]]:
    """Every counted step reward of a completion, weighted, with its last token's index; none where the completion failed."""
    if scored.failure is not None:
        return []
    counted = [(a, end, reward) for a in scored.aspects if a.weight != 0 for end, reward in a.steps or ()]
    for aspect, end, reward in counted:
        if not (0 <= end < len(scored.completion.token_ids) and math.isfinite(reward)):
            raise RewardError(
                f"reward '{aspect.name}'",
                f"step reward {reward} ending at token {end} of {len(scored.completion.token_ids)}",
                because="a step must end at one of the completion's tokens, with a finite reward",
                fix="count tokens from 0, the end token included; report a step that can't be judged as a failure",
            )
    return [(end, aspect.weight * reward) for aspect, end, reward in counted]


def _table(lines: Sequence[Sequence[float]]) -> Tensor:
    """Lines of different lengths as one float64 table, filled with NaN."""
    width = max(len(line) for line in lines)
    return torch.tensor([[*line, *[math.nan] * (width - len(line))] for line in lines], dtype=torch.float64)
