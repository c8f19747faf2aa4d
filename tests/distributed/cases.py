"""Steps to be taken by any number of ranks, and what is compared of them."""

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
from oncurve.training.learner.sharded_optimiser import ShardedOptimiser, shard_policy
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.stages.sft import SftLoop
from oncurve.training.start import task_for
from tests.training.builders import PROMPTS, SMOOTH, TERMS, policy, recipe, snapshot, stage

PLAIN: dict[str, Any] = {"updates_per_step": 2, "optimiser": SMOOTH}


@dataclass(frozen=True)
class Rewarded:
    """``of`` says what is rewarded: `digits` of a text; `steps` of it, each by itself; `few`, where only some prompts' groups
    have anything to learn from; `none`, where no group has; or `fails` on some completions."""

    of: str = "digits"
    name: str = "r"
    weight: float = 1.0

    def score(self, group: Group) -> list[Result]:
        return [self._one(group, completion) for completion in group.completions]

    def _one(self, group: Group, completion: Completion) -> Result:
        if self.of == "steps":
            ends = [t for t, token in enumerate(completion.token_ids.tolist()) if token % 3 == 0]
            return Score(None, steps=tuple((t, float(t % 5)) for t in ends))
        if self.of == "none" or (self.of == "few" and (group.prompt.text or "")[0] not in "01"):
            return Score(1.0)
        if self.of == "fails" and len(completion.token_ids) % 3 == 0:
            return ValueError("a length that it does not like")
        return Score(float(sum(c.isdigit() for c in completion.text)))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("digits", {"objective": name, **TERMS}) for name in OBJECTIVES},
    "kl in the reward": ("digits", {**PLAIN, "kl": {"beta": 0.1, "where": "reward"}}),
    "batch scale": ("digits", {**PLAIN, "advantage": {"scale": "batch"}}),
    "mini-batches": ("digits", {**PLAIN, "minibatches": 2, "kl": {"beta": 0.04}}),
    "process rewards": ("steps", PLAIN),
    "resampled": ("few", {**PLAIN, "no_signal": "resample", "max_resample_rounds": 3}),
    "empty ranks": ("few", PLAIN),
    "nothing to learn": ("none", PLAIN),
    "failures": ("fails", {**PLAIN, "max_failure_share": 1.0}),
    "fewer prompts than ranks": ("digits", {**PLAIN, "prompts_per_step": 1}),
    "small packs": ("digits", {**PLAIN, "objective": "dapo", "tokens_per_pack": 20}),
    "checkpointed": ("digits", {**PLAIN, "checkpointing": "on"}),
    "clipped": ("digits", {**PLAIN, "optimiser": {**SMOOTH, "max_grad_norm": 0.01}}),
}


@dataclass(frozen=True)
class Taken:
    """A step: the gradient of its last update, the weights after it, what was sampled and graded, and its metrics."""

    gradient: np.ndarray
    weights: np.ndarray
    tokens: list[list[list[int]]]
    advantages: np.ndarray
    metrics: dict[str, float]
    stats: int
    """Completions of which per-token figures are known."""
    written: str = ""
    """What the stage keeps in files of the run."""


def steps(world: World, names: list[str]) -> dict[str, Taken]:
    return {name: step(world, name) for name in names}


def steps_layer_by_layer(world: World, names: list[str]) -> dict[str, Taken]:
    return {name: step(world, name, gather=False) for name in names}


def step(world: World, name: str, dtype: str = "float32", by_modules: bool = False, gather: bool = True) -> Taken:
    """``by_modules``: through the model's own modules, as shards of weights are."""
    pupil = policy(dtype=dtype)
    if by_modules:
        pupil.fast_backbone = None
    return step_of(world, name, pupil, gather)


def step_of(world: World, name: str, pupil: Policy, gather: bool = True, **more: Any) -> Taken:
    of, options = CASES[name]
    made = stage(**{"prompts_per_step": 5, "sampling": {"max_new_tokens": 8}, **options, **more})
    asked = recipe() if gather else recipe("scale.shard=full", "scale.gather=false", "scale.ranks=2")
    engine = NativeEngine(shard_policy(pupil, asked, world), Engine(slots=16))
    loop = GrpoLoop(made, 0, PROMPTS, engine, RewardMix([Rewarded(of)]), world)
    return taken(world, loop.step(1), engine.policy, [loop.learner.optimiser])


def taken(
    world: World, report: StepReport, policy: Policy, optimisers: list[Optimiser], beside: nn.Module | None = None
) -> Taken:
    """``beside``: a model that was trained beside the policy, or in its place."""
    slopes = [whole_gradient(world, optimiser) for optimiser in optimisers]
    with policy.full_weights():
        weights = [snapshot(model).float() for model in (policy.model, beside) if model is not None]
    return Taken(
        torch.cat([torch.zeros(0), *slopes]).numpy(),
        torch.cat(weights).numpy(),
        [[c.token_ids.tolist() for c in g.group.completions] for g in report.groups],
        np.concatenate([np.zeros(0), *(of_one for g in report.groups for of_one in g.advantages)]),
        {name: value for name, value in report.metrics.items() if name not in CLOCKS},
        sum(found is not None for row in report.stats for found in row),
    )


def away(one: np.ndarray, other: np.ndarray) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-12))


def whole_gradient(world: World, optimiser: Optimiser) -> Tensor:
    """The gradient of the last update as one rank would have it, put together of pieces where ranks hold pieces."""
    own = [torch.zeros_like(m) if m.grad is None else m.grad for m in optimiser.masters]
    if not isinstance(optimiser, ShardedOptimiser):
        return torch.cat([g.flatten() for g in own])
    mine = [(optimiser._range(w), g.numpy()) for w, g in zip(optimiser.weights, own, strict=True)]
    wholes = [torch.full(w.shape, torch.nan) for w in optimiser.weights]
    for parts in world.all_gather_dict({world.rank: mine}).values():
        for whole, (at, part) in zip(wholes, parts, strict=True):
            at.fill(whole, torch.from_numpy(part))
    return torch.cat([whole.flatten() for whole in wholes])


CLOCKS = {"tokens_per_s", "cpu_seconds", "memory_mib", "sample_tokens_per_s", "update_tflops", "mfu"}


def imitate(world: World) -> tuple[np.ndarray, list[float]]:
    """Weights after three sft steps, and the held-out loss after each; in packs of which ranks have unequal numbers."""
    told = ("examples=40", "heldout_share=0.3", "eval_every=1", "tokens_per_pack=64", "batch_size=7")
    asked = recipe(*(f"sft.{key}" for key in told))
    first = asked.stages[0]
    assert isinstance(first, Sft)
    task = task_for(asked, first)
    pupil = shard_policy(policy(alphabet=task.alphabet or ""), asked, world)
    loop = SftLoop(
        first.model_copy(update={"optimiser": first.optimiser.model_copy(update=SMOOTH)}), 0, task, pupil, None, world
    )
    losses = [loop.step(n).metrics["heldout_loss"] for n in (1, 2, 3)]
    with pupil.full_weights():
        return snapshot(pupil.model).numpy(), losses


def disagree(world: World) -> str:
    """One rank's share can't be rewarded: what each rank hears of it."""

    def own() -> list[int]:
        if world.rank == 1:
            raise RewardError("reward 'r'", "gone", because="its endpoint does not answer", fix="start it")
        return [0]

    try:
        world.all_gather_results(own)
    except RewardError as error:
        return f"{error} {world.all_failed('here')}"
    return "nothing"


def exchange(world: World) -> dict[str, Any]:
    """Every call of a world once, with ranks that have different things to say."""
    halves = torch.full((3,), float(world.rank))
    world.broadcast_([halves])
    own = {"all": 1.0, f"of {world.rank}": float(world.rank)}
    return {
        "share": world.local_prompts(list(range(7))),
        "gathered": world.all_gather_results(lambda: [10 * i for i in world.local_prompts(list(range(7)))]),
        "mine": world.local_indices([5, 1, 1, 1, 1, 1]),
        "summed": world.all_reduce_sum(own),
        "largest": world.all_reduce_max(own),
        "together": world.all_gather_dict({world.rank: "x"}),
        "spread": halves.tolist(),
    }
