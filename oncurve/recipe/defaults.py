"""Defaults that depend on other keys: on a stage's objective, or on the recipe that the stage is part of."""

from __future__ import annotations

from oncurve.objective_specs import DEFAULT_KL_ESTIMATOR, AdvantageScale, Baseline, KlEstimator, KlPlace
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward, Task
from oncurve.recipe.schema.stages import Grpo, Ppo, RolloutStage, Stage, StageBase, Trpo
from oncurve.rng import derive_seed


def advantage_settings(stage: Grpo | Trpo) -> tuple[Baseline, AdvantageScale]:
    """The baseline and the scale of a stage's advantages. Settings that the recipe leaves out come from the stage's objective;
    for a trpo stage that is GRPO."""
    return stage.advantage.baseline or stage.spec.baseline, stage.advantage.scale or stage.spec.scale


def kl_settings(stage: Grpo | Ppo) -> tuple[KlPlace, KlEstimator]:
    """Where a stage's KL term goes and how it is estimated: the recipe's, else the objective's. PPO puts it in the reward."""
    return stage.kl_place, stage.kl.estimator or DEFAULT_KL_ESTIMATOR[stage.kl_place]


OFF_POLICY_IMPORTANCE_CAP = 2.0
"""Default cap of truncated importance sampling if the sampler's weights or rounding differ from the learner's (Yao et al.
2025)."""


def with_importance_cap(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages, with truncated importance sampling turned on if sampler and learner are not the same policy.

    With `scale.engine = "vllm"`, `engine.kv_dtype = "fp8"`, staleness or `carry_over`, tokens are weighted by
    min(π_learner/π_sampler, 2), unless the stage sets `importance_cap`, `mismatch_limit` or `correction`.
    """
    differs = recipe.scale.engine != "native" or recipe.scale.max_staleness > 0 or recipe.engine.kv_dtype == "fp8"

    def is_corrected(stage: Stage) -> bool:
        return stage.needs_importance_cap and (differs or (isinstance(stage, Grpo) and stage.carry_over > 0))

    return tuple(
        stage.model_copy(update={"importance_cap": OFF_POLICY_IMPORTANCE_CAP}) if is_corrected(stage) else stage
        for stage in recipe.stages
    )


def seed_for_stage(recipe: Recipe, stage: Stage) -> int:
    """The seed of a stage's prompts and samples. It is the recipe's seed, except for the second and later stages that sample:
    with the recipe's seed they would repeat the first one's prompts and random numbers.

    It depends on the stage's position and not on its name or type, so that in `oncurve compare` all algorithms get the same
    prompts and random numbers.
    """
    names = [other.label for other in recipe.rollout_stages]
    place = names.index(stage.label) if stage.samples else 0
    return derive_seed(recipe.seed, f"stage/{place}") if place else recipe.seed


def task_for_stage(recipe: Recipe, stage: StageBase) -> Task:
    """The stage's own task, else the recipe's."""
    return stage.task or recipe.task


def rewards_for_stage(recipe: Recipe, stage: RolloutStage) -> tuple[Reward, ...]:
    """The stage's own rewards, else the recipe's. Agents report their reward themselves if there are none."""
    rewards = recipe.rewards if stage.rewards is None else stage.rewards
    return rewards or (REPORTED if task_for_stage(recipe, stage).type == "agent" else ())


REPORTED = (Reward(type="reported"),)
"""The default rewards of agents."""


def mixed_tasks(task: Task) -> tuple[str, ...]:
    """The names of the tasks of a `mix`; none of any other task."""
    entries = task.options.get("mix", ()) if task.type == "mix" else ()
    tables = entries if isinstance(entries, list | tuple) else ()
    return tuple(str(entry.get("name") or entry.get("type")) for entry in tables if isinstance(entry, dict))
