"""The stage `ppo`: GRPO's loop with a critic in the place of the group.

Sampling, rewards, packing, the clipped surrogate and the KL are those of GRPO, and the same code. What differs: a completion is
graded token by token against what the critic expected there (``algos/gae.py``), and the critic learns what really came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.advantages import counted_steps, is_graded, whiten
from oncurve.algos.gae import Doubles, explained_variance, gae, token_rewards, value_loss
from oncurve.algos.reductions import LossDenominators
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine
from oncurve.models.heads.critic import Critic, append_placeholder
from oncurve.models.packing import Pack
from oncurve.models.policy import Policy
from oncurve.recipe.defaults import kl_settings
from oncurve.recipe.schema.stages import Grpo, PolicyGradientStage, Ppo
from oncurve.records import Floats, GradedGroup, Ints, ScoredCompletion, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
from oncurve.training.learner.learner import Learner, split_evenly
from oncurve.training.learner.optimiser import Update
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.learner.update_stats import CompletionIndex, MicroBatch, UpdateResult, UpdateStats
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.timing import DevicePhases

EPS = 1e-8
"""Added to the std when advantages are whitened: OpenAI's baselines' choice."""


@dataclass(frozen=True, slots=True)
class ValuedGroup(GradedGroup):
    """A graded group with what the critic expected at each token (``values``) and what it should have (``returns`` = A + V).

    ``followed`` is the discounted reward that really followed: explained variance is measured against it.
    """

    values: tuple[Floats, ...] = ()
    returns: tuple[Floats, ...] = ()
    followed: tuple[Floats, ...] = ()


@dataclass(frozen=True, slots=True)
class ValuedBatch(MicroBatch):
    """A micro-batch with the critic's old values and its targets."""

    value_old_M: Tensor | None = None
    return_M: Tensor | None = None


def policy_side(stage: Ppo) -> Grpo:
    """The policy's part of a ppo stage, as the grpo stage that it is: same sampling, surrogate, KL, optimiser."""
    told = {name: getattr(stage, name) for name in PolicyGradientStage.model_fields if name != "type"}
    told |= {"name": stage.label, "steps": stage.steps - stage.critic.warmup_steps, "no_signal": "keep"}
    told["kl"] = stage.kl.model_copy(update={"where": kl_settings(stage)[0]})
    told["objective"] = "bnpo" if stage.reduction == "tokens" else "grpo"
    return Grpo.model_validate(told)


class PpoLoop(GrpoLoop):
    """What happens in each step of the stage `ppo`."""

    learner: PpoLearner

    def __init__(
        self, stage: Ppo, seed: int, task: Task, engine: Engine, rewards: RewardMix, world: World = SINGLE_PROCESS
    ) -> None:
        self.ppo = stage
        super().__init__(policy_side(stage), seed, task, engine, rewards, world)

    def make_learner(self) -> PpoLearner:
        return PpoLearner(self.engine.policy, self.ppo, self.world)

    def step(self, n: int) -> StepReport:
        self.learner.warming = n <= self.ppo.critic.warmup_steps
        return super().step(n)

    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        """Rewards by token, minus the KL where it goes into the reward; advantages by GAE over the critic's values."""
        kls = self.learner.kl_tokens(scored) if self.learner.kl_in_reward else None
        graded = [
            grade_with_critic(group, values, self.ppo, None if kls is None else kls[g])
            for g, (group, values) in enumerate(zip(scored, self.learner.values(scored), strict=True))
        ]
        return whiten(graded, EPS) if self.ppo.whiten else list(graded)

    def state(self) -> dict[str, dict[str, Tensor]]:
        own = {"critic": self.learner.critic.state(), "critic_optimiser": self.learner.critic_optimiser.state()}
        return super().state() | own

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state(tensors)
        self.learner.critic.load_state(tensors["critic"])
        self.learner.critic_optimiser.load_state(tensors["critic_optimiser"])


def grade_with_critic(group: ScoredGroup, values: Sequence[Floats], stage: Ppo, kls: Sequence[Floats] | None) -> ValuedGroup:
    """``values[c]`` holds V before each token of completion c, and V after the last where it was cut."""
    counts = tuple(is_graded(s, stage.mask_cut) for s in group.scored)
    columns: list[tuple[Floats, ...]] = []
    for c, s in enumerate(group.scored):
        penalty_T = None if kls is None else stage.kl.beta * kls[c]
        columns.append(value_completion(s, values[c], stage, penalty_T) if counts[c] else (_zeros(s),) * 4)
    advantages, at, returns, followed = zip(*columns, strict=True)
    return ValuedGroup(group, advantages, counts, at, returns, followed)


def value_completion(s: ScoredCompletion, values: Floats, stage: Ppo, penalty_T: Floats | None) -> tuple[Floats, ...]:
    """(A, V, A + V, what really followed) at each token; tokens of an environment have 0 everywhere."""
    mask_T = s.completion.loss_mask
    assert s.total is not None
    rewards_T = token_rewards(s.total, counted_steps(s), penalty_T, mask_T)
    values_T = values[: len(mask_T)].astype(np.float64)[mask_T]
    after = float(values[len(mask_T)]) if s.completion.cut else 0.0
    advantages_T = gae(rewards_T, values_T, after, stage.gamma, stage.gae_lambda)
    followed_T = gae(rewards_T, np.zeros_like(values_T), after, stage.gamma, 1.0)
    return tuple(_spread(x, s) for x in (advantages_T, values_T, advantages_T + values_T, followed_T))


def _spread(values: Doubles, scored: ScoredCompletion) -> Floats:
    out = _zeros(scored)
    out[scored.completion.loss_mask] = values
    return out


def _zeros(scored: ScoredCompletion) -> Floats:
    return np.zeros(len(scored.completion.token_ids), np.float32)


class PpoLearner(Learner):
    """The learner with a critic beside it. In a separate trunk the critic has its own optimiser; in a shared one the value loss
    adds to the policy's gradient, by a pass of its own, and only the value head is the critic's."""

    def __init__(self, policy: Policy, stage: Ppo, world: World = SINGLE_PROCESS) -> None:
        super().__init__(policy, policy_side(stage), world)
        self.ppo, self.warming = stage, False
        self.critic = Critic(policy, shared=stage.critic.trunk == "shared")
        rate = stage.critic.learning_rate or stage.optimiser.learning_rate
        settings = stage.optimiser.model_copy(update={"learning_rate": rate})
        updates = stage.steps * stage.updates_per_step * stage.minibatches
        self.critic_optimiser = build_optimiser(self.critic.module, settings, updates, world)
        self.value_updates: list[Update] = []
        self.value_sums = {"value_loss": 0.0, "value_clip_share": 0.0}
        self.last_values: dict[str, float] = {}

    @torch.no_grad()
    def values(self, scored: Sequence[ScoredGroup]) -> list[list[Floats]]:
        """V before each token of each completion; where one was cut, V after its last token follows."""
        return self.by_token(scored, [self._valued(group) for group in scored], self.critic.values)

    def _valued(self, group: ScoredGroup) -> dict[int, Ints]:
        """The completions that are graded, with one more token where one was cut."""
        rows = {c: s.completion for c, s in enumerate(group.scored) if is_graded(s, self.ppo.mask_cut)}
        return {c: append_placeholder(one.token_ids) if one.cut else one.token_ids for c, one in rows.items()}

    def update(self, groups: Sequence[GradedGroup]) -> UpdateResult:
        self.value_updates, self.value_sums = [], dict.fromkeys(self.value_sums, 0.0)
        learned = self._critic_alone(groups) if self.warming else super().update(groups)
        return replace(learned, metrics=learned.metrics | self._value_metrics(groups))

    def _critic_alone(self, groups: Sequence[GradedGroup]) -> UpdateResult:
        """A step of value warm-up: the policy stays as it is, so its log-probs are not asked for."""
        self.phases = DevicePhases(self.policy.device)
        chunks = split_evenly(len(groups), self.ppo.minibatches)
        batches = self._fitting(groups, chunks)
        for _ in range(self.ppo.updates_per_step):
            for chunk, batch in zip(chunks, batches, strict=True):
                if self._used(groups, chunk):
                    totals = self._totals([groups[g] for g in chunk])
                    self._value_step(self.with_fitting_packs(groups, batch, partial(self._accumulate_values, totals=totals)))
        return UpdateResult({}, [])

    def _micro_batch(self, groups: Sequence[GradedGroup], pack: Pack, seats: tuple[CompletionIndex, ...]) -> ValuedBatch:
        plain = super()._micro_batch(groups, pack, seats)
        found = [(_judged(groups[g]), c) for g, c in seats]
        fields = {name: getattr(plain, name) for name in MicroBatch.__slots__}
        return ValuedBatch(
            **fields,
            value_old_M=self._join([group.values[c] for group, c in found]),
            return_M=self._join([group.returns[c] for group, c in found]),
        )

    def _gradient(
        self, groups: Sequence[GradedGroup], batch: list[MicroBatch], totals: LossDenominators, seen: UpdateStats | None
    ) -> list[MicroBatch]:
        done = super()._gradient(groups, batch, totals, seen)
        self._value_step(self.last_values)
        return done

    def _accumulate(self, batch: Sequence[MicroBatch], totals: LossDenominators, seen: UpdateStats | None) -> list[MicroBatch]:
        done = super()._accumulate(batch, totals, seen)
        self.last_values = self._accumulate_values(batch, totals)
        return done

    def _accumulate_values(self, batch: Sequence[MicroBatch], totals: LossDenominators) -> dict[str, float]:
        """The critic's gradient of one update, and what its loss was."""
        self.critic_optimiser.zero_grad()
        weight = self.ppo.critic.loss_weight if self.critic.shared else 1.0
        trunks = self.optimiser if self.critic.shared else self.critic_optimiser
        sums = dict.fromkeys(self.value_sums, 0.0)
        for micro in batch:
            assert isinstance(micro, ValuedBatch)
            assert micro.value_old_M is not None
            assert micro.return_M is not None
            with self.critic.trunk.accumulate_into(trunks.accumulator):
                value_M = self.critic.values(micro.pack)
            loss_M, clipped_M = value_loss(value_M, micro.value_old_M, micro.return_M, self.ppo.critic.clip)
            loss = loss_M[micro.mask_M].sum() / max(totals.tokens, 1)
            (weight * loss).backward()  # type: ignore[no-untyped-call]
            self.critic_optimiser.add_autograd_grads()
            sums["value_loss"] += float(loss.detach())
            sums["value_clip_share"] += float(clipped_M[micro.mask_M].sum()) / max(totals.tokens, 1)
        return sums

    def _value_step(self, sums: Mapping[str, float]) -> None:
        """The critic's own update, with what its loss was over this rank's packs. In a shared trunk that is the head alone: the
        rest is in the policy's gradient."""
        for name, value in self.world.all_reduce_sum(sums).items():
            self.value_sums[name] += value
        self.value_updates.append(self.critic_optimiser.step())

    def _value_metrics(self, groups: Sequence[GradedGroup]) -> dict[str, float]:
        tokens = [
            (group.values[c][mask], group.followed[c][mask])
            for group in map(_judged, groups)
            for c, s in enumerate(group.scored.scored)
            if group.graded[c]
            for mask in (s.completion.loss_mask,)
        ]
        none = np.zeros(0, np.float32)
        values, followed = (np.concatenate([t[i] for t in tokens] or [none]).astype(np.float64) for i in (0, 1))
        updates = max(len(self.value_updates), 1)
        return {
            **{name: total / updates for name, total in self.value_sums.items()},
            "explained_variance": explained_variance(values, followed),
            "value_mean": float(values.mean()) if len(values) else 0.0,
            "critic_grad_norm": self.value_updates[-1].grad_norm if self.value_updates else 0.0,
            "skipped_critic_updates": float(sum(u.skipped for u in self.value_updates)),
        }


def _judged(group: GradedGroup) -> ValuedGroup:
    assert isinstance(group, ValuedGroup)
    return group
