"""The stage `dpo`: one optimiser update per step on preference pairs, both completions packed behind their shared prompt.

The reference is the policy at the start of the stage. Neither it nor the pairs change, so its log-probs are computed once,
before the first step, and stored as two numbers per pair instead of a second model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.preference_losses import PREFERENCE_LOSSES, Pairs, implicit_rewards
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import DataError
from oncurve.models.packing import Pack, PrefixGroup
from oncurve.models.policy import Policy
from oncurve.recipe.schema.stages import Dpo
from oncurve.tasks.base import Task
from oncurve.tasks.data.preference_pairs import Pair, TrainingRows, read_pairs
from oncurve.tasks.prompt_order import batch_indices
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.prompt_checker import PromptChecker
from oncurve.training.stages.offline import PackedOfflineStage
from oncurve.training.timing import PhaseClock

MEANS = ("loss", "pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward")
"""Metrics that are means over the pairs of a batch."""


class DpoLoop(PackedOfflineStage[Dpo, PrefixGroup]):
    """The loop of the stage `dpo`. ``pairs`` replace the stage's file, if given."""

    def __init__(
        self, stage: Dpo, seed: int, policy: Policy, pairs: Sequence[Pair] | None = None, world: World = SINGLE_PROCESS
    ) -> None:
        super().__init__(stage, seed, policy, world)
        self.tokens_per_pack = stage.tokens_per_pack
        data = read_pairs(stage) if pairs is None else TrainingRows(pairs)
        self.left_out = data.left_out
        self.rows = [encode_pair(policy, pair, i) for i, pair in enumerate(data.rows)]
        self.optimiser = build_optimiser(policy.model, stage.optimiser, stage.steps, world)
        self.reference: Tensor | None = None
        """[pairs, 2]: the reference's log-probs of the chosen and the rejected completion."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        reference = {} if self.reference is None else {"reference_logps": {"chosen_rejected": self.reference}}
        return {"optimiser": self.optimiser.state(), **reference}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.optimiser.load_state(tensors["optimiser"])
        if "reference_logps" in tensors:
            self.reference = tensors["reference_logps"]["chosen_rejected"].clone()

    def before_update(self, clock: PhaseClock) -> None:
        if self.stage.loss != "simpo" and self.reference is None:
            with clock("reference"):
                self.reference = self._reference_logps()

    def update(self, batch: Sequence[PrefixGroup]) -> tuple[dict[str, float], list[Pack]]:
        def pack_loss(pack: Pack, logp_M: Tensor, entropy_M: Tensor) -> tuple[Tensor, dict[str, float]]:
            pairs = self._pairs(logp_M, pack)
            loss_B = PREFERENCE_LOSSES[self.stage.loss](pairs, self.stage.beta, self.stage.margin)
            chosen_B, rejected_B = implicit_rewards(pairs, self.stage.beta)
            values = (loss_B.detach(), chosen_B > rejected_B, chosen_B - rejected_B, chosen_B, rejected_B)
            sums = {name: float(value_B.double().sum()) for name, value_B in zip(MEANS, values, strict=True)}
            counts = {"pairs": float(len(loss_B)), "tokens": float(len(entropy_M))}
            return loss_B.sum() / len(batch), {**sums, **counts, "entropy": float(entropy_M.detach().double().sum())}

        sums, packs = self.compute_gradient(batch, self._pack_budget(batch), pack_loss)
        metrics = {name: sums[name] / sums["pairs"] for name in MEANS}
        metrics |= {"entropy": sums["entropy"] / sums["tokens"], "tokens": sums["tokens"]}
        done = self.optimiser.step(lambda: {"loss": metrics["loss"]})
        return metrics | done.metrics, packs

    def _pack_budget(self, rows: Sequence[PrefixGroup]) -> int:
        """Tokens of a pack: at least those of the longest pair, since a pair's loss needs both of its completions at once."""
        costs = [row.tokens for row in rows]
        return max(min(self.tokens_per_pack, sum(costs)), max(costs))

    def _pairs(self, logp_M: Tensor, pack: Pack) -> Pairs:
        sums = torch.zeros(pack.rows, dtype=logp_M.dtype, device=logp_M.device).index_add(0, pack.row_M, logp_M)
        lengths = torch.tensor(pack.lengths, dtype=logp_M.dtype, device=logp_M.device)
        indices = pair_indices(pack)
        reference = [None, None] if self.reference is None else list(self.reference[indices].to(logp_M).unbind(1))
        return Pairs(sums[0::2], sums[1::2], lengths[0::2], lengths[1::2], *reference)

    @torch.no_grad()
    def _reference_logps(self) -> Tensor:
        """The summed log-probs of both completions of every pair that the stage will use; 0 for the others."""
        size, batch_size = len(self.rows), self.stage.batch_size
        used = sorted({i for step in range(self.stage.steps) for i in batch_indices(size, self.seed, step, batch_size)})
        rows = [self.rows[i] for i in used]

        def attempt(local: list[int], budget: int) -> dict[int, list[float]]:
            logps: dict[int, list[float]] = {}
            for pack in self.each_pack([rows[i] for i in local], budget, self.policy.pack_logps):
                logp_M, _ = self.policy.pack_logps(pack)
                parts = torch.split(logp_M.double().cpu(), list(pack.lengths))
                sums = torch.stack([part.sum() for part in parts]).view(-1, 2)
                logps |= zip(pair_indices(pack), sums.tolist(), strict=True)
            return logps

        local_logps = self.on_local_rows([row.tokens for row in rows], self._pack_budget(rows), attempt)
        logps = self.world.all_gather_dict(local_logps)
        return torch.tensor([logps.get(i, [0.0, 0.0]) for i in range(size)], dtype=torch.float64)


def encode_pair(policy: Policy, pair: Pair, index: int) -> PrefixGroup:
    """A pair as token ids: both completions behind their prompt. Raises DataError if it is too long for the model."""
    prompt = policy.encode(pair.prompt)
    completions = tuple(policy.encode_completion(text) for text in (pair.chosen, pair.rejected))
    longest = len(prompt) + max(map(len, completions))
    if longest > policy.max_positions:
        raise DataError(
            pair.prompt.id,
            f"a pair of {longest} tokens",
            because=f"the model addresses {policy.max_positions} positions",
            fix="shorten or drop the row, or use a model with a longer context",
        )
    return PrefixGroup(np.asarray(prompt), completions, (2 * index, 2 * index + 1))


def pair_indices(pack: Pack) -> list[int]:
    """The indices of a pack's pairs (see the keys of `encode_pair`)."""
    return [key // 2 for key in pack.keys[::2]]


def check_data(stage: Dpo) -> None:
    read_pairs(stage)


def check_policy(stage: Dpo, task: Task, checker: PromptChecker) -> None:
    for pair in read_pairs(stage).rows:
        texts = pair.prompt.shown + max(pair.chosen, pair.rejected, key=len)
        if checker.must_encode(pair.prompt, texts, 1):
            encode_pair(checker.policy, pair, 0)
