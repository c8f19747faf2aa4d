"""Combinations that no run could carry out, or that would silently do nothing: each a small function in a table.

A check yields RecipeErrors; the first one is raised. What a single key may hold is the schema's matter, what a task or reward
wants is theirs.

Prompts and rewards that were given as Python objects: the run's folder does not hold them, and its recipe says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from oncurve.errors import RecipeError
from oncurve.objective_specs import OBJECTIVE_SPECS
from oncurve.recipe.defaults import advantage_settings, kl_settings, rewards_for_stage
from oncurve.recipe.schema.base import STAGE_PREFIX
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward
from oncurve.recipe.schema.stages import Grpo, PolicyGradientStage, RolloutStage, Sft, Stage, StageBase, TrainingFree

Problems = Iterator[RecipeError]


def check_recipe(recipe: Recipe) -> Recipe:
    """The recipe itself, if it can be run as written; else the first RecipeError."""
    for problem in find_problems(recipe):
        raise problem
    return recipe


def find_problems(recipe: Recipe) -> Problems:
    """Every impossible combination, in the order of the tables."""
    for check in RECIPE_CHECKS:
        yield from check(recipe)
    for stage in recipe.stages:
        for stage_check in STAGE_CHECKS:
            yield from stage_check(recipe, stage)
        if isinstance(stage, RolloutStage):
            for sampled_check in SAMPLED_CHECKS:
                yield from sampled_check(recipe, stage)
        if isinstance(stage, PolicyGradientStage):
            for surrogate_check in SURROGATE_CHECKS:
                yield from surrogate_check(recipe, stage)
        if isinstance(stage, Grpo):
            for grpo_check in GRPO_CHECKS:
                yield from grpo_check(recipe, stage)


def _stage_names(recipe: Recipe) -> Problems:
    for label, count in Counter(stage.label for stage in recipe.stages).items():
        if count > 1:
            because = f"{count} stages are called that, and --set, checkpoints and tables tell stages apart by name"
            yield RecipeError("stages", label, because=because, fix=f'give each its own, such as name = "{label}_2"')
        if label in Recipe.model_fields:
            because = f"'{label}' is a key of the recipe itself, and --set {label}.… would mean that"
            yield RecipeError(f"{label}.name", label, because=because, fix="choose another name")
        yield from _plain_name(label, f"{label}.name")


def _plain_name(label: str, key: str) -> Problems:
    if not label or any(mark in label for mark in ".=/\\ \t\n"):
        because = "names are part of dotted keys and of file names"
        yield RecipeError(key, repr(label), because=because, fix="use letters, digits, - and _ only")


def _reward_names(recipe: Recipe) -> Problems:
    yield from _unique_rewards(recipe.rewards, "rewards")
    for stage in recipe.stages:
        if isinstance(stage, RolloutStage) and stage.rewards is not None:
            yield from _unique_rewards(stage.rewards, f"{stage.label}.rewards")


def _unique_rewards(rewards: Sequence[Reward], key: str) -> Problems:
    for label, count in Counter(reward.label for reward in rewards).items():
        if count > 1:
            because = f"{count} rewards are called that, and tables and --set tell rewards apart by name"
            yield RecipeError(key, label, because=because, fix=f'give each its own, such as name = "{label}_2"')
        yield from _plain_name(label, f"{key}.{label}.name")


def _tiny_context(recipe: Recipe) -> Problems:
    """Positions are shared by the prompt, of one token at the least, and the completion."""
    context = recipe.model.tiny.context
    asked = [s for s in recipe.stages if isinstance(s, RolloutStage) and not isinstance(s, TrainingFree)]
    limits = {f"{s.label}.sampling.max_new_tokens": s.sampling.max_new_tokens for s in asked}
    if recipe.evaluation.max_new_tokens is not None:
        limits["evaluation.max_new_tokens"] = recipe.evaluation.max_new_tokens
    for key, limit in limits.items() if recipe.model.source == "tiny" else ():
        if limit >= context:
            because = f"the built-in model has {context} positions, for the prompt and the completion together"
            yield RecipeError(key, limit, because=because, fix=f"use less than {context}, or raise model.tiny.context")


def _warmup(recipe: Recipe, stage: Stage) -> Problems:
    per_step = stage.updates_per_step * stage.minibatches if isinstance(stage, PolicyGradientStage) else 1
    updates, warmup = stage.steps * per_step, stage.optimiser.warmup_steps
    if warmup > updates:
        key = f"{stage.label}.optimiser.warmup_steps"
        because = f"the stage ends after {updates} updates, before its learning rate is reached"
        yield RecipeError(key, warmup, because=because, fix=f"use {updates} or less: --set {key}={updates}")


def _patience(recipe: Recipe, stage: Stage) -> Problems:
    if isinstance(stage, Sft) and stage.patience is not None and not (stage.heldout_share and stage.eval_every):
        because = "it counts measurements of the held-out loss, and none is made"
        fix = "set heldout_share (0.1 is usual) and eval_every"
        yield RecipeError(f"{stage.label}.patience", stage.patience, because=because, fix=fix)


def _kept_samples(recipe: Recipe, stage: Stage) -> Problems:
    if isinstance(stage, Sft) and stage.data is not None and stage.data.startswith(STAGE_PREFIX):
        yield from _earlier(recipe, stage, stage.data, "rejection_sample", f"{stage.label}.data")


def _trained_rewards(recipe: Recipe, stage: RolloutStage) -> Problems:
    """A reward by a model that this run trains: it must be there when the stage begins."""
    key = "rewards" if stage.rewards is None else f"{stage.label}.rewards"
    for reward in rewards_for_stage(recipe, stage):
        source = reward.options.get("model")
        if reward.type == "model" and isinstance(source, str) and source.startswith(STAGE_PREFIX):
            yield from _earlier(recipe, stage, source, "reward_model", f"{key}.{reward.label}.model")


def _earlier(recipe: Recipe, stage: StageBase, named: str, kind: str, key: str) -> Problems:
    names = [one.label for one in recipe.stages]
    before = [one.label for one in recipe.stages[: names.index(stage.label)] if one.type == kind]
    if named.removeprefix(STAGE_PREFIX) not in before:
        because = f"the stages of type {kind} before '{stage.label}' are: {', '.join(before) or 'none'}"
        yield RecipeError(key, named, because=because, fix=f"name one of them, put a {kind} stage before this one, or a path")


def _iterated_reward(recipe: Recipe, stage: Grpo) -> Problems:
    if stage.iterate is None:
        return
    rewards = {reward.label: reward.type for reward in rewards_for_stage(recipe, stage)}
    if rewards.get(stage.iterate.reward) != "model":
        because = f"the stage's rewards are {', '.join(rewards) or 'none'}, and one of type model is trained"
        key = f"{stage.label}.iterate.reward"
        yield RecipeError(key, stage.iterate.reward, because=because, fix="name the reward of type model")


def _rewards_given(recipe: Recipe, stage: RolloutStage) -> Problems:
    rewards = rewards_for_stage(recipe, stage)
    key = "rewards" if stage.rewards is None else f"{stage.label}.rewards"
    if not rewards:
        because = f"the stage '{stage.label}' learns from rewards alone"
        yield RecipeError(key, "none", because=because, fix='add a line [[rewards]] and under it type = "answer"')
    elif all(reward.weight == 0 for reward in rewards):
        names = ", ".join(reward.label for reward in rewards)
        because = f"a reward of weight 0 is watched, not trained on, and the stage '{stage.label}' has no other"
        yield RecipeError(f"{key}.{rewards[0].label}.weight", "0 for all", because=because, fix=f"give one of {names} a weight")


def _group_of_one(recipe: Recipe, stage: Grpo) -> Problems:
    if stage.group_size > 1:
        return
    baseline, scale = advantage_settings(stage)
    key = f"{stage.label}.group_size"
    if baseline == "mean":
        because = "a completion alone in its group is its own mean, so every advantage would be 0"
        yield RecipeError(key, 1, because=because, fix='use 2 or more (8 to 64 is usual), or objective = "reinforce"')
    elif baseline == "leave_one_out":
        because = "the baseline is the mean of the others in the group, and there are none"
        yield RecipeError(key, 1, because=because, fix='use 2 or more, or objective = "reinforce"')
    elif scale == "group":
        because = "rewards are divided by their group's std, and one number has none"
        yield RecipeError(key, 1, because=because, fix='use 2 or more, or advantage.scale = "batch" or "none"')
    elif stage.no_signal == "resample":
        because = "groups of equal rewards are replaced, and one completion always equals itself"
        yield RecipeError(f"{stage.label}.no_signal", "resample", because=because, fix='use "drop" or "keep" with group_size 1')


def _prompts_for_ranks(recipe: Recipe, stage: RolloutStage) -> Problems:
    if recipe.scale.copies > stage.prompts_per_step:
        prompts, key = stage.prompts_per_step, f"{stage.label}.prompts_per_step"
        because = f"each copy of the model samples at least one prompt of a step, and {key} is {prompts}"
        fix = f"use {prompts * recipe.scale.tensor} ranks or fewer, or raise {key}"
        yield RecipeError("scale.ranks", recipe.scale.ranks, because=because, fix=fix)


def _temperature(recipe: Recipe, stage: RolloutStage) -> Problems:
    if stage.sampling.temperature == 0:
        because = "greedy completions of one prompt are all the same, so no group has a signal"
        key = f"{stage.label}.sampling.temperature"
        yield RecipeError(
            key, 0, because=because, fix="use 1, which samples the policy itself; evaluation.temperature may be 0"
        )


def _kl_without_weight(recipe: Recipe, stage: PolicyGradientStage) -> Problems:
    if stage.kl.beta != 0:
        return
    asked = {
        "where": stage.kl.where if stage.kl.where == "reward" else None,
        "ratio_weighted": stage.kl.ratio_weighted or None,
        "refresh_every": stage.kl.refresh_every or None,
    }
    for name, value in asked.items():
        if value is not None:
            because = f"with {stage.label}.kl.beta = 0 no reference is held, so it would change nothing"
            shown = str(value).lower() if isinstance(value, bool) else value
            yield RecipeError(
                f"{stage.label}.kl.{name}", shown, because=because, fix="set kl.beta (0.04 is GRPO's), or leave this out"
            )


def _kl_in_reward(recipe: Recipe, stage: Grpo) -> Problems:
    where, _ = kl_settings(stage)
    if stage.kl.ratio_weighted and where == "reward" and stage.kl.beta != 0:
        because = "the KL term is in the reward, which is settled before there is a ratio to weight it by"
        key = f"{stage.label}.kl.ratio_weighted"
        yield RecipeError(key, "true", because=because, fix='leave it out, or use kl.where = "loss"')


def _minibatches(recipe: Recipe, stage: PolicyGradientStage) -> Problems:
    if stage.minibatches > stage.prompts_per_step:
        because = f"groups are never split, and a step has {stage.prompts_per_step} of them (prompts_per_step)"
        fix = f"use {stage.prompts_per_step} or less"
        yield RecipeError(f"{stage.label}.minibatches", stage.minibatches, because=because, fix=fix)


def _clip(recipe: Recipe, stage: Grpo) -> Problems:
    clip, key = stage.clip, f"{stage.label}.clip"
    if clip is None:
        return
    spec = OBJECTIVE_SPECS[stage.objective]
    if spec.clip is None:
        because = f"the objective {stage.objective} clips nothing"
        yield RecipeError(key, _range(clip.low, clip.high), because=because, fix="leave clip out, or use grpo, dapo or gspo")
    elif clip.dual is not None and spec.surrogate == "cispo":
        because = "cispo bounds the ratio whatever the advantage's sign, so a second bound has nothing to do"
        yield RecipeError(f"{key}.dual", clip.dual, because=because, fix="leave it out and use clip.high")
    elif clip.dual is not None and clip.dual <= 1 + clip.high:
        because = f"it bounds ratios that clip.high lets through, and that is up to 1 + high = {1 + clip.high:g}"
        yield RecipeError(
            f"{key}.dual", clip.dual, because=because, fix=f"use more than {1 + clip.high:g} (3 is usual), or leave it out"
        )


def _range(low: float, high: float) -> str:
    return f"low = {low:g}, high = {high:g}"


def _fixed_advantage(recipe: Recipe, stage: Grpo) -> Problems:
    spec = OBJECTIVE_SPECS[stage.objective]
    if not spec.fixed_advantage:
        return
    baseline, scale = advantage_settings(stage)
    fix = 'remove it, or use objective = "grpo_sequence", which has the same loss with any advantage'
    for key, value, own in (("baseline", baseline, spec.baseline), ("scale", scale, spec.scale)):
        if value != own:
            because = f'{stage.objective} is defined by {key} = "{own}"'
            yield RecipeError(f"{stage.label}.advantage.{key}", value, because=because, fix=fix)


def _overlong(recipe: Recipe, stage: RolloutStage) -> Problems:
    limit = stage.sampling.max_new_tokens
    if stage.overlong is not None and stage.overlong.buffer >= limit:
        because = (
            f"the punishment begins at max_new_tokens − buffer, and max_new_tokens is {limit}: every length would be punished"
        )
        yield RecipeError(
            f"{stage.label}.overlong.buffer", stage.overlong.buffer, because=because, fix=f"use less than {limit}"
        )


def _length_budget(recipe: Recipe, stage: Grpo) -> Problems:
    if stage.length_budget is not None and not OBJECTIVE_SPECS[stage.objective].uses_length_budget:
        because = f"only dr_grpo divides by it, and the objective is {stage.objective}"
        fix = 'leave it out, or use objective = "dr_grpo"'
        yield RecipeError(f"{stage.label}.length_budget", stage.length_budget, because=because, fix=fix)


RECIPE_CHECKS: tuple[Callable[[Recipe], Problems], ...] = (_stage_names, _reward_names, _tiny_context)
STAGE_CHECKS: tuple[Callable[[Recipe, Stage], Problems], ...] = (_warmup, _patience, _kept_samples)
SAMPLED_CHECKS: tuple[Callable[[Recipe, RolloutStage], Problems], ...] = (
    _rewards_given,
    _trained_rewards,
    _prompts_for_ranks,
    _temperature,
    _overlong,
)
SURROGATE_CHECKS: tuple[Callable[[Recipe, PolicyGradientStage], Problems], ...] = (_kl_without_weight, _minibatches)
GRPO_CHECKS: tuple[Callable[[Recipe, Grpo], Problems], ...] = (
    _group_of_one,
    _kl_in_reward,
    _clip,
    _fixed_advantage,
    _length_budget,
    _iterated_reward,
)


FROM_PYTHON = "python"
"""The task type that the recipe of such a run has."""


def is_from_python(recipe: Recipe, stage: Stage | None = None) -> bool:
    own = stage.task if stage is not None else None
    return (own or recipe.task).type == FROM_PYTHON


def reject_python_only(recipe: Recipe, stage: Stage | None = None) -> None:
    """For what needs the prompts and rewards and can't have them."""
    if is_from_python(recipe, stage):
        raise RecipeError(
            "task.type",
            FROM_PYTHON,
            because="its prompts and rewards were given from Python, and are not in the run's folder",
            fix="go on with it there: oncurve.train(…, resume=RUN); to measure it here, name a task or recipe with --task",
        )
