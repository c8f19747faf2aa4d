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
from oncurve.objective_specs import OBJECTIVE_SPECS, ObjectiveName
from oncurve.recipe.defaults import kl_settings
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Advantage, Optimiser
from oncurve.recipe.schema.stages import Grpo, PolicyGradientStage, Ppo, RolloutStage, Stage, Trpo
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
        because="a comparison gives every algorithm the same samples and rewards to learn from",
        fix="compare a recipe with a stage of type grpo, ppo or trpo",
    )


def with_algorithm(recipe: Recipe, algorithm: str, sets: list[str] | None = None) -> Recipe:
    """The recipe with another algorithm in its sampling stage, which is named after it. Later stages are dropped."""
    if algorithm not in ALGORITHMS:
        raise _unknown_algorithm(algorithm)
    base = base_stage(recipe)
    stage = ALGORITHMS[algorithm](base)
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
    algorithm = {"type", "name", "advantage", "clip"}
    return {key: getattr(base, key) for key in kind.model_fields if key in type(base).model_fields and key not in algorithm}


def _with_objective(name: ObjectiveName, **changes: Any) -> Callable[[RolloutStage], Stage]:
    def convert(base: RolloutStage) -> Grpo:
        if isinstance(base, Grpo) and base.objective == name and not changes:
            return base
        values = _shared_keys(base, Grpo) | {"objective": name, **changes}
        if not OBJECTIVE_SPECS[name].uses_ratio:  # a second update would use samples of another policy, uncorrected
            values |= {"updates_per_step": 1, "minibatches": 1}
        if isinstance(base, PolicyGradientStage):
            values["kl"] = base.kl.model_copy(update={"where": None, "estimator": None})
        return Grpo.model_validate(values | {"length_budget": None})

    return convert


def _as_ppo(base: RolloutStage) -> Stage:
    return base if isinstance(base, Ppo) else Ppo.model_validate(_shared_keys(base, Ppo))


def _as_trpo(base: RolloutStage) -> Stage:
    if isinstance(base, Trpo):
        return base
    advantage = {"advantage": base.advantage} if isinstance(base, Grpo) else {}
    return Trpo.model_validate(_shared_keys(base, Trpo) | {"optimiser": Optimiser()} | advantage)


ALGORITHMS: Mapping[str, Callable[[RolloutStage], Stage]] = {
    **{name: _with_objective(name) for name in OBJECTIVE_SPECS},
    "reinforce_baseline": _with_objective("reinforce", advantage=Advantage(baseline="mean")),
    "ppo": _as_ppo,
    "trpo": _as_trpo,
}
"""Every algorithm by name: a function from a recipe's sampling stage to the same stage with this algorithm."""


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Forward and backward passes of a model of the policy's size over a step's samples, without sampling."""

    forward: float
    backward: float


def learning_passes(stage: RolloutStage, tries: float = 1.0) -> PassCounts:
    """The passes of a step's update. ``tries`` is the number of line-search steps of a trpo stage. Each Fisher product of trpo
    counts as two backward passes over ``fisher_share`` of the samples."""
    if isinstance(stage, Trpo):
        share = stage.fisher_share
        return PassCounts(1 + share + 1 + tries, 1 + share + 2 * share * (stage.cg_iterations + 1))
    assert isinstance(stage, Grpo | Ppo)
    forward = stage.updates_per_step + (stage.minibatches > 1)
    if stage.kl.beta:
        forward += 1 + 2 * (kl_settings(stage)[0] == "reward")
    if isinstance(stage, Ppo):
        return PassCounts(forward + 1 + stage.updates_per_step, 2 * stage.updates_per_step)
    return PassCounts(forward, stage.updates_per_step)


def with_budget(recipe: Recipe, *, tokens: int | None = None, seconds: float | None = None) -> Recipe:
    """The recipe with a constant learning rate after the warm-up in its last stage, and a budget instead of steps if one is
    given.

    A decaying schedule needs the number of the last step, which a run that ends by its budget does not know.
    """
    stage = recipe.stages[-1]
    assert isinstance(stage, RolloutStage)
    changes: dict[str, Any] = {"optimiser": stage.optimiser.model_copy(update={"schedule": "constant"})}
    if tokens is not None or seconds is not None:
        changes |= {"tokens": tokens, "seconds": seconds, "steps": stage.steps * MAX_STEPS_FACTOR}
    changed = stage.model_copy(update=changes)
    return check_recipe(recipe.model_copy(update={"stages": (*recipe.stages[:-1], changed)}))
