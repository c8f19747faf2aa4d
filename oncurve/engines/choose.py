"""Which engine samples for a recipe."""

from __future__ import annotations

from oncurve.engines.native import NativeEngine
from oncurve.engines.vllm import VllmEngine, check_vllm
from oncurve.models.policy import Policy
from oncurve.recipe.schema import Recipe


def engine_for(policy: Policy, recipe: Recipe) -> NativeEngine:
    """The engine that ``scale.engine`` names, with the policy's weights. Whoever asks for it closes it."""
    if recipe.scale.engine == "vllm":
        return VllmEngine(policy, recipe.engine, recipe.scale)
    return NativeEngine(policy, recipe.engine)


def check_engine(recipe: Recipe) -> None:
    """Refuses a recipe whose engine is not installed, before anything is loaded or written."""
    if recipe.scale.engine == "vllm":
        check_vllm()
