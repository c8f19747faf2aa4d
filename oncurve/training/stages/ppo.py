"""The stage `ppo`: GRPO's loop with a critic instead of the group.

Sampling, rewards, packing, clipped surrogate and KL are those of GRPO, by the same code. Two things differ: each token of a
completion is graded against the critic's value (``algos/advantages.py``), and the critic is trained on the returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.advantages import (
    Doubles,
    explained_variance,
    gae,
    is_graded,
    token_rewards,
    value_loss,
    weighted_step_rewards,
    whiten,
)
from oncurve.algos.reductions import LossDenominators
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine
from oncurve.models.heads.critic import ValueModel, append_placeholder
from oncurve.models.packing import Pack
from oncurve.models.policy import Policy
from oncurve.objective_specs import BUILT_IN_OBJECTIVES
from oncurve.recipe.schema.stages import Ppo
from oncurve.records import Floats, GradedGroup, Ints, ScoredCompletion, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
from oncurve.training.learner.activation_checkpointing import CheckpointedLayers
from oncurve.training.learner.learner import Learner, LearnerSettings, largest_pack, split_evenly
from oncurve.training.learner.micro_batch import CompletionIndex, MicroBatch
from oncurve.training.learner.optimiser import Update
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.learner.update_stats import UpdateResult, UpdateStats
from oncurve.training.stages.grpo import RolloutLoop, surrogate_learner_settings
from oncurve.training.timing import DevicePhases

EPS = 1e-8
"""Added to the std when advantages are whitened, as in OpenAI's baselines."""


@dataclass(frozen=True, slots=True)
class ValuedGroup(GradedGroup):
    """A graded group with the critic's value at each token (``values``) and its target (``returns`` = A + V).

    ``reward_to_go`` is the discounted reward that followed each token: explained variance is measured against it.
    """

    values: tuple[Floats, ...] = ()
    returns: tuple[Floats, ...] = ()
    reward_to_go: tuple[Floats, ...] = ()


@dataclass(frozen=True, slots=True)
class ValuedBatch(MicroBatch):
    """A micro-batch with the critic's old values and its targets."""

    value_old_M: Tensor | None = None
    return_M: Tensor | None = None


def ppo_learner_settings(stage: Ppo) -> LearnerSettings:
    """The policy's side of a ppo stage. Its schedule begins after the critic's warm-up steps."""
    return surrogate_learner_settings(
        stage,
        BUILT_IN_OBJECTIVES["bnpo" if stage.reduction == "tokens" else "grpo"],
        updates=(stage.steps - stage.critic.warmup_steps) * stage.updates_in_step,
        length_budget=stage.max_new_tokens,
        forward_silent_groups=True,
    )


class PpoLoop(RolloutLoop):
    """The loop of the stage `ppo`."""

    learner: PpoLearner

    def __init__(
        self, stage: Ppo, seed: int, task: Task, engine: Engine, rewards: RewardMix, world: World = SINGLE_PROCESS
    ) -> None:
        super().__init__(stage, seed, task, engine, rewards, world)
        self.ppo, self.kl = stage, stage.kl
        self.learner = PpoLearner(engine.policy, stage, world, seed)

    def step(self, n: int) -> StepReport:
        self.learner.is_warming_up = n <= self.ppo.critic.warmup_steps
        return super().step(n)

    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        """Rewards by token, minus the KL if it is in the reward; advantages by GAE over the critic's values."""
        kls = self.learner.kl_tokens(scored) if self.learner.kl_in_reward else None
        if self.ppo.critic.normalise and self.learner.value_scale is None:
            self.learner.value_scale = reward_scale(scored)
        graded = [
            grade_with_critic(group, values, self.ppo, None if kls is None else kls[g])
            for g, (group, values) in enumerate(zip(scored, self.learner.values(scored), strict=True))
        ]
        return whiten(graded, EPS) if self.ppo.whiten else list(graded)

    def state(self) -> dict[str, dict[str, Tensor]]:
        critic = {"critic": self.learner.critic.state(), "critic_optimiser": self.learner.critic_optimiser.state()}
        if self.learner.value_scale is not None:
            critic["value_scale"] = {"mean_std": torch.tensor(self.learner.value_scale, dtype=torch.float64)}
        return super().state() | critic

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state(tensors)
        self.learner.critic.load_state(tensors["critic"])
        self.learner.critic_optimiser.load_state(tensors["critic_optimiser"])
        if "value_scale" in tensors:
            mean, std = tensors["value_scale"]["mean_std"].tolist()
            self.learner.value_scale = (mean, std)


def reward_scale(scored: Sequence[ScoredGroup]) -> tuple[float, float]:
    """(mean, std) of the rewards of a step, over all its completions that have one; a std of 0 counts as 1."""
    totals = [total for group in scored for total in group.totals if total is not None]
    return (float(np.mean(totals)), float(np.std(totals)) or 1.0) if totals else (0.0, 1.0)


def grade_with_critic(group: ScoredGroup, values: Sequence[Floats], stage: Ppo, kls: Sequence[Floats] | None) -> ValuedGroup:
    """``values[c]`` holds V before each token of completion c, and V after the last if it was truncated."""
    graded = tuple(is_graded(s, stage.mask_cut) for s in group.scored)
    columns: list[tuple[Floats, ...]] = []
    for c, s in enumerate(group.scored):
        penalty_T = None if kls is None else stage.kl.beta * kls[c]
        columns.append(value_completion(s, values[c], stage, penalty_T) if graded[c] else (_zeros(s),) * 4)
    advantages, token_values, returns, reward_to_go = zip(*columns, strict=True)
    return ValuedGroup(group, advantages, graded, values=token_values, returns=returns, reward_to_go=reward_to_go)


def value_completion(s: ScoredCompletion, values: Floats, stage: Ppo, penalty_T: Floats | None) -> tuple[Floats, ...]:
    """(A, V, A + V, reward to go) at each token; all are 0 at tokens of an environment."""
    mask_T = s.completion.loss_mask
    assert s.total is not None
    rewards_T = token_rewards(s.total, weighted_step_rewards(s), penalty_T, mask_T)
    values_T = values[: len(mask_T)].astype(np.float64)[mask_T]
    value_after = float(values[len(mask_T)]) if s.completion.is_truncated else 0.0
    advantages_T = gae(rewards_T, values_T, value_after, stage.gamma, stage.gae_lambda)
    reward_to_go_T = gae(rewards_T, np.zeros_like(values_T), value_after, stage.gamma, 1.0)
    return tuple(_at_loss_tokens(x_T, s) for x_T in (advantages_T, values_T, advantages_T + values_T, reward_to_go_T))


def _at_loss_tokens(values: Doubles, scored: ScoredCompletion) -> Floats:
    out = _zeros(scored)
    out[scored.completion.loss_mask] = values
    return out


def _zeros(scored: ScoredCompletion) -> Floats:
    return np.zeros(len(scored.completion.token_ids), np.float32)


class PpoLearner(Learner):
    """The learner with a critic.

    With a separate trunk the critic has its own optimiser. With a shared trunk the value loss adds to the policy's gradient, by
    a separate forward and backward pass, and the critic's optimiser has the value head only.
    """

    def __init__(self, policy: Policy, stage: Ppo, world: World = SINGLE_PROCESS, seed: int = 0) -> None:
        super().__init__(policy, replace(ppo_learner_settings(stage), seed=seed), world)
        self.ppo, self.is_warming_up = stage, False
        self.critic = ValueModel(policy, shared=stage.critic.trunk == "shared")
        self.critic_checkpointed = (
            self.checkpointed if self.critic.shared else CheckpointedLayers(self.critic.trunk, stage.checkpointing)
        )
        rate = stage.critic.learning_rate or stage.optimiser.learning_rate
        settings = stage.optimiser.model_copy(update={"learning_rate": rate})
        updates = stage.steps * stage.critic_passes * stage.minibatches
        self.critic_optimiser = build_optimiser(self.critic.module, settings, updates, world)
        self.value_scale: tuple[float, float] | None = None
        """If the critic is normalised, (mean, std) that turn the head's output into values: output · std + mean. None before
        the first step."""
        self.value_updates: list[Update] = []
        self.value_sums = {"value_loss": 0.0, "value_clip_share": 0.0}
        self._last_value_sums: dict[str, float] = {}

    @torch.no_grad()
    def values(self, scored: Sequence[ScoredGroup]) -> list[list[Floats]]:
        """V before each token of each completion; if a completion was truncated, also V after its last token."""
        return self.measure_tokens(scored, [self._ids_to_value(group) for group in scored], self._values)

    def _values(self, pack: Pack) -> Tensor:
        """The critic's values, in units of reward."""
        if self.value_scale is None:
            return self.critic.values(pack)
        mean, std = self.value_scale
        return self.critic.values(pack) * std + mean

    def _ids_to_value(self, group: ScoredGroup) -> dict[int, Ints]:
        """The graded completions, with one more token if a completion was truncated."""
        graded = {c: s.completion for c, s in enumerate(group.scored) if is_graded(s, self.ppo.mask_cut)}
        return {c: append_placeholder(one.token_ids) if one.is_truncated else one.token_ids for c, one in graded.items()}

    def update(self, groups: Sequence[GradedGroup]) -> UpdateResult:
        self.value_updates, self.value_sums = [], dict.fromkeys(self.value_sums, 0.0)
        if self.is_warming_up:  # the policy does not change, so its log-probs are not computed
            self.phases = DevicePhases(self.policy.device)
            result = UpdateResult({}, [])
            self._update_critic_only(groups, self.ppo.critic_passes)
        else:
            result = super().update(groups)
            self._update_critic_only(groups, self.ppo.critic_passes - self.ppo.updates_per_step)
        return replace(result, metrics=result.metrics | self._value_metrics(groups))

    def _update_critic_only(self, groups: Sequence[GradedGroup], passes: int) -> None:
        """Passes over a step's groups that train the critic alone."""
        if not passes:
            return
        chunks = split_evenly(len(groups), self.ppo.minibatches)
        batches = self._build_fitting_batches(groups, chunks)
        for _ in range(passes):
            for chunk, batch in zip(chunks, batches, strict=True):
                if self._forwarded_groups(groups, chunk):
                    totals = self._loss_denominators([groups[g] for g in chunk])
                    self._step_critic(self.with_fitting_packs(groups, batch, partial(self._accumulate_values, totals=totals)))

    def _build_micro_batch(
        self, groups: Sequence[GradedGroup], pack: Pack, indices: tuple[CompletionIndex, ...]
    ) -> ValuedBatch:
        plain = super()._build_micro_batch(groups, pack, indices)
        valued = [(_as_valued(groups[g]), c) for g, c in indices]
        fields = {name: getattr(plain, name) for name in MicroBatch.__slots__}
        return ValuedBatch(
            **fields,
            value_old_M=self._concatenate([group.values[c] for group, c in valued]),
            return_M=self._concatenate([group.returns[c] for group, c in valued]),
        )

    def _compute_gradient(
        self, groups: Sequence[GradedGroup], batch: list[MicroBatch], totals: LossDenominators, stats: UpdateStats | None
    ) -> list[MicroBatch]:
        done = super()._compute_gradient(groups, batch, totals, stats)
        self._step_critic(self._last_value_sums)
        return done

    def _accumulate(self, batch: Sequence[MicroBatch], totals: LossDenominators, stats: UpdateStats | None) -> list[MicroBatch]:
        done = super()._accumulate(batch, totals, stats)
        self._last_value_sums = self._accumulate_values(batch, totals)
        return done

    def _accumulate_values(self, batch: Sequence[MicroBatch], totals: LossDenominators) -> dict[str, float]:
        """The critic's gradient of one update. Returns its loss and clipped fraction over this rank's packs."""
        self.critic_optimiser.zero_grad()
        self.critic_checkpointed.choose(largest_pack(batch), self.critic_optimiser)
        weight = self.ppo.critic.loss_weight if self.critic.shared else 1.0
        trunk_optimiser = self.optimiser if self.critic.shared else self.critic_optimiser
        sums = dict.fromkeys(self.value_sums, 0.0)
        for micro in batch:
            assert isinstance(micro, ValuedBatch)
            assert micro.value_old_M is not None
            assert micro.return_M is not None
            with self.critic.trunk.accumulate_into(trunk_optimiser.accumulator):
                value_M = self._values(micro.pack)
            loss_M, clipped_M = value_loss(value_M, micro.value_old_M, micro.return_M, self.ppo.critic.clip)
            loss = loss_M[micro.mask_M].sum() / max(totals.tokens, 1)
            self.critic_optimiser.scaled(weight * loss).backward()  # type: ignore[no-untyped-call]
            self.critic_optimiser.add_autograd_grads()
            sums["value_loss"] += float(loss.detach())
            sums["value_clip_share"] += float(clipped_M[micro.mask_M].sum()) / max(totals.tokens, 1)
        return sums

    def _step_critic(self, sums: Mapping[str, float]) -> None:
        """The critic's update, and its ``sums`` over all ranks. With a shared trunk it updates the value head only."""
        for name, value in self.world.all_reduce_sum(sums).items():
            self.value_sums[name] += value
        self.value_updates.append(self.critic_optimiser.step())

    def _value_metrics(self, groups: Sequence[GradedGroup]) -> dict[str, float]:
        tokens = [
            (group.values[c][mask], group.reward_to_go[c][mask])
            for group in map(_as_valued, groups)
            for c, s in enumerate(group.scored.scored)
            if group.graded[c]
            for mask in (s.completion.loss_mask,)
        ]
        none = np.zeros(0, np.float32)
        values, reward_to_go = (np.concatenate([t[i] for t in tokens] or [none]).astype(np.float64) for i in (0, 1))
        updates = max(len(self.value_updates), 1)
        return {
            **{name: total / updates for name, total in self.value_sums.items()},
            "explained_variance": explained_variance(values, reward_to_go),
            "value_mean": float(values.mean()) if len(values) else 0.0,
            "critic_grad_norm": self.value_updates[-1].grad_norm if self.value_updates else 0.0,
            "skipped_critic_updates": float(sum(u.skipped for u in self.value_updates)),
        }


def _as_valued(group: GradedGroup) -> ValuedGroup:
    assert isinstance(group, ValuedGroup)
    return group
