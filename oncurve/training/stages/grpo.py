"""GRPO, one step at a time: sample groups, score them, grade each completion on its group's curve, update the policy.

`RolloutLoop` is the step that grpo, ppo and trpo share. They differ in how completions are graded and in their learner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.advantages import grade
from oncurve.algos.objectives import build_objective, with_clip
from oncurve.algos.surrogates import Dro
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine, PassCounts, SampleKey
from oncurve.errors import ChangedTextError, ModelError, RecipeError, RewardError, troubleshooting
from oncurve.models.device_memory import peak_memory_mib
from oncurve.objective_specs import ObjectiveSpec
from oncurve.recipe.defaults import advantage_settings, kl_settings
from oncurve.recipe.schema.sections import Kl
from oncurve.recipe.schema.stages import Grpo, Ppo, RolloutStage, Trpo
from oncurve.records import GradedGroup, Group, Prompt, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
from oncurve.tasks.curriculum import GroupResult, Selector, build_selector
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.learner.learner import Learner, LearnerSettings
from oncurve.training.learner.oom_retry import sample_with_retry
from oncurve.training.learner.update_stats import UpdateResult
from oncurve.training.stages.carry_over import CarryOver
from oncurve.training.timing import PhaseClock

MAX_MISMATCH_32BIT, MAX_MISMATCH_16BIT = 0.01, 1.0
"""`mismatch_max` above which the first step of a run with the native engine stops it. Correct runs stay below 1e-4 and 0.5."""
MAX_MISMATCH_KL_16BIT = 0.01
"""In 16 bits one unlikely token can differ by more; if sampler and learner really disagree, `mismatch_kl` exceeds this too."""
MAX_MISMATCH_KL_FP8 = 0.1
"""With an FP8 KV cache only `mismatch_kl` counts. 0.1 stands for log-probs that are off by 0.45 nats (KL ≈ σ²/2), so importance
weights vary by half."""


class RolloutLoop(ABC):
    """The loop of a stage that samples groups, rewards them and updates the policy. Logging and saving happen outside."""

    learner: Learner
    kl = Kl()
    """The KL penalty of stages that have one."""

    def __init__(
        self, stage: RolloutStage, seed: int, task: Task, engine: Engine, rewards: RewardMix, world: World = SINGLE_PROCESS
    ) -> None:
        self.stage, self.seed, self.task, self.engine, self.rewards, self.world = stage, seed, task, engine, rewards, world
        self.budget = Budget(stage)
        self._compared_with_sampler = False
        self._passes = PassCounts()
        """The sampler's passes of the current step."""
        self._discarded: list[ScoredGroup] = []
        """Groups that the current step has sampled and does not train on."""

    def step(self, n: int) -> StepReport:
        """Step number n, from 1: a pure function of the weights, the seed and n."""
        clock = PhaseClock(self.world.set_phase)
        self._passes, self._discarded = PassCounts(), []
        with clock("sample"):
            groups = self.sample(n)  # prompts -> completions and their log-probs; asynchronous rewards start meanwhile
        with clock("score"):
            scored = self.score(groups)  # text -> reward per aspect
        scored, replaced = self.complete_groups(n, scored, clock)
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
        return self.sample_prompts(self.select_prompts(n, round), self.stage.group_size, SampleKey(self.seed, n))

    def select_prompts(self, n: int, round: int = 0) -> list[Prompt]:
        """The prompts of a step, the same on every rank."""
        return prompts_for_step(self.task, self.seed, n - 1, self.stage.prompts_per_step, round=round)

    def sample_prompts(self, prompts: Sequence[Prompt], size: int, key: SampleKey) -> list[Group]:
        """A group of ``size`` completions for each of this rank's share of the prompts."""
        local = self.world.local_prompts(prompts)
        before, self.engine.records_routing = self.engine.counts, self.stage.records_routing
        groups = sample_with_retry(self.engine, local, size, self.stage.sampling, key, on_group=self._prefetch_rewards)
        self.engine.records_routing = False
        self._passes += self.engine.counts - before
        return groups

    def _prefetch_rewards(self, index: int, group: Group) -> None:
        if self.world.computes_rewards:
            self.rewards.prefetch(group)

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Scores this rank's groups and gathers those of all ranks, because every rank grades the complete step."""
        return self.world.all_gather_results(lambda: self.rewards.score(groups))

    def complete_groups(self, n: int, scored: list[ScoredGroup], clock: PhaseClock) -> tuple[list[ScoredGroup], int]:
        """(the step's groups, how many of them were replaced), after any further samples that the stage wants."""
        return scored, 0

    def _stop_if_rewards_fail(self, scored: Sequence[ScoredGroup]) -> None:
        stop_if_rewards_fail(self.stage, scored)

    @abstractmethod
    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        """An advantage for each token."""

    def refresh_reference(self, n: int) -> None:
        """The reference becomes the policy, or a mixture with it, after every ``kl.refresh_every`` steps."""
        if self.learner.reference is not None and self.kl.refresh_every and n % self.kl.refresh_every == 0:
            self.learner.reference.refresh(self.engine.policy, self.kl.refresh_mix)

    @property
    def is_over(self) -> bool:
        return self.budget.is_spent

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint must hold besides the policy's weights."""
        tensors = {"optimiser": self.learner.optimiser.state()}
        if self.learner.reference is not None:
            tensors["reference"] = self.learner.reference.state()
        if self.learner.adaptive_bonus is not None:
            bonus = self.learner.adaptive_bonus
            tensors["entropy_bonus"] = {"bonus": torch.tensor([bonus.bonus, bonus.last_entropy], dtype=torch.float64)}
        return tensors | self.budget.state()

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.learner.optimiser.load_state(tensors["optimiser"])
        if self.learner.reference is not None and "reference" in tensors:
            # A fork may turn the KL term on: its reference is then the policy that it starts from.
            self.learner.reference.load_state(tensors["reference"])
        if self.learner.adaptive_bonus is not None and "entropy_bonus" in tensors:  # missing if a fork sets the target
            bonus, last_entropy = tensors["entropy_bonus"]["bonus"].tolist()
            self.learner.adaptive_bonus = replace(self.learner.adaptive_bonus, bonus=bonus, last_entropy=last_entropy)
        self.budget.load_state(tensors)

    def _stop_if_sampler_differs(self, metrics: Mapping[str, float]) -> None:
        """Stops a run whose sampler and learner compute different policies, at the first step that forwards any token.

        Both use the same weights, so their log-probs of a sampled token differ by rounding only. Other engines and asynchronous
        samplers differ by design; `importance_cap` corrects for them. So does an FP8 KV cache, within wider limits.
        """
        gap = metrics.get("mismatch_max", 0.0)
        if self._compared_with_sampler or not self.engine.shares_weights or gap == 0.0:
            return
        self._compared_with_sampler = True
        because = "both use the same weights, so Oncurve does not compute this model correctly; nothing was saved"
        fix = f"train another model family, and report this one; {troubleshooting('Sampler and learner disagree')}"
        if self.engine.settings.kv_dtype == "fp8":
            differs = not metrics["mismatch_kl"] <= MAX_MISMATCH_KL_FP8
            because = f"the FP8 KV cache is too coarse for it (mismatch_kl = {metrics['mismatch_kl']:.2g}); nothing was saved"
            fix = 'set engine.kv_dtype = "auto"'
        elif self.engine.policy.model.dtype == torch.float32:
            differs = not gap <= MAX_MISMATCH_32BIT
        else:
            differs = not gap <= MAX_MISMATCH_16BIT and not metrics["mismatch_kl"] <= MAX_MISMATCH_KL_16BIT
        if differs:
            raise ModelError(
                type(self.engine.policy.model).__name__,
                f"sampler and learner disagree by up to {gap:.2g} nats per token",
                because=because,
                fix=fix,
            )

    def _report(self, n: int, graded: list[GradedGroup], update: UpdateResult, replaced: int, clock: PhaseClock) -> StepReport:
        metrics = rollout_metrics(graded, self.rewards) | update.metrics | self._passes.metrics()
        metrics["groups_resampled"] = float(replaced)
        metrics["tokens"] += sum(c.length for scored in self._discarded for c in scored.group.completions)
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
        self.grpo, self.kl = stage, stage.kl
        self.learner = self.build_learner()
        self.selector = None if stage.curriculum is None else build_selector(stage.curriculum, task, seed)
        self.carry_over = CarryOver(stage, task) if stage.carry_over else None
        self._compared_with_sampler = self.carry_over is not None  # other weights may have sampled a resumed run's first tokens

    def build_learner(self) -> Learner:
        return Learner(self.engine.policy, grpo_learner_settings(self.grpo, self.seed), self.world)

    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        kl_sums = self.learner.kl_sums(scored) if self.learner.kl_in_reward else None
        return grade_by_group(self.grpo, scored, kl_sums, self.grpo.kl.beta)

    def select_prompts(self, n: int, round: int = 0) -> list[Prompt]:
        if self.selector is None:
            return super().select_prompts(n, round)
        return self.selector.select(n - 1, self.stage.prompts_per_step, round=round)

    def sample(self, n: int, round: int = 0) -> list[Group]:
        if self.carry_over is not None:
            before = self.engine.counts
            groups = self.carry_over.sample(self.engine, n, self.seed, self._prefetch_rewards)
            self._passes += self.engine.counts - before
            return groups
        first = None if self.grpo.curriculum is None else self.grpo.curriculum.first_samples
        return self.sample_prompts(self.select_prompts(n, round), first or self.stage.group_size, SampleKey(self.seed, n))

    def complete_groups(self, n: int, scored: list[ScoredGroup], clock: PhaseClock) -> tuple[list[ScoredGroup], int]:
        replaced = 0
        if self.grpo.no_signal == "resample":
            scored, replaced = self.replace_silent_groups(n, scored, clock)
        if self.grpo.curriculum is not None and self.grpo.curriculum.first_samples is not None:
            scored = self.extend_groups(n, scored, self.grpo.curriculum.first_samples, clock)
        return scored, replaced

    def replace_silent_groups(self, n: int, scored: list[ScoredGroup], clock: PhaseClock) -> tuple[list[ScoredGroup], int]:
        """DAPO's dynamic sampling: replaces groups without signal, such as those of equal rewards, by groups of fresh prompts.

        Returns (the step's groups, how many of them were replaced)."""
        replaced = 0
        for i in range(1, self.grpo.max_resample_rounds + 1):
            silent = [g for g, has_signal in enumerate(self.have_signal(scored)) if not has_signal]
            if not silent:
                break
            with clock("sample"):
                groups = self.sample(n, round=i)
            with clock("score"):
                fresh = self.score(groups)
            with_signal = [group for group, has_signal in zip(fresh, self.have_signal(fresh), strict=True) if has_signal]
            used = list(zip(silent, with_signal, strict=False))
            self._discarded += [group for group in fresh if all(group is not other for _, other in used)]
            self._discarded += [scored[g] for g, _ in used]
            replaced += len(used)
            for g, group in used:
                scored = [*scored[:g], group, *scored[g + 1 :]]
        return scored, replaced

    def have_signal(self, scored: Sequence[ScoredGroup]) -> list[bool]:
        """Whether the rewards of each group give any of its completions an advantage. A KL in the reward is not a signal.

        Without a baseline, or with whitening over the batch, groups of equal rewards have advantages too and would never be
        replaced. Rewards are therefore compared with their group's mean in these two cases.
        """
        baseline, scale = advantage_settings(self.grpo)
        if baseline == "none" or scale == "whiten":
            advantage = self.grpo.advantage.model_copy(update={"baseline": "mean", "scale": "none"})
            return [
                graded.has_signal for graded in grade_by_group(self.grpo.model_copy(update={"advantage": advantage}), scored)
            ]
        return [graded.has_signal for graded in grade_by_group(self.grpo, scored)]

    def extend_groups(self, n: int, scored: list[ScoredGroup], first: int, clock: PhaseClock) -> list[ScoredGroup]:
        """Adaptive group size: spends the step's remaining completions on the groups whose first completions disagree.

        Samples are numbered consecutively, so a group gets the same samples as if it had been larger from the start. Rewards
        may compare the completions of a group with each other, so complete groups are scored again.
        """
        assert self.grpo.curriculum is not None
        size = self.stage.group_size
        extra = extra_samples(
            self.have_signal(scored),
            total=self.stage.prompts_per_step * size - len(scored) * first,
            limit=(self.grpo.curriculum.max_group_size or MAX_GROWTH * size) - first,
        )
        extended = list(scored)
        for count in sorted({count for count in extra if count}):
            indices = [g for g, more in enumerate(extra) if more == count]
            prompts = [scored[g].group.prompt for g in indices]
            old = [scored[g].group for g in self.world.local_prompts(indices)]
            groups: list[Group] | ChangedTextError
            try:
                with clock("sample"):
                    new = self.sample_prompts(prompts, count, SampleKey(self.seed, n, first))
                groups = [replace(a, completions=a.completions + b.completions) for a, b in zip(old, new, strict=True)]
            except ChangedTextError as error:
                groups = error
            with clock("score"):
                for g, group in zip(indices, self.world.all_gather_results(partial(self._score_extended, groups)), strict=True):
                    extended[g] = group
        return extended

    def _score_extended(self, groups: list[Group] | ChangedTextError) -> list[ScoredGroup]:
        """Scores the groups, or raises the error that sampling raised, so that all ranks get it and start the step again."""
        if isinstance(groups, ChangedTextError):
            raise groups
        return self.rewards.score(groups)

    def _report(self, n: int, graded: list[GradedGroup], update: UpdateResult, replaced: int, clock: PhaseClock) -> StepReport:
        if self.selector is not None:
            # All that was sampled: pass rates of groups with signal alone would make every level look half solved.
            sampled = [*(g.scored for g in graded), *self._discarded]
            self.selector.record(group_result(group, self.rewards) for group in sampled)
        report = super()._report(n, graded, update, replaced, clock)
        if self.selector is not None:
            return replace(report, metrics={**report.metrics, **curriculum_metrics(graded, self.selector)})
        if self.carry_over is not None:
            self.carry_over.groups = self.carry_over.unfinished
            carried = {"carried_groups": float(len(self.carry_over.groups))}
            return replace(report, metrics={**report.metrics, **staleness_metrics(report), **carried})
        return report

    def state(self) -> dict[str, dict[str, Tensor]]:
        state = super().state()
        if self.selector is not None:
            state["curriculum"] = {name: torch.from_numpy(array) for name, array in self.selector.state().items()}
        if self.carry_over is not None and self.carry_over.groups:
            state["carried"] = self.carry_over.state()
        return state

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state(tensors)
        if self.selector is not None and "curriculum" in tensors:  # missing if a fork turns the curriculum on
            self.selector.load_state({name: tensor.numpy() for name, tensor in tensors["curriculum"].items()})
        if self.carry_over is not None and "carried" in tensors:
            self.carry_over.load_state(tensors["carried"])


MAX_GROWTH = 4
"""Adaptive group size: the default of the largest group, as a multiple of `group_size`."""


def extra_samples(disagrees: Sequence[bool], *, total: int, limit: int) -> list[int]:
    """How many more completions each group gets: ``total`` in all, spread evenly over the groups that disagree, up to ``limit``
    each; what they can't take is spread over the others.

    Example: ``extra_samples([True, False, True], total=9, limit=4)`` is ``[4, 1, 4]``
    """
    extra = [0] * len(disagrees)
    for chosen, most in ((True, limit), (False, total)):
        indices = [g for g, disagree in enumerate(disagrees) if disagree == chosen]
        left = total - sum(extra)
        for position, g in enumerate(indices):
            share = left // len(indices) + (position < left % len(indices))
            extra[g] = min(share, most)
    return extra


def group_result(scored: ScoredGroup, rewards: RewardMix) -> GroupResult:
    """How many of a group's completions are correct. Those with a failed reward do not count, even if it is only recorded."""
    graded = [
        s
        for s in scored.scored
        if s.failure is None and not any(a.failure is not None and a.name in rewards.accuracy_rewards for a in s.aspects)
    ]
    return GroupResult(scored.group.prompt, sum(rewards.is_correct(s) for s in graded), len(graded))


def curriculum_metrics(graded: Sequence[GradedGroup], selector: Selector) -> dict[str, float]:
    """The fraction of samples that taught nothing, how many prompts have a pass rate, and the pass rates of levels."""
    samples, silent = sum(len(g.graded) for g in graded), sum(len(g.graded) for g in graded if not g.has_signal)
    levels = {f"pass_rate/{level}": rate.estimate() for level, rate in selector.levels.items()}
    return {"no_signal_samples": silent / max(samples, 1), "known_prompts": float(len(selector.known)), **levels}


def check_curriculum(stage: Grpo, task: Task, rewards: RewardMix) -> None:
    """Raises an OncurveError if there are no pass rates to select by, or if the file of first estimates can't be read."""
    if stage.curriculum is None:
        return
    if rewards.accuracy_reward is None:
        raise RecipeError(
            f"{stage.label}.curriculum", "set",
            because="it selects prompts by their pass rate, and none of the stage's rewards defines correct answers",
            fix="add a verifiable reward (weight = 0 only records it), give the reward that defines them the name `answer`, or "
            "remove the curriculum",
        )  # fmt: skip
    build_selector(stage.curriculum, task, 0)


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
        k=stage.advantage.k,
    )


def grpo_learner_settings(stage: Grpo, seed: int = 0) -> LearnerSettings:
    """The learner of a grpo stage. From the second update of a step on, dro's penalty acts on tokens of advantage 0 too."""
    penalises_all = stage.spec.surrogate == "dro" and stage.updates_in_step > 1
    settings = surrogate_learner_settings(
        stage,
        stage.spec,
        updates=stage.steps * stage.updates_in_step,
        length_budget=stage.length_budget or stage.max_new_tokens,
        forward_silent_groups=stage.no_signal == "keep" or penalises_all,
        routing_replay=stage.routing_replay,
        balance_loss=stage.balance_loss,
        seed=seed,
    )
    if stage.dro_tau is None:
        return settings
    return replace(settings, objective=replace(settings.objective, surrogate=Dro(stage.dro_tau)))


def surrogate_learner_settings(stage: Grpo | Ppo, spec: ObjectiveSpec, **settings: Any) -> LearnerSettings:
    """The learner settings that stages with a clipped surrogate share, and ``settings`` of the stage's type."""
    plain, clip = build_objective(spec), stage.clip
    kl_place, kl_estimator = kl_settings(stage)
    return LearnerSettings(
        objective=plain if clip is None else with_clip(plain, clip.low, clip.high, clip.dual),
        optimiser=stage.optimiser,
        temperature=stage.sampling.temperature,
        truncation=stage.sampling if stage.sampling.truncates else None,
        min_new_tokens=stage.sampling.min_new_tokens,
        passes=stage.updates_per_step,
        minibatches=stage.minibatches,
        beta=stage.kl.beta,
        kl_in_reward=kl_place == "reward",
        kl_estimator=kl_estimator,
        ratio_weighted_kl=stage.kl.ratio_weighted,
        reference_on_cpu=stage.kl.on_cpu,
        entropy_bonus=stage.entropy_bonus,
        entropy=stage.entropy,
        importance_cap=stage.importance_cap,
        mismatch_limit=stage.mismatch_limit,
        correction=stage.correction,
        off_policy_kl=stage.off_policy_kl,
        tokens_per_pack=stage.tokens_per_pack,
        checkpointing=stage.checkpointing,
        **settings,
    )


class Budget:
    """The limit of a stage in sampled tokens or seconds of training. What was spent is part of a checkpoint."""

    def __init__(self, stage: RolloutStage) -> None:
        self.stage, self.tokens, self.seconds = stage, 0.0, 0.0

    @property
    def is_spent(self) -> bool:
        no_tokens = self.stage.tokens is not None and self.tokens >= self.stage.tokens
        return no_tokens or (self.stage.seconds is not None and self.seconds >= self.stage.seconds)

    def spend(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def state(self) -> dict[str, dict[str, Tensor]]:
        """A checkpoint's entry; none if the stage has no limit."""
        if self.stage.tokens is None and self.stage.seconds is None:
            return {}
        return {"budget": {"spent": torch.tensor([self.tokens, self.seconds], dtype=torch.float64)}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        if "budget" in tensors:  # missing if a fork sets the limit
            self.tokens, self.seconds = tensors["budget"]["spent"].tolist()


def stop_if_rewards_fail(stage: RolloutStage, scored: Sequence[ScoredGroup]) -> None:
    """Ends the run if more than ``max_failure_share`` of a step's completions could not be rewarded."""
    failures = [s.failure for g in scored for s in g.scored if s.failure is not None]
    completions = sum(len(g.scored) for g in scored)
    if len(failures) > stage.max_failure_share * completions:
        raise RewardError(
            f"{stage.label}.max_failure_share",
            f"{len(failures)} of {completions} completions of a step could not be rewarded",
            because=f"the first failure is: {failures[0]}",
            fix="correct the reward, then continue with oncurve train --resume --accept-changes; if such failures are "
            "expected, raise max_failure_share with oncurve fork; " + troubleshooting("Rewards fail"),
        )


def rollout_metrics(graded: Sequence[GradedGroup], rewards: RewardMix) -> dict[str, float]:
    """Metrics of a step's samples: rewards by aspect, lengths, and the fractions of groups without signal and of truncated and
    failed completions."""
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
    episodes = [s.completion.episode for s in scored if s.completion.episode is not None]
    if episodes:
        calls = [call for episode in episodes for call in episode.calls]
        metrics["turns"] = float(np.mean([len(episode.turns) for episode in episodes]))
        metrics["tool_calls"] = len(calls) / len(episodes)
    ours = [c.episode for g in graded if g.group.prompt.agent is None for c in g.group.completions if c.episode is not None]
    if ours:  # an agent program runs its tools itself, and does not say which calls failed
        failures = [call.failure is not None for episode in ours for call in episode.calls]
        metrics["tool_failure_share"] = float(np.mean(failures)) if failures else 0.0
    if rewards.accuracy_reward is not None:
        metrics["accuracy"] = float(np.mean([rewards.is_correct(s) for s in scored])) if scored else 0.0
        metrics |= rewards.accuracy_by_task([g.scored for g in graded])
    for name in {a.name for s in scored for a in s.aspects}:
        values = [a.value for s in scored for a in s.aspects if a.name == name and a.value is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    return metrics


def staleness_metrics(report: StepReport) -> dict[str, float]:
    """Over the step's tokens, the mean and maximum number of updates since the weights that sampled a token."""
    ages: list[float] = []
    for group in report.groups:
        for completion in group.group.completions:
            spans = [*(completion.versions or ()), (len(completion.token_ids), 0)]
            for (start, version), (end, _) in pairwise(spans):
                ages += [float(report.step - 1 - version)] * (end - start)
    return {"staleness": float(np.mean(ages)), "staleness_max": max(ages)} if ages else {}
