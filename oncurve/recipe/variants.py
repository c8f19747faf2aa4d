"""Variants of a recipe for `oncurve compare`: the same sampling, rewards and starting point, another algorithm.

An algorithm is the stage type `ppo` or `trpo`, or the name of an objective of the stage `grpo`; `reinforce_baseline` is
`reinforce` with the group's mean as baseline. Sampling, rewards, KL and optimiser are kept; keys that only the recipe's own
algorithm has are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oncurve.errors import RecipeError, did_you_mean
from oncurve.objective_specs import BUILT_IN_OBJECTIVES, OBJECTIVE_SPECS
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Advantage, Optimiser
from oncurve.recipe.schema.stages import Distil, Grpo, PolicyGradientStage, Ppo, RolloutStage, Trpo
from oncurve.recipe.validate import check_recipe

MAX_STEPS_FACTOR = 50
"""With a budget in tokens or seconds, a stage ends after at most this many times the recipe's steps."""


def base_stage(recipe: Recipe) -> RolloutStage:
    """The stage that gets another algorithm: the recipe's last one that samples."""
    if recipe.rollout_stages:
        return recipe.rollout_stages[-1]
    raise RecipeError(
        "stages",
        "no stage that samples",
        because="a comparison gives every algorithm the same prompts and rewards to learn from",
        fix="compare a recipe with a stage of type grpo, ppo or trpo",
    )


def with_algorithm(recipe: Recipe, algorithm: str, sets: list[str] | None = None) -> Recipe:
    """The recipe with another algorithm in its sampling stage, which is named after it. Later stages are dropped."""
    if algorithm not in ALGORITHMS and algorithm not in OBJECTIVE_SPECS:
        raise _unknown_algorithm(algorithm)
    base = base_stage(recipe)
    convert = ALGORITHMS.get(algorithm) or _with_objective(algorithm)
    stage = convert(base)
    before = recipe.stages[: recipe.stages.index(base)]
    stages = (*before, stage.model_copy(update={"name": algorithm}))
    changed = recipe.model_copy(update={"stages": stages})
    try:
        return parse_recipe(changed.model_dump(mode="json", exclude_none=True), sets or [])
    except RecipeError as error:
        raise RecipeError(
            f"--algorithms {algorithm}", f"{error.where}: {error.what}", because=error.because, fix=error.fix
        ) from None


def _unknown_algorithm(algorithm: str) -> RecipeError:
    if algorithm in ("dpo", "sft"):
        because = "it learns from a file, not from samples and rewards, so there is no equal budget to compare at"
        return RecipeError(f"--algorithms {algorithm}", "not comparable", because=because, fix="remove it")
    return RecipeError(
        f"--algorithms {algorithm}",
        "unknown algorithm" + did_you_mean(algorithm, ALGORITHMS),
        because="it is neither a stage type that samples nor an objective of grpo",
        fix=f"use any of: {', '.join(ALGORITHMS)}",
    )


def _shared_keys(base: RolloutStage, kind: type[RolloutStage]) -> dict[str, Any]:
    """The values of all keys that both stage types have, except those that define the algorithm."""
    algorithm = {"type", "name", "clip"} | (set() if kind is Trpo else {"advantage"})  # a trpo stage grades as the base does
    return {key: getattr(base, key) for key in kind.model_fields if key in type(base).model_fields and key not in algorithm}


def _with_objective(name: str, **changes: Any) -> Callable[[RolloutStage], RolloutStage]:
    def convert(base: RolloutStage) -> RolloutStage:
        if base.algorithm == name and not changes:
            return base
        values = _shared_keys(base, Grpo) | {"objective": name, **changes}
        if not OBJECTIVE_SPECS[name].uses_ratio:  # a second update would use samples of another policy, uncorrected
            values |= {"updates_per_step": 1, "minibatches": 1}
        if "kl" in values:
            values["kl"] = values["kl"].model_copy(update={"where": None, "estimator": None})
        return Grpo.model_validate(values | {"length_budget": None, "dro_tau": None})

    return convert


def _with_type(kind: type[RolloutStage], **changes: Any) -> Callable[[RolloutStage], RolloutStage]:
    def convert(base: RolloutStage) -> RolloutStage:
        return base if type(base) is kind else kind.model_validate(_shared_keys(base, kind) | changes)

    return convert


ALGORITHMS: Mapping[str, Callable[[RolloutStage], RolloutStage]] = {
    **{name: _with_objective(name) for name in BUILT_IN_OBJECTIVES},
    "reinforce_baseline": _with_objective("reinforce", advantage=Advantage(baseline="mean")),
    "ppo": _with_type(Ppo),
    "trpo": _with_type(Trpo, optimiser=Optimiser()),
}
"""Every built-in algorithm by name: a function from a recipe's sampling stage to the same stage with this algorithm."""


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Forward and backward passes of a model of the policy's size over a step's samples, without sampling."""

    forward: float
    backward: float


def learning_passes(stage: RolloutStage, tries: float = 1.0) -> PassCounts:
    """The passes of a step's update. ``tries`` is the number of line-search steps of a trpo stage."""
    return LEARNING_PASSES[type(stage)](stage, tries)


def _surrogate_passes(stage: PolicyGradientStage, tries: float) -> PassCounts:
    forward = stage.updates_per_step + (stage.minibatches > 1) + (stage.entropy.top_share < 1)
    if stage.kl.beta:
        forward += 1 + 2 * (stage.kl_place == "reward")
    return PassCounts(forward, stage.updates_per_step)


def _distil_passes(stage: Distil, tries: float) -> PassCounts:
    """The teacher adds a forward pass, which counts as one of the policy, whatever the teacher's size."""
    passes = _surrogate_passes(stage, tries)
    return PassCounts(passes.forward + 1, passes.backward)


def _ppo_passes(stage: Ppo, tries: float) -> PassCounts:
    """The critic adds a forward pass for the old values, and its own updates."""
    policy = _surrogate_passes(stage, tries)
    return PassCounts(policy.forward + 1 + stage.critic_passes, policy.backward + stage.critic_passes)


def _trpo_passes(stage: Trpo, tries: float) -> PassCounts:
    """Each Fisher product counts as two backward passes over ``fisher_share`` of the samples."""
    share = stage.fisher_share
    return PassCounts(1 + share + 1 + tries, 1 + share + 2 * share * (stage.cg_iterations + 1))


LEARNING_PASSES: Mapping[type[RolloutStage], Callable[[Any, float], PassCounts]] = {
    Grpo: _surrogate_passes,
    Distil: _distil_passes,
    Ppo: _ppo_passes,
    Trpo: _trpo_passes,
}


def with_budget(recipe: Recipe, *, tokens: int | None = None, seconds: float | None = None) -> Recipe:
    """The recipe with a constant learning rate after the warm-up in its last stage, and a budget instead of steps if one is
    given.

    A decaying schedule needs the number of the last step, which a run that ends by its budget does not know.
    """
    stage = base_stage(recipe)
    changes: dict[str, Any] = {"optimiser": stage.optimiser.model_copy(update={"schedule": "constant"})}
    if tokens is not None or seconds is not None:
        changes |= {"tokens": tokens, "seconds": seconds, "steps": stage.steps * MAX_STEPS_FACTOR}
    changed = stage.model_copy(update=changes)
    return check_recipe(recipe.model_copy(update={"stages": (*recipe.stages[:-1], changed)}))
