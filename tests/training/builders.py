"""A small policy, small recipes, and graded groups made by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.native.engine import NativeEngine
from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Aspect, Completion, GradedGroup, Group, Prompt, ScoredCompletion, ScoredGroup, StopReason
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.stages.grpo import GrpoLoop

SMOOTH = {"learning_rate": 0.5, "eps": 1.0, "max_grad_norm": 0.0}
"""Adam with a large epsilon: the update is smooth in its gradient, so that rounding stays rounding."""
TERMS = {
    "kl": {"beta": 0.04, "where": "loss", "ratio_weighted": True},
    "entropy_bonus": 0.01,
    "importance_cap": 1.5,
    "updates_per_step": 2,
    "optimiser": SMOOTH,
}
"""A stage with every term of the loss."""
SMALL = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=128)

RECIPE = """
name = "small"
threads = 1

[model.tiny]
layers = 1
width = 32
heads = 2
kv_heads = 1
head_size = 16
mlp_width = 48
context = 64

[task]
type = "arithmetic"
digits = 1
heldout = 10

[[rewards]]
type = "format"
style = "soft"

[[stages]]
type = "sft"
steps = 3
batch_size = 8

[[stages]]
type = "grpo"
steps = 4
prompts_per_step = 3
group_size = 4
sampling.max_new_tokens = 8
optimiser.learning_rate = 1e-3
"""


def recipe(*sets: str) -> Recipe:
    return parse_recipe(tomllib.loads(RECIPE), sets)


def policy(seed: int = 0, alphabet: str = "0123456789+=", **options: Any) -> Policy:
    return load_policy(Model(tiny=SMALL, **options), alphabet=alphabet, seed=seed)


def stage(**options: Any) -> Grpo:
    """A grpo stage whose updates are too small to change a weight, unless the options say otherwise."""
    plain = {"steps": 4, "prompts_per_step": 4, "group_size": 4, "optimiser": {"learning_rate": 1e-9, "max_grad_norm": 0.0}}
    return Grpo.model_validate({**plain, **options})


def completion(dice: np.random.Generator, length: int, *, stop: StopReason = "end", masked: bool = False) -> Completion:
    logps = -dice.random(length).astype(np.float32)
    mask = dice.random(length) < 0.7 if masked else np.ones(length, bool)
    return Completion(dice.integers(3, 19, length), "", stop, logps, logps, logps, mask)


def graded_group(
    dice: np.random.Generator,
    prompt: int,
    lengths: Sequence[int],
    *,
    signal: bool = True,
    masked: bool = False,
    name: str = "p",
) -> GradedGroup:
    """A group of completions of these lengths, with a random advantage for every token, or 0."""
    rows = [completion(dice, n, masked=masked) for n in lengths]
    group = Group(Prompt(id=name, text="1"), dice.integers(3, 19, prompt), tuple(rows))
    scored = ScoredGroup(group, tuple(ScoredCompletion(c, (Aspect("a", 0.0),)) for c in rows))
    size = 1.0 if signal else 0.0
    advantages = tuple((size * dice.standard_normal(n)).astype(np.float32) for n in lengths)
    return GradedGroup(scored, advantages, (True,) * len(rows))


def gradient(model: torch.nn.Module) -> Tensor:
    """Every gradient end to end; a parameter that got none counts as 0."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def snapshot(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def apart(one: Tensor, other: Tensor) -> float:
    """Relative L2 distance."""
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


PROMPTS = PromptList.of([f"{a}+{b}=" for a in range(6) for b in range(6)])


def loop_for(options: dict[str, Any], reward: Callable[..., Any], task: PromptList = PROMPTS, seed: int = 0) -> GrpoLoop:
    """A grpo stage on the small model, with one Python function as its reward."""
    sampling = {"max_new_tokens": 8}
    config = stage(**{"sampling": sampling, "optimiser": {"learning_rate": 1e-2}, **options})
    engine = NativeEngine(policy(seed), Engine(slots=16))
    return GrpoLoop(config, seed, task, engine, RewardMix([FunctionReward(reward, "f")]))


def digits(text: str) -> float:
    """A reward with something to learn: how many digits there are."""
    return float(sum(c.isdigit() for c in text))
