"""Which engine samples for a recipe."""

from __future__ import annotations

from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.vllm.engine import VllmEngine, check_model, check_sampling, check_vllm
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import RolloutStage


def build_engine(policy: Policy, recipe: Recipe) -> NativeEngine:
    """The engine that ``scale.engine`` names, with the policy's weights. Whoever asks for it closes it."""
    if recipe.scale.engine == "vllm":
        return VllmEngine(policy, recipe.engine, recipe.scale)
    return NativeEngine(policy, recipe.engine)


def check_engine(recipe: Recipe) -> None:
    """Refuses what the recipe's engine can't do, and one that is not installed, before anything is loaded or written."""
    if recipe.scale.engine != "vllm":
        return
    check_model(recipe.model)
    for stage in recipe.stages:
        if isinstance(stage, RolloutStage):
            check_sampling(stage.sampling, f"{stage.label}.sampling")
    check_vllm()
