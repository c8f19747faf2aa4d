"""One recipe under several algorithms: the same sampling, rewards and start, another way to learn from them.

An algorithm is the stage type `ppo` or `trpo`, or an objective of the stage `grpo` by its name (`reinforce_baseline` being
`reinforce` against the group's mean). What a recipe says of sampling, rewards, KL and optimiser goes over; what only its own
algorithm understands does not.
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

STEPS_AT_MOST = 50
"""With a budget in tokens or seconds a stage may take this many times the recipe's steps before it ends anyway."""


def base_stage(recipe: Recipe) -> RolloutStage:
    """The stage that is put under other algorithms: the recipe's last that samples."""
    for stage in reversed(recipe.stages):
        if isinstance(stage, RolloutStage):
            return stage
    raise RecipeError(
        "stages",
        "no stage that samples",
        because="algorithms are compared by what they make of samples and their rewards",
        fix="compare a recipe with a stage of type grpo, ppo or trpo",
    )


def with_algorithm(recipe: Recipe, algorithm: str, sets: list[str] | None = None) -> Recipe:
    """The recipe with its sampling stage under another algorithm, named after it, and the stages before it as they are."""
    if algorithm not in ALGORITHMS:
        raise _unknown(algorithm)
    base = base_stage(recipe)
    stage = ALGORITHMS[algorithm](base)
    before = recipe.stages[: recipe.stages.index(base)]
    named = stage.model_copy(update={"name": algorithm})
    changed = recipe.model_copy(update={"stages": (*before, named)})
    try:
        return parse_recipe(changed.model_dump(mode="json", exclude_none=True), sets or [])
    except RecipeError as error:
        raise RecipeError(
            f"--algorithms {algorithm}", f"{error.where}: {error.what}", because=error.because, fix=error.fix
        ) from None


def _unknown(algorithm: str) -> RecipeError:
    if algorithm in ("dpo", "sft"):
        because = "it learns from a file of its own, not from samples and rewards: there is no like budget to compare at"
        return RecipeError(f"--algorithms {algorithm}", "not comparable", because=because, fix="leave it out")
    return RecipeError(
        f"--algorithms {algorithm}",
        "unknown algorithm" + did_you_mean(algorithm, ALGORITHMS),
        because="it is neither a stage type that samples nor an objective of the stage grpo",
        fix=f"use some of: {', '.join(ALGORITHMS)}",
    )


def _shared(base: RolloutStage, kind: type[RolloutStage]) -> dict[str, Any]:
    """What goes over: every key that both kinds of stage have, except those that are the algorithm itself."""
    own = {"type", "name", "advantage", "clip"}
    return {key: getattr(base, key) for key in kind.model_fields if key in type(base).model_fields and key not in own}


def _objective(name: ObjectiveName, **changes: Any) -> Callable[[RolloutStage], Stage]:
    def convert(base: RolloutStage) -> Grpo:
        if isinstance(base, Grpo) and base.objective == name and not changes:
            return base
        told = _shared(base, Grpo) | {"objective": name, **changes}
        if not OBJECTIVE_SPECS[name].uses_ratio:  # a second update would use samples of another policy, uncorrected
            told |= {"updates_per_step": 1, "minibatches": 1}
        if isinstance(base, PolicyGradientStage):
            told["kl"] = base.kl.model_copy(update={"where": None, "estimator": None})
        return Grpo.model_validate(told | {"length_budget": None})

    return convert


def _ppo(base: RolloutStage) -> Stage:
    return base if isinstance(base, Ppo) else Ppo.model_validate(_shared(base, Ppo))


def _trpo(base: RolloutStage) -> Stage:
    if isinstance(base, Trpo):
        return base
    graded = {"advantage": base.advantage} if isinstance(base, Grpo) else {}
    return Trpo.model_validate(_shared(base, Trpo) | {"optimiser": Optimiser()} | graded)


ALGORITHMS: Mapping[str, Callable[[RolloutStage], Stage]] = {
    **{name: _objective(name) for name in OBJECTIVE_SPECS},
    "reinforce_baseline": _objective("reinforce", advantage=Advantage(baseline="mean")),
    "ppo": _ppo,
    "trpo": _trpo,
}
"""Every algorithm by name, as what it makes of a recipe's sampling stage."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes over a step's samples by a model of the policy's size, sampling aside."""

    forward: float
    backward: float


def passes_of(stage: RolloutStage, tries: float = 1.0) -> Passes:
    """What a step's learning costs. ``tries`` are the line search's of a trpo stage; its second derivatives count as two passes
    back, over ``fisher_share`` of the samples."""
    if isinstance(stage, Trpo):
        share = stage.fisher_share
        return Passes(1 + share + 1 + tries, 1 + share + 2 * share * (stage.cg_iterations + 1))
    assert isinstance(stage, Grpo | Ppo)
    forward = stage.updates_per_step + (stage.minibatches > 1)
    if stage.kl.beta:
        forward += 1 + 2 * (kl_settings(stage)[0] == "reward")
    if isinstance(stage, Ppo):
        return Passes(forward + 1 + stage.updates_per_step, 2 * stage.updates_per_step)
    return Passes(forward, stage.updates_per_step)


def with_constant_rate(recipe: Recipe, *, tokens: int | None = None, seconds: float | None = None) -> Recipe:
    """The recipe's last stage with a constant rate after its warm-up, and, where a budget is told, with that in place of steps.

    A schedule that goes down to the last step must know which step is last; a run that ends by its budget does not.
    """
    stage = recipe.stages[-1]
    assert isinstance(stage, RolloutStage)
    changes: dict[str, Any] = {"optimiser": stage.optimiser.model_copy(update={"schedule": "constant"})}
    if tokens is not None or seconds is not None:
        changes |= {"tokens": tokens, "seconds": seconds, "steps": stage.steps * STEPS_AT_MOST}
    changed = stage.model_copy(update=changes)
    return check_recipe(recipe.model_copy(update={"stages": (*recipe.stages[:-1], changed)}))
