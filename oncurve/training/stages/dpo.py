"""The stage `dpo`: one optimiser update per step on preference pairs, both completions packed behind their shared prompt.

The reference is the policy as the stage found it. It never changes, and neither do the pairs: its log-probs are computed once,
before the first step, and held as two numbers per pair in place of a second model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.preference_losses import PREFERENCE_LOSSES, Pairs, implicit_rewards
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import DataError
from oncurve.models.packing import Pack, PrefixGroup, build_pack, split_by_budget
from oncurve.models.policy import Policy, dummy_passes
from oncurve.recipe.schema.stages import Dpo
from oncurve.records import StepReport
from oncurve.runs.step_notes import note
from oncurve.tasks.data.preference_pairs import Pair, TrainingRows, left_out_text, read_pairs
from oncurve.tasks.prompt_order import batch_indices
from oncurve.training.learner.oom_retry import PackedStage
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.memory_stats import peak_memory_mib
from oncurve.training.timing import PhaseClock, utilisation

T = TypeVar("T")


class DpoLoop(PackedStage):
    """One optimiser update per step. ``pairs`` stand in for the stage's file, where they are given."""

    out_of_time = False
    """Its length is counted in steps alone."""

    def __init__(
        self, stage: Dpo, seed: int, policy: Policy, pairs: Sequence[Pair] | None = None, world: World = SINGLE_PROCESS
    ) -> None:
        self.stage, self.seed, self.policy, self.world = stage, seed, policy, world
        self.tokens_per_pack = stage.tokens_per_pack
        taught = read_pairs(stage) if pairs is None else TrainingRows(pairs)
        self.left_out = taught.left_out
        self.bundles = [pair_group(policy, pair) for pair in taught.rows]
        self.optimiser = build_optimiser(policy.model, stage.optimiser, stage.steps, world)
        self.reference: Tensor | None = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        held = {} if self.reference is None else {"reference_logps": {"chosen_rejected": self.reference}}
        return {"optimiser": self.optimiser.state(), **held}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.optimiser.load_state(tensors["optimiser"])
        if "reference_logps" in tensors:
            self.reference = tensors["reference_logps"]["chosen_rejected"].clone()

    def step(self, n: int) -> StepReport:
        """Update number n, from 1."""
        clock = PhaseClock(self.world.set_phase)
        if n == 1 and self.left_out:
            note("data", f"{left_out_text(self.left_out)} left out")
        if self.stage.loss != "simpo" and self.reference is None:
            with clock("reference"):
                self.reference = self._reference_logps()
        chosen = batch_indices(len(self.bundles), self.seed, n - 1, self.stage.batch_size)
        with clock("update"):
            own = self._in_fitting_packs(chosen, partial(self._gradient, count=len(chosen)))
            seen = own.of_all(self.world)
            update = self.optimiser.step(lambda: {"loss": seen["loss"]})
        metrics = seen | {
            **update.metrics,
            "tokens_per_s": seen["tokens"] / clock.seconds["update"],
            "examples_seen": float(n * self.stage.batch_size),
            "epoch": n * self.stage.batch_size / len(self.bundles),
            "memory_mib": peak_memory_mib(self.policy.device),
            **utilisation(self.policy, own.packs, clock.seconds["update"]),
        }
        return StepReport(self.stage.label, n, metrics, clock.seconds)

    def _in_fitting_packs(self, places: Sequence[int], work: Callable[[list[tuple[Pack, list[int]]]], T]) -> T:
        """What ``work`` makes of packs of this rank's part of the pairs."""
        costs = [self.bundles[i].tokens for i in places]
        own = [places[k] for k in self.world.local_indices(costs)]
        budget = max(min(self.tokens_per_pack, sum(costs)), max(costs))
        return self.with_oom_retry(lambda tokens: work(self._packs(own, tokens)), budget, max(costs))

    def _gradient(self, packs: list[tuple[Pack, list[int]]], count: int) -> _DpoStats:
        """The gradient of one update over ``count`` pairs, summed over this rank's packs of them."""
        self.optimiser.zero_grad()
        seen, more = _DpoStats([pack for pack, _ in packs]), self.world.padding_passes(len(packs))
        for pack, places in packs:
            with self.policy.accumulate_into(self.optimiser.accumulator):
                logp_M, entropy_M = self.policy.pack_logps(pack)
            pairs = self._pairs(logp_M, pack, places)
            loss_B = PREFERENCE_LOSSES[self.stage.loss](pairs, self.stage.beta, self.stage.margin)
            (loss_B.sum() / count).backward()  # type: ignore[no-untyped-call]
            self.optimiser.add_autograd_grads()
            seen.note(loss_B, pairs, entropy_M, self.stage.beta)
        dummy_passes(self.policy, more)
        return seen

    def _packs(self, places: Sequence[int], budget: int) -> list[tuple[Pack, list[int]]]:
        """Packs of whole pairs, each with the places of its pairs: a pair's loss needs both of its completions at once."""
        found, done = [], 0
        for part in split_by_budget([self.bundles[i] for i in places], budget):
            found.append((build_pack(part, self.policy.device), list(places[done : done + len(part)])))
            done += len(part)
        return found

    def _pairs(self, logp_M: Tensor, pack: Pack, places: Sequence[int]) -> Pairs:
        sums = torch.zeros(pack.rows, dtype=logp_M.dtype, device=logp_M.device).index_add(0, pack.row_M, logp_M)
        lengths = torch.tensor(pack.lengths, dtype=logp_M.dtype, device=logp_M.device)
        reference = [None, None] if self.reference is None else list(self.reference[list(places)].to(logp_M).unbind(1))
        return Pairs(sums[0::2], sums[1::2], lengths[0::2], lengths[1::2], *reference)

    @torch.no_grad()
    def _reference_logps(self) -> Tensor:
        """[pairs, 2]: summed log-probs of both completions, of every pair that the stage will see; 0 for the others."""
        size, batch_size = len(self.bundles), self.stage.batch_size
        drawn = {i for step in range(self.stage.steps) for i in batch_indices(size, self.seed, step, batch_size)}

        def measure(packs: list[tuple[Pack, list[int]]]) -> dict[int, list[float]]:
            own: dict[int, list[float]] = {}
            more = self.world.padding_passes(len(packs))
            for pack, places in packs:
                logp_M, _ = self.policy.pack_logps(pack)
                parts = torch.split(logp_M.double().cpu(), list(pack.lengths))
                sums = torch.stack([part.sum() for part in parts]).view(-1, 2)
                own |= zip(places, sums.tolist(), strict=True)
            dummy_passes(self.policy, more, self.policy.pack_logps)
            return own

        found = self.world.all_gather_dict(self._in_fitting_packs(sorted(drawn), measure))
        return torch.tensor([found.get(i, [0.0, 0.0]) for i in range(size)], dtype=torch.float64)


class _DpoStats:
    """Sums over this rank's packs of a step."""

    def __init__(self, packs: Sequence[Pack]) -> None:
        self.packs = packs
        self.sums = dict.fromkeys(("loss", "pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward"), 0.0)
        self.counts = {"pairs": 0.0, "tokens": 0.0, "entropy": 0.0}

    def note(self, loss_B: Tensor, pairs: Pairs, entropy_M: Tensor, beta: float) -> None:
        chosen_B, rejected_B = implicit_rewards(pairs, beta)
        found = (loss_B.detach(), chosen_B > rejected_B, chosen_B - rejected_B, chosen_B, rejected_B)
        for name, value_B in zip(self.sums, found, strict=True):
            self.sums[name] += float(value_B.double().sum())
        self.counts["pairs"] += len(loss_B)
        self.counts["tokens"] += len(entropy_M)
        self.counts["entropy"] += float(entropy_M.detach().double().sum())

    def of_all(self, world: World) -> dict[str, float]:
        """The step's figures, over all ranks."""
        found = world.all_reduce_sum(self.sums | self.counts)
        means = {name: found[name] / found["pairs"] for name in self.sums}
        return means | {"entropy": found["entropy"] / found["tokens"], "tokens": found["tokens"]}


def pair_group(policy: Policy, pair: Pair) -> PrefixGroup:
    """A pair as token ids: both completions behind their prompt. Raises where the model can't read it."""
    prompt = policy.encode(pair.prompt)
    both = tuple(policy.encode_completion(text) for text in (pair.chosen, pair.rejected))
    longest = len(prompt) + max(map(len, both))
    if longest > policy.max_positions:
        raise DataError(
            pair.prompt.id,
            f"a pair of {longest} tokens",
            because=f"the model addresses {policy.max_positions} positions",
            fix="shorten or drop the row, or use a model with a longer context",
        )
    return PrefixGroup(np.asarray(prompt), both, (0, 1))
