"""The learner: graded groups in, an updated policy out.

Groups are packed with their prompt shared, forwarded under the objective, and their gradients summed over packs: reductions
divide by the totals of the whole update, so the split into packs changes nothing. Groups without signal cost nothing, unless
a KL in the loss or an entropy bonus gives them a gradient.

Legend: ``M`` predicted tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.kl import KL_ESTIMATORS
from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossOutputs, LossSettings, with_clip
from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.ratios import mismatch_mask, truncated_weights
from oncurve.algos.reductions import LossDenominators, loss_denominators
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.models.activation_checkpointing import checkpoint_layers, free_bytes, layers_to_checkpoint, transient_bytes
from oncurve.models.packing import Pack, PrefixGroup, build_pack, split_by_budget, to_device
from oncurve.models.policy import Policy, dummy_passes
from oncurve.models.reference import Reference
from oncurve.recipe.defaults import kl_settings
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Completion, Floats, GradedGroup, Group, Ints, ScoredGroup
from oncurve.training.learner.micro_batch import merge_inputs, merge_outputs, split_micro_batch, tensors_of
from oncurve.training.learner.oom_retry import PackedStage
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.learner.update_stats import CompletionIndex, MicroBatch, UpdateResult, UpdateStats
from oncurve.training.timing import DevicePhases, utilisation

T = TypeVar("T")


class Learner(PackedStage):
    """Holds the optimiser and, where β > 0, the reference."""

    def __init__(self, policy: Policy, stage: Grpo, world: World = SINGLE_PROCESS) -> None:
        self.policy, self.stage, self.world, self.tokens_per_pack = policy, stage, world, stage.tokens_per_pack
        self.phases = DevicePhases(policy.device)
        self._planned_tokens = 0
        objective = OBJECTIVES[stage.objective]
        clip = stage.clip
        self.objective = objective if clip is None else with_clip(objective, clip.low, clip.high, clip.dual)
        place, self.kl_estimator = kl_settings(stage)
        self.kl_in_reward = place == "reward" and stage.kl.beta > 0
        self.reference = Reference(policy, stage.kl.on_cpu) if stage.kl.beta > 0 else None
        updates = stage.steps * stage.updates_per_step * stage.minibatches
        self.optimiser = build_optimiser(policy.model, stage.optimiser, updates, world)
        self.loss_settings = LossSettings(
            beta=stage.kl.beta if place == "loss" else 0.0,
            kl_estimator=self.kl_estimator,
            ratio_weighted_kl=stage.kl.ratio_weighted,
            entropy_bonus=stage.entropy_bonus,
        )

    def update(self, groups: Sequence[GradedGroup]) -> UpdateResult:
        """μ passes over the groups, each in ``minibatches`` optimiser updates. Every rank is given all groups of the step,
        packs its own of them, and takes part in the updates of all."""
        self.phases = DevicePhases(self.policy.device)
        chunks = split_evenly(len(groups), self.stage.minibatches)
        batches = self._fitting(groups, chunks)
        totals = [self._totals([groups[g] for g in chunk]) for chunk in chunks]
        self._choose_checkpoints(max((micro.pack.tokens for batch in batches for micro in batch), default=0))
        seen = UpdateStats(groups, self.world)
        for turn in range(self.stage.updates_per_step):
            last = turn == self.stage.updates_per_step - 1
            for i, total in enumerate(totals):
                if self._used(groups, chunks[i]):
                    before = seen.snapshot()
                    batches[i] = self._gradient(groups, batches[i], total, seen if last else None)
                    with self.phases("optimiser"):
                        seen.updates.append(self.optimiser.step(partial(seen.metrics_since, before)))
        return self._timed(seen.result(), [micro.pack for batch in batches for micro in batch])

    def _timed(self, learned: UpdateResult, packs: Sequence[Pack]) -> UpdateResult:
        """With the update's seconds by phase, and its model FLOPs per second as a share of the device's matrix rate."""
        seconds, passes = self.phases.seconds(), self.stage.updates_per_step
        once = (self.reference is not None) + (self.stage.minibatches > 1)
        used = utilisation(self.policy, packs, sum(seconds.values()), forward=passes + once, backward=passes)
        return replace(learned, metrics=learned.metrics | used, seconds=seconds)

    def _choose_checkpoints(self, tokens: int) -> None:
        """How many layers compute their activations again, for packs of so many tokens: asked anew only where packs grow."""
        if tokens <= self._planned_tokens:
            return
        self._planned_tokens = tokens
        how, device = self.stage.checkpointing, self.policy.device
        if how == "on":
            checkpoint_layers(self.policy, int(self.policy.model.config.get_text_config().num_hidden_layers))
        elif how == "auto" and device.type == "cuda":
            free = free_bytes(device) - self.optimiser.unallocated_bytes - transient_bytes(self.policy, tokens)
            checkpoint_layers(self.policy, layers_to_checkpoint(self.policy, tokens, free))

    def _fitting(self, groups: Sequence[GradedGroup], chunks: Sequence[range]) -> list[list[MicroBatch]]:
        """The packs of each mini-batch; smaller ones where memory runs out in a pass over them without gradient."""

        def attempt(budget: int) -> list[list[MicroBatch]]:
            self.tokens_per_pack = budget
            return [self._micro_batches(groups, chunk) for chunk in chunks]

        return self.with_oom_retry(attempt, self.tokens_per_pack, max((min_pack_tokens(g) for g in groups), default=1))

    def _gradient(
        self, groups: Sequence[GradedGroup], batch: list[MicroBatch], totals: LossDenominators, seen: UpdateStats | None
    ) -> list[MicroBatch]:
        """One update's gradient. Where memory runs out it is begun again over packs of half the size: the sum is the same."""
        before = None if seen is None else seen.snapshot()

        def attempt(packs: list[MicroBatch]) -> list[MicroBatch]:
            if seen is not None and before is not None:
                seen.restore(before)
            return self._accumulate(packs, totals, seen)

        return self.with_fitting_packs(groups, batch, attempt)

    def with_fitting_packs(
        self, groups: Sequence[GradedGroup], batch: list[MicroBatch], attempt: Callable[[list[MicroBatch]], T]
    ) -> T:
        """What ``attempt`` makes of a batch: of the same rows in packs of half the size, as often as memory runs out in it."""
        whole = max((micro.pack.tokens for micro in batch), default=0)
        least = max((min_pack_tokens(groups[g]) for micro in batch for g, _ in micro.indices), default=0)
        return self.with_oom_retry(
            lambda budget: attempt(batch if budget == whole else resplit(groups, batch, budget)), whole, least
        )

    def kl_sums(self, scored: Sequence[ScoredGroup]) -> list[list[float]]:
        """Σ_t KL of each completion, for a KL inside the reward."""
        return [
            [float(kl_T[s.completion.loss_mask].sum()) for s, kl_T in zip(group.scored, of_group, strict=True)]
            for group, of_group in zip(scored, self.kl_tokens(scored), strict=True)
        ]

    @torch.no_grad()
    def kl_tokens(self, scored: Sequence[ScoredGroup]) -> list[list[Floats]]:
        """The KL estimate at each token of each completion."""
        assert self.reference is not None
        ids = [{c: completion.token_ids for c, completion in enumerate(g.group.completions)} for g in scored]
        return self.by_token(scored, ids, self._kl)

    def by_token(
        self, scored: Sequence[ScoredGroup], ids: Sequence[Mapping[int, Ints]], measure: Callable[[Pack], Tensor]
    ) -> list[list[Floats]]:
        """One number per token of ``ids[group][completion]``, and nothing of completions that it lacks. Each rank measures its
        part of the groups, and hears of all."""
        places = self.world.local_indices([tokens_of(group.group) for group in scored])
        seats = [(g, c) for g in places for c in ids[g]]
        key = {seat: k for k, seat in enumerate(seats)}
        bundles = [
            PrefixGroup(scored[g].group.prompt_ids, tuple(ids[g].values()), tuple(key[g, c] for c in ids[g]))
            for g in places
            if ids[g]
        ]
        found = {g: [np.zeros(0, np.float32)] * len(scored[g].scored) for g in places}
        for k, values_T in self.by_completion(bundles, measure):
            g, c = seats[k]
            found[g][c] = values_T
        whole = self.world.all_gather_dict(found)
        return [whole[g] for g in range(len(scored))]

    def _kl(self, pack: Pack) -> Tensor:
        assert self.reference is not None
        logp_M, _ = self.policy.pack_logps(pack, self._temperature)
        return KL_ESTIMATORS[self.kl_estimator](logp_M, self.reference.logps(pack, self._temperature))

    def by_completion(self, bundles: Sequence[PrefixGroup], measure: Callable[[Pack], Tensor]) -> list[tuple[int, Floats]]:
        """(key, one number per token) of every completion, measured without gradient in packs that memory has room for."""

        def attempt(budget: int) -> list[tuple[int, Floats]]:
            parts = list(split_by_budget(bundles, budget))
            more = self.world.padding_passes(len(parts))
            packs = (build_pack(part, self.policy.device) for part in parts)
            found = [pair for pack in packs for pair in zip(pack.keys, by_row(measure(pack), pack), strict=True)]
            dummy_passes(self.policy, more, measure)
            return found

        whole = min(self.tokens_per_pack, sum(b.tokens for b in bundles))
        least = max((len(b.prompt_ids) + max(map(len, b.completion_ids)) for b in bundles), default=1)
        return self.with_oom_retry(attempt, whole, least)

    def _logps(self, pack: Pack) -> Tensor:
        return self.policy.pack_logps(pack, self._temperature)[0]

    @property
    def _temperature(self) -> float:
        return self.stage.sampling.temperature

    def _totals(self, groups: Sequence[GradedGroup]) -> LossDenominators:
        return loss_denominators(groups, self.stage.length_budget or self.stage.sampling.max_new_tokens)

    def _used(self, groups: Sequence[GradedGroup], chunk: range) -> list[int]:
        """Which of some groups have a gradient."""
        settings = self.loss_settings
        every = self.stage.no_signal == "keep" or settings.beta > 0 or settings.entropy_bonus != 0
        return [g for g in chunk if any(groups[g].graded) and (every or groups[g].has_signal)]

    def _micro_batches(self, groups: Sequence[GradedGroup], chunk: range) -> list[MicroBatch]:
        """This rank's packs of some groups, with what does not change over the step's updates."""
        seats: list[CompletionIndex] = []
        bundles = []
        used = self._used(groups, chunk)
        for g in [used[k] for k in self.world.local_indices([tokens_of(groups[g].group) for g in used])]:
            rows = [c for c, graded in enumerate(groups[g].graded) if graded]
            bundles.append(prefix_group_of(groups[g].scored, rows, range(len(seats), len(seats) + len(rows))))
            seats += [(g, c) for c in rows]
        made, parts = [], list(split_by_budget(bundles, self.tokens_per_pack))
        more = self.world.padding_passes(len(parts)) if self.stage.minibatches > 1 else 0
        for part in parts:
            with self.phases("pack", host=True):
                pack = build_pack(part, self.policy.device)
            made.append(self._micro_batch(groups, pack, tuple(seats[k] for k in pack.keys)))
        with torch.no_grad():
            dummy_passes(self.policy, more, self._logps)
        return self._with_reference(made)

    def _with_reference(self, batch: list[MicroBatch]) -> list[MicroBatch]:
        """The reference's log-probs of all packs in one go: its weights may have to be brought over."""
        reference = self.reference
        if reference is None or not (batch or self.world.shard == "full"):
            return batch
        more = self.world.padding_passes(len(batch))
        with self.phases("reference"), reference.loaded():
            made = [replace(micro, logp_ref_M=reference.logps(micro.pack, self._temperature)) for micro in batch]
            dummy_passes(self.policy, more, lambda pack: reference.logps(pack, self._temperature))
        return made

    @torch.no_grad()
    def _micro_batch(self, groups: Sequence[GradedGroup], pack: Pack, seats: tuple[CompletionIndex, ...]) -> MicroBatch:
        completions: list[Completion] = [groups[g].scored.scored[c].completion for g, c in seats]
        # With one mini-batch, the first update's own pass sees the weights that sampled: it gives the old log-probs for free.
        old = None
        if self.stage.minibatches > 1:
            with self.phases("old"):
                old = self._logps(pack)
        return MicroBatch(
            pack=pack,
            indices=seats,
            advantage_M=self._join([groups[g].advantages[c] for g, c in seats]),
            mask_M=to_device(np.concatenate([c.loss_mask for c in completions]), self.policy.device),
            sampler_M=self._join([c.logps for c in completions]),
            logp_old_M=old,
            logp_ref_M=None,
        )

    def _join(self, parts: Sequence[Floats]) -> Tensor:
        return to_device(np.concatenate(parts), self.policy.device)

    def _accumulate(self, batch: Sequence[MicroBatch], totals: LossDenominators, seen: UpdateStats | None) -> list[MicroBatch]:
        """The gradient of one update, summed over its packs. Returns the packs with their old log-probs filled in."""
        self.optimiser.zero_grad()
        done, more = [], self.world.padding_passes(len(batch))
        for micro in batch:
            with self.policy.accumulate_into(self.optimiser.accumulator):
                inputs, outputs = self._forward_backward(micro, totals)
            done.append(replace(micro, logp_old_M=inputs.logp_old_M))
            if seen is not None:
                seen.note(micro, inputs, outputs)
        dummy_passes(self.policy, more)
        return done

    def _forward_backward(self, micro: MicroBatch, totals: LossDenominators) -> tuple[LossInputs, LossOutputs]:
        """A pack's gradient: through the backbone; through head and loss and back, part by part; back through the backbone."""
        with self.phases("forward"):
            hidden_MD = self.policy.pack_hidden(micro.pack)
        inputs, outputs, slopes = [], [], []
        for tokens, part in split_micro_batch(micro, self.policy.head_chunk_tokens):
            with self.phases("forward"):
                own = hidden_MD[tokens].detach().requires_grad_()
                logp_M, entropy_M = self.policy.target_logps(own, part.pack.target_M, self._temperature)
                inputs.append(self._loss_inputs(part, totals, logp_M, entropy_M))
                outputs.append(self.objective.loss(inputs[-1], self.loss_settings))
            with self.phases("backward"):
                outputs[-1].loss.backward()  # type: ignore[no-untyped-call]
                assert own.grad is not None
                slopes.append(own.grad)
        with self.phases("backward"):
            if hidden_MD.requires_grad:
                hidden_MD.backward(slopes[0] if len(slopes) == 1 else torch.cat(slopes))  # type: ignore[no-untyped-call]
            self.optimiser.add_autograd_grads()
        return merge_inputs(micro, inputs), merge_outputs(outputs)

    def _loss_inputs(self, micro: MicroBatch, totals: LossDenominators, logp_M: Tensor, entropy_M: Tensor) -> LossInputs:
        old_M = logp_M.detach() if micro.logp_old_M is None else micro.logp_old_M
        return LossInputs(
            logp_new_M=logp_M,
            logp_old_M=old_M,
            advantage_M=micro.advantage_M,
            mask_M=micro.mask_M,
            row_M=micro.pack.row_M,
            rows=micro.pack.rows,
            totals=totals,
            logp_ref_M=micro.logp_ref_M,
            entropy_M=entropy_M,
            weight_M=self._weights(micro, old_M),
        )

    def _weights(self, micro: MicroBatch, old_M: Tensor) -> Tensor | None:
        """What sampler and learner disagree on counts less, or not at all, where the recipe says so."""
        cap, limit = self.stage.importance_cap, self.stage.mismatch_limit
        weight_M = None if cap is None else truncated_weights(old_M, micro.sampler_M, cap)
        if limit is None:
            return weight_M
        rows = PackedRows.of(micro.pack.row_M, micro.mask_M, micro.pack.rows, old_M.dtype)
        agree_M = mismatch_mask(old_M, micro.sampler_M, rows, limit)
        return agree_M if weight_M is None else weight_M * agree_M


def prefix_group_of(group: ScoredGroup, rows: Sequence[int], keys: Sequence[int]) -> PrefixGroup:
    """The chosen completions of a group, with their prompt."""
    return PrefixGroup(group.group.prompt_ids, tuple(group.scored[c].completion.token_ids for c in rows), tuple(keys))


def tokens_of(group: Group) -> int:
    """Tokens of a group in a pack, its prompt once: what it costs to learn from."""
    return len(group.prompt_ids) + sum(len(c.token_ids) for c in group.completions)


def min_pack_tokens(group: GradedGroup) -> int:
    """Tokens of the prompt with its longest completion: the smallest pack that the group can be cut into."""
    return len(group.group.prompt_ids) + max((len(c.token_ids) for c in group.group.completions), default=0)


def resplit(groups: Sequence[GradedGroup], batch: Sequence[MicroBatch], budget: int) -> list[MicroBatch]:
    """The same rows in packs of at most ``budget`` tokens, with all that is known of each token (old log-probs among it)."""
    rows = [(micro, place) for micro in batch for place in range(len(micro.indices))]
    by_group: dict[int, list[int]] = {}
    for key, (micro, place) in enumerate(rows):
        by_group.setdefault(micro.indices[place][0], []).append(key)
    bundles = [
        prefix_group_of(groups[g].scored, [rows[key][0].indices[rows[key][1]][1] for key in keys], keys)
        for g, keys in by_group.items()
    ]
    known = {name: _rows_of(name, batch) for name in tensors_of(batch[0])}
    made = []
    for part in split_by_budget(bundles, budget):
        pack = build_pack(part, batch[0].mask_M.device)
        seats = tuple(rows[key][0].indices[rows[key][1]] for key in pack.keys)
        values = {name: torch.cat([of_row[key] for key in pack.keys]) for name, of_row in known.items()}
        made.append(replace(batch[0], pack=pack, indices=seats, **values))
    return made


def _rows_of(name: str, batch: Sequence[MicroBatch]) -> list[Tensor]:
    """One tensor per completion, in the order of packs and seats."""
    return [row for micro in batch for row in torch.split(getattr(micro, name), list(micro.pack.lengths))]


def by_row(values_M: Tensor, pack: Pack) -> list[np.ndarray]:
    """Per-token values as one array for each completion of the pack."""
    values = values_M.detach().cpu()
    flat = values.numpy() if values.dtype == torch.bool else values.float().numpy()
    return np.split(flat, np.cumsum(pack.lengths)[:-1])


def split_evenly(count: int, parts: int) -> list[range]:
    """0 … count − 1 in ``parts`` runs of nearly equal size, in order."""
    return [range(a, b) for a, b in pairwise(round(i * count / parts) for i in range(parts + 1))]
