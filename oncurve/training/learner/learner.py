"""The learner: graded groups in, an updated policy out.

Groups are packed with their prompt stored once, and the gradient is summed over packs: reductions divide by the totals of the
complete update, so the split into packs does not change it. Groups without signal are not forwarded, unless another term of the
loss gives them a gradient: a KL, an entropy bonus, or a penalty on the change of the policy (`kl_cov`, dro). A stage can also
ask for them (`no_signal = "keep"`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.entropy_controls import (
    AdaptiveBonus,
    LossTokens,
    clip_cov_tokens,
    covariances,
    high_entropy_tokens,
    kl_cov_tokens,
)
from oncurve.algos.kl import KL_ESTIMATORS
from oncurve.algos.objectives import LossInputs, LossOutputs, LossSettings, Objective
from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.ratios import correction_weights, mismatch_mask, off_policy_mask, truncated_weights
from oncurve.algos.reductions import LossDenominators, loss_denominators
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.token_sampling import truncate
from oncurve.errors import ModelError
from oncurve.models import experts
from oncurve.models.experts import RoutingPass
from oncurve.models.heads.lm_head import Truncation, truncated_logps
from oncurve.models.packing import Pack, PrefixGroup, build_pack, split_by_budget, to_device
from oncurve.models.policy import Policy, dummy_passes
from oncurve.models.reference import Reference
from oncurve.objective_specs import CORRECTIONS, CorrectionName, KlEstimator
from oncurve.recipe.schema.sections import EntropyControls, Sampling
from oncurve.recipe.schema.sections import Optimiser as OptimiserSettings
from oncurve.records import Bools, Completion, Floats, GradedGroup, Group, Ints, ScoredGroup
from oncurve.rng import philox_generator
from oncurve.training.learner.activation_checkpointing import CheckpointedLayers
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
from oncurve.training.timing import DevicePhases, model_flops, utilisation

T = TypeVar("T")
PrefixesOf = Callable[[ScoredGroup, Sequence[int], Sequence[int]], list[PrefixGroup]]
"""(group, indices of completions, their keys) → the completions behind the prompts that a teacher reads."""


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
    entropy: EntropyControls = field(default_factory=EntropyControls)
    importance_cap: float | None = None
    mismatch_limit: float | None = None
    correction: CorrectionName | None = None
    off_policy_kl: float | None = None
    truncation: Sampling | None = None
    """How top-k, top-p or min-p truncate what is sampled: log-probs are then those of the truncated distribution. None:
    sampling is not truncated."""
    min_new_tokens: int = 0
    """Positions before this one ban the end token; what was sampled there counts as not truncated."""
    forward_silent_groups: bool = False
    """Whether groups without signal are forwarded although their gradient is 0."""
    routing_replay: bool = False
    """Whether tokens take the experts that they took in the sampler."""
    balance_loss: float = 0.0
    """Weight of the balance loss of a mixture of experts."""
    seed: int = 0
    """The stage's seed, for tokens that are chosen at random."""
    tokens_per_pack: int = 16384
    checkpointing: Literal["auto", "on", "off"] = "auto"

    @property
    def has_old_pass(self) -> bool:
        """Whether a pass before the first update computes the old log-probs, and the mass that truncated sampling kept. It is
        needed if weights change before a token's first update (several mini-batches) or, with truncated sampling, before its
        last one (several passes)."""
        return self.minibatches > 1 or (self.truncation is not None and self.passes > 1)


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
        entropy = settings.entropy
        self.adaptive_bonus = (
            None
            if entropy.target is None
            else AdaptiveBonus(entropy.target, entropy.bonus_step, entropy.max_bonus, settings.entropy_bonus)
        )
        """The entropy bonus that follows a target; None if it is fixed."""
        self.expert_load: ExpertLoad | None = None
        """Of the current update, for the balance loss."""
        if settings.routing_replay or settings.balance_loss:
            self._check_experts()
        self.other_flops = 0.0
        """Of the current update: FLOPs of passes besides those over its own packs."""
        self.has_old_pass = settings.has_old_pass
        """Of the current update: whether there is a pass before its first gradient."""
        self.checkpointed = CheckpointedLayers(policy, settings.checkpointing)

    def update(self, groups: Sequence[GradedGroup]) -> UpdateResult:
        """μ passes over the groups, each in ``minibatches`` optimiser updates.

        Every rank gets all groups of the step, packs its share of them, and takes part in every update.
        """
        self.phases, self.other_flops = DevicePhases(self.policy.device), 0.0
        groups = self._select_tokens(groups)
        self.has_old_pass = self.settings.has_old_pass or self._lacks_masses(groups)
        if self.adaptive_bonus is not None:
            self.loss_settings = replace(self.loss_settings, entropy_bonus=self.adaptive_bonus.applied)
        chunks = split_evenly(len(groups), self.settings.minibatches)
        batches = self._build_fitting_batches(groups, chunks)
        totals = [self._loss_denominators([groups[g] for g in chunk]) for chunk in chunks]
        self.checkpointed.choose(largest_pack(micro for batch in batches for micro in batch), self.optimiser)
        stats = UpdateStats(groups, self.world)
        for i in range(self.settings.passes):
            last = i == self.settings.passes - 1
            for k, total in enumerate(totals):
                if self._forwarded_groups(groups, chunks[k]):
                    before = stats.snapshot()
                    self.expert_load = self._expert_load(groups, chunks[k])
                    batches[k] = self._compute_gradient(groups, batches[k], total, stats if last else None)
                    with self.phases("optimiser"):
                        stats.updates.append(self.optimiser.step(partial(stats.metrics_since, before)))
        result = self._follow_entropy(stats.result())
        return self._add_timing(result, [micro.pack for batch in batches for micro in batch])

    def _lacks_masses(self, groups: Sequence[GradedGroup]) -> bool:
        """Whether the sampler truncated and did not report the mass that it kept, which must then be computed with the weights
        of the step's start."""
        if self.settings.truncation is None:
            return False
        return any(np.isnan(self._log_mass(g.group, c)).any() for g in groups for c in g.group.completions)

    def _follow_entropy(self, result: UpdateResult) -> UpdateResult:
        """Adds the applied entropy bonus to the metrics, and chooses the next step's, if it follows a target."""
        if self.adaptive_bonus is None:
            return result
        applied = self.loss_settings.entropy_bonus
        if "entropy" in result.metrics:
            self.adaptive_bonus = self.adaptive_bonus.observe(result.metrics["entropy"])
        return replace(result, metrics=result.metrics | {"entropy_bonus": applied})

    def _select_tokens(self, groups: Sequence[GradedGroup]) -> list[GradedGroup]:
        """The groups with the tokens that entropy controls drop or hold back, selected among all loss tokens of the step.

        Covariances are those of the sampler's log-probs, which are the policy's before the first update. Entropies take a
        forward pass of their own.
        """
        controls = self.settings.entropy
        if not controls.selects_tokens:
            return list(groups)
        tokens = LossTokens(groups)
        kept: Bools | None = None
        anchored: Bools | None = None
        if controls.top_share < 1:
            kept = high_entropy_tokens(tokens.gather(self._entropies(groups)), controls.top_share)
        if controls.clip_cov is not None or controls.kl_cov is not None:
            logps = [[self._sampler_logps(g.group, s.completion) for s in g.scored.scored] for g in groups]
            values = covariances(tokens.gather([g.advantages for g in groups]), tokens.gather(logps))
            if controls.clip_cov is not None:
                generator = philox_generator(self.settings.seed, "clip_cov", self.optimiser.done)
                unclipped = ~clip_cov_tokens(values, controls.clip_cov, controls.clip_cov_range, generator)
                kept = unclipped if kept is None else kept & unclipped
            if controls.kl_cov is not None:
                anchored = kl_cov_tokens(values, controls.kl_cov)
        marks = zip(groups, tokens.scatter(kept), tokens.scatter(anchored), strict=True)
        return [replace(group, kept=k, anchored=a) for group, k, a in marks]

    @torch.no_grad()
    def _entropies(self, groups: Sequence[GradedGroup]) -> list[list[Floats]]:
        """The policy's entropy at each token of each completion."""
        ids = [{c: completion.token_ids for c, completion in enumerate(g.group.completions)} for g in groups]

        def measure(pack: Pack) -> Tensor:
            self.other_flops += model_flops(self.policy, [pack], forward=1, backward=0)
            return self.policy.pack_logps(pack, self.settings.temperature)[1]

        with self.phases("old"):
            return self.measure_tokens([g.scored for g in groups], ids, measure)

    def _add_timing(self, result: UpdateResult, packs: Sequence[Pack]) -> UpdateResult:
        """Adds the update's seconds by phase, and its model FLOPs per second as a fraction of the device's matmul rate."""
        seconds, passes = self.phases.seconds(), self.settings.passes
        once = (self.reference is not None) + self.has_old_pass
        total, other = sum(seconds.values()), self.other_flops
        used = utilisation(self.policy, packs, total, forward=passes + once, backward=passes, other=other)
        return replace(result, metrics=result.metrics | used, seconds=seconds)

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
        largest = largest_pack(batch)
        min_budget = max((min_pack_tokens(groups[g]) for micro in batch for g, _ in micro.indices), default=0)
        return self.with_oom_retry(
            lambda budget: attempt(batch if budget == largest else self.repack(groups, batch, budget)), largest, min_budget
        )

    def repack(self, groups: Sequence[GradedGroup], batch: Sequence[MicroBatch], budget: int) -> list[MicroBatch]:
        """The same completions in packs of at most ``budget`` tokens."""
        return repack(groups, batch, budget)

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
        self,
        scored: Sequence[ScoredGroup],
        ids: Sequence[Mapping[int, Ints]],
        measure: Callable[[Pack], Tensor],
        prefixes: PrefixesOf | None = None,
    ) -> list[list[Floats]]:
        """``measure``'s value at each token of ``ids[group][completion]``; empty for completions that ``ids`` lacks.

        Each rank measures its share of the groups, and gets the values of all. ``prefixes`` puts completions behind other
        prompts than their own.
        """
        local = self.world.local_indices([tokens_of(group.group) for group in scored])
        indices = [(g, c) for g in local for c in ids[g]]
        key_of = {index: key for key, index in enumerate(indices)}
        prefix_groups = []
        for g in local:
            keys = [key_of[g, c] for c in ids[g]]
            if prefixes is not None:
                prefix_groups += prefixes(scored[g], list(ids[g]), keys)
            elif ids[g]:
                contexts = tuple(scored[g].scored[c].completion.contexts for c in ids[g])
                prefix_groups.append(PrefixGroup(scored[g].group.prompt_ids, tuple(ids[g].values()), tuple(keys), contexts))
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
        min_budget = max(
            (len(group.prompt_ids) + max(map(group.inputs_of, range(len(group.keys)))) + 1 for group in groups), default=1
        )
        return self.with_oom_retry(attempt, budget, min_budget)

    def _check_experts(self) -> None:
        """Refuse a model whose experts can't be recorded, or whose routers have no logits for the balance loss."""
        layers = self.policy.routed_layers
        assert self.policy.experts_per_token
        if self.settings.balance_loss and (layers is None or not layers.has_logits):
            raise ModelError(
                type(self.policy.model).__name__, "a balance loss", because="transformers records no logits of its routers",
                fix="set balance_loss = 0",
            )  # fmt: skip

    def _routing_of(self, pack: Pack) -> RoutingPass | None:
        """What the experts of a pack's pass do; None if the model's routers choose and nothing is kept."""
        settings, layers, forced_NLk = self.settings, self.policy.routed_layers, None
        if not (settings.routing_replay or settings.balance_loss) or layers is None:
            return None
        if settings.routing_replay and pack.routing_NE is not None:
            forced_NLk = pack.routing_NE.view(pack.tokens, layers.layers, -1)
        keeps_logits = settings.balance_loss > 0 and torch.is_grad_enabled()
        return RoutingPass(forced_NLk=forced_NLk, keeps_logits=keeps_logits, predicted_M=pack.predicted_from_M)

    def _expert_load(self, groups: Sequence[GradedGroup], chunk: Sequence[int]) -> ExpertLoad | None:
        """How often the sampler took each expert for the tokens of an update, on all ranks."""
        layers = self.policy.routed_layers
        if not self.settings.balance_loss or layers is None:
            return None
        counts, tokens = np.zeros(layers.experts, np.int64), 0
        for g in self._forwarded_groups(groups, chunk):
            for scored, is_graded in zip(groups[g].scored.scored, groups[g].graded, strict=True):
                completion = scored.completion
                if is_graded and completion.routing is not None:
                    counts += np.bincount(completion.routing[completion.loss_mask].flatten(), minlength=layers.experts)
                    tokens += completion.length
        return ExpertLoad(experts.expert_load(torch.from_numpy(counts), tokens, layers.layers).to(self.policy.device), tokens)

    def _loss_denominators(self, groups: Sequence[GradedGroup]) -> LossDenominators:
        return loss_denominators(groups, self.settings.length_budget)

    def _forwarded_groups(self, groups: Sequence[GradedGroup], chunk: Sequence[int]) -> list[int]:
        """The groups of a mini-batch that the update forwards."""
        loss = self.loss_settings
        all_groups = self.settings.forward_silent_groups or loss.beta > 0 or loss.entropy_bonus != 0
        all_groups = all_groups or self.adaptive_bonus is not None  # the target is the entropy of all tokens
        return [
            g for g in chunk if any(groups[g].graded) and (all_groups or groups[g].has_signal or groups[g].has_anchored_tokens)
        ]

    def _build_micro_batches(self, groups: Sequence[GradedGroup], chunk: Sequence[int]) -> list[MicroBatch]:
        """This rank's packs of a mini-batch, with everything that stays the same over the step's updates."""
        indices: list[CompletionIndex] = []
        prefix_groups = []
        forwarded = self._forwarded_groups(groups, chunk)
        for g in [forwarded[k] for k in self.world.local_indices([tokens_of(groups[g].group) for g in forwarded])]:
            graded = [c for c, is_graded in enumerate(groups[g].graded) if is_graded]
            prefix_groups.append(prefix_group_of(groups[g].scored, graded, range(len(indices), len(indices) + len(graded))))
            indices += [(g, c) for c in graded]
        batch, parts = [], list(split_by_budget(prefix_groups, self.tokens_per_pack))
        padding = self.world.padding_passes(len(parts)) if self.has_old_pass else 0
        for part in parts:
            with self.phases("pack", host=True):
                pack = build_pack(part, self.policy.device)
            if pack.routing_NE is None and (self.settings.routing_replay or self.settings.balance_loss):
                raise ModelError(
                    "routing_replay", "completions without a record of their experts",
                    because="their sampler does not record which experts a token takes",
                    fix="set routing_replay = false and balance_loss = 0",
                )  # fmt: skip
            batch.append(self._build_micro_batch(groups, pack, tuple(indices[k] for k in pack.keys)))
        with torch.no_grad():
            dummy_passes(self.policy, padding, self.policy.pack_logps)
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
        rows: list[tuple[Group, Completion]] = [(groups[g].group, groups[g].scored.scored[c].completion) for g, c in indices]
        # With one mini-batch the first update's forward runs on the weights that sampled: its log-probs are the old ones.
        logp_old_M = truncation = None
        if self.settings.truncation is not None:
            truncation = Truncation(self._concatenate([self._log_mass(*row) for row in rows]))
        if self.has_old_pass:
            with self.phases("old"), experts.routed(self._routing_of(pack)):
                if truncation is None:
                    logp_old_M, _ = self.policy.pack_logps(pack, self.settings.temperature)
                else:
                    logp_old_M, truncation = self.policy.truncated_pack_logps(
                        pack, self.settings.temperature, truncation.log_mass_M, self._truncate
                    )
        sampler_M = self._concatenate([completion.logps for _, completion in rows])
        kept = [groups[g].kept[c] for g, c in indices if groups[g].kept]
        anchored = [groups[g].anchored[c] for g, c in indices if groups[g].anchored]
        return MicroBatch(
            pack=pack,
            indices=indices,
            advantage_M=self._concatenate([groups[g].advantages[c] for g, c in indices]),
            mask_M=to_device(np.concatenate([completion.loss_mask for _, completion in rows]), self.policy.device),
            sampler_M=sampler_M if truncation is None else sampler_M - truncation.log_mass_M,
            logp_old_M=logp_old_M,
            logp_ref_M=None,
            truncation=truncation,
            kept_M=to_device(np.concatenate(kept), self.policy.device) if kept else None,
            anchor_M=to_device(np.concatenate(anchored), self.policy.device) * self.settings.entropy.kl_cov_weight
            if anchored
            else None,
        )

    def _truncate(self, logp_MV: Tensor) -> Tensor:
        """The tokens that vLLM keeps; it is the one sampler that does not report them. Top-k and min-p come first, and top-p is
        taken of what is left."""
        sampling = self.settings.truncation
        assert sampling is not None
        first = truncate(logp_MV, sampling.model_copy(update={"top_p": 1.0}))
        return truncate(first.log_softmax(-1), Sampling(top_p=sampling.top_p))

    def _sampler_logps(self, group: Group, completion: Completion) -> Floats:
        """The sampler's log-probs, of the truncated distribution if sampling truncates and the sampler reports it."""
        if self.settings.truncation is None:
            return completion.logps
        return completion.logps - np.nan_to_num(self._log_mass(group, completion))

    def _log_mass(self, group: Group, completion: Completion) -> Floats:
        return log_mass_of(completion, self.settings.min_new_tokens, by_turn=group.prompt.agent is not None)

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
        """A pack's gradient: forward through the backbone; head and loss forward and backward, part by part; backward through
        the backbone."""
        routing = self._routing_of(micro.pack)
        with self.phases("forward"), experts.routed(routing):
            hidden_MD = self.policy.pack_hidden(micro.pack)
        inputs, outputs, hidden_grads = [], [], []
        for tokens, part in split_micro_batch(micro, self.policy.head_chunk_tokens):
            with self.phases("forward"):
                part_hidden_MD = hidden_MD[tokens].detach().requires_grad_()
                part_inputs, part_outputs = self._part_loss(part, totals, part_hidden_MD)
                inputs.append(part_inputs)
                outputs.append(part_outputs)
            with self.phases("backward"):
                self.optimiser.scaled(outputs[-1].loss).backward()  # type: ignore[no-untyped-call]
                assert part_hidden_MD.grad is not None
                hidden_grads.append(part_hidden_MD.grad)
        with self.phases("backward"):
            hidden_grad_MD = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads)
            if self.expert_load is not None and routing is not None:
                balance = experts.balance_loss(routing, self.expert_load.load_X, micro.mask_M, self.expert_load.tokens)
                weighted = self.settings.balance_loss * balance
                torch.autograd.backward([hidden_MD, self.optimiser.scaled(weighted)], [hidden_grad_MD, None])
                outputs[0] = replace(outputs[0], loss=outputs[0].loss.detach() + weighted.detach(), balance=balance.detach())
            elif hidden_MD.requires_grad:
                hidden_MD.backward(hidden_grad_MD)  # type: ignore[no-untyped-call]
            self.optimiser.add_autograd_grads()
        return merge_inputs(micro, inputs), merge_outputs(outputs)

    def _part_loss(self, part: MicroBatch, totals: LossDenominators, hidden_MD: Tensor) -> tuple[LossInputs, LossOutputs]:
        """The loss of a part, forward through the head."""
        target_M, temperature = part.pack.target_M, self.settings.temperature
        if part.truncation is None:
            logp_M, entropy_M = self.policy.target_logps(hidden_MD, target_M, temperature)
            inputs = self._loss_inputs(part, totals, logp_M, entropy_M)
        else:
            head, truncation = self.policy.head, part.truncation
            logp_M, entropy_M, untruncated_M = truncated_logps(head, hidden_MD, target_M, temperature, truncation)
            inputs = replace(self._loss_inputs(part, totals, logp_M, entropy_M), logp_untruncated_M=untruncated_M)
        return inputs, self.objective.loss(inputs, self.loss_settings)

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
            weight_M=self._sample_weights(micro, logp_M, logp_old_M),
            kept_M=micro.kept_M,
            anchor_M=micro.anchor_M,
        )

    def _sample_weights(self, micro: MicroBatch, logp_M: Tensor, logp_old_M: Tensor) -> Tensor | None:
        """Weights of tokens on which sampler and learner disagree: the product of `importance_cap`, `mismatch_limit`,
        `correction` and `off_policy_kl`; None if none of them is set."""
        settings, sampler_M = self.settings, micro.sampler_M
        rows = PackedRows.of(micro.pack.row_M, micro.mask_M, micro.pack.rows, logp_old_M.dtype)
        weights: list[Tensor] = []
        if settings.importance_cap is not None:
            weights.append(truncated_weights(logp_old_M, sampler_M, settings.importance_cap))
        if settings.mismatch_limit is not None:
            weights.append(mismatch_mask(logp_old_M, sampler_M, rows, settings.mismatch_limit))
        if settings.correction is not None:
            weights.append(correction_weights(logp_old_M, sampler_M, rows, CORRECTIONS[settings.correction]))
        if settings.off_policy_kl is not None:
            weights.append(off_policy_mask(logp_M, sampler_M, micro.advantage_M, rows, settings.off_policy_kl))
        return reduce(torch.mul, weights) if weights else None


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The fraction of an update's tokens that take each expert (`experts.expert_load`), and the number of these tokens."""

    load_X: Tensor
    tokens: int


def prefix_group_of(group: ScoredGroup, completions: Sequence[int], keys: Sequence[int]) -> PrefixGroup:
    """The chosen completions of a group, with their prompt."""
    chosen = [group.scored[c].completion for c in completions]
    contexts = tuple(completion.contexts for completion in chosen)
    routing = tuple(completion.routing for completion in chosen if completion.routing is not None)
    ids = tuple(completion.token_ids for completion in chosen)
    return PrefixGroup(group.group.prompt_ids, ids, tuple(keys), contexts, routing, group.group.prompt_routing)


def log_mass_of(completion: Completion, min_new_tokens: int, *, by_turn: bool = False) -> Floats:
    """The log of the probability mass that truncated sampling kept at each token. It is NaN if the engine did not report it,
    and 0 for tokens of an environment and wherever end tokens were banned: there the measured mass would lack the probability
    of the banned tokens too. End tokens are banned at the completion's start; for an agent, which makes a request for each
    turn, at the start of every turn (``by_turn``)."""
    mass_T: Floats = np.minimum(completion.logps - completion.sampled_logps, 0.0).astype(np.float32)
    mass_T[~completion.loss_mask] = 0.0
    starts = {0}
    if by_turn:
        mask_T = completion.loss_mask
        starts |= {*(np.flatnonzero(mask_T[1:] & ~mask_T[:-1]) + 1).tolist(), *(first for first, _ in completion.contexts)}
    for start in starts:
        mass_T[start : start + min_new_tokens] = 0.0
    return mass_T


def tokens_of(group: Group) -> int:
    """Tokens of a group in a pack, its prompt counted once: what it costs to learn from it."""
    return len(group.prompt_ids) + sum(c.packed_tokens for c in group.completions)


def largest_pack(batch: Iterable[MicroBatch]) -> int:
    """Tokens of the largest pack."""
    return max((micro.pack.tokens for micro in batch), default=0)


def min_pack_tokens(group: GradedGroup) -> int:
    """Tokens of the prompt with its longest completion: the smallest pack size into which the group can be split."""
    return len(group.group.prompt_ids) + max((c.packed_tokens for c in group.group.completions), default=0)


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
    truncations = [
        micro.truncation.part(slice(end - length, end))
        for micro in batch
        if micro.truncation is not None
        for end, length in zip(accumulate(micro.pack.lengths), micro.pack.lengths, strict=True)
    ]
    packed = []
    for part in split_by_budget(prefix_groups, budget):
        pack = build_pack(part, batch[0].mask_M.device)
        indices = tuple(rows[key][0].indices[rows[key][1]] for key in pack.keys)
        values = {name: torch.cat([of_row[key] for key in pack.keys]) for name, of_row in by_completion.items()}
        truncation = Truncation.join([truncations[key] for key in pack.keys]) if truncations else None
        packed.append(replace(batch[0], pack=pack, indices=indices, truncation=truncation, **values))
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
