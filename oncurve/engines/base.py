"""What an engine is, what it is asked for, and which one samples for a recipe.

Three classes implement `Engine`: `NativeEngine` decodes in this process, `VllmEngine` in a vLLM process, and `RemoteEngine`
(cluster) in sampler processes on other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from oncurve.errors import ModelError
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Ints, Prompt

SLOTS_CPU, SLOTS_GPU = 128, 512
"""Completions decoded at once if the recipe sets no number."""


@dataclass(frozen=True, slots=True)
class SampleKey:
    """The seed and step from which, with a prompt's id and a sample's index, all random numbers of a completion follow."""

    seed: int
    step: int


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """``samples`` completions of one prompt. ``top``: how many of the likeliest tokens to report at each position.

    Example: ``SampleRequest(prompt, policy.encode(prompt), samples=8, sampling=Sampling(), key=SampleKey(seed=0, step=1))``
    """

    prompt: Prompt
    prompt_ids: Ints
    samples: int
    sampling: Sampling
    key: SampleKey
    top: int = 0


class WeightSource(Protocol):
    """Puts new weights into the policy while completions are sampled."""

    @property
    def version(self) -> int:
        """The number of updates that the policy's present weights have had."""

    def __call__(self) -> bool:
        """Load new weights if there are any; called between two decode rounds. Returns whether the weights changed."""


class Engine(Protocol):
    """Samples groups of completions from a policy."""

    policy: Policy
    settings: EngineSettings
    weight_source: WeightSource | None
    """If set, new weights may arrive while completions are sampled; each completion then records its versions."""
    shares_weights: bool
    """Whether the engine samples with the very tensors that the learner updates."""

    @property
    def log_lines(self) -> tuple[str, ...]:
        """What the run's log should say about how this engine samples."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: SampleKey,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """Sample ``group_size`` completions of each prompt. ``on_group`` gets a prompt's index and group once it is
        complete."""

    def close(self) -> None:
        """Release what the engine holds besides the policy."""


def build_engine(policy: Policy, recipe: Recipe) -> Engine:
    """Build the engine that ``scale.engine`` names, with the policy's weights. The caller closes it."""
    if recipe.scale.engine == "vllm":
        from oncurve.engines.vllm.engine import VllmEngine  # the engines import this module

        return VllmEngine(policy, recipe.engine, recipe.scale)
    from oncurve.engines.native.engine import NativeEngine
    from oncurve.engines.native.sampler_check import check_sampler

    engine = NativeEngine(policy, recipe.engine)
    check_sampler(engine)
    return engine


def check_engine(recipe: Recipe) -> None:
    """Refuse an engine that is not installed, and settings that it does not support, before a model is loaded."""
    if recipe.scale.engine != "vllm":
        return
    from oncurve.engines.vllm.engine import check_model, check_sampling, check_vllm

    check_model(recipe.model)
    for stage in recipe.rollout_stages:
        check_sampling(stage.sampling, f"{stage.label}.sampling")
    check_vllm()


def slots_for(engine: Engine, completions: int) -> int:
    """The number of these completions that the engine decodes at once."""
    return engine.settings.slots or default_slots(engine.policy.device, completions)


def default_slots(device: torch.device, completions: int) -> int:
    """Slots for steps of this many completions: all at once, up to the device's limit."""
    return min(max(completions, 1), SLOTS_GPU if device.type == "cuda" else SLOTS_CPU)


def encode_prompts(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling) -> list[Ints]:
    """The prompts' tokens. Raises ModelError if a prompt and its completion would not fit the model's positions."""
    prompt_ids = [policy.encode(p) for p in prompts]
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if len(ids) + sampling.max_new_tokens > policy.max_positions:
            raise ModelError(
                prompt.id,
                f"a prompt of {len(ids)} tokens with max_new_tokens = {sampling.max_new_tokens}",
                because=f"the model addresses {policy.max_positions} positions",
                fix="shorten the prompt, lower sampling.max_new_tokens, or use a model with a longer context",
            )
    return prompt_ids
