"""Checks on combinations of keys that no run could execute, or that would silently do nothing. Each check is one function.

A check yields RecipeErrors, and the first one is raised. The schema checks the value of a single key; tasks and rewards check
their own options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oncurve.errors import RecipeError
from oncurve.recipe.defaults import advantage_settings, kl_settings, rewards_for_stage, task_for_stage
from oncurve.recipe.schema.base import STAGE_PREFIX
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward
from oncurve.recipe.schema.stages import Grpo, PolicyGradientStage, RolloutStage, Sft, Stage, StageBase

Problems = Iterator[RecipeError]


def check_recipe(recipe: Recipe) -> Recipe:
    """The recipe, if it can run. Otherwise raises the first RecipeError."""
    for problem in find_problems(recipe):
        raise problem
    return recipe


def find_problems(recipe: Recipe) -> Problems:
    """Every invalid combination, in the order of the tables below."""
    for check in RECIPE_CHECKS:
        yield from check(recipe)
    for stage in recipe.stages:
        for section, checks in STAGE_CHECKS.items():
            for stage_check in checks if isinstance(stage, section) else ():
                yield from stage_check(recipe, stage)


def _check_stage_names(recipe: Recipe) -> Problems:
    for label, count in Counter(stage.label for stage in recipe.stages).items():
        if count > 1:
            because = f"{count} stages have this name, and --set, checkpoints and tables identify stages by name"
            yield RecipeError("stages", label, because=because, fix=f'give each its own name, such as name = "{label}_2"')
        if label in Recipe.model_fields:
            because = f"'{label}' is a top-level key, and --set {label}.… would change that"
            yield RecipeError(f"{label}.name", label, because=because, fix="choose another name")
        yield from _check_characters(label, f"{label}.name")


def _check_characters(label: str, key: str) -> Problems:
    if not label or any(mark in label for mark in ".=/\\ \t\n"):
        because = "names are part of dotted keys and of file names"
        yield RecipeError(key, repr(label), because=because, fix="use letters, digits, - and _ only")


def _check_reward_names(recipe: Recipe) -> Problems:
    yield from _check_unique_rewards(recipe.rewards, "rewards")
    for stage in recipe.rollout_stages:
        if stage.rewards is not None:
            yield from _check_unique_rewards(stage.rewards, f"{stage.label}.rewards")


def _check_unique_rewards(rewards: Sequence[Reward], key: str) -> Problems:
    for label, count in Counter(reward.label for reward in rewards).items():
        if count > 1:
            because = f"{count} rewards have this name, and tables and --set identify rewards by name"
            yield RecipeError(key, label, because=because, fix=f'give each its own name, such as name = "{label}_2"')
        yield from _check_characters(label, f"{key}.{label}.name")


def _check_tiny_context(recipe: Recipe) -> Problems:
    """The prompt, at least one token, and the completion share the model's positions."""
    context = recipe.model.tiny.context
    samplers = [stage for stage in recipe.rollout_stages if stage.uses_policy]
    limits = {f"{stage.label}.sampling.max_new_tokens": stage.sampling.max_new_tokens for stage in samplers}
    if recipe.evaluation.max_new_tokens is not None:
        limits["evaluation.max_new_tokens"] = recipe.evaluation.max_new_tokens
    for key, limit in limits.items() if recipe.model.source == "tiny" else ():
        if limit >= context:
            because = f"the built-in model has {context} positions for the prompt and the completion together"
            yield RecipeError(key, limit, because=because, fix=f"use less than {context}, or raise model.tiny.context")


def _check_warmup(recipe: Recipe, stage: Stage) -> Problems:
    updates, warmup = stage.steps * stage.updates_in_step, stage.optimiser.warmup_steps
    if warmup > updates:
        key = f"{stage.label}.optimiser.warmup_steps"
        because = f"the stage ends after {updates} updates, before the warm-up does"
        fix = f"use {updates} or less: --set {key}={updates}; for a short trial, `oncurve train RECIPE --smoke`"
        yield RecipeError(key, warmup, because=because, fix=fix)


def _check_patience(recipe: Recipe, stage: Sft) -> Problems:
    if stage.patience is not None and not (stage.heldout_share and stage.eval_every):
        because = "it counts evaluations of the held-out loss, and there are none"
        fix = "set heldout_share (0.1 is usual) and eval_every"
        yield RecipeError(f"{stage.label}.patience", stage.patience, because=because, fix=fix)


def _check_heldout_patience(recipe: Recipe, stage: RolloutStage) -> Problems:
    if stage.patience is not None and not (stage.eval_every and stage.updates_policy):
        because = "it counts evaluations on the held-out split, and there are none before the end of the stage"
        fix = "set eval_every" if stage.updates_policy else "remove it: this stage does not change the policy"
        yield RecipeError(f"{stage.label}.patience", stage.patience, because=because, fix=fix)


def _check_sft_data(recipe: Recipe, stage: Sft) -> Problems:
    if stage.data is not None and stage.data.startswith(STAGE_PREFIX):
        yield from _check_earlier_stage(recipe, stage, stage.data, "rejection_sample", f"{stage.label}.data")


def _check_reward_models(recipe: Recipe, stage: RolloutStage) -> Problems:
    """A reward model that this run trains must be trained before the stage that uses it."""
    key = "rewards" if stage.rewards is None else f"{stage.label}.rewards"
    for reward in rewards_for_stage(recipe, stage):
        source = reward.options.get("model")
        if reward.type == "model" and isinstance(source, str) and source.startswith(STAGE_PREFIX):
            yield from _check_earlier_stage(recipe, stage, source, "reward_model", f"{key}.{reward.label}.model")


def _check_earlier_stage(recipe: Recipe, stage: StageBase, reference: str, kind: str, key: str) -> Problems:
    labels = [other.label for other in recipe.stages]
    earlier = [other.label for other in recipe.stages[: labels.index(stage.label)] if other.type == kind]
    if reference.removeprefix(STAGE_PREFIX) not in earlier:
        because = f"the stages of type {kind} before '{stage.label}' are: {', '.join(earlier) or 'none'}"
        fix = f"name one of them, add a {kind} stage before this one, or give a path"
        yield RecipeError(key, reference, because=because, fix=fix)


def _check_iterated_reward(recipe: Recipe, stage: Grpo) -> Problems:
    if stage.iterate is None:
        return
    rewards = {reward.label: reward.type for reward in rewards_for_stage(recipe, stage)}
    if rewards.get(stage.iterate.reward) != "model":
        because = f"the stage's rewards are {', '.join(rewards) or 'none'}, and only one of type model can be trained"
        key = f"{stage.label}.iterate.reward"
        yield RecipeError(key, stage.iterate.reward, because=because, fix="name the reward of type model")


def _check_has_reward(recipe: Recipe, stage: RolloutStage) -> Problems:
    rewards = rewards_for_stage(recipe, stage)
    key = "rewards" if stage.rewards is None else f"{stage.label}.rewards"
    if not rewards:
        because = f"the stage '{stage.label}' learns from rewards alone"
        yield RecipeError(key, "none", because=because, fix='add a line [[rewards]] and below it type = "answer"')
    elif all(reward.weight == 0 for reward in rewards):
        names = ", ".join(reward.label for reward in rewards)
        because = f"a reward of weight 0 is recorded but not trained on, and the stage '{stage.label}' has no other"
        yield RecipeError(f"{key}.{rewards[0].label}.weight", "0 for all", because=because, fix=f"give one of {names} a weight")


def _check_group_of_one(recipe: Recipe, stage: Grpo) -> Problems:
    if stage.group_size > 1:
        return
    baseline, scale = advantage_settings(stage)
    key = f"{stage.label}.group_size"
    if baseline == "mean":
        because = "a single completion is its own mean, so every advantage would be 0"
        yield RecipeError(key, 1, because=because, fix='use 2 or more (8 to 64 is usual), or objective = "reinforce"')
    elif baseline == "leave_one_out":
        because = "the baseline is the mean of the others in the group, and there are none"
        yield RecipeError(key, 1, because=because, fix='use 2 or more, or objective = "reinforce"')
    elif scale == "group":
        because = "rewards are divided by the std of their group, and a single reward has none"
        yield RecipeError(key, 1, because=because, fix='use 2 or more, or advantage.scale = "batch" or "none"')
    elif stage.no_signal == "resample":
        because = "groups of equal rewards are resampled, and a single reward always equals itself"
        yield RecipeError(f"{stage.label}.no_signal", "resample", because=because, fix='use "drop" or "keep" with group_size 1')


def _check_prompts_for_ranks(recipe: Recipe, stage: RolloutStage) -> Problems:
    if recipe.scale.copies > stage.prompts_per_step:
        prompts, key = stage.prompts_per_step, f"{stage.label}.prompts_per_step"
        because = f"each copy of the model samples at least one prompt of a step, and {key} is {prompts}"
        fix = f"use {prompts * recipe.scale.tensor} ranks or fewer, or raise {key}"
        yield RecipeError("scale.ranks", recipe.scale.ranks, because=because, fix=fix)


def _check_temperature(recipe: Recipe, stage: RolloutStage) -> Problems:
    if stage.sampling.temperature == 0:
        because = "greedy completions of one prompt are all the same, so no group has a signal"
        key = f"{stage.label}.sampling.temperature"
        fix = "use 1, which samples the policy itself; evaluation.temperature may be 0"
        yield RecipeError(key, 0, because=because, fix=fix)


def _check_overlong(recipe: Recipe, stage: RolloutStage) -> Problems:
    limit = stage.sampling.max_new_tokens
    if stage.overlong is not None and stage.overlong.buffer >= limit:
        because = (
            f"the penalty starts at max_new_tokens − buffer, and max_new_tokens is {limit}: every length would be penalised"
        )
        key = f"{stage.label}.overlong.buffer"
        yield RecipeError(key, stage.overlong.buffer, because=because, fix=f"use less than {limit}")


def _check_kl_weight(recipe: Recipe, stage: PolicyGradientStage) -> Problems:
    if stage.kl.beta != 0:
        return
    values = {
        "where": stage.kl.where if stage.kl.where == "reward" else None,
        "ratio_weighted": stage.kl.ratio_weighted or None,
        "refresh_every": stage.kl.refresh_every or None,
    }
    for name, value in values.items():
        if value is not None:
            because = f"{stage.label}.kl.beta is 0, so there is no reference and this would change nothing"
            shown = str(value).lower() if isinstance(value, bool) else value
            fix = "set kl.beta (0.04 is GRPO's), or remove this"
            yield RecipeError(f"{stage.label}.kl.{name}", shown, because=because, fix=fix)


def _check_minibatches(recipe: Recipe, stage: PolicyGradientStage) -> Problems:
    if stage.minibatches > stage.prompts_per_step:
        because = f"groups are never split, and a step has {stage.prompts_per_step} of them (prompts_per_step)"
        fix = f"use {stage.prompts_per_step} or less"
        yield RecipeError(f"{stage.label}.minibatches", stage.minibatches, because=because, fix=fix)


def _check_kl_in_reward(recipe: Recipe, stage: Grpo) -> Problems:
    place, _ = kl_settings(stage)
    if stage.kl.ratio_weighted and place == "reward" and stage.kl.beta != 0:
        because = "the KL term is in the reward, which is computed before there is a ratio to weight it by"
        key = f"{stage.label}.kl.ratio_weighted"
        yield RecipeError(key, "true", because=because, fix='remove it, or use kl.where = "loss"')


def _check_clip(recipe: Recipe, stage: Grpo) -> Problems:
    clip, key, spec = stage.clip, f"{stage.label}.clip", stage.spec
    if clip is None:
        return
    if spec.clip is None:
        because, shown = f"the objective {stage.objective} clips nothing", f"low = {clip.low:g}, high = {clip.high:g}"
        yield RecipeError(key, shown, because=because, fix="remove clip, or use grpo, dapo or gspo")
    elif clip.dual is not None and spec.surrogate == "cispo":
        because = "cispo bounds the ratio for both signs of the advantage, so a second bound would change nothing"
        yield RecipeError(f"{key}.dual", clip.dual, because=because, fix="remove it and use clip.high")
    elif clip.dual is not None and clip.dual <= 1 + clip.high:
        because = f"it must be above the ratios that clip.high allows, which go up to 1 + high = {1 + clip.high:g}"
        fix = f"use more than {1 + clip.high:g} (3 is usual), or remove it"
        yield RecipeError(f"{key}.dual", clip.dual, because=because, fix=fix)


def _check_fixed_advantage(recipe: Recipe, stage: Grpo) -> Problems:
    spec = stage.spec
    if not spec.fixed_advantage:
        return
    baseline, scale = advantage_settings(stage)
    fix = 'remove it, or use objective = "grpo_sequence", which has the same loss with any advantage'
    for key, value, own in (("baseline", baseline, spec.baseline), ("scale", scale, spec.scale)):
        if value != own:
            because = f'{stage.objective} is defined by {key} = "{own}"'
            yield RecipeError(f"{stage.label}.advantage.{key}", value, because=because, fix=fix)


def _check_length_budget(recipe: Recipe, stage: Grpo) -> Problems:
    if stage.length_budget is not None and not stage.spec.uses_length_budget:
        because = f"only dr_grpo divides by it, and the objective is {stage.objective}"
        fix = 'remove it, or use objective = "dr_grpo"'
        yield RecipeError(f"{stage.label}.length_budget", stage.length_budget, because=because, fix=fix)


RECIPE_CHECKS: tuple[Callable[[Recipe], Problems], ...] = (_check_stage_names, _check_reward_names, _check_tiny_context)
STAGE_CHECKS: dict[type[StageBase], tuple[Callable[[Recipe, Any], Problems], ...]] = {
    StageBase: (_check_warmup,),
    Sft: (_check_patience, _check_sft_data),
    RolloutStage: (
        _check_heldout_patience,
        _check_has_reward,
        _check_reward_models,
        _check_prompts_for_ranks,
        _check_temperature,
        _check_overlong,
    ),
    PolicyGradientStage: (_check_kl_weight, _check_minibatches),
    Grpo: (
        _check_group_of_one,
        _check_kl_in_reward,
        _check_clip,
        _check_fixed_advantage,
        _check_length_budget,
        _check_iterated_reward,
    ),
}
"""The checks of each section, and of the sections that extend it."""


FROM_PYTHON = "python"
"""The task type in the recipe of a run whose prompts and rewards are Python objects, which its folder does not hold."""


def is_from_python(recipe: Recipe, stage: Stage | None = None) -> bool:
    task = recipe.task if stage is None else task_for_stage(recipe, stage)
    return task.type == FROM_PYTHON


def reject_python_only(recipe: Recipe, stage: Stage | None = None) -> None:
    """Raise RecipeError if the prompts and rewards that a command needs exist only in the Python program that started the
    run."""
    if is_from_python(recipe, stage):
        raise RecipeError(
            "task.type",
            FROM_PYTHON,
            because="the prompts and rewards were passed from Python, and are not in the run's folder",
            fix="resume it in Python: oncurve.train(…, resume=RUN); to evaluate it here, give a task or recipe with --task",
        )
