"""The stage `dpo`: one optimiser update per step on preference pairs, both completions packed behind their shared prompt.

The reference is the policy as the stage found it. It never changes, and neither do the pairs: its log-probs are computed once,
before the first step, and held as two numbers per pair in place of a second model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.preference import PREFERENCE_LOSSES, Pairs, implicit_rewards
from oncurve.errors import DataError
from oncurve.models.packing import Bundle, Pack, build_pack, split_by_budget
from oncurve.models.policy import Policy
from oncurve.recipe.dpo import Dpo
from oncurve.records import StepReport
from oncurve.tasks.order import places_for_step
from oncurve.tasks.pairs import Pair, read_pairs
from oncurve.train.clock import Clock
from oncurve.train.memory import with_less
from oncurve.train.optimiser import Optimiser, Update
from oncurve.train.peak import peak_memory_mib
from oncurve.train.phases import utilisation

T = TypeVar("T")


class DpoLoop:
    """One optimiser update per step. ``pairs`` stand in for the stage's file, where they are given."""

    out_of_time = False
    """Its length is counted in steps alone."""

    def __init__(self, stage: Dpo, seed: int, policy: Policy, pairs: Sequence[Pair] | None = None) -> None:
        self.stage, self.seed, self.policy, self.tokens_per_pack = stage, seed, policy, stage.tokens_per_pack
        self.bundles = [_bundle(policy, pair) for pair in (read_pairs(stage) if pairs is None else pairs)]
        self.optimiser = Optimiser(policy.model, stage.optimiser, stage.steps)
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
        clock = Clock()
        if self.stage.loss != "simpo" and self.reference is None:
            with clock("reference"):
                self.reference = self._reference_logps()
        chosen = places_for_step(len(self.bundles), self.seed, n - 1, self.stage.batch_size)
        with clock("update"):
            seen = self._in_fitting_packs(chosen, self._gradient)
            update = self.optimiser.step(loss=seen.sums["loss"] / seen.pairs)
        metrics = seen.metrics(update) | {
            "tokens_per_s": seen.tokens / clock.seconds["update"],
            "examples_seen": float(n * self.stage.batch_size),
            "epoch": n * self.stage.batch_size / len(self.bundles),
            "memory_mib": peak_memory_mib(self.policy.device),
            **utilisation(self.policy, seen.packs, clock.seconds["update"]),
        }
        return StepReport(self.stage.label, n, metrics, clock.seconds)

    def _in_fitting_packs(self, places: Sequence[int], work: Callable[[list[tuple[Pack, list[int]]]], T]) -> T:
        """What ``work`` makes of packs of these pairs: of packs of half the size, as often as memory runs out in it."""
        bundles = [self.bundles[i] for i in places]
        least, whole = max(b.tokens for b in bundles), sum(b.tokens for b in bundles)
        budget = max(min(self.tokens_per_pack, whole), least)
        done, enough = with_less(lambda tokens: work(self._packs(places, tokens)), budget, least=least, what="tokens_per_pack")
        if enough < budget:
            self.tokens_per_pack = enough
        return done

    def _gradient(self, packs: list[tuple[Pack, list[int]]]) -> _Seen:
        """The gradient of one update, summed over its packs."""
        self.optimiser.zero_grad()
        seen, count = _Seen([pack for pack, _ in packs]), sum(len(places) for _, places in packs)
        for pack, places in packs:
            with self.policy.collecting(self.optimiser.sums):
                logp_M, entropy_M = self.policy.pack_logps(pack)
            pairs = self._pairs(logp_M, pack, places)
            loss_N = PREFERENCE_LOSSES[self.stage.loss](pairs, self.stage.beta, self.stage.margin)
            (loss_N.sum() / count).backward()  # type: ignore[no-untyped-call]
            self.optimiser.absorb()
            seen.note(loss_N, pairs, entropy_M, self.stage.beta)
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
        found = torch.zeros(len(self.bundles), 2, dtype=torch.float64)
        size, batch_size = len(self.bundles), self.stage.batch_size
        drawn = {i for step in range(self.stage.steps) for i in places_for_step(size, self.seed, step, batch_size)}

        def measure(packs: list[tuple[Pack, list[int]]]) -> None:
            for pack, places in packs:
                logp_M, _ = self.policy.pack_logps(pack)
                parts = torch.split(logp_M.double().cpu(), list(pack.lengths))
                found[places] = torch.stack([part.sum() for part in parts]).view(-1, 2)

        self._in_fitting_packs(sorted(drawn), measure)
        return found


class _Seen:
    """Sums over a step's packs."""

    def __init__(self, packs: Sequence[Pack]) -> None:
        self.packs, self.pairs, self.tokens = packs, 0, 0
        self.sums = dict.fromkeys(("loss", "pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward"), 0.0)
        self.entropy = 0.0

    def note(self, loss_N: Tensor, pairs: Pairs, entropy_M: Tensor, beta: float) -> None:
        chosen_N, rejected_N = implicit_rewards(pairs, beta)
        found = (loss_N.detach(), chosen_N > rejected_N, chosen_N - rejected_N, chosen_N, rejected_N)
        for name, value_N in zip(self.sums, found, strict=True):
            self.sums[name] += float(value_N.double().sum())
        self.pairs += len(loss_N)
        self.tokens += len(entropy_M)
        self.entropy += float(entropy_M.detach().double().sum())

    def metrics(self, update: Update) -> dict[str, float]:
        return {name: total / self.pairs for name, total in self.sums.items()} | {
            "entropy": self.entropy / self.tokens,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "skipped_updates": float(update.skipped),
            "tokens": float(self.tokens),
        }


def _bundle(policy: Policy, pair: Pair) -> Bundle:
    prompt = policy.encode(pair.prompt)
    both = tuple(policy.encode_completion(text) for text in (pair.chosen, pair.rejected))
    longest = len(prompt) + max(map(len, both))
    if longest > policy.context:
        raise DataError(
            pair.prompt.id,
            f"a pair of {longest} tokens",
            because=f"the model addresses {policy.context} positions",
            fix="shorten or drop the row, or use a model with a longer context",
        )
    return Bundle(np.asarray(prompt), both, (0, 1))
