"""GRPO, one step at a time: sample groups, score them, grade each completion on its group's curve, update the policy.

`RolloutLoop` is the step that grpo, ppo and trpo share. They differ in how completions are graded and in their learner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.advantages import grade
from oncurve.algos.objectives import build_objective, with_clip
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine, SampleKey
from oncurve.errors import ModelError, RewardError
from oncurve.models.device_memory import peak_memory_mib
from oncurve.objective_specs import ObjectiveSpec
from oncurve.recipe.defaults import advantage_settings, kl_settings
from oncurve.recipe.schema.stages import Grpo, Ppo, RolloutStage, Trpo
from oncurve.records import GradedGroup, Group, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.learner.learner import Learner, LearnerSettings
from oncurve.training.learner.oom_retry import sample_with_retry
from oncurve.training.learner.update_stats import UpdateResult
from oncurve.training.timing import PhaseClock

MAX_MISMATCH_32BIT, MAX_MISMATCH_16BIT = 0.01, 1.0
"""`mismatch_max` above which the first step of a run with the native engine stops it. Correct runs stay below 1e-4 and 0.5."""
MAX_MISMATCH_KL_16BIT = 0.01
"""In 16 bits one unlikely token can differ by more; if sampler and learner really disagree, `mismatch_kl` exceeds this too."""


class RolloutLoop(ABC):
    """The loop of a stage that samples groups, rewards them and updates the policy. Logging and saving happen outside."""

    learner: Learner
    refresh_every = 0
    """`kl.refresh_every` of stages that have it."""

    def __init__(
        self, stage: RolloutStage, seed: int, task: Task, engine: Engine, rewards: RewardMix, world: World = SINGLE_PROCESS
    ) -> None:
        self.stage, self.seed, self.task, self.engine, self.rewards, self.world = stage, seed, task, engine, rewards, world
        self.budget = Budget(stage)
        self._compared_with_sampler = False

    def step(self, n: int) -> StepReport:
        """Step number n, from 1: a pure function of the weights, the seed and n."""
        clock = PhaseClock(self.world.set_phase)
        with clock("sample"):
            groups = self.sample(n)  # prompts -> completions and their log-probs; asynchronous rewards start meanwhile
        with clock("score"):
            scored = self.score(groups)  # text -> reward per aspect
        scored, replaced = self.replace_silent_groups(n, scored, clock)
        self._stop_if_rewards_fail(scored)
        with clock("grade"):
            graded = self.grade(scored)  # rewards -> advantage per token
        with clock("update"):
            update = self.learner.update(graded)  # loss, backward, optimiser
            self._stop_if_sampler_differs(update.metrics)
            self.refresh_reference(n)
        return self._report(n, graded, update, replaced, clock)

    def sample(self, n: int, round: int = 0) -> list[Group]:
        """This rank's share of the step's groups. Rounds 1, 2 … have prompts that the step has not sampled yet."""
        prompts = prompts_for_step(self.task, self.seed, n - 1, self.stage.prompts_per_step, round=round)
        return sample_with_retry(
            self.engine,
            self.world.local_prompts(prompts),
            self.stage.group_size,
            self.stage.sampling,
            SampleKey(self.seed, n),
            on_group=self._prefetch_rewards,
        )

    def _prefetch_rewards(self, index: int, group: Group) -> None:
        if self.world.computes_rewards:
            self.rewards.prefetch(group)

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Every rank scores its own groups and gets those of all: each rank grades the complete step."""
        return self.world.all_gather_results(lambda: self.rewards.score(groups))

    def replace_silent_groups(self, n: int, scored: list[ScoredGroup], clock: PhaseClock) -> tuple[list[ScoredGroup], int]:
        """(the step's groups, how many of them were replaced)."""
        return scored, 0

    @abstractmethod
    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        """An advantage for each token."""

    def refresh_reference(self, n: int) -> None:
        """The reference becomes the policy after every ``refresh_every`` steps."""
        if self.learner.reference is not None and self.refresh_every and n % self.refresh_every == 0:
            self.learner.reference.refresh(self.engine.policy)

    @property
    def is_over(self) -> bool:
        return self.budget.is_spent

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint must hold besides the policy's weights."""
        tensors = {"optimiser": self.learner.optimiser.state()}
        if self.learner.reference is not None:
            tensors["reference"] = self.learner.reference.state()
        if self.budget.is_set:
            tensors["budget"] = self.budget.state()
        return tensors

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.learner.optimiser.load_state(tensors["optimiser"])
        if self.learner.reference is not None and "reference" in tensors:
            # A fork may turn the KL term on: its reference is then the policy that it starts from.
            self.learner.reference.load_state(tensors["reference"])
        if "budget" in tensors:
            self.budget.load_state(tensors["budget"])

    def _stop_if_sampler_differs(self, metrics: Mapping[str, float]) -> None:
        """Stops a run whose sampler and learner compute different policies, at the first step that forwards any token.

        Both use the same weights, so their log-probs of a sampled token differ by rounding only. Other engines and asynchronous
        samplers differ by design; `importance_cap` corrects for them.
        """
        gap = metrics.get("mismatch_max", 0.0)
        if self._compared_with_sampler or not self.engine.shares_weights or gap == 0.0:
            return
        self._compared_with_sampler = True
        if self.engine.policy.model.dtype == torch.float32:
            differs = not gap <= MAX_MISMATCH_32BIT
        else:
            differs = not gap <= MAX_MISMATCH_16BIT and not metrics["mismatch_kl"] <= MAX_MISMATCH_KL_16BIT
        if differs:
            raise ModelError(
                type(self.engine.policy.model).__name__,
                f"sampler and learner disagree by up to {gap:.2g} nats per token",
                because="both use the same weights, so Oncurve does not compute this model correctly; nothing was saved",
                fix="train another model family, and report this one",
            )

    def _stop_if_rewards_fail(self, scored: Sequence[ScoredGroup]) -> None:
        failures = [s.failure for g in scored for s in g.scored if s.failure is not None]
        completions = sum(len(g.scored) for g in scored)
        if len(failures) > self.stage.max_failure_share * completions:
            raise RewardError(
                f"{self.stage.label}.max_failure_share",
                f"{len(failures)} of {completions} completions of a step could not be rewarded",
                because=f"the first failure is: {failures[0]}",
                fix="fix the reward, or raise max_failure_share if such failures are expected",
            )

    def _report(self, n: int, graded: list[GradedGroup], update: UpdateResult, replaced: int, clock: PhaseClock) -> StepReport:
        metrics = rollout_metrics(graded, self.rewards) | update.metrics
        metrics["groups_resampled"] = float(replaced)
        seconds = sum(clock.seconds.values())
        self.budget.spend(metrics["tokens"], seconds)
        metrics["tokens_per_s"] = metrics["tokens"] / seconds
        metrics["cpu_seconds"] = clock.cpu_seconds
        metrics["memory_mib"] = peak_memory_mib(self.engine.policy.device)
        metrics["sample_tokens_per_s"] = metrics["tokens"] / clock.seconds["sample"]
        update_seconds = {f"update/{phase}": value for phase, value in update.seconds.items()}
        return StepReport(self.stage.label, n, metrics, clock.seconds | update_seconds, graded, update.stats)


class GrpoLoop(RolloutLoop):
    """The stage `grpo`: a completion's advantage is its reward compared with the other completions of its group."""

    def __init__(
        self, stage: Grpo, seed: int, task: Task, engine: Engine, rewards: RewardMix, world: World = SINGLE_PROCESS
    ) -> None:
        super().__init__(stage, seed, task, engine, rewards, world)
        self.grpo, self.refresh_every = stage, stage.kl.refresh_every
        self.learner = Learner(engine.policy, grpo_learner_settings(stage), world)

    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        kl_sums = self.learner.kl_sums(scored) if self.learner.kl_in_reward else None
        return grade_by_group(self.grpo, scored, kl_sums, self.grpo.kl.beta)

    def replace_silent_groups(self, n: int, scored: list[ScoredGroup], clock: PhaseClock) -> tuple[list[ScoredGroup], int]:
        """DAPO's dynamic sampling: replaces groups of equal rewards, which have no signal, by groups of fresh prompts."""
        replaced = 0
        if self.grpo.no_signal != "resample":
            return scored, replaced
        for i in range(1, self.grpo.max_resample_rounds + 1):
            silent = [g for g, group in enumerate(scored) if not has_reward_spread(group)]
            if not silent:
                break
            with clock("sample"):
                groups = self.sample(n, round=i)
            with clock("score"):
                with_signal = [group for group in self.score(groups) if has_reward_spread(group)]
            for g, group in zip(silent, with_signal, strict=False):
                scored = [*scored[:g], group, *scored[g + 1 :]]
                replaced += 1
        return scored, replaced


def grade_by_group(
    stage: Grpo | Trpo, scored: Sequence[ScoredGroup], kl_sums: Sequence[Sequence[float]] | None = None, beta: float = 0.0
) -> list[GradedGroup]:
    """Advantages relative to the group: the stage's baseline and scale, or those of its objective."""
    baseline, scale = advantage_settings(stage)
    return grade(
        scored,
        baseline=baseline,
        scale=scale,
        eps=stage.advantage.eps,
        mask_cut=stage.mask_cut,
        kl_sums=kl_sums,
        beta=beta,
    )


def grpo_learner_settings(stage: Grpo) -> LearnerSettings:
    """The learner of a grpo stage."""
    return surrogate_learner_settings(
        stage,
        stage.spec,
        updates=stage.steps * stage.updates_in_step,
        length_budget=stage.length_budget or stage.max_new_tokens,
        forward_silent_groups=stage.no_signal == "keep",
    )


def surrogate_learner_settings(stage: Grpo | Ppo, spec: ObjectiveSpec, **settings: Any) -> LearnerSettings:
    """The learner settings that stages with a clipped surrogate share, and ``settings`` of the stage's type."""
    plain, clip = build_objective(spec), stage.clip
    kl_place, kl_estimator = kl_settings(stage)
    return LearnerSettings(
        objective=plain if clip is None else with_clip(plain, clip.low, clip.high, clip.dual),
        optimiser=stage.optimiser,
        temperature=stage.sampling.temperature,
        passes=stage.updates_per_step,
        minibatches=stage.minibatches,
        beta=stage.kl.beta,
        kl_in_reward=kl_place == "reward",
        kl_estimator=kl_estimator,
        ratio_weighted_kl=stage.kl.ratio_weighted,
        reference_on_cpu=stage.kl.on_cpu,
        entropy_bonus=stage.entropy_bonus,
        importance_cap=stage.importance_cap,
        mismatch_limit=stage.mismatch_limit,
        tokens_per_pack=stage.tokens_per_pack,
        checkpointing=stage.checkpointing,
        **settings,
    )


class Budget:
    """The limit of a stage in sampled tokens or seconds of training. What was spent is part of a checkpoint."""

    def __init__(self, stage: RolloutStage) -> None:
        self.stage, self.tokens, self.seconds = stage, 0.0, 0.0

    @property
    def is_set(self) -> bool:
        return self.stage.tokens is not None or self.stage.seconds is not None

    @property
    def is_spent(self) -> bool:
        no_tokens = self.stage.tokens is not None and self.tokens >= self.stage.tokens
        return no_tokens or (self.stage.seconds is not None and self.seconds >= self.stage.seconds)

    def spend(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def state(self) -> dict[str, Tensor]:
        return {"spent": torch.tensor([self.tokens, self.seconds], dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.tokens, self.seconds = state["spent"].tolist()


def rollout_metrics(graded: Sequence[GradedGroup], rewards: RewardMix) -> dict[str, float]:
    """Metrics of a step's samples: rewards by aspect, lengths, fractions of silent groups, truncated and failed completions."""
    scored = [s for g in graded for s in g.scored.scored]
    totals = [s.total for s in scored if s.total is not None]
    lengths = [s.completion.length for s in scored]
    group_totals = [[t for t in g.scored.totals if t is not None] for g in graded]
    spreads = [float(np.std(group, ddof=1)) if len(group) > 1 else 0.0 for group in group_totals]
    metrics = {
        "reward": float(np.mean(totals)) if totals else 0.0,
        "reward_std": float(np.mean(spreads)) if spreads else 0.0,
        "no_signal_share": float(np.mean([not g.has_signal for g in graded])) if graded else 1.0,
        "cut_share": float(np.mean([s.completion.is_truncated for s in scored])) if scored else 0.0,
        "failure_share": float(np.mean([s.failure is not None for s in scored])) if scored else 0.0,
        "length_mean": float(np.mean(lengths)) if lengths else 0.0,
        "length_min": float(min(lengths, default=0)),
        "length_max": float(max(lengths, default=0)),
        "tokens": float(sum(lengths)),
    }
    logps = [s.completion.sampled_logps[s.completion.loss_mask] for s in scored]
    if any(np.isfinite(logps_T).any() for logps_T in logps):  # an endpoint returns none
        metrics["sampled_entropy"] = -float(np.nanmean(np.concatenate(logps), dtype=np.float64))
    if rewards.accuracy_reward is not None:
        metrics["accuracy"] = float(np.mean([rewards.is_correct(s) for s in scored])) if scored else 0.0
    for name in {a.name for s in scored for a in s.aspects}:
        values = [a.value for s in scored for a in s.aspects if a.name == name and a.value is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    return metrics


def has_reward_spread(scored: ScoredGroup) -> bool:
    """Whether a group's rewards differ: their totals, or any reward of a single step of reasoning."""
    if any(a.steps for s in scored.scored for a in s.aspects if a.weight != 0):
        return True
    return len({t for t in scored.totals if t is not None}) > 1
