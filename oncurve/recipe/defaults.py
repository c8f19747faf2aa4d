"""What a recipe leaves unsaid: the parts of a stage that follow from its objective, or from the recipe around it."""

from __future__ import annotations

from typing import NamedTuple

from oncurve.recipe.schema.recipe import Grpo, ObjectiveName, Recipe, Stage
from oncurve.recipe.schema.sections import Reward, Task
from oncurve.recipe.schema.stages import Baseline, KlEstimator, KlPlace, PolicyGradientStage, Ppo, RolloutStage, Scale, Trpo


class ObjectiveDefaults(NamedTuple):
    """What an objective's paper does around its loss, where the recipe says nothing."""

    baseline: Baseline = "mean"
    scale: Scale = "group"
    kl: KlPlace = "loss"


OBJECTIVE_DEFAULTS: dict[ObjectiveName, ObjectiveDefaults] = {
    "dr_grpo": ObjectiveDefaults(scale="none"),
    "rloo": ObjectiveDefaults(baseline="leave_one_out", scale="none", kl="reward"),
    "reinforce": ObjectiveDefaults(baseline="none", scale="none", kl="reward"),
    "reinforce_pp": ObjectiveDefaults(baseline="none", scale="whiten", kl="reward"),
}
"""Only those that differ from GRPO's. Dr. GRPO: Liu et al. 2025; RLOO: Ahmadian et al. 2024; REINFORCE++: Hu et al. 2025."""


def _objective_defaults(stage: Grpo | Ppo | Trpo) -> ObjectiveDefaults:
    if isinstance(stage, Ppo):
        return ObjectiveDefaults(kl="reward")
    return OBJECTIVE_DEFAULTS.get(stage.objective, ObjectiveDefaults()) if isinstance(stage, Grpo) else ObjectiveDefaults()


def advantage_settings(stage: Grpo | Trpo) -> tuple[Baseline, Scale]:
    """The baseline and the scale of a stage's advantages: the recipe's, else the objective's own."""
    own = _objective_defaults(stage)
    return stage.advantage.baseline or own.baseline, stage.advantage.scale or own.scale


def kl_settings(stage: Grpo | Ppo) -> tuple[KlPlace, KlEstimator]:
    """Where a stage's KL term goes and how it is estimated: the recipe's, else the objective's own.

    In the loss the default is k3, which is never negative; in the reward it is k1, whose sum over a completion
    is its log-ratio.
    """
    where = stage.kl.where or _objective_defaults(stage).kl
    return where, stage.kl.estimator or ("k1" if where == "reward" else "k3")


FOREIGN_CAP = 2.0
"""The cap of truncated importance sampling where the sampler is not the learner itself (Yao et al. 2025)."""


def with_importance_cap(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages, with the correction that a sampler of other weights or other rounding than the learner's asks for.

    With `scale.engine = "vllm"`, or staleness, tokens are weighted by min(π_learner/π_sampler, 2) where the recipe sets neither
    `importance_cap` nor `mismatch_limit`.
    """
    foreign = recipe.scale.engine != "native" or recipe.scale.max_staleness > 0
    unsaid = [
        isinstance(s, PolicyGradientStage) and s.importance_cap is None and s.mismatch_limit is None for s in recipe.stages
    ]
    capped = {"importance_cap": FOREIGN_CAP}
    return tuple(
        s.model_copy(update=capped) if foreign and silent else s for s, silent in zip(recipe.stages, unsaid, strict=True)
    )


def task_for_stage(recipe: Recipe, stage: Stage) -> Task:
    """The stage's own task, else the recipe's."""
    return stage.task or recipe.task


def rewards_for_stage(recipe: Recipe, stage: RolloutStage) -> tuple[Reward, ...]:
    """The stage's own rewards, else the recipe's."""
    return recipe.rewards if stage.rewards is None else stage.rewards
