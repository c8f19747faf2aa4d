"""What a stage may spend in all, where a recipe limits it: tokens sampled, or seconds of training.

GRPO, one step at a time: sample groups, score them, grade each on its own curve, update the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.advantages import grade
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine, SampleKey
from oncurve.errors import ModelError, RewardError
from oncurve.recipe.defaults import advantage_settings
from oncurve.recipe.schema.stages import Grpo, RolloutStage
from oncurve.records import GradedGroup, Group, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.learner.learner import Learner
from oncurve.training.learner.oom_retry import sample_with_retry
from oncurve.training.learner.update_stats import UpdateResult
from oncurve.training.memory_stats import peak_memory_mib
from oncurve.training.timing import PhaseClock


class Budget:
    """Counts over the whole stage, also over a stop and a resume: a checkpoint holds what was spent."""

    def __init__(self, stage: RolloutStage) -> None:
        self.stage, self.tokens, self.seconds = stage, 0.0, 0.0

    @property
    def is_set(self) -> bool:
        return self.stage.tokens is not None or self.stage.seconds is not None

    @property
    def is_spent(self) -> bool:
        over_tokens = self.stage.tokens is not None and self.tokens >= self.stage.tokens
        return over_tokens or (self.stage.seconds is not None and self.seconds >= self.stage.seconds)

    def spend(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def state(self) -> dict[str, Tensor]:
        return {"spent": torch.tensor([self.tokens, self.seconds], dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.tokens, self.seconds = state["spent"].tolist()


MAX_MISMATCH_32BIT, MAX_MISMATCH_16BIT = 0.01, 1.0
"""`mismatch_max` above which the first step of a run with the native engine stops it. Correct runs stay below 1e-4 and 0.5."""
MAX_MISMATCH_KL_16BIT = 0.01
"""In 16 bits one unlikely token can differ by more; if sampler and learner really disagree, `mismatch_kl` exceeds this too."""


class GrpoLoop:
    """The stage `grpo`: what happens in each of its steps. Logging and saving listen from outside."""

    def __init__(
        self, stage: Grpo, seed: int, task: Task, engine: Engine, rewards: RewardMix, world: World = SINGLE_PROCESS
    ) -> None:
        self.stage, self.seed, self.task, self.world = stage, seed, task, world
        self.engine, self.rewards = engine, rewards
        self.learner = self.make_learner()
        self.budget = Budget(stage)
        self._compared_with_sampler = False

    def make_learner(self) -> Learner:
        return Learner(self.engine.policy, self.stage, self.world)

    def step(self, n: int) -> StepReport:
        """Step number n, from 1: a pure function of the weights, the seed and n."""
        clock = PhaseClock(self.world.set_phase)
        with clock("sample"):
            groups = self.sample(n)  # prompts -> completions and their log-probs; rewards that wait begin meanwhile
        with clock("score"):
            scored = self.score(groups)  # text -> reward per aspect
        scored, replaced = self.resample_silent_groups(n, scored, clock)
        self._stop_if_failing(scored)
        with clock("grade"):
            graded = self.grade(scored)  # rewards -> advantage per token
        with clock("update"):
            learned = self.learner.update(graded)  # loss, backward, optimiser
            self._stop_if_sampler_differs(learned.metrics)
            self._refresh_reference(n)
        return self._report(n, graded, learned, replaced, clock)

    def sample(self, n: int, retry: int = 0) -> list[Group]:
        """This rank's share of the step's groups."""
        prompts = prompts_for_step(self.task, self.seed, n - 1, self.stage.prompts_per_step, round=retry)
        draws = SampleKey(self.seed, n)
        own = self.world.local_prompts(prompts)
        return sample_with_retry(
            self.engine, own, self.stage.group_size, self.stage.sampling, draws, on_group=self._begin_scoring
        )

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Every rank scores its own groups and hears of all: each grades the whole step, and learns from its part of it."""
        return self.world.all_gather_results(lambda: self.rewards.score(groups))

    def _begin_scoring(self, place: int, group: Group) -> None:
        if self.world.computes_rewards:
            self.rewards.prefetch(group)

    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        baseline, scale = advantage_settings(self.stage)
        return grade(
            scored,
            baseline=baseline,
            scale=scale,
            eps=self.stage.advantage.eps,
            mask_cut=self.stage.mask_cut,
            kl_sums=self.learner.kl_sums(scored) if self.learner.kl_in_reward else None,
            beta=self.stage.kl.beta,
        )

    def resample_silent_groups(self, n: int, scored: list[ScoredGroup], clock: PhaseClock) -> tuple[list[ScoredGroup], int]:
        """DAPO's dynamic sampling: groups of equal rewards are replaced by fresh prompts; and how many were."""
        replaced = 0
        if self.stage.no_signal != "resample":
            return scored, replaced
        for retry in range(1, self.stage.max_resample_rounds + 1):
            silent = [i for i, s in enumerate(scored) if not has_reward_spread(s)]
            if not silent:
                break
            with clock("sample"):
                fresh = self.sample(n, retry)
            with clock("score"):
                loud = [s for s in self.score(fresh) if has_reward_spread(s)]
            for place, new in zip(silent, loud, strict=False):
                scored = [*scored[:place], new, *scored[place + 1 :]]
                replaced += 1
        return scored, replaced

    @property
    def out_of_time(self) -> bool:
        return self.budget.is_spent

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All that a checkpoint must hold beside the policy's weights."""
        tensors = {"optimiser": self.learner.optimiser.state()}
        if self.learner.reference is not None:
            tensors["reference"] = self.learner.reference.state()
        if self.budget.is_set:
            tensors["budget"] = self.budget.state()
        return tensors

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.learner.optimiser.load_state(tensors["optimiser"])
        if self.learner.reference is not None:
            self.learner.reference.load_state(tensors["reference"])
        if "budget" in tensors:
            self.budget.load_state(tensors["budget"])

    def _refresh_reference(self, n: int) -> None:
        every = self.stage.kl.refresh_every
        if self.learner.reference is not None and every and n % every == 0:
            self.learner.reference.refresh(self.engine.policy)

    def _stop_if_sampler_differs(self, metrics: Mapping[str, float]) -> None:
        """Stops a run whose sampler and learner compute different policies, at the first step that forwards any token.

        Both use the same weights, so their log-probs of a sampled token differ by rounding only. Foreign engines and
        asynchronous samplers differ by design; `importance_cap` corrects for them.
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

    def _stop_if_failing(self, scored: Sequence[ScoredGroup]) -> None:
        failures = [s.failure for g in scored for s in g.scored if s.failure is not None]
        asked = sum(len(g.scored) for g in scored)
        if len(failures) > self.stage.max_failure_share * asked:
            raise RewardError(
                f"{self.stage.label}.max_failure_share",
                f"{len(failures)} of {asked} completions of a step could not be rewarded",
                because=f"the first said: {failures[0]}",
                fix="mend the reward, or raise max_failure_share if such failures are expected",
            )

    def _report(self, n: int, graded: list[GradedGroup], learned: UpdateResult, replaced: int, clock: PhaseClock) -> StepReport:
        metrics = rollout_metrics(graded, self.rewards) | learned.metrics
        metrics["groups_resampled"] = float(replaced)
        seconds = sum(clock.seconds.values())
        self.budget.spend(metrics["tokens"], seconds)
        metrics["tokens_per_s"] = metrics["tokens"] / seconds
        metrics["cpu_seconds"] = clock.cpu_seconds
        metrics["memory_mib"] = peak_memory_mib(self.engine.policy.device)
        metrics["sample_tokens_per_s"] = metrics["tokens"] / clock.seconds["sample"]
        within = {f"update/{phase}": value for phase, value in learned.seconds.items()}
        return StepReport(self.stage.label, n, metrics, clock.seconds | within, graded, learned.stats)


def rollout_metrics(graded: Sequence[GradedGroup], rewards: RewardMix) -> dict[str, float]:
    """What a step's samples were like: rewards by aspect, lengths, shares of silent groups, cut and failed completions."""
    scored = [s for g in graded for s in g.scored.scored]
    totals = [s.total for s in scored if s.total is not None]
    lengths = [s.completion.length for s in scored]
    rewarded = [[t for t in g.scored.totals if t is not None] for g in graded]
    spreads = [float(np.std(group, ddof=1)) if len(group) > 1 else 0.0 for group in rewarded]
    metrics = {
        "reward": float(np.mean(totals)) if totals else 0.0,
        "reward_std": float(np.mean(spreads)) if spreads else 0.0,
        "no_signal_share": float(np.mean([not g.has_signal for g in graded])) if graded else 1.0,
        "cut_share": float(np.mean([s.completion.cut for s in scored])) if scored else 0.0,
        "failure_share": float(np.mean([s.failure is not None for s in scored])) if scored else 0.0,
        "length_mean": float(np.mean(lengths)) if lengths else 0.0,
        "length_min": float(min(lengths, default=0)),
        "length_max": float(max(lengths, default=0)),
        "tokens": float(sum(lengths)),
    }
    if rewards.accuracy_reward is not None:
        metrics["accuracy"] = float(np.mean([rewards.is_correct(s) for s in scored])) if scored else 0.0
    for name in {a.name for s in scored for a in s.aspects}:
        values = [a.value for s in scored for a in s.aspects if a.name == name and a.value is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    return metrics


def has_reward_spread(scored: ScoredGroup) -> bool:
    """Whether a group's rewards differ: outcome totals, or any step rewards."""
    if any(a.steps for s in scored.scored for a in s.aspects if a.weight != 0):
        return True
    return len({t for t in scored.totals if t is not None}) > 1
