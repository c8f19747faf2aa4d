"""Steps that any number of ranks can run, and the outcomes that tests compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oncurve.algos.objectives import OBJECTIVES
from oncurve.distributed.world import World
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import RewardError
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Sft
from oncurve.records import Completion, Group, StepReport
from oncurve.rewards.base import Result, Score
from oncurve.rewards.mix import RewardMix
from oncurve.training.learner.optimiser import Optimiser
from oncurve.training.learner.sharded_optimiser import ShardedOptimiser
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.stages.sft import SftLoop
from oncurve.training.start import task_for
from oncurve.training.trainer import shard_policy
from tests.training.builders import PROMPTS, SMOOTH, TERMS, policy, recipe, snapshot, stage

PLAIN: dict[str, Any] = {"updates_per_step": 2, "optimiser": SMOOTH}


@dataclass(frozen=True)
class CaseReward:
    """``of`` says what is rewarded: the `digits` of a text; `steps` (process rewards); `few`: only some groups have a learning
    signal; `none`: no group has one; `fails`: the reward fails on some completions."""

    of: str = "digits"
    name: str = "r"
    weight: float = 1.0

    def score(self, group: Group) -> list[Result]:
        return [self._score(group, completion) for completion in group.completions]

    def _score(self, group: Group, completion: Completion) -> Result:
        if self.of == "steps":
            ends = [t for t, token in enumerate(completion.token_ids.tolist()) if token % 3 == 0]
            return Score(None, steps=tuple((t, float(t % 5)) for t in ends))
        if self.of == "none" or (self.of == "few" and (group.prompt.text or "")[0] not in "01"):
            return Score(1.0)
        if self.of == "fails" and len(completion.token_ids) % 3 == 0:
            return ValueError("unsupported length")
        return Score(float(sum(c.isdigit() for c in completion.text)))


ENTROPY = {"top_share": 0.6, "clip_cov": 0.1, "clip_cov_range": [0.0, 9.0], "kl_cov": 0.2, "target": 9.0}
TRUNCATED = {"max_new_tokens": 8, "top_p": 0.8, "temperature": 1.3, "min_new_tokens": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("digits", {"objective": name, **TERMS}) for name in OBJECTIVES},
    "kl in the reward": ("digits", {**PLAIN, "kl": {"beta": 0.1, "where": "reward"}}),
    "batch scale": ("digits", {**PLAIN, "advantage": {"scale": "batch"}}),
    "mini-batches": ("digits", {**PLAIN, "minibatches": 2, "kl": {"beta": 0.04}}),
    "process rewards": ("steps", PLAIN),
    "resampled": ("few", {**PLAIN, "no_signal": "resample", "max_resample_rounds": 3}),
    "empty ranks": ("few", PLAIN),
    "groups of adaptive size": ("few", {**PLAIN, "curriculum": {"first_samples": 2}}),
    "truncated": ("few", {**PLAIN, "sampling": TRUNCATED, "kl": {"beta": 0.04}, "tokens_per_pack": 40}),
    "truncated in mini-batches": ("digits", {**PLAIN, "sampling": TRUNCATED, "minibatches": 2}),
    "penalties of silent groups": ("few", {**PLAIN, "objective": "dro", "entropy": {"kl_cov": 0.3}}),
    "nothing to learn": ("none", PLAIN),
    "failures": ("fails", {**PLAIN, "max_failure_share": 1.0}),
    "fewer prompts than ranks": ("digits", {**PLAIN, "prompts_per_step": 1}),
    "small packs": ("digits", {**PLAIN, "objective": "dapo", "tokens_per_pack": 20}),
    "checkpointed": ("digits", {**PLAIN, "checkpointing": "on"}),
    "clipped": ("digits", {**PLAIN, "optimiser": {**SMOOTH, "max_grad_norm": 0.01}}),
    "entropy controls": ("digits", {**PLAIN, "entropy": ENTROPY, "updates_per_step": 2}),
}


@dataclass(frozen=True)
class StepOutcome:
    """A step: the gradient of its last update, the weights after it, its samples and advantages, and its metrics."""

    gradient: np.ndarray
    weights: np.ndarray
    tokens: list[list[list[int]]]
    advantages: np.ndarray
    metrics: dict[str, float]
    stats: int
    """Completions with per-token statistics."""
    written: str = ""
    """What the stage wrote to files of the run."""


def steps(world: World, names: list[str]) -> dict[str, StepOutcome]:
    return {name: step(world, name) for name in names}


def steps_layer_by_layer(world: World, names: list[str]) -> dict[str, StepOutcome]:
    return {name: step(world, name, gather=False) for name in names}


def step(world: World, name: str, dtype: str = "float32", by_modules: bool = False, gather: bool = True) -> StepOutcome:
    """``by_modules``: without the fast backbone, as sharded weights run."""
    trained = policy(dtype=dtype)
    if by_modules:
        trained.fast_backbone = None
    return step_of(world, name, trained, gather)


def step_of(world: World, name: str, trained: Policy, gather: bool = True, **more: Any) -> StepOutcome:
    of, options = CASES[name]
    section = stage(**{"prompts_per_step": 5, "sampling": {"max_new_tokens": 8}, **options, **more})
    run = recipe() if gather else recipe("scale.shard=full", "scale.gather=false", "scale.ranks=2")
    engine = NativeEngine(shard_policy(trained, run, world), Engine(slots=16))
    loop = GrpoLoop(section, 0, PROMPTS, engine, RewardMix([CaseReward(of)]), world)
    return outcome_of(world, loop.step(1), engine.policy, [loop.learner.optimiser])


def outcome_of(
    world: World, report: StepReport, policy: Policy, optimisers: list[Optimiser], second: nn.Module | None = None
) -> StepOutcome:
    """``second``: a model that was trained in addition to the policy, or instead of it."""
    gradients = [full_gradient(world, optimiser) for optimiser in optimisers]
    with policy.full_weights():
        weights = [snapshot(model).float() for model in (policy.model, second) if model is not None]
    return StepOutcome(
        torch.cat([torch.zeros(0), *gradients]).numpy(),
        torch.cat(weights).numpy(),
        [[c.token_ids.tolist() for c in g.group.completions] for g in report.groups],
        np.concatenate([np.zeros(0), *(a for g in report.groups for a in g.advantages)]),
        {name: value for name, value in report.metrics.items() if name not in CLOCKS},
        sum(stats is not None for row in report.stats for stats in row),
    )


def relative_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))


def full_gradient(world: World, optimiser: Optimiser) -> Tensor:
    """The gradient of the last update as a single process would have it, gathered if it is sharded."""
    local = [torch.zeros_like(m) if m.grad is None else m.grad for m in optimiser.masters]
    if not isinstance(optimiser, ShardedOptimiser):
        return torch.cat([g.flatten() for g in local])
    shards = [(optimiser._local_range(w), g.numpy()) for w, g in zip(optimiser.weights, local, strict=True)]
    full = [torch.full(w.shape, torch.nan) for w in optimiser.weights]
    for of_rank in world.all_gather_dict({world.rank: shards}).values():
        for gradient, (elements, shard) in zip(full, of_rank, strict=True):
            elements.fill(gradient, torch.from_numpy(shard))
    return torch.cat([gradient.flatten() for gradient in full])


CLOCKS = {"tokens_per_s", "cpu_seconds", "memory_mib", "sample_tokens_per_s", "update_tflops", "mfu"}


def run_sft(world: World) -> tuple[np.ndarray, list[float]]:
    """Weights after three sft steps, and the held-out loss after each; ranks have unequal numbers of packs."""
    settings = ("examples=40", "heldout_share=0.3", "eval_every=1", "tokens_per_pack=64", "batch_size=7")
    run = recipe(*(f"sft.{setting}" for setting in settings))
    first = run.stages[0]
    assert isinstance(first, Sft)
    task = task_for(run, first)
    trained = shard_policy(policy(alphabet=task.alphabet or ""), run, world)
    loop = SftLoop(
        first.model_copy(update={"optimiser": first.optimiser.model_copy(update=SMOOTH)}), 0, task, trained, None, world
    )
    losses = [loop.step(n).metrics["heldout_loss"] for n in (1, 2, 3)]
    with trained.full_weights():
        return snapshot(trained.model).numpy(), losses


def fail_on_one_rank(world: World) -> str:
    """The rewards of one rank fail: returns the error that each rank gets."""

    def score() -> list[int]:
        if world.rank == 1:
            raise RewardError("reward 'r'", "gone", because="its endpoint does not answer", fix="start it")
        return [0]

    try:
        world.all_gather_results(score)
    except RewardError as error:
        return f"{error} {world.all_failed('here')}"
    return "nothing"


def call_collectives(world: World) -> dict[str, Any]:
    """Calls every collective once, with different arguments on each rank."""
    tensor = torch.full((3,), float(world.rank))
    world.broadcast_([tensor])
    values = {"all": 1.0, f"of {world.rank}": float(world.rank)}
    return {
        "local_prompts": world.local_prompts(list(range(7))),
        "all_gather_results": world.all_gather_results(lambda: [10 * i for i in world.local_prompts(list(range(7)))]),
        "local_indices": world.local_indices([5, 1, 1, 1, 1, 1]),
        "all_reduce_sum": world.all_reduce_sum(values),
        "all_reduce_max": world.all_reduce_max(values),
        "all_gather_dict": world.all_gather_dict({world.rank: "x"}),
        "broadcast_": tensor.tolist(),
    }
