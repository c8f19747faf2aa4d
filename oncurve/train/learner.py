"""The learner: graded groups in, an updated policy out.

Groups are packed with their prompt shared, forwarded under the objective, and their gradients summed over packs: reductions
divide by the totals of the whole update, so the split into packs changes nothing. Groups without signal cost nothing, unless
a KL in the loss or an entropy bonus gives them a gradient.

Legend: ``M`` predicted tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.kl import KL_ESTIMATORS
from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossOutputs, LossSettings, with_clip
from oncurve.algos.ratios import truncated_weights
from oncurve.algos.reductions import StepTotals, step_totals
from oncurve.models.packing import Bundle, Pack, build_pack, split_by_budget, to_device
from oncurve.models.policy import Policy
from oncurve.models.reference import Reference
from oncurve.recipe.resolve import resolved_kl
from oncurve.recipe.schema import Grpo
from oncurve.records import Completion, Floats, GradedGroup, ScoredGroup, TokenStats
from oncurve.train.memory import with_less
from oncurve.train.optimiser import Optimiser, Update
from oncurve.train.phases import Phases, matrix_rate, model_flops

Seat = tuple[int, int]
"""(group, completion): where a packed row came from."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack with what the loss needs of each predicted token. ``logp_old_M`` is None until the first update has passed."""

    pack: Pack
    seats: tuple[Seat, ...]
    advantage_M: Tensor
    mask_M: Tensor
    sampler_M: Tensor
    logp_old_M: Tensor | None
    logp_ref_M: Tensor | None


@dataclass(frozen=True, slots=True)
class Learned:
    """What a step's updates did: metrics by name, and per completion what was seen at each token."""

    metrics: dict[str, float]
    stats: list[list[TokenStats | None]]
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the update, by phase: pack, old, reference, forward, backward, optimiser, idle."""


class Learner:
    """Holds the optimiser and, where β > 0, the reference."""

    def __init__(self, policy: Policy, stage: Grpo) -> None:
        self.policy, self.stage, self.tokens_per_pack = policy, stage, stage.tokens_per_pack
        self.phases = Phases(policy.device)
        objective = OBJECTIVES[stage.objective]
        clip = stage.clip
        self.objective = objective if clip is None else with_clip(objective, clip.low, clip.high, clip.dual)
        self.kl_place, self.kl_estimator = resolved_kl(stage)
        self.reference = Reference(policy) if stage.kl.beta > 0 else None
        updates = stage.steps * stage.updates_per_step * stage.minibatches
        self.optimiser = Optimiser(policy.model, stage.optimiser, updates)
        self.loss_settings = LossSettings(
            beta=stage.kl.beta if self.kl_place == "loss" else 0.0,
            kl_estimator=self.kl_estimator,
            ratio_weighted_kl=stage.kl.ratio_weighted,
            entropy_bonus=stage.entropy_bonus,
        )

    def update(self, groups: Sequence[GradedGroup]) -> Learned:
        """μ passes over the groups, each in ``minibatches`` optimiser updates."""
        self.phases = Phases(self.policy.device)
        chunks = in_parts(len(groups), self.stage.minibatches)
        batches = self._fitting(groups, chunks)
        totals = [self._totals([groups[g] for g in chunk]) for chunk in chunks]
        seen = Seen(groups)
        for turn in range(self.stage.updates_per_step):
            last = turn == self.stage.updates_per_step - 1
            for i, total in enumerate(totals):
                if batches[i]:
                    before = seen.mark()
                    batches[i] = self._gradient(groups, batches[i], total, seen if last else None)
                    watched = seen.since(before)
                    with self.phases("optimiser"):
                        seen.updates.append(self.optimiser.step(**watched))
        return self._timed(seen.learned(), [micro.pack for batch in batches for micro in batch])

    def _timed(self, learned: Learned, packs: Sequence[Pack]) -> Learned:
        """With the update's seconds by phase, and its model FLOPs per second as a share of the device's matrix rate."""
        seconds, passes = self.phases.seconds(), self.stage.updates_per_step
        once = (self.reference is not None) + (self.stage.minibatches > 1)
        flops = model_flops(self.policy, packs, forward=passes + once, backward=passes)
        rate = flops / max(sum(seconds.values()), 1e-9)
        share = rate / matrix_rate(self.policy.device, self.policy.model.dtype)
        return replace(learned, metrics=learned.metrics | {"update_tflops": rate / 1e12, "mfu": share}, seconds=seconds)

    def _fitting(self, groups: Sequence[GradedGroup], chunks: Sequence[range]) -> list[list[MicroBatch]]:
        """The packs of each mini-batch; smaller ones where memory runs out in a pass over them without gradient."""

        def attempt(budget: int) -> list[list[MicroBatch]]:
            self.tokens_per_pack = budget
            return [list(self._micro_batches(groups, chunk)) for chunk in chunks]

        least = max((longest(g) for g in groups), default=1)
        return with_less(attempt, self.tokens_per_pack, least=least, what="tokens_per_pack")[0]

    def _gradient(
        self, groups: Sequence[GradedGroup], batch: list[MicroBatch], totals: StepTotals, seen: Seen | None
    ) -> list[MicroBatch]:
        """One update's gradient. Where memory runs out it is begun again over packs of half the size: the sum is the same."""
        before = None if seen is None else seen.mark()
        whole = max(micro.pack.tokens for micro in batch)

        def attempt(budget: int) -> list[MicroBatch]:
            if seen is not None and before is not None:
                seen.back_to(before)
            return self._accumulate(batch if budget == whole else resplit(groups, batch, budget), totals, seen)

        least = max(longest(groups[g]) for micro in batch for g, _ in micro.seats)
        done, enough = with_less(attempt, whole, least=least, what="tokens_per_pack")
        if enough < whole:
            self.tokens_per_pack = enough
        return done

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
        seats = [(g, c) for g, group in enumerate(scored) for c in range(len(group.scored))]
        key = {seat: k for k, seat in enumerate(seats)}
        bundles = [bundle_of(group, range(len(group.scored)), [key[g, c] for c in range(len(group.scored))])
                   for g, group in enumerate(scored)]  # fmt: skip
        found = [[np.zeros(0, np.float32)] * len(group.scored) for group in scored]
        for part in split_by_budget(bundles, self.tokens_per_pack):
            pack = build_pack(part, self.policy.device)
            logp_M, _ = self.policy.pack_logps(pack, self._temperature)
            kl_M = KL_ESTIMATORS[self.kl_estimator](logp_M, self.reference.logps(pack, self._temperature))
            for k, kl_T in zip(pack.keys, by_row(kl_M, pack), strict=True):
                g, c = seats[k]
                found[g][c] = kl_T
        return found

    @property
    def _temperature(self) -> float:
        return self.stage.sampling.temperature

    def _totals(self, groups: Sequence[GradedGroup]) -> StepTotals:
        return step_totals(groups, self.stage.length_budget or self.stage.sampling.max_new_tokens)

    def _micro_batches(self, groups: Sequence[GradedGroup], chunk: range) -> Iterator[MicroBatch]:
        """The packs of some groups, with what does not change over the step's updates."""
        settings = self.loss_settings
        every = self.stage.no_signal == "keep" or settings.beta > 0 or settings.entropy_bonus != 0
        seats: list[Seat] = []
        bundles = []
        for g in chunk:
            rows = [c for c, graded in enumerate(groups[g].graded) if graded]
            if rows and (every or groups[g].has_signal):
                bundles.append(bundle_of(groups[g].scored, rows, range(len(seats), len(seats) + len(rows))))
                seats += [(g, c) for c in rows]
        for part in split_by_budget(bundles, self.tokens_per_pack):
            with self.phases("pack", host=True):
                pack = build_pack(part, self.policy.device)
            yield self._micro_batch(groups, pack, tuple(seats[k] for k in pack.keys))

    @torch.no_grad()
    def _micro_batch(self, groups: Sequence[GradedGroup], pack: Pack, seats: tuple[Seat, ...]) -> MicroBatch:
        completions: list[Completion] = [groups[g].scored.scored[c].completion for g, c in seats]
        # With one mini-batch, the first update's own pass sees the weights that sampled: it gives the old log-probs for free.
        old = reference = None
        if self.stage.minibatches > 1:
            with self.phases("old"):
                old = self.policy.pack_logps(pack, self._temperature)[0]
        if self.reference is not None:
            with self.phases("reference"):
                reference = self.reference.logps(pack, self._temperature)
        return MicroBatch(
            pack=pack,
            seats=seats,
            advantage_M=self._join([groups[g].advantages[c] for g, c in seats]),
            mask_M=to_device(np.concatenate([c.loss_mask for c in completions]), self.policy.device),
            sampler_M=self._join([c.logps for c in completions]),
            logp_old_M=old,
            logp_ref_M=reference,
        )

    def _join(self, parts: Sequence[Floats]) -> Tensor:
        return to_device(np.concatenate(parts), self.policy.device)

    def _accumulate(self, batch: Sequence[MicroBatch], totals: StepTotals, seen: Seen | None) -> list[MicroBatch]:
        """The gradient of one update, summed over its packs. Returns the packs with their old log-probs filled in."""
        self.optimiser.zero_grad()
        done = []
        for micro in batch:
            with self.phases("forward"), self.policy.collecting(self.optimiser.sums):
                logp_M, entropy_M = self.policy.pack_logps(micro.pack, self._temperature)
                inputs = self._loss_inputs(micro, totals, logp_M, entropy_M)
                outputs = self.objective.loss(inputs, self.loss_settings)
            with self.phases("backward"):
                outputs.loss.backward()  # type: ignore[no-untyped-call]
                self.optimiser.absorb()
            done.append(replace(micro, logp_old_M=inputs.logp_old_N))
            if seen is not None:
                seen.note(micro, inputs, outputs)
        return done

    def _loss_inputs(self, micro: MicroBatch, totals: StepTotals, logp_M: Tensor, entropy_M: Tensor) -> LossInputs:
        old_M = logp_M.detach() if micro.logp_old_M is None else micro.logp_old_M
        cap = self.stage.importance_cap
        return LossInputs(
            logp_new_N=logp_M,
            logp_old_N=old_M,
            advantage_N=micro.advantage_M,
            mask_N=micro.mask_M,
            row_N=micro.pack.row_M,
            rows=micro.pack.rows,
            totals=totals,
            logp_ref_N=micro.logp_ref_M,
            entropy_N=entropy_M,
            weight_N=None if cap is None else truncated_weights(old_M, micro.sampler_M, cap),
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """How far ``Seen`` had come."""

    tokens: int
    sums: dict[str, float]
    largest: dict[str, float]
    losses: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Noted:
    """What one pack showed, still on its device: numbers by name, and columns of one value per token."""

    micro: MicroBatch
    names: tuple[str, ...]
    numbers: Tensor
    columns_XM: Tensor


LARGEST = ("ratio_max", "mismatch_max")


class Seen:
    """Gathers what the last pass over a step saw, for metrics and for the store.

    A pack is noted without waiting for the device; what was noted is brought over once, when somebody looks.
    """

    def __init__(self, groups: Sequence[GradedGroup]) -> None:
        self.stats: list[list[TokenStats | None]] = [[None] * len(g.graded) for g in groups]
        self.updates: list[Update] = []
        self._noted: list[_Noted] = []
        self.tokens = 0
        self.sums: dict[str, float] = {}
        self.largest: dict[str, float] = {"ratio_max": 0.0, "mismatch_max": 0.0}
        self.losses = {"loss": 0.0, "policy_loss": 0.0}
        totals = [total for g in groups for total in g.scored.totals if total is not None]
        self.reward = float(np.mean(totals)) if totals else None

    def mark(self) -> Mark:
        self._settle()
        return Mark(self.tokens, dict(self.sums), dict(self.largest), dict(self.losses))

    def back_to(self, mark: Mark) -> None:
        """Forgets what a pass that did not come to its end has noted; its tokens' stats are written over."""
        self._noted.clear()
        self.tokens, self.sums, self.largest, self.losses = mark.tokens, dict(mark.sums), dict(mark.largest), dict(mark.losses)

    def since(self, mark: Mark) -> dict[str, float]:
        """What the guard looks at beside the gradient: the step's mean reward, and the loss and KL of the update just noted."""
        self._settle()
        watched = {} if self.reward is None else {"reward": self.reward}
        tokens = self.tokens - mark.tokens
        if tokens:
            watched["loss"] = self.losses["loss"] - mark.losses["loss"]
            if "kl" in self.sums:
                watched["kl"] = (self.sums["kl"] - mark.sums.get("kl", 0.0)) / tokens
        return watched

    def note(self, micro: MicroBatch, inputs: LossInputs, outputs: LossOutputs) -> None:
        mask_M, new_M = inputs.mask_N, inputs.logp_new_N.detach()
        assert inputs.entropy_N is not None
        gap_M, drift_M = inputs.logp_old_N - micro.sampler_M, new_M - inputs.logp_old_N
        found = {
            "tokens": mask_M,
            "entropy": inputs.entropy_N.detach(),
            "ratio_mean": outputs.ratio_N,
            "clip_low_share": outputs.clipped_low_N,
            "clip_high_share": outputs.clipped_high_N,
            "clip_share": outputs.clipped_N,
            "kl": outputs.kl_N,
            "update_kl": drift_M.exp() - 1 - drift_M,
            "mismatch_kl": gap_M.exp() - gap_M - 1,
            "ratio_max": outputs.ratio_N,
            "mismatch_max": gap_M.abs(),
        }
        numbers = {name: _masked(x_M, mask_M, name in LARGEST) for name, x_M in found.items() if x_M is not None}
        numbers |= {"loss": outputs.loss.detach().double(), "policy_loss": outputs.policy_loss.double()}
        columns = [new_M, outputs.ratio_N, inputs.entropy_N.detach(), outputs.clipped_N]
        columns += [] if outputs.kl_N is None else [outputs.kl_N]
        table_XM = torch.stack([x_M.float() for x_M in columns])
        self._noted.append(_Noted(micro, tuple(numbers), torch.stack(list(numbers.values())), table_XM))

    def _settle(self) -> None:
        """Brings over all that was noted, in two transfers."""
        if not self._noted:
            return
        numbers = torch.stack([one.numbers for one in self._noted]).cpu().tolist()
        columns_XM = torch.cat([one.columns_XM for one in self._noted], 1).cpu().numpy()
        at = 0
        for one, values in zip(self._noted, numbers, strict=True):
            self._add(dict(zip(one.names, values, strict=True)))
            width = one.columns_XM.shape[1]
            self._keep_tokens(one.micro, columns_XM[:, at : at + width])
            at += width
        self._noted.clear()

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
            micro.seats, zip(*(np.split(x_M, ends) for x_M in columns_XM), strict=True), strict=True
        ):
            self.stats[g][c] = TokenStats(logps, ratio, entropy, clipped > 0, kl[0] if kl else None)

    def learned(self) -> Learned:
        self._settle()
        metrics = {name: total / max(self.tokens, 1) for name, total in self.sums.items()} | self.largest | self.losses
        if self.updates:
            metrics["grad_norm"] = self.updates[-1].grad_norm
            metrics["learning_rate"] = self.updates[-1].learning_rate
        metrics["skipped_updates"] = float(sum(u.skipped for u in self.updates))
        return Learned(metrics, self.stats)


def _masked(value_M: Tensor, mask_M: Tensor, largest: bool) -> Tensor:
    """The sum, or the largest, over masked-in tokens, as a float64 on the device."""
    kept_M = torch.where(mask_M, value_M.double(), 0.0)
    return kept_M.amax() if largest and len(kept_M) else kept_M.sum()


def bundle_of(group: ScoredGroup, rows: Sequence[int], keys: Sequence[int]) -> Bundle:
    """The chosen completions of a group, with their prompt."""
    return Bundle(group.group.prompt_ids, tuple(group.scored[c].completion.token_ids for c in rows), tuple(keys))


def longest(group: GradedGroup) -> int:
    """Tokens of the prompt with its longest completion: the smallest pack that the group can be cut into."""
    return len(group.group.prompt_ids) + max((len(c.token_ids) for c in group.group.completions), default=0)


def resplit(groups: Sequence[GradedGroup], batch: Sequence[MicroBatch], budget: int) -> list[MicroBatch]:
    """The same rows in packs of at most ``budget`` tokens, with all that is known of each token (old log-probs among it)."""
    rows = [(micro, place) for micro in batch for place in range(len(micro.seats))]
    by_group: dict[int, list[int]] = {}
    for key, (micro, place) in enumerate(rows):
        by_group.setdefault(micro.seats[place][0], []).append(key)
    bundles = [
        bundle_of(groups[g].scored, [rows[key][0].seats[rows[key][1]][1] for key in keys], keys) for g, keys in by_group.items()
    ]
    known = {name: _rows_of(name, batch) for name in _tensors_of(batch[0])}
    made = []
    for part in split_by_budget(bundles, budget):
        pack = build_pack(part, batch[0].mask_M.device)
        seats = tuple(rows[key][0].seats[rows[key][1]] for key in pack.keys)
        values = {name: torch.cat([of_row[key] for key in pack.keys]) for name, of_row in known.items()}
        made.append(replace(batch[0], pack=pack, seats=seats, **values))
    return made


def _tensors_of(micro: MicroBatch) -> list[str]:
    """The fields of a micro-batch, or of a stage's own kind of it, that hold one number per token."""
    return [field.name for field in fields(micro) if isinstance(getattr(micro, field.name), Tensor)]


def _rows_of(name: str, batch: Sequence[MicroBatch]) -> list[Tensor]:
    """One tensor per completion, in the order of packs and seats."""
    return [row for micro in batch for row in torch.split(getattr(micro, name), list(micro.pack.lengths))]


def by_row(values_M: Tensor, pack: Pack) -> list[np.ndarray]:
    """Per-token values as one array for each completion of the pack."""
    values = values_M.detach().cpu()
    flat = values.numpy() if values.dtype == torch.bool else values.float().numpy()
    return np.split(flat, np.cumsum(pack.lengths)[:-1])


def in_parts(count: int, parts: int) -> list[range]:
    """0 … count − 1 in ``parts`` runs of nearly equal size, in order."""
    return [range(a, b) for a, b in pairwise(round(i * count / parts) for i in range(parts + 1))]
