"""The learner: graded groups in, an updated policy out.

Groups are packed with their prompt stored once, and the gradient is summed over packs: reductions divide by the totals of the
complete update, so the split into packs does not change it. Groups without signal are not forwarded, unless a KL term in the
loss or an entropy bonus gives them a gradient.

Activation checkpointing: a layer saves only its input, and recomputes the rest in the backward pass.

As few layers as fit into the free memory are checkpointed. The gradient is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oncurve.algos.kl import KL_ESTIMATORS
from oncurve.algos.objectives import LossInputs, LossOutputs, LossSettings, Objective
from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.ratios import mismatch_mask, truncated_weights
from oncurve.algos.reductions import LossDenominators, loss_denominators
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.models import lora
from oncurve.models.device_memory import free_memory
from oncurve.models.heads.lm_head import gpu_chunk_tokens
from oncurve.models.packing import Pack, PrefixGroup, build_pack, split_by_budget, to_device
from oncurve.models.policy import Policy, dummy_passes
from oncurve.models.reference import Reference
from oncurve.objective_specs import KlEstimator
from oncurve.recipe.schema.sections import Optimiser as OptimiserSettings
from oncurve.records import Completion, Floats, GradedGroup, Group, Ints, ScoredGroup
from oncurve.training.learner.micro_batch import (
    CompletionIndex,
    MicroBatch,
    merge_inputs,
    merge_outputs,
    split_micro_batch,
    token_fields,
)
from oncurve.training.learner.oom_retry import PackedStage
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.learner.update_stats import UpdateResult, UpdateStats
from oncurve.training.timing import DevicePhases, utilisation

MAX_FRACTION = 0.9
"""Fraction of the free memory that activations may use; the rest allows for fragmentation."""


def saved_bytes_per_token(policy: Policy) -> int:
    """Bytes that one layer saves per token for the backward pass.

    On the fast path: two residual sums, q, k, v, attention's output, gate and up, a float32 per head, and x Aᵀ of adapters.
    With transformers' modules and autograd: about three times the residuals and norms, and twice the MLP.
    """
    config = policy.model.config.get_text_config()
    itemsize, D, heads = policy.model.dtype.itemsize, config.hidden_size, config.num_attention_heads
    mlp = int(getattr(config, "intermediate_size", None) or 4 * D)
    ranks = (
        sum(len(p) for name, p in lora.adapter_parameters(policy.model).items() if "lora_A" in name) // config.num_hidden_layers
    )
    fused: int = itemsize * (2 * D + 2 * (heads + policy.kv_heads) * policy.head_size + 2 * mlp + ranks) + 4 * heads
    return fused if policy.fast_backbone is not None else fused + itemsize * (6 * D + 2 * mlp) + 8 * D


def layers_to_checkpoint(policy: Policy, tokens: int, free: int) -> int:
    """The fewest layers, counted from the first, that must be checkpointed for ``tokens`` to fit into ``free`` bytes."""
    config = policy.model.config.get_text_config()
    layers = int(config.num_hidden_layers)
    layer_bytes = tokens * saved_bytes_per_token(policy)
    gain = layer_bytes - tokens * policy.model.dtype.itemsize * config.hidden_size
    excess = layers * layer_bytes - int(MAX_FRACTION * free)
    return 0 if excess <= 0 else min(layers, -(-excess // max(gain, 1)))


def transient_bytes(policy: Policy, tokens: int) -> int:
    """Bytes that a pass uses beyond saved activations: one layer's gradients, embedding and head, and a chunk of logits."""
    config, itemsize = policy.model.config.get_text_config(), policy.model.dtype.itemsize
    mlp = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    chunk: int = min(tokens, gpu_chunk_tokens(config.vocab_size)) * config.vocab_size * (4 + itemsize)
    return int(tokens * itemsize * (4 * mlp + 8 * config.hidden_size)) + chunk


def checkpoint_layers(policy: Policy, count: int) -> None:
    """Checkpoint the first ``count`` layers; the others save their activations."""
    if policy.fast_backbone is not None:
        policy.fast_backbone.checkpointed = count
        return
    layers = getattr(policy.backbone, "layers", None)
    assert isinstance(layers, nn.ModuleList)
    for i, layer in enumerate(layers):
        forward = type(layer).forward.__get__(layer)
        layer.forward = partial(_forward_with_recompute, forward) if i < count else forward


def _forward_with_recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What a learner needs to know of its stage.

    Example: ``LearnerSettings(OBJECTIVES["grpo"], Optimiser(learning_rate=1e-6), updates=100, length_budget=256)``
    """

    objective: Objective
    optimiser: OptimiserSettings
    updates: int
    """Optimiser updates of the complete stage: the length of the learning-rate schedule."""
    length_budget: int
    """The constant that dr_grpo divides by."""
    temperature: float = 1.0
    """The sampling temperature; log-probs are computed at the same one."""
    passes: int = 1
    """μ: passes over a step's groups."""
    minibatches: int = 1
    """Optimiser updates of each pass."""
    beta: float = 0.0
    """Weight of the KL term; 0 means that there is no reference."""
    kl_in_reward: bool = False
    """Whether the KL term is subtracted from the reward. Otherwise it is a term of the loss."""
    kl_estimator: KlEstimator = "k3"
    ratio_weighted_kl: bool = False
    reference_on_cpu: bool = False
    entropy_bonus: float = 0.0
    importance_cap: float | None = None
    mismatch_limit: float | None = None
    forward_silent_groups: bool = False
    """Whether groups without signal are forwarded although their gradient is 0."""
    tokens_per_pack: int = 16384
    checkpointing: Literal["auto", "on", "off"] = "auto"


class Learner(PackedStage):
    """Holds the optimiser and, if β > 0, the reference."""

    def __init__(self, policy: Policy, settings: LearnerSettings, world: World = SINGLE_PROCESS) -> None:
        self.policy, self.settings, self.world, self.tokens_per_pack = policy, settings, world, settings.tokens_per_pack
        self.phases = DevicePhases(policy.device)
        self.objective = settings.objective
        self.kl_in_reward = settings.kl_in_reward and settings.beta > 0
        self.reference = Reference(policy, settings.reference_on_cpu) if settings.beta > 0 else None
        self.optimiser = build_optimiser(policy.model, settings.optimiser, settings.updates, world)
        self.loss_settings = LossSettings(
            beta=0.0 if settings.kl_in_reward else settings.beta,
            kl_estimator=settings.kl_estimator,
            ratio_weighted_kl=settings.ratio_weighted_kl,
            entropy_bonus=settings.entropy_bonus,
        )
        self._largest_pack = 0
        """Tokens of the largest pack for which checkpointed layers were chosen."""

    def update(self, groups: Sequence[GradedGroup]) -> UpdateResult:
        """μ passes over the groups, each in ``minibatches`` optimiser updates.

        Every rank gets all groups of the step, packs its share of them, and takes part in every update.
        """
        self.phases = DevicePhases(self.policy.device)
        chunks = split_evenly(len(groups), self.settings.minibatches)
        batches = self._build_fitting_batches(groups, chunks)
        totals = [self._loss_denominators([groups[g] for g in chunk]) for chunk in chunks]
        self._choose_checkpointed_layers(max((micro.pack.tokens for batch in batches for micro in batch), default=0))
        stats = UpdateStats(groups, self.world)
        for i in range(self.settings.passes):
            last = i == self.settings.passes - 1
            for k, total in enumerate(totals):
                if self._forwarded_groups(groups, chunks[k]):
                    before = stats.snapshot()
                    batches[k] = self._compute_gradient(groups, batches[k], total, stats if last else None)
                    with self.phases("optimiser"):
                        stats.updates.append(self.optimiser.step(partial(stats.metrics_since, before)))
        return self._add_timing(stats.result(), [micro.pack for batch in batches for micro in batch])

    def _add_timing(self, result: UpdateResult, packs: Sequence[Pack]) -> UpdateResult:
        """Adds the update's seconds by phase, and its model FLOPs per second as a fraction of the device's matmul rate."""
        seconds, passes = self.phases.seconds(), self.settings.passes
        once = (self.reference is not None) + (self.settings.minibatches > 1)
        used = utilisation(self.policy, packs, sum(seconds.values()), forward=passes + once, backward=passes)
        return replace(result, metrics=result.metrics | used, seconds=seconds)

    def _choose_checkpointed_layers(self, tokens: int) -> None:
        """How many layers recompute their activations, for packs of this many tokens. Chosen again only if packs grow."""
        if tokens <= self._largest_pack:
            return
        self._largest_pack = tokens
        checkpointing, device = self.settings.checkpointing, self.policy.device
        if checkpointing == "on":
            checkpoint_layers(self.policy, int(self.policy.model.config.get_text_config().num_hidden_layers))
        elif checkpointing == "auto" and device.type == "cuda":
            free = free_memory(device) - self.optimiser.unallocated_bytes - transient_bytes(self.policy, tokens)
            checkpoint_layers(self.policy, layers_to_checkpoint(self.policy, tokens, free))

    def _build_fitting_batches(self, groups: Sequence[GradedGroup], chunks: Sequence[range]) -> list[list[MicroBatch]]:
        """The packs of each mini-batch; smaller ones if memory runs out in a forward pass without gradient."""

        def attempt(budget: int) -> list[list[MicroBatch]]:
            self.tokens_per_pack = budget
            return [self._build_micro_batches(groups, chunk) for chunk in chunks]

        return self.with_oom_retry(attempt, self.tokens_per_pack, max((min_pack_tokens(g) for g in groups), default=1))

    def _compute_gradient(
        self, groups: Sequence[GradedGroup], batch: list[MicroBatch], totals: LossDenominators, stats: UpdateStats | None
    ) -> list[MicroBatch]:
        """One update's gradient. If memory runs out it is computed again over packs of half the size: the sum is the same."""
        before = None if stats is None else stats.snapshot()

        def attempt(packs: list[MicroBatch]) -> list[MicroBatch]:
            if stats is not None and before is not None:
                stats.restore(before)
            return self._accumulate(packs, totals, stats)

        return self.with_fitting_packs(groups, batch, attempt)

    def with_fitting_packs(
        self, groups: Sequence[GradedGroup], batch: list[MicroBatch], attempt: Callable[[list[MicroBatch]], T]
    ) -> T:
        """The result of ``attempt`` on a batch, repacked at half the size after each out-of-memory error."""
        largest = max((micro.pack.tokens for micro in batch), default=0)
        min_budget = max((min_pack_tokens(groups[g]) for micro in batch for g, _ in micro.indices), default=0)
        return self.with_oom_retry(
            lambda budget: attempt(batch if budget == largest else repack(groups, batch, budget)), largest, min_budget
        )

    def kl_sums(self, scored: Sequence[ScoredGroup]) -> list[list[float]]:
        """Σ_t KL of each completion, for a KL term in the reward."""
        return [
            [float(kl_T[s.completion.loss_mask].sum()) for s, kl_T in zip(group.scored, group_kls, strict=True)]
            for group, group_kls in zip(scored, self.kl_tokens(scored), strict=True)
        ]

    @torch.no_grad()
    def kl_tokens(self, scored: Sequence[ScoredGroup]) -> list[list[Floats]]:
        """The KL estimate at each token of each completion."""
        assert self.reference is not None
        ids = [{c: completion.token_ids for c, completion in enumerate(g.group.completions)} for g in scored]
        return self.measure_tokens(scored, ids, self._kl)

    def measure_tokens(
        self, scored: Sequence[ScoredGroup], ids: Sequence[Mapping[int, Ints]], measure: Callable[[Pack], Tensor]
    ) -> list[list[Floats]]:
        """``measure``'s value at each token of ``ids[group][completion]``; empty for completions that ``ids`` lacks.

        Each rank measures its share of the groups, and gets the values of all.
        """
        local = self.world.local_indices([tokens_of(group.group) for group in scored])
        indices = [(g, c) for g in local for c in ids[g]]
        key_of = {index: key for key, index in enumerate(indices)}
        prefix_groups = [
            PrefixGroup(scored[g].group.prompt_ids, tuple(ids[g].values()), tuple(key_of[g, c] for c in ids[g]))
            for g in local
            if ids[g]
        ]
        values = {g: [np.zeros(0, np.float32)] * len(scored[g].scored) for g in local}
        for key, values_T in self._measure_completions(prefix_groups, measure):
            g, c = indices[key]
            values[g][c] = values_T
        of_all_ranks = self.world.all_gather_dict(values)
        return [of_all_ranks[g] for g in range(len(scored))]

    def _kl(self, pack: Pack) -> Tensor:
        assert self.reference is not None
        logp_M, _ = self.policy.pack_logps(pack, self.settings.temperature)
        return KL_ESTIMATORS[self.settings.kl_estimator](logp_M, self.reference.logps(pack, self.settings.temperature))

    def _measure_completions(
        self, groups: Sequence[PrefixGroup], measure: Callable[[Pack], Tensor]
    ) -> list[tuple[int, Floats]]:
        """(key, value per token) of every completion, measured without gradient in packs that fit into memory."""

        def attempt(budget: int) -> list[tuple[int, Floats]]:
            parts = list(split_by_budget(groups, budget))
            padding = self.world.padding_passes(len(parts))
            packs = (build_pack(part, self.policy.device) for part in parts)
            values = [pair for pack in packs for pair in zip(pack.keys, split_by_completion(measure(pack), pack), strict=True)]
            dummy_passes(self.policy, padding, measure)
            return values

        budget = min(self.tokens_per_pack, sum(group.tokens for group in groups))
        min_budget = max((len(group.prompt_ids) + max(map(len, group.completion_ids)) for group in groups), default=1)
        return self.with_oom_retry(attempt, budget, min_budget)

    def _logps(self, pack: Pack) -> Tensor:
        return self.policy.pack_logps(pack, self.settings.temperature)[0]

    def _loss_denominators(self, groups: Sequence[GradedGroup]) -> LossDenominators:
        return loss_denominators(groups, self.settings.length_budget)

    def _forwarded_groups(self, groups: Sequence[GradedGroup], chunk: range) -> list[int]:
        """The groups of a mini-batch that have a gradient."""
        loss = self.loss_settings
        all_groups = self.settings.forward_silent_groups or loss.beta > 0 or loss.entropy_bonus != 0
        return [g for g in chunk if any(groups[g].graded) and (all_groups or groups[g].has_signal)]

    def _build_micro_batches(self, groups: Sequence[GradedGroup], chunk: range) -> list[MicroBatch]:
        """This rank's packs of a mini-batch, with everything that stays the same over the step's updates."""
        indices: list[CompletionIndex] = []
        prefix_groups = []
        forwarded = self._forwarded_groups(groups, chunk)
        for g in [forwarded[k] for k in self.world.local_indices([tokens_of(groups[g].group) for g in forwarded])]:
            graded = [c for c, is_graded in enumerate(groups[g].graded) if is_graded]
            prefix_groups.append(prefix_group_of(groups[g].scored, graded, range(len(indices), len(indices) + len(graded))))
            indices += [(g, c) for c in graded]
        batch, parts = [], list(split_by_budget(prefix_groups, self.tokens_per_pack))
        padding = self.world.padding_passes(len(parts)) if self.settings.minibatches > 1 else 0
        for part in parts:
            with self.phases("pack", host=True):
                pack = build_pack(part, self.policy.device)
            batch.append(self._build_micro_batch(groups, pack, tuple(indices[k] for k in pack.keys)))
        with torch.no_grad():
            dummy_passes(self.policy, padding, self._logps)
        return self._add_reference_logps(batch)

    def _add_reference_logps(self, batch: list[MicroBatch]) -> list[MicroBatch]:
        """The reference's log-probs of all packs at once: its weights may have to be copied to the device first."""
        reference = self.reference
        if reference is None or not (batch or self.world.forward_is_collective):
            return batch
        padding = self.world.padding_passes(len(batch))
        with self.phases("reference"), reference.loaded():
            with_logps = [replace(micro, logp_ref_M=reference.logps(micro.pack, self.settings.temperature)) for micro in batch]
            dummy_passes(self.policy, padding, lambda pack: reference.logps(pack, self.settings.temperature))
        return with_logps

    @torch.no_grad()
    def _build_micro_batch(self, groups: Sequence[GradedGroup], pack: Pack, indices: tuple[CompletionIndex, ...]) -> MicroBatch:
        completions: list[Completion] = [groups[g].scored.scored[c].completion for g, c in indices]
        # With one mini-batch the first update's forward runs on the weights that sampled: its log-probs are the old ones.
        logp_old_M = None
        if self.settings.minibatches > 1:
            with self.phases("old"):
                logp_old_M = self._logps(pack)
        return MicroBatch(
            pack=pack,
            indices=indices,
            advantage_M=self._concatenate([groups[g].advantages[c] for g, c in indices]),
            mask_M=to_device(np.concatenate([c.loss_mask for c in completions]), self.policy.device),
            sampler_M=self._concatenate([c.logps for c in completions]),
            logp_old_M=logp_old_M,
            logp_ref_M=None,
        )

    def _concatenate(self, arrays: Sequence[Floats]) -> Tensor:
        return to_device(np.concatenate(arrays), self.policy.device)

    def _accumulate(self, batch: Sequence[MicroBatch], totals: LossDenominators, stats: UpdateStats | None) -> list[MicroBatch]:
        """The gradient of one update, summed over its packs. Returns the packs with their old log-probs."""
        self.optimiser.zero_grad()
        done, padding = [], self.world.padding_passes(len(batch))
        for micro in batch:
            with self.policy.accumulate_into(self.optimiser.accumulator):
                inputs, outputs = self._forward_backward(micro, totals)
            done.append(replace(micro, logp_old_M=inputs.logp_old_M))
            if stats is not None:
                stats.add(micro, inputs, outputs)
        dummy_passes(self.policy, padding)
        return done

    def _forward_backward(self, micro: MicroBatch, totals: LossDenominators) -> tuple[LossInputs, LossOutputs]:
        """A pack's gradient: forward through the backbone; head and loss forward and backward, part by part; backward."""
        with self.phases("forward"):
            hidden_MD = self.policy.pack_hidden(micro.pack)
        inputs, outputs, hidden_grads = [], [], []
        for tokens, part in split_micro_batch(micro, self.policy.head_chunk_tokens):
            with self.phases("forward"):
                part_hidden_MD = hidden_MD[tokens].detach().requires_grad_()
                logp_M, entropy_M = self.policy.target_logps(part_hidden_MD, part.pack.target_M, self.settings.temperature)
                inputs.append(self._loss_inputs(part, totals, logp_M, entropy_M))
                outputs.append(self.objective.loss(inputs[-1], self.loss_settings))
            with self.phases("backward"):
                outputs[-1].loss.backward()  # type: ignore[no-untyped-call]
                assert part_hidden_MD.grad is not None
                hidden_grads.append(part_hidden_MD.grad)
        with self.phases("backward"):
            if hidden_MD.requires_grad:
                hidden_MD.backward(hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads))  # type: ignore[no-untyped-call]
            self.optimiser.add_autograd_grads()
        return merge_inputs(micro, inputs), merge_outputs(outputs)

    def _loss_inputs(self, micro: MicroBatch, totals: LossDenominators, logp_M: Tensor, entropy_M: Tensor) -> LossInputs:
        logp_old_M = logp_M.detach() if micro.logp_old_M is None else micro.logp_old_M
        return LossInputs(
            logp_new_M=logp_M,
            logp_old_M=logp_old_M,
            advantage_M=micro.advantage_M,
            mask_M=micro.mask_M,
            row_M=micro.pack.row_M,
            rows=micro.pack.rows,
            totals=totals,
            logp_ref_M=micro.logp_ref_M,
            entropy_M=entropy_M,
            weight_M=self._mismatch_weights(micro, logp_old_M),
        )

    def _mismatch_weights(self, micro: MicroBatch, logp_old_M: Tensor) -> Tensor | None:
        """Weights of tokens on which sampler and learner disagree: `importance_cap` and `mismatch_limit`; None if unset."""
        cap, limit = self.settings.importance_cap, self.settings.mismatch_limit
        weight_M = None if cap is None else truncated_weights(logp_old_M, micro.sampler_M, cap)
        if limit is None:
            return weight_M
        rows = PackedRows.of(micro.pack.row_M, micro.mask_M, micro.pack.rows, logp_old_M.dtype)
        agree_M = mismatch_mask(logp_old_M, micro.sampler_M, rows, limit)
        return agree_M if weight_M is None else weight_M * agree_M


def prefix_group_of(group: ScoredGroup, completions: Sequence[int], keys: Sequence[int]) -> PrefixGroup:
    """The chosen completions of a group, with their prompt."""
    return PrefixGroup(group.group.prompt_ids, tuple(group.scored[c].completion.token_ids for c in completions), tuple(keys))


def tokens_of(group: Group) -> int:
    """Tokens of a group in a pack, its prompt counted once: what it costs to learn from it."""
    return len(group.prompt_ids) + sum(len(c.token_ids) for c in group.completions)


def min_pack_tokens(group: GradedGroup) -> int:
    """Tokens of the prompt with its longest completion: the smallest pack size into which the group can be split."""
    return len(group.group.prompt_ids) + max((len(c.token_ids) for c in group.group.completions), default=0)


def repack(groups: Sequence[GradedGroup], batch: Sequence[MicroBatch], budget: int) -> list[MicroBatch]:
    """The same completions in packs of at most ``budget`` tokens, with all that is known of each token (old log-probs too)."""
    rows = [(micro, row) for micro in batch for row in range(len(micro.indices))]
    keys_of_group: dict[int, list[int]] = {}
    for key, (micro, row) in enumerate(rows):
        keys_of_group.setdefault(micro.indices[row][0], []).append(key)
    prefix_groups = [
        prefix_group_of(groups[g].scored, [rows[key][0].indices[rows[key][1]][1] for key in keys], keys)
        for g, keys in keys_of_group.items()
    ]
    by_completion = {name: _split_field(name, batch) for name in token_fields(batch[0])}
    packed = []
    for part in split_by_budget(prefix_groups, budget):
        pack = build_pack(part, batch[0].mask_M.device)
        indices = tuple(rows[key][0].indices[rows[key][1]] for key in pack.keys)
        values = {name: torch.cat([of_row[key] for key in pack.keys]) for name, of_row in by_completion.items()}
        packed.append(replace(batch[0], pack=pack, indices=indices, **values))
    return packed


def _split_field(name: str, batch: Sequence[MicroBatch]) -> list[Tensor]:
    """One tensor per completion, in the order of packs and of completions in them."""
    return [values for micro in batch for values in torch.split(getattr(micro, name), list(micro.pack.lengths))]


def split_by_completion(values_M: Tensor, pack: Pack) -> list[np.ndarray]:
    """Values of predicted tokens as one array for each completion of the pack."""
    values = values_M.detach().cpu()
    flat = values.numpy() if values.dtype == torch.bool else values.float().numpy()
    return np.split(flat, np.cumsum(pack.lengths)[:-1])


def split_evenly(count: int, parts: int) -> list[range]:
    """0 … count − 1 in ``parts`` ranges of nearly equal size, in order."""
    return [range(a, b) for a, b in pairwise(round(i * count / parts) for i in range(parts + 1))]
