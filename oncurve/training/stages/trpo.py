"""The stage `trpo`: GRPO's loop with a natural gradient step of bounded KL in the place of AdamW.

Maximise L(θ) = mean over tokens of ρ A, subject to mean KL(π_old ‖ π_θ) ≤ δ (Schulman et al. 2015, arXiv 1502.05477): solve
F x = ∇L by conjugate gradient, go along x as far as the quadratic KL allows, and shorten until the real KL is within δ and L
has risen. Advantages are the group's, as in GRPO.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oncurve.algos.objectives import Objective
from oncurve.algos.ratios import LOG_CAP, token_ratio
from oncurve.algos.reductions import LossDenominators, mean_over_step_tokens
from oncurve.algos.surrogates import Unclipped
from oncurve.algos.trust_region import Solution, Step, conjugate_gradient, line_search, longest_step
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine
from oncurve.errors import ModelError, RecipeError
from oncurve.models.fisher import Fisher, flatten, policy_distributions, set_parameters
from oncurve.models.packing import Pack
from oncurve.models.policy import Policy
from oncurve.plan.memory import VECTOR_BYTES, parameters_with_room, table_bytes
from oncurve.recipe.schema.stages import Grpo, RolloutStage, Trpo
from oncurve.records import GradedGroup
from oncurve.rewards.mix import RewardMix
from oncurve.runs.step_notes import note
from oncurve.tasks.base import Task
from oncurve.training.learner.learner import Learner, min_pack_tokens
from oncurve.training.learner.oom_retry import available
from oncurve.training.learner.update_stats import MicroBatch, UpdateResult, UpdateStats
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.timing import DevicePhases


def grading_side(stage: Trpo) -> Grpo:
    """The sampling and grading of a trpo stage, as the grpo stage that they are."""
    told = {name: getattr(stage, name) for name in RolloutStage.model_fields if name != "type"}
    return Grpo.model_validate(told | {"name": stage.label, "advantage": stage.advantage, "no_signal": "keep"})


class TrpoLoop(GrpoLoop):
    """What happens in each step of the stage `trpo`."""

    def __init__(
        self, stage: Trpo, seed: int, task: Task, engine: Engine, rewards: RewardMix, world: World = SINGLE_PROCESS
    ) -> None:
        self.trpo = stage
        super().__init__(grading_side(stage), seed, task, engine, rewards, world)

    def make_learner(self) -> TrpoLearner:
        return TrpoLearner(self.engine.policy, self.trpo, self.world)


class TrpoLearner(Learner):
    """One natural gradient step per batch. Its optimiser holds nothing: it only clears gradients.

    Every rank solves for the same step: gradients, products with the Fisher matrix, and what the line search measures are sums
    over all ranks' packs. Where memory runs out, a rank makes its part of one such sum again over smaller packs, before it is
    added to the others'.
    """

    def __init__(self, policy: Policy, stage: Trpo, world: World = SINGLE_PROCESS) -> None:
        super().__init__(policy, grading_side(stage), world)
        if any(p.dtype not in (torch.float32, torch.float64) for p in policy.trainable.values()):
            raise RecipeError(
                "model.dtype",
                str(policy.model.dtype).removeprefix("torch."),
                because="trpo solves for its step and measures KLs of 0.01, and bfloat16 has three digits",
                fix='use dtype = "float32", or stages of type grpo or ppo',
            )
        self.optimiser.accumulator = None  # the gradient itself is wanted, from autograd
        self.trpo, self.parameters = stage, list(policy.trainable.values())
        self.objective = Objective(token_ratio, Unclipped(), mean_over_step_tokens)

    def update(self, groups: Sequence[GradedGroup]) -> UpdateResult:
        self.phases = DevicePhases(self.policy.device)
        every = range(len(groups))
        batch, totals, seen = self._fitting(groups, [every])[0], self._totals(groups), UpdateStats(groups, self.world)
        if not self._used(groups, every):
            return seen.result()
        before = seen.snapshot()
        batch = self._gradient(groups, batch, totals, seen)
        self.world.all_reduce_gradients(self.parameters)
        uphill_n = -flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        self.optimiser.zero_grad()
        slope, learned = float(uphill_n.norm()), seen.result()
        why = self.optimiser.guard.rejection_reason({"grad_norm": slope, **seen.metrics_since(before)})
        if why is None:
            solved, step_n = self._solve(groups, uphill_n)
            why = None if bool(step_n.isfinite().all()) else "its natural gradient is not finite"
        if why is not None:
            note("bad", f"update left out: {why}")
            return replace(learned, metrics=learned.metrics | {"grad_norm": slope, "skipped_updates": 1.0})
        taken = self._search(groups, batch, totals, step_n) if bool(step_n.any()) else Step(0.0, 0.0, 0.0, 0)
        return replace(learned, metrics=learned.metrics | _metrics(solved, taken, slope, float(step_n.norm())))

    def _solve(self, groups: Sequence[GradedGroup], uphill_n: Tensor) -> tuple[Solution, Tensor]:
        """The natural gradient, and the step along it that the quadratic KL allows."""
        least = max(map(min_pack_tokens, groups))
        fisher: Fisher | None = None

        def own(v_n: Tensor, budget: int) -> Tensor:
            nonlocal fisher
            if fisher is None or budget != self.tokens_per_pack:
                fisher, self.tokens_per_pack = None, budget  # one that is too large makes room before the next is made
                fisher = Fisher(self.policy, self._some(groups), self._temperature)
            return fisher.product(v_n)

        def product(v_n: Tensor) -> Tensor:
            found_n = self.with_oom_retry(lambda budget: own(v_n, budget), self.tokens_per_pack, least)
            self.world.all_reduce_([found_n])
            return found_n + self.trpo.damping * v_n

        solved = conjugate_gradient(product, uphill_n, self.trpo.cg_iterations)
        return solved, solved.x * longest_step(solved.x, product(solved.x), self.trpo.max_kl)

    def _some(self, groups: Sequence[GradedGroup]) -> list[tuple[Pack, Tensor]]:
        """The packs that the Fisher matrix is measured on: every so manyth group, each token weighing alike."""
        stride = max(1, int(1 / self.trpo.fisher_share))
        chosen = [g for g in groups[::stride] if any(g.graded)] or [g for g in groups if any(g.graded)][:1]
        tokens = self._totals(chosen).tokens
        packs = self._micro_batches(chosen, range(len(chosen)))
        return [(micro.pack, micro.mask_M.to(micro.advantage_M.dtype) / max(tokens, 1)) for micro in packs]

    @torch.no_grad()
    def _search(self, groups: Sequence[GradedGroup], batch: list[MicroBatch], totals: LossDenominators, step_n: Tensor) -> Step:
        """Moves the policy to the longest step that keeps its promise, or leaves it, to the bit, where it was."""
        start_n = flatten([p.detach() for p in self.parameters]).clone()
        packs, old = batch, list[Tensor]()

        def try_share(share: float) -> tuple[float, float]:
            def attempt(fitting: list[MicroBatch]) -> dict[str, float]:
                nonlocal packs, old
                if fitting is not packs or not old:
                    packs, old = fitting, []
                    set_parameters(self.parameters, start_n, step_n, 0.0)
                    old = [policy_distributions(self.policy, micro.pack, self._temperature) for micro in packs]
                set_parameters(self.parameters, start_n, step_n, share)
                return self._measure(packs, old)

            found = self.world.all_reduce_sum(self.with_fitting_packs(groups, packs, attempt))
            return found["gain"] / max(totals.tokens, 1), found["kl"] / max(totals.tokens, 1)

        share = 0.0
        try:
            taken = line_search(try_share, self.trpo.max_kl, self.trpo.backtrack_by, self.trpo.backtracks)
            share = taken.share
        finally:
            if not share:
                set_parameters(self.parameters, start_n, step_n, 0.0)
        return taken

    def _measure(self, batch: Sequence[MicroBatch], old: Sequence[Tensor]) -> dict[str, float]:
        """The sums over this rank's tokens of L's rise and of KL(π_old ‖ π_θ), the KL over the whole vocabulary."""
        gain = kl = 0.0
        for micro, old_MV in zip(batch, old, strict=True):
            new_MV = policy_distributions(self.policy, micro.pack, self._temperature)
            at = micro.pack.target_M[:, None]
            ratio_M = (new_MV.gather(1, at) - old_MV.gather(1, at))[:, 0].clamp(max=LOG_CAP).exp()
            kl_M = (old_MV.exp() * (old_MV - new_MV)).nan_to_num().sum(-1)
            gain += float(((ratio_M - 1) * micro.advantage_M)[micro.mask_M].double().sum())
            kl += float(kl_M[micro.mask_M].double().sum())
        return {"gain": gain, "kl": kl}


def _metrics(solved: Solution, taken: Step, slope: float, length: float) -> dict[str, float]:
    return {
        "grad_norm": slope,
        "step_norm": taken.share * length,
        "step_kl": taken.kl,
        "step_gain": taken.gain,
        "step_share": taken.share,
        "line_search_tries": float(taken.tries),
        "cg_residual": solved.residual,
        "skipped_updates": float(taken.share == 0),
    }


def refuse_if_too_large(policy: Policy, stage: Trpo) -> None:
    """Asked before the first step of the first stage: no run should end at its last stage for want of memory."""
    parameters, vocabulary = sum(p.numel() for p in policy.trainable.values()), policy.head.weight_VD.shape[0]
    room = fits_in(free_memory(policy.device), stage, vocabulary)
    if parameters > room:
        raise ModelError(
            stage.label,
            f"trpo on a model of {parameters:,} trained parameters",
            because=f"it keeps {VECTOR_BYTES} bytes for each, and every token's distribution: {room:,} would fit",
            fix="use a smaller model, fewer completions in a step, or a lower fisher_share; or a stage of type grpo or ppo",
        )


def fits_in(memory: int, stage: Trpo, vocabulary: int) -> int:
    """How many trained parameters a trpo stage has room for, beside the model itself."""
    tokens = stage.prompts_per_step * stage.group_size * stage.sampling.max_new_tokens
    return parameters_with_room(memory, table_bytes(tokens, vocabulary, stage.fisher_share))


def free_memory(device: torch.device) -> int:
    """Bytes that may yet be taken: of the GPU, or of the machine as Linux counts what is available (else of all it has)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = available()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else found
