"""What a pass over a step saw: packs with what their loss needs, and what is gathered of them for metrics and for the store.

Legend: ``M`` predicted tokens of a pack, ``X`` columns of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.objectives import LossInputs, LossOutputs
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.models.packing import Pack
from oncurve.records import GradedGroup, TokenStats
from oncurve.training.learner.optimiser import Update

CompletionIndex = tuple[int, int]
"""(group, completion): where a packed row came from."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack with what the loss needs of each predicted token. ``logp_old_M`` is None until the first update has passed."""

    pack: Pack
    indices: tuple[CompletionIndex, ...]
    advantage_M: Tensor
    mask_M: Tensor
    sampler_M: Tensor
    logp_old_M: Tensor | None
    logp_ref_M: Tensor | None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What a step's updates did: metrics by name, and per completion what was seen at each token."""

    metrics: dict[str, float]
    stats: list[list[TokenStats | None]]
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the update, by phase: pack, old, reference, forward, backward, optimiser, idle."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far ``UpdateStats`` had come."""

    tokens: int
    sums: dict[str, float]
    largest: dict[str, float]
    losses: dict[str, float]
    packs: int


@dataclass(frozen=True, slots=True)
class _Noted:
    """What one pack showed, still on its device: numbers by name, and columns of one value per token."""

    micro: MicroBatch
    names: tuple[str, ...]
    numbers: Tensor
    columns_XM: Tensor


LARGEST = ("ratio_max", "mismatch_max")


class UpdateStats:
    """Gathers what the last pass over a step saw, for metrics and for the store.

    A pack is noted without waiting for the device. What it showed is brought over when somebody looks, before the optimiser's
    update; the values of its tokens are sorted out at the end, when the device is at work on that.
    """

    def __init__(self, groups: Sequence[GradedGroup], world: World = SINGLE_PROCESS) -> None:
        self.world = world
        self.stats: list[list[TokenStats | None]] = [[None] * len(g.graded) for g in groups]
        self.updates: list[Update] = []
        self._noted: list[_Noted] = []
        self._columns: list[np.ndarray] = []
        """Values of tokens, [X, M], of those noted that have been brought over."""
        self.tokens = 0
        self.sums: dict[str, float] = {}
        self.largest = dict.fromkeys(LARGEST, 0.0)
        self.losses = {"loss": 0.0, "policy_loss": 0.0}
        totals = [total for g in groups for total in g.scored.totals if total is not None]
        self.reward = float(np.mean(totals)) if totals else None

    def snapshot(self) -> Snapshot:
        self._settle()
        return Snapshot(self.tokens, dict(self.sums), dict(self.largest), dict(self.losses), len(self._noted))

    def restore(self, mark: Snapshot) -> None:
        """Forgets what a pass that did not come to its end has noted."""
        del self._noted[mark.packs :], self._columns[mark.packs :]
        self.tokens, self.sums, self.largest, self.losses = mark.tokens, dict(mark.sums), dict(mark.largest), dict(mark.losses)

    def metrics_since(self, mark: Snapshot) -> dict[str, float]:
        """What the guard looks at beside the gradient: the step's mean reward, and the loss and KL of the update just noted."""
        self._settle()
        watched = {} if self.reward is None else {"reward": self.reward}
        own = {"tokens": self.tokens - mark.tokens, "loss": self.losses["loss"] - mark.losses["loss"]}
        own |= {"kl": self.sums["kl"] - mark.sums.get("kl", 0.0)} if "kl" in self.sums else {}
        found = self.world.all_reduce_sum(own)
        if found["tokens"]:
            watched["loss"] = found["loss"]
            if "kl" in found:
                watched["kl"] = found["kl"] / found["tokens"]
        return watched

    def note(self, micro: MicroBatch, inputs: LossInputs, outputs: LossOutputs) -> None:
        mask_M, new_M = inputs.mask_M, inputs.logp_new_M.detach()
        assert inputs.entropy_M is not None
        gap_M, drift_M = inputs.logp_old_M - micro.sampler_M, new_M - inputs.logp_old_M
        found = {
            "tokens": mask_M,
            "entropy": inputs.entropy_M.detach(),
            "ratio_mean": outputs.ratio_M,
            "clip_low_share": outputs.clipped_low_M,
            "clip_high_share": outputs.clipped_high_M,
            "clip_share": outputs.clipped_M,
            "kl": outputs.kl_M,
            "update_kl": drift_M.exp() - 1 - drift_M,
            "mismatch_kl": gap_M.exp() - gap_M - 1,
            "ratio_max": outputs.ratio_M,
            "mismatch_max": gap_M.abs(),
            "mismatch_masked_share": None if inputs.weight_M is None else inputs.weight_M == 0,
        }
        numbers = {name: _masked(x_M, mask_M, name in LARGEST) for name, x_M in found.items() if x_M is not None}
        numbers |= {"loss": outputs.loss.detach().double(), "policy_loss": outputs.policy_loss.double()}
        columns = [new_M, outputs.ratio_M, inputs.entropy_M.detach(), outputs.clipped_M]
        columns += [] if outputs.kl_M is None else [outputs.kl_M]
        table_XM = torch.stack([x_M.float() for x_M in columns])
        self._noted.append(_Noted(micro, tuple(numbers), torch.stack(list(numbers.values())), table_XM))

    def _settle(self) -> None:
        """Brings over all that was noted since, in two transfers."""
        new = self._noted[len(self._columns) :]
        if not new:
            return
        for one, values in zip(new, torch.stack([one.numbers for one in new]).cpu().tolist(), strict=True):
            self._add(dict(zip(one.names, values, strict=True)))
        ends = np.cumsum([one.columns_XM.shape[1] for one in new])[:-1]
        self._columns += np.split(torch.cat([one.columns_XM for one in new], 1).cpu().numpy(), ends, 1)

    def _add(self, numbers: Mapping[str, float]) -> None:
        self.tokens += round(numbers["tokens"])
        for name, value in numbers.items():
            if name in LARGEST:
                self.largest[name] = max(self.largest[name], value)
            elif name in self.losses:
                self.losses[name] += value
            elif name != "tokens":
                self.sums[name] = self.sums.get(name, 0.0) + value

    def _keep_tokens(self, micro: MicroBatch, columns_XM: np.ndarray) -> None:
        ends = np.cumsum(micro.pack.lengths)[:-1]
        for (g, c), (logps, ratio, entropy, clipped, *kl) in zip(
            micro.indices, zip(*(np.split(x_M, ends) for x_M in columns_XM), strict=True), strict=True
        ):
            self.stats[g][c] = TokenStats(logps, ratio, entropy, clipped > 0, kl[0] if kl else None)

    def result(self) -> UpdateResult:
        self._settle()
        for one, columns_XM in zip(self._noted, self._columns, strict=True):
            self._keep_tokens(one.micro, columns_XM)
        sums = self.world.all_reduce_sum({"tokens": self.tokens, **self.sums, **self.losses})
        tokens, losses = sums.pop("tokens"), {name: sums.pop(name) for name in self.losses}
        largest = self.world.all_reduce_max(self.largest)
        metrics = {name: total / max(tokens, 1) for name, total in sums.items()} | largest | losses
        if self.updates:
            metrics["grad_norm"] = self.updates[-1].grad_norm
            metrics["learning_rate"] = self.updates[-1].learning_rate
        metrics["skipped_updates"] = float(sum(u.skipped for u in self.updates))
        own = {(g, c): stats for g, row in enumerate(self.stats) for c, stats in enumerate(row) if stats is not None}
        for (g, c), stats in self.world.all_gather_dict(own).items():
            self.stats[g][c] = stats
        return UpdateResult(metrics, self.stats)


def _masked(value_M: Tensor, mask_M: Tensor, largest: bool) -> Tensor:
    """The sum, or the largest, over masked-in tokens, as a float64 on the device."""
    kept_M = torch.where(mask_M, value_M.double(), 0.0)
    return kept_M.amax() if largest and len(kept_M) else kept_M.sum()
