"""The stage `trpo`: GRPO's loop with a natural gradient step of bounded KL instead of AdamW.

Maximise L(θ) = mean over tokens of ρ A, subject to mean KL(π_old ‖ π_θ) ≤ δ (Schulman et al. 2015, arXiv 1502.05477): solve
F x = ∇L by conjugate gradient, scale x to the length that the quadratic KL allows, and shorten the step until the real KL is
within δ and L has risen. Advantages are relative to the group, as in GRPO.

Directions and steps are flat tensors: all trained parameters, end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oncurve.algos.objectives import Objective
from oncurve.algos.ratios import LOG_CAP, token_ratio
from oncurve.algos.reductions import LossDenominators, mean_over_step_tokens
from oncurve.algos.surrogates import Unclipped
from oncurve.algos.trust_region import LineSearchResult, Solution, conjugate_gradient, line_search, max_step_size
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine
from oncurve.errors import ModelError, RecipeError
from oncurve.models.device_memory import free_memory
from oncurve.models.fisher import Fisher, flatten, policy_distributions, set_parameters
from oncurve.models.packing import Pack
from oncurve.models.policy import Policy
from oncurve.plan.memory import VECTOR_BYTES, fisher_groups, parameters_with_room, table_bytes
from oncurve.recipe.schema.stages import Trpo
from oncurve.records import GradedGroup, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.runs.step_notes import mark_update, note
from oncurve.tasks.base import Task
from oncurve.training.learner.learner import Learner, LearnerSettings, largest_pack, min_pack_tokens
from oncurve.training.learner.micro_batch import MicroBatch
from oncurve.training.learner.update_stats import UpdateResult, UpdateStats
from oncurve.training.stages.grpo import RolloutLoop, grade_by_group
from oncurve.training.timing import DevicePhases


class TrpoLoop(RolloutLoop):
    """The loop of the stage `trpo`."""

    def __init__(
        self, stage: Trpo, seed: int, task: Task, engine: Engine, rewards: RewardMix, world: World = SINGLE_PROCESS
    ) -> None:
        super().__init__(stage, seed, task, engine, rewards, world)
        self.trpo = stage
        self.learner = TrpoLearner(engine.policy, stage, world)

    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        return grade_by_group(self.trpo, scored)


def trpo_learner_settings(stage: Trpo) -> LearnerSettings:
    """The unclipped surrogate ρ A, averaged over the step's tokens."""
    return LearnerSettings(
        objective=Objective(token_ratio, Unclipped(), mean_over_step_tokens),
        optimiser=stage.optimiser,
        updates=stage.steps,
        length_budget=stage.max_new_tokens,
        temperature=stage.sampling.temperature,
        forward_silent_groups=True,
        tokens_per_pack=stage.tokens_per_pack,
        checkpointing=stage.checkpointing,
    )


class TrpoLearner(Learner):
    """One natural gradient step per batch. AdamW never steps: the optimiser only clears gradients and holds the update guard.

    Every rank solves for the same step: gradients, products with the Fisher matrix, and what the line search measures are sums
    over all ranks' packs. If memory runs out, a rank computes its term of such a sum again over smaller packs, before the
    all-reduce.
    """

    def __init__(self, policy: Policy, stage: Trpo, world: World = SINGLE_PROCESS) -> None:
        super().__init__(policy, trpo_learner_settings(stage), world)
        if any(p.dtype not in (torch.float32, torch.float64) for p in policy.trainable.values()):
            raise RecipeError(
                "model.dtype",
                str(policy.model.dtype).removeprefix("torch."),
                because="trpo solves for its step and measures KLs of 0.01, and 16-bit numbers have at most three digits",
                fix='use dtype = "float32", or stages of type grpo or ppo',
            )
        self.optimiser.accumulator = None  # the gradient is read from autograd
        self.trpo, self.parameters = stage, list(policy.trainable.values())

    def update(self, groups: Sequence[GradedGroup]) -> UpdateResult:
        self.phases = DevicePhases(self.policy.device)
        every = range(len(groups))
        batch, totals = self._build_fitting_batches(groups, [every])[0], self._loss_denominators(groups)
        self.checkpointed.choose(largest_pack(batch), self.optimiser)
        stats = UpdateStats(groups, self.world)
        if not self._forwarded_groups(groups, every):
            return stats.result()
        before = stats.snapshot()
        batch = self._compute_gradient(groups, batch, totals, stats)
        self.world.all_reduce_gradients(self.parameters)
        gradient = -flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])  # ∇L: uphill
        self.optimiser.zero_grad()
        norm, result = float(gradient.norm()), stats.result()
        mark_update()
        rejection = self.optimiser.guard.rejection_reason({"grad_norm": norm, **stats.metrics_since(before)})
        if rejection is None:
            solution, step = self._solve(groups, gradient)
            rejection = None if bool(step.isfinite().all()) else "its natural gradient is not finite"
        if rejection is not None:
            note("bad", f"update skipped: {rejection}")
            return replace(result, metrics=result.metrics | {"grad_norm": norm, "skipped_updates": 1.0})
        taken = self._search(groups, batch, totals, step) if bool(step.any()) else LineSearchResult(0.0, 0.0, 0.0, 0)
        return replace(result, metrics=result.metrics | _step_metrics(solution, taken, norm, float(step.norm())))

    def _solve(self, groups: Sequence[GradedGroup], gradient: Tensor) -> tuple[Solution, Tensor]:
        """The natural gradient, and the step along it that the quadratic KL allows."""
        min_budget = max(map(min_pack_tokens, groups))
        fisher: Fisher | None = None

        def local_product(v: Tensor, budget: int) -> Tensor:
            nonlocal fisher
            if fisher is None or budget != self.tokens_per_pack:
                fisher, self.tokens_per_pack = None, budget  # the old one is freed before the new one is built
                fisher = Fisher(self.policy, self._fisher_packs(groups), self.settings.temperature)
            return fisher.product(v)

        def product(v: Tensor) -> Tensor:
            fisher_v = self.with_oom_retry(lambda budget: local_product(v, budget), self.tokens_per_pack, min_budget)
            self.world.all_reduce_([fisher_v])
            return fisher_v + self.trpo.damping * v

        solution = conjugate_gradient(product, gradient, self.trpo.cg_iterations)
        return solution, solution.x * max_step_size(solution.x, product(solution.x), self.trpo.max_kl)

    def _fisher_packs(self, groups: Sequence[GradedGroup]) -> list[tuple[Pack, Tensor]]:
        """The packs on which the Fisher matrix is measured (``fisher_share`` of the groups), with each token's weight."""
        measured = [groups[i] for i in fisher_groups(len(groups), self.trpo.fisher_share)]
        chosen = [g for g in measured if any(g.graded)] or [g for g in groups if any(g.graded)][:1]
        tokens = self._loss_denominators(chosen).tokens
        batch = self._build_micro_batches(chosen, range(len(chosen)))
        return [(micro.pack, micro.mask_M.to(micro.advantage_M.dtype) / max(tokens, 1)) for micro in batch]

    @torch.no_grad()
    def _search(
        self, groups: Sequence[GradedGroup], batch: list[MicroBatch], totals: LossDenominators, step: Tensor
    ) -> LineSearchResult:
        """Moves the policy by the longest fraction of the step that passes, or restores its weights bit for bit."""
        start = flatten([p.detach() for p in self.parameters]).clone()
        packs, old = batch, list[Tensor]()

        def try_fraction(fraction: float) -> tuple[float, float]:
            def attempt(fitting: list[MicroBatch]) -> dict[str, float]:
                nonlocal packs, old
                if fitting is not packs or not old:
                    packs, old = fitting, []
                    set_parameters(self.parameters, start, step, 0.0)
                    old = [policy_distributions(self.policy, micro.pack, self.settings.temperature) for micro in packs]
                set_parameters(self.parameters, start, step, fraction)
                return self._measure_step(packs, old)

            sums = self.world.all_reduce_sum(self.with_fitting_packs(groups, packs, attempt))
            return sums["gain"] / max(totals.tokens, 1), sums["kl"] / max(totals.tokens, 1)

        fraction = 0.0
        try:
            taken = line_search(try_fraction, self.trpo.max_kl, self.trpo.backtrack_by, self.trpo.backtracks)
            fraction = taken.share
        finally:
            if not fraction:
                set_parameters(self.parameters, start, step, 0.0)
        return taken

    def _measure_step(self, batch: Sequence[MicroBatch], old: Sequence[Tensor]) -> dict[str, float]:
        """Two sums over this rank's tokens: how much the surrogate L has risen, and KL(π_old ‖ π_θ) over the complete
        vocabulary."""
        gain = kl = 0.0
        for micro, old_MV in zip(batch, old, strict=True):
            new_MV = policy_distributions(self.policy, micro.pack, self.settings.temperature)
            target = micro.pack.target_M[:, None]
            ratio_M = (new_MV.gather(1, target) - old_MV.gather(1, target))[:, 0].clamp(max=LOG_CAP).exp()
            kl_M = (old_MV.exp() * (old_MV - new_MV)).nan_to_num().sum(-1)
            gain += float(((ratio_M - 1) * micro.advantage_M)[micro.mask_M].double().sum())
            kl += float(kl_M[micro.mask_M].double().sum())
        return {"gain": gain, "kl": kl}


def _step_metrics(solution: Solution, taken: LineSearchResult, grad_norm: float, step_norm: float) -> dict[str, float]:
    return {
        "grad_norm": grad_norm,
        "step_norm": taken.share * step_norm,
        "step_kl": taken.kl,
        "step_gain": taken.gain,
        "step_share": taken.share,
        "line_search_tries": float(taken.tries),
        "cg_residual": solution.residual,
        "skipped_updates": float(taken.share == 0),
    }


def check_memory(stage: Trpo, policy: Policy) -> None:
    """Raises ModelError if a trpo stage would run out of memory. Called before the first stage, not hours later."""
    parameters, vocabulary = sum(p.numel() for p in policy.trainable.values()), policy.head.weight_VD.shape[0]
    max_parameters = parameters_that_fit(free_memory(policy.device), stage, vocabulary)
    if parameters > max_parameters:
        raise ModelError(
            stage.label,
            f"trpo on a model of {parameters:,} trained parameters",
            because=f"it keeps {VECTOR_BYTES} bytes for each, and every token's distribution: {max_parameters:,} would fit",
            fix="use a smaller model, fewer completions in a step, or a lower fisher_share; or a stage of type grpo or ppo",
        )


def parameters_that_fit(memory: int, stage: Trpo, vocabulary: int) -> int:
    """How many trained parameters a trpo stage has memory for, besides the model itself."""
    group_tokens = stage.group_size * stage.max_new_tokens
    return parameters_with_room(memory, table_bytes(stage.prompts_per_step, group_tokens, vocabulary, stage.fisher_share))
