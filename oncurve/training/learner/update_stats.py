"""Statistics of a step's updates, for the run's database: metrics, and values for each token of a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.objectives import LossInputs, LossOutputs
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.records import GradedGroup, TokenStats
from oncurve.training.learner.micro_batch import MicroBatch
from oncurve.training.learner.optimiser import Update


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What a step's updates did: metrics by name, and the token statistics of each completion (None if not forwarded)."""

    metrics: dict[str, float]
    stats: list[list[TokenStats | None]]
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the update by phase: pack, old, reference, teacher (distil), forward, backward, optimiser, idle."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an `UpdateStats`, to return to."""

    tokens: int
    sums: dict[str, float]
    maxima: dict[str, float]
    losses: dict[str, float]
    packs: int


@dataclass(frozen=True, slots=True)
class _PackStats:
    """Statistics of one pack, still on its device: scalars by name, and a table with a column for each token."""

    micro: MicroBatch
    names: tuple[str, ...]
    scalars: Tensor
    token_table: Tensor


MAXIMA = ("ratio_max", "mismatch_max")
"""Statistics that are maxima over all tokens. Most others are means."""

LOSSES = ("loss", "policy_loss", "balance_loss")
"""Statistics that are sums over packs."""


class UpdateStats:
    """Collects the statistics of the last pass over a step.

    `add` does not wait for the device. Values are copied to the host when they are first needed, before the optimiser's update;
    token statistics are sorted by completion at the end, while the device works on the update.
    """

    def __init__(self, groups: Sequence[GradedGroup], world: World = SINGLE_PROCESS) -> None:
        self.world = world
        self.stats: list[list[TokenStats | None]] = [[None] * len(g.graded) for g in groups]
        self.updates: list[Update] = []
        self._packs: list[_PackStats] = []
        self._token_tables: list[np.ndarray] = []
        """The token tables that are on the host: those of the first packs of ``_packs``."""
        self.tokens = 0
        self.sums: dict[str, float] = {}
        self.maxima = dict.fromkeys(MAXIMA, 0.0)
        self.losses = {"loss": 0.0, "policy_loss": 0.0}
        totals = [total for g in groups for total in g.scored.totals if total is not None]
        self.reward = float(np.mean(totals)) if totals else None

    def snapshot(self) -> Snapshot:
        self._copy_to_host()
        return Snapshot(self.tokens, dict(self.sums), dict(self.maxima), dict(self.losses), len(self._packs))

    def restore(self, before: Snapshot) -> None:
        """Discards the packs of an attempt that failed."""
        del self._packs[before.packs :], self._token_tables[before.packs :]
        self.tokens, self.sums = before.tokens, dict(before.sums)
        self.maxima, self.losses = dict(before.maxima), dict(before.losses)

    def metrics_since(self, before: Snapshot) -> dict[str, float]:
        """What the update guard checks besides the gradient: the step's mean reward, and the loss and KL of the last update."""
        self._copy_to_host()
        metrics = {} if self.reward is None else {"reward": self.reward}
        local = {"tokens": self.tokens - before.tokens, "loss": self.losses["loss"] - before.losses["loss"]}
        local |= {"kl": self.sums["kl"] - before.sums.get("kl", 0.0)} if "kl" in self.sums else {}
        sums = self.world.all_reduce_sum(local)
        if sums["tokens"]:
            metrics["loss"] = sums["loss"]
            if "kl" in sums:
                metrics["kl"] = sums["kl"] / sums["tokens"]
        return metrics

    def add(self, micro: MicroBatch, inputs: LossInputs, outputs: LossOutputs) -> None:
        """Adds a pack."""
        mask_M, logp_M = inputs.mask_M, inputs.logp_new_M.detach()
        assert inputs.entropy_M is not None
        mismatch_M, drift_M = inputs.logp_old_M - micro.sampler_M, logp_M - inputs.logp_old_M
        by_token = {
            "tokens": mask_M,
            "entropy": inputs.entropy_M.detach(),
            "ratio_mean": outputs.ratio_M,
            "clip_low_share": outputs.clipped_low_M,
            "clip_high_share": outputs.clipped_high_M,
            "clip_share": outputs.clipped_M,
            "kl": outputs.kl_M,
            "teacher_divergence": outputs.divergence_M,
            "update_kl": drift_M.exp() - 1 - drift_M,
            "mismatch_kl": mismatch_M.exp() - mismatch_M - 1,
            "ratio_max": outputs.ratio_M,
            "mismatch_max": mismatch_M.abs(),
            "entropy_dropped_share": None if inputs.kept_M is None else ~inputs.kept_M,
            "mismatch_masked_share": None if inputs.weight_M is None else inputs.weight_M == 0,
        }
        scalars = {name: _reduce(x_M, mask_M, name in MAXIMA) for name, x_M in by_token.items() if x_M is not None}
        scalars |= {"loss": outputs.loss.detach().double(), "policy_loss": outputs.policy_loss.double()}
        if outputs.balance is not None:
            scalars["balance_loss"] = outputs.balance.double()
        rows = [logp_M, outputs.ratio_M, inputs.entropy_M.detach(), outputs.clipped_M]
        rows += [] if outputs.kl_M is None else [outputs.kl_M]
        token_table = torch.stack([x_M.float() for x_M in rows])
        self._packs.append(_PackStats(micro, tuple(scalars), torch.stack(list(scalars.values())), token_table))

    def _copy_to_host(self) -> None:
        """Copies the packs added since the last call to the host, in two transfers."""
        new = self._packs[len(self._token_tables) :]
        if not new:
            return
        for pack, values in zip(new, torch.stack([pack.scalars for pack in new]).cpu().tolist(), strict=True):
            self._add_scalars(dict(zip(pack.names, values, strict=True)))
        ends = np.cumsum([pack.token_table.shape[1] for pack in new])[:-1]
        self._token_tables += np.split(torch.cat([pack.token_table for pack in new], 1).cpu().numpy(), ends, 1)

    def _add_scalars(self, scalars: Mapping[str, float]) -> None:
        self.tokens += round(scalars["tokens"])
        for name, value in scalars.items():
            if name in MAXIMA:
                self.maxima[name] = max(self.maxima[name], value)
            elif name in LOSSES:
                self.losses[name] = self.losses.get(name, 0.0) + value
            elif name != "tokens":
                self.sums[name] = self.sums.get(name, 0.0) + value

    def _store_token_stats(self, micro: MicroBatch, token_table: np.ndarray) -> None:
        ends = np.cumsum(micro.pack.lengths)[:-1]
        for (g, c), (logps, ratio, entropy, clipped, *kl) in zip(
            micro.indices, zip(*(np.split(x_M, ends) for x_M in token_table), strict=True), strict=True
        ):
            self.stats[g][c] = TokenStats(logps, ratio, entropy, clipped > 0, kl[0] if kl else None)

    def result(self) -> UpdateResult:
        """The metrics and token statistics of all ranks."""
        self._copy_to_host()
        for pack, token_table in zip(self._packs, self._token_tables, strict=True):
            self._store_token_stats(pack.micro, token_table)
        sums = self.world.all_reduce_sum({"tokens": self.tokens, **self.sums, **self.losses})
        tokens, losses = sums.pop("tokens"), {name: sums.pop(name) for name in LOSSES if name in sums}
        maxima = self.world.all_reduce_max(self.maxima)
        metrics = {name: total / max(tokens, 1) for name, total in sums.items()} | maxima | losses
        if self.updates:
            metrics["grad_norm"] = self.updates[-1].grad_norm
            metrics["learning_rate"] = self.updates[-1].learning_rate
            if self.updates[-1].loss_scale is not None:
                metrics["loss_scale"] = self.updates[-1].loss_scale
        metrics["skipped_updates"] = float(sum(u.skipped for u in self.updates))
        local = {(g, c): stats for g, row in enumerate(self.stats) for c, stats in enumerate(row) if stats is not None}
        for (g, c), stats in self.world.all_gather_dict(local).items():
            self.stats[g][c] = stats
        return UpdateResult(metrics, self.stats)


def _reduce(value_M: Tensor, mask_M: Tensor, is_maximum: bool) -> Tensor:
    """The sum or the maximum over the tokens of the mask, as a float64 on the device."""
    masked_M = torch.where(mask_M, value_M.double(), 0.0)
    return masked_M.amax() if is_maximum and len(masked_M) else masked_M.sum()
