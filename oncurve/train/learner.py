"""The learner: graded groups in, an updated policy out.

Groups are packed with their prompt shared, forwarded under the objective, and their gradients summed over packs: reductions divide by the
totals of the whole update, so the split into packs changes nothing. Groups without signal cost nothing, unless a KL in the loss or an
entropy bonus gives them a gradient.

Legend: ``M`` predicted tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.kl import KL_ESTIMATORS
from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossOutputs, LossSettings, with_clip
from oncurve.algos.ratios import truncated_weights
from oncurve.algos.reductions import StepTotals, step_totals
from oncurve.models.packing import Bundle, Pack, build_pack, split_by_budget
from oncurve.models.policy import Policy
from oncurve.models.reference import Reference
from oncurve.recipe.resolve import resolved_kl
from oncurve.recipe.schema import Grpo
from oncurve.records import Floats, GradedGroup, ScoredGroup, TokenStats
from oncurve.train.optimiser import Optimiser, Update

Seat = tuple[int, int]
"""(group, completion): where a packed row came from."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a step's updates did: metrics by name, and per completion what was seen at each token."""

    metrics: dict[str, float]
    stats: list[list[TokenStats | None]]


class Learner:
    """Holds the optimiser and, where β > 0, the reference."""

    def __init__(self, policy: Policy, stage: Grpo) -> None:
        self.policy, self.stage = policy, stage
        objective = OBJECTIVES[stage.objective]
        self.objective = objective if stage.clip is None else with_clip(objective, stage.clip.low, stage.clip.high, stage.clip.dual)
        self.kl_place, self.kl_estimator = resolved_kl(stage)
        self.reference = Reference(policy) if stage.kl.beta > 0 else None
        self.optimiser = Optimiser(policy.model, stage.optimiser, stage.steps * stage.updates_per_step * stage.minibatches)
        self.loss_settings = LossSettings(
            beta=stage.kl.beta if self.kl_place == "loss" else 0.0,
            kl_estimator=self.kl_estimator,
            ratio_weighted_kl=stage.kl.ratio_weighted,
            entropy_bonus=stage.entropy_bonus,
        )
        self._seats: list[Seat] = []

    def update(self, groups: Sequence[GradedGroup]) -> Learned:
        """μ passes over the groups, each in ``minibatches`` optimiser updates."""
        self._seats = [(g, c) for g, group in enumerate(groups) for c in range(len(group.graded))]
        chunks = _split(list(range(len(groups))), self.stage.minibatches)
        batches = [self._packs(groups, chunk) for chunk in chunks]
        old = self._old_logps(batches)
        reference = [[self.reference.logps(p, self._temperature) for p in packs] for packs in batches] if self.reference else None
        seen = _Seen(groups)
        for turn in range(self.stage.updates_per_step):
            last = turn == self.stage.updates_per_step - 1
            for b, (chunk, packs) in enumerate(zip(chunks, batches, strict=True)):
                totals = self._totals([groups[g] for g in chunk])
                self._one_update(groups, packs, totals, old and old[b], reference and reference[b], seen if last else None)
                seen.updates += [self._finish()] if packs else []
        return seen.learned()

    @torch.no_grad()
    def kl_sums(self, scored: Sequence[ScoredGroup]) -> list[list[float]]:
        """Σ_t KL of each completion, for a KL inside the reward."""
        assert self.reference is not None
        bundles = _bundles([(s.group.prompt_ids, [c.completion.token_ids for c in s.scored]) for s in scored])
        seats = [(g, c) for g, s in enumerate(scored) for c in range(len(s.scored))]
        sums = [[0.0] * len(s.scored) for s in scored]
        for part in split_by_budget(bundles, self.stage.tokens_per_pack):
            pack = build_pack(part, self.policy.device)
            logp_M, _ = self.policy.pack_logps(pack, self._temperature)
            kl_M = KL_ESTIMATORS[self.kl_estimator](logp_M, self.reference.logps(pack, self._temperature))
            for key, kl_T in zip(pack.keys, kl_M.cpu().split(pack.lengths), strict=True):
                g, c = seats[key]
                mask = torch.from_numpy(scored[g].scored[c].completion.loss_mask)
                sums[g][c] = float(kl_T[mask].sum())
        return sums

    @property
    def _temperature(self) -> float:
        return self.stage.sampling.temperature

    def _totals(self, groups: Sequence[GradedGroup]) -> StepTotals:
        return step_totals(groups, self.stage.length_budget or self.stage.sampling.max_new_tokens)

    def _packs(self, groups: Sequence[GradedGroup], chunk: Sequence[int]) -> list[Pack]:
        every = self.stage.no_signal == "keep" or self.loss_settings.beta > 0 or self.loss_settings.entropy_bonus != 0
        seat_key = {seat: key for key, seat in enumerate(self._seats)}
        bundles = []
        for g in chunk:
            group = groups[g]
            rows = [c for c, graded in enumerate(group.graded) if graded]
            if rows and (every or group.has_signal):
                ids = tuple(group.scored.scored[c].completion.token_ids for c in rows)
                bundles.append(Bundle(group.group.prompt_ids, ids, tuple(seat_key[(g, c)] for c in rows)))
        return [build_pack(part, self.policy.device) for part in split_by_budget(bundles, self.stage.tokens_per_pack)]

    @torch.no_grad()
    def _old_logps(self, batches: Sequence[Sequence[Pack]]) -> list[list[Tensor]] | None:
        """π_old is the learner's. One update per batch: the same numbers, detached, and no pass is spent; else one pass before the first."""
        if self.stage.updates_per_step * self.stage.minibatches == 1:
            return None
        return [[self.policy.pack_logps(p, self._temperature)[0] for p in packs] for packs in batches]

    def _one_update(
        self,
        groups: Sequence[GradedGroup],
        packs: Sequence[Pack],
        totals: StepTotals,
        old: Sequence[Tensor] | None,
        reference: Sequence[Tensor] | None,
        seen: _Seen | None,
    ) -> None:
        self.optimiser.zero_grad()
        for i, pack in enumerate(packs):
            logp_M, entropy_M = self.policy.pack_logps(pack, self._temperature)
            rows = [groups[g].scored.scored[c].completion for g, c in (self._seats[k] for k in pack.keys)]
            advantage = [groups[g].advantages[c] for g, c in (self._seats[k] for k in pack.keys)]
            logp_old_M = logp_M.detach() if old is None else old[i]
            sampler_M = _join([c.logps for c in rows], logp_M)
            inputs = LossInputs(
                logp_new_N=logp_M,
                logp_old_N=logp_old_M,
                advantage_N=_join(advantage, logp_M),
                mask_N=torch.from_numpy(np.concatenate([c.loss_mask for c in rows])).to(logp_M.device),
                row_N=pack.row_M,
                rows=pack.rows,
                totals=totals,
                logp_ref_N=None if reference is None else reference[i],
                entropy_N=entropy_M,
                weight_N=None if self.stage.importance_cap is None else truncated_weights(logp_old_M, sampler_M, self.stage.importance_cap),
            )
            outputs = self.objective.loss(inputs, self.loss_settings)
            outputs.loss.backward()
            if seen is not None:
                seen.note(self._seats, pack, inputs, outputs, sampler_M)

    def _finish(self) -> Update:
        return self.optimiser.step()


class _Seen:
    """Gathers what the last pass over a step saw, for metrics and for the store."""

    def __init__(self, groups: Sequence[GradedGroup]) -> None:
        self.stats: list[list[TokenStats | None]] = [[None] * len(g.graded) for g in groups]
        self.updates: list[Update] = []
        self.tokens = 0
        self.sums: dict[str, float] = {}
        self.largest: dict[str, float] = {"ratio_max": 0.0, "mismatch_max": 0.0}
        self.losses = {"loss": 0.0, "policy_loss": 0.0}

    def note(self, seats: Sequence[Seat], pack: Pack, inputs: LossInputs, outputs: LossOutputs, sampler_M: Tensor) -> None:
        mask_M = inputs.mask_N
        self.tokens += int(mask_M.sum())
        gap_M = (inputs.logp_old_N - sampler_M)[mask_M]
        ratio_M = outputs.ratio_N[mask_M]
        means = {
            "entropy": inputs.entropy_N,
            "ratio_mean": outputs.ratio_N,
            "clip_low_share": outputs.clipped_low_N,
            "clip_high_share": outputs.clipped_high_N,
            "clip_share": outputs.clipped_N,
            "kl": outputs.kl_N,
        }
        for name, value_M in means.items():
            if value_M is not None:
                self.sums[name] = self.sums.get(name, 0.0) + float(value_M.detach()[mask_M].double().sum())
        self.sums["mismatch_kl"] = self.sums.get("mismatch_kl", 0.0) + float((gap_M.exp() - gap_M - 1).double().sum())
        if len(gap_M):
            self.largest["mismatch_max"] = max(self.largest["mismatch_max"], float(gap_M.abs().max()))
            self.largest["ratio_max"] = max(self.largest["ratio_max"], float(ratio_M.max()))
        self.losses["loss"] += float(outputs.loss.detach())
        self.losses["policy_loss"] += float(outputs.policy_loss)
        self._keep_tokens(seats, pack, inputs, outputs)

    def _keep_tokens(self, seats: Sequence[Seat], pack: Pack, inputs: LossInputs, outputs: LossOutputs) -> None:
        assert inputs.entropy_N is not None
        columns = [inputs.logp_new_N.detach(), outputs.ratio_N, inputs.entropy_N.detach(), outputs.clipped_N]
        columns += [] if outputs.kl_N is None else [outputs.kl_N]
        by_row = zip(*(x.cpu().split(pack.lengths) for x in columns), strict=True)
        for key, (logps, ratio, entropy, clipped, *kl) in zip(pack.keys, by_row, strict=True):
            g, c = seats[key]
            self.stats[g][c] = TokenStats(_floats(logps), _floats(ratio), _floats(entropy), clipped.numpy(), _floats(kl[0]) if kl else None)

    def learned(self) -> Learned:
        metrics = {name: total / max(self.tokens, 1) for name, total in self.sums.items()} | self.largest | self.losses
        if self.updates:
            metrics["grad_norm"] = self.updates[-1].grad_norm
            metrics["learning_rate"] = self.updates[-1].learning_rate
        metrics["skipped_updates"] = float(sum(u.skipped for u in self.updates))
        return Learned(metrics, self.stats)


def _floats(values: Tensor) -> Floats:
    return values.float().numpy()


def _join(parts: Sequence[Floats], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(like.device, like.dtype)


def _bundles(sequences: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]]) -> list[Bundle]:
    out, key = [], 0
    for prompt_ids, completions in sequences:
        out.append(Bundle(prompt_ids, tuple(completions), tuple(range(key, key + len(completions)))))
        key += len(completions)
    return out


def _split(items: list[int], parts: int) -> list[list[int]]:
    """Into ``parts`` runs of nearly equal size, in order."""
    bounds = [round(i * len(items) / parts) for i in range(parts + 1)]
    return [items[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
