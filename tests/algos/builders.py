"""Small records and micro-batches for the formulas' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.objectives import LossInputs, LossSettings
from oncurve.algos.reductions import LossDenominators
from oncurve.records import Aspect, Completion, Group, Prompt, ScoredCompletion, ScoredGroup, StopReason

PLAIN = LossSettings(beta=0.0, kl_estimator="k3", ratio_weighted_kl=False, entropy_bonus=0.0)


def completion(length: int = 3, stop: StopReason = "end", loss_mask: Sequence[bool] | None = None) -> Completion:
    logps = np.full(length, -1.0, dtype=np.float32)
    mask = np.array([True] * length if loss_mask is None else loss_mask, dtype=np.bool_)
    return Completion(np.arange(length, dtype=np.int64), "x" * length, stop, logps, logps, logps, mask)


def scored(*aspects: Aspect, length: int = 3, stop: StopReason = "end") -> ScoredCompletion:
    return ScoredCompletion(completion(length, stop), aspects)


def group(*members: ScoredCompletion) -> ScoredGroup:
    ids = np.array([0, 1], dtype=np.int64)
    return ScoredGroup(Group(Prompt("p", "?"), ids, tuple(m.completion for m in members)), members)


def right(value: float | None, failure: str | None = None) -> Aspect:
    return Aspect("answer", value, failure=failure)


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def micro_batch(lengths: Sequence[int], totals: LossDenominators | None = None, **tensors: Any) -> LossInputs:
    """Rows of these lengths end to end, nothing masked. The default is on-policy, with log-prob −1 and advantage 1."""
    row_M = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    ones_M = torch.ones(sum(lengths), dtype=torch.float64)
    fields = {"logp_new_M": -ones_M, "logp_old_M": -ones_M, "advantage_M": ones_M, "mask_M": ones_M.bool(), **tensors}
    totals = totals or LossDenominators(len(lengths), int(fields["mask_M"].sum()), 10)
    return LossInputs(row_M=row_M, rows=len(lengths), totals=totals, **fields)
