"""Checks on combinations of keys that no run could execute, or that would silently do nothing. Each check is one function.

A check yields RecipeErrors, and the first one is raised. The schema checks the value of a single key; tasks and rewards check
their own options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oncurve.errors import RecipeError, did_you_mean
from oncurve.recipe.defaults import advantage_settings, kl_settings, mixed_tasks, rewards_for_stage, task_for_stage
from oncurve.recipe.schema.base import STAGE_PREFIX
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward
from oncurve.recipe.schema.stages import (
    SELF,
    Distil,
    Grpo,
    PolicyGradientStage,
    Ppo,
    RolloutStage,
    Sft,
    Stage,
    StageBase,
    TrainingFree,
    Trpo,
)

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


def _check_float16(recipe: Recipe) -> Problems:
    """The loss is scaled by the optimiser of the weights that it reaches."""
    if recipe.model.dtype != "float16":
        return
    if recipe.scale.shard == "full":
        because, fix = "float16 needs a loss scale, which sharded weights do not have", 'use dtype = "bfloat16"'
        yield RecipeError("model.dtype", "float16", because=because, fix=fix)
    for stage in recipe.stages:
        if isinstance(stage, Ppo) and stage.critic.trunk == "shared":
            because, fix = "policy and critic have loss scales of their own, and share a backbone", 'use trunk = "separate"'
            yield RecipeError(f"{stage.label}.critic.trunk", "shared", because=because, fix=fix)


def _check_agents(recipe: Recipe) -> Problems:
    """Refuses settings that agents don't support: agents call the learner's own engine, in one process, and their rollouts are
    conversations, not texts."""
    stages = [stage for stage in recipe.stages if stage.samples and task_for_stage(recipe, stage).type == "agent"]
    if stages and recipe.scale.engine != "native":
        because, fix = "agents call the learner's own engine", 'use scale.engine = "native"'
        yield RecipeError("scale.engine", recipe.scale.engine, because=because, fix=fix)
    for key in ("ranks", "samplers"):
        value = getattr(recipe.scale, key)
        if stages and value > (key == "ranks"):
            because = "agents call the endpoint of one process, which samples and learns"
            yield RecipeError(f"scale.{key}", value, because=because, fix="remove it")
    for stage in stages:
        if (reads := _key_that_reads_texts(stage)) is not None:
            because = "it reads completions as texts, and an agent's rollout is a conversation"
            yield RecipeError(f"{stage.label}.{reads}", stage.type, because=because, fix="use grpo, ppo or trpo for agents")
        if isinstance(stage, Grpo) and stage.curriculum is not None and stage.curriculum.first_samples is not None:
            because = "agents choose their own prompts, so a group can't be continued after its first samples"
            key = f"{stage.label}.curriculum.first_samples"
            yield RecipeError(key, stage.curriculum.first_samples, because=because, fix="remove it")


def _key_that_reads_texts(stage: Stage) -> str | None:
    """The key by which a stage reads completions as texts, and not as tokens with their contexts; None if it does not."""
    if getattr(stage, "iterate", None) is not None:
        return "iterate"
    return None if isinstance(stage, PolicyGradientStage | Trpo) else "type"


def _check_history(recipe: Recipe) -> Problems:
    for stage in recipe.stages:
        if not stage.samples or task_for_stage(recipe, stage).options.get("history") != "template":
            continue
        if (key := _key_that_reads_texts(stage)) is not None:
            because = 'it reads completions as texts, and with task.history = "template" one may have several sequences'
            fix = 'use grpo, ppo or trpo, or task.history = "tokens"'
            yield RecipeError(f"{stage.label}.{key}", stage.type, because=because, fix=fix)


def _check_drafts(recipe: Recipe) -> Problems:
    """Drafts that the recipe asks for must be possible in the samples or the held-out answers of one of its stages at least."""
    if recipe.engine.draft in ("auto", "off"):
        return
    fix = 'use "auto" or "off"'
    if recipe.scale.engine != "native":
        because = 'vLLM samples (scale.engine = "vllm"), and only the native engine makes these drafts'
        yield RecipeError("engine.draft", recipe.engine.draft, because=because, fix=fix)
    tasks = [task_for_stage(recipe, stage) for stage in recipe.stages if stage.uses_policy]
    if tasks and all(task.options.get("history") == "template" for task in tasks):
        because = 'no stage could use drafts: with task.history = "template" there are none'
        yield RecipeError("engine.draft", recipe.engine.draft, because=because, fix=fix)


def _check_kv_dtype(recipe: Recipe) -> Problems:
    if recipe.engine.kv_dtype == "fp8" and recipe.scale.engine != "native":
        because = 'vLLM samples (scale.engine = "vllm"), and only the native engine has this KV cache'
        yield RecipeError("engine.kv_dtype", "fp8", because=because, fix='use "auto", or scale.engine = "native"')


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
        models = [label for label, kind in rewards.items() if kind == "model"]
        fix = f"name it: {models[0]}" if models else "add a reward of type model to the stage, and name it here"
        yield RecipeError(key, stage.iterate.reward, because=because, fix=fix)


def _check_has_reward(recipe: Recipe, stage: RolloutStage) -> Problems:
    if isinstance(stage, Distil) and stage.reward_weight == 0:
        return
    rewards = rewards_for_stage(recipe, stage)
    key = "rewards" if stage.rewards is None else f"{stage.label}.rewards"
    if not rewards:
        because = f"the stage '{stage.label}' learns from rewards alone"
        yield RecipeError(key, "none", because=because, fix='add a line [[rewards]] and below it type = "answer"')
    elif all(reward.weight == 0 for reward in rewards):
        where = f"{key}.{rewards[0].label}.weight"
        because = f"a reward of weight 0 is recorded but not trained on, and the stage '{stage.label}' has no other"
        yield RecipeError(where, "0 for all", because=because, fix=f"raise one: --set {where}=1")


def _check_tasks_of_rewards(recipe: Recipe, stage: RolloutStage) -> Problems:
    key = "rewards" if stage.rewards is None else f"{stage.label}.rewards"
    rewards, tasks = rewards_for_stage(recipe, stage), mixed_tasks(task_for_stage(recipe, stage))
    for reward in rewards:
        if reward.task is not None and reward.task not in tasks:
            because = f"the tasks of the mix are {', '.join(tasks)}" if tasks else "the task is not a mix of several"
            fix = f"name one of them{did_you_mean(reward.task, tasks)}" if tasks else 'remove it, or use task.type = "mix"'
            yield RecipeError(f"{key}.{reward.label}.task", reward.task, because=because, fix=fix)
    for task in tasks:
        if rewards and all(reward.task not in (None, task) or reward.weight == 0 for reward in rewards):
            because = f"no reward scores the prompts of task '{task}', and the stage '{stage.label}' learns from rewards alone"
            yield RecipeError(key, "missing", because=because, fix=f'add a reward with task = "{task}", or one without `task`')


def _check_routing(recipe: Recipe, stage: Grpo) -> Problems:
    """Only the learner's own engine records experts."""
    key = f"{stage.label}.{'routing_replay' if stage.routing_replay else 'balance_loss'}"
    others = {
        'scale.engine = "vllm"': recipe.scale.engine != "native",
        "scale.samplers": recipe.scale.samplers > 0,
        "a task of type agent": task_for_stage(recipe, stage).type == "agent",
        'task.history = "template"': task_for_stage(recipe, stage).options.get("history") == "template",
    }
    for name in (name for name, is_set in others.items() if is_set and stage.records_routing):
        because = f"with {name}, the experts that a token took are not recorded"
        fix = f"remove {name}, or set {stage.label}.routing_replay = false and {stage.label}.balance_loss = 0"
        yield RecipeError(key, "set", because=because, fix=fix)


def _check_group_of_one(recipe: Recipe, stage: Grpo) -> Problems:
    if stage.group_size > 1 or (isinstance(stage, Distil) and stage.reward_weight == 0):
        return
    baseline, scale = advantage_settings(stage)
    key = f"{stage.label}.group_size"
    if baseline in ("mean", "length_weighted"):
        because = "a single completion is its own mean, so every advantage would be 0"
        yield RecipeError(key, 1, because=because, fix='use 2 or more (8 to 64 is usual), or objective = "reinforce"')
    elif baseline in ("leave_one_out", "best_of_others"):
        because = "the baseline is computed from the others in the group, and there are none"
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
        because = "greedy completions of one prompt are all the same, so a group holds only one answer"
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
        "estimator": stage.kl.estimator,
        "where": stage.kl.where if stage.kl.where == "reward" else None,
        "ratio_weighted": stage.kl.ratio_weighted or None,
        "refresh_every": stage.kl.refresh_every or None,
        "refresh_mix": stage.kl.refresh_mix if stage.kl.refresh_mix != 1 else None,
        "on_cpu": stage.kl.on_cpu or None,
    }
    for name, value in values.items():
        if value is not None:
            because = f"{stage.label}.kl.beta is 0, so there is no reference and this would change nothing"
            shown = str(value).lower() if isinstance(value, bool) else value
            fix = "set kl.beta (0.04 is GRPO's), or remove this"
            yield RecipeError(f"{stage.label}.kl.{name}", shown, because=because, fix=fix)


def _check_refresh_mix(recipe: Recipe, stage: PolicyGradientStage) -> Problems:
    if stage.kl.beta and stage.kl.refresh_mix != 1 and not stage.kl.refresh_every:
        because = "the reference is never refreshed, so nothing would be mixed"
        fix = "set kl.refresh_every (1 for an exponential moving average), or remove this"
        yield RecipeError(f"{stage.label}.kl.refresh_mix", stage.kl.refresh_mix, because=because, fix=fix)
    if stage.kl.beta and stage.kl.refresh_mix != 1 and recipe.model.lora is not None and recipe.model.lora.dora:
        because = "the reference starts with the adapter disabled, and a disabled DoRA adapter has no magnitudes to mix with"
        fix = "use model.lora without dora, or refresh_mix = 1"
        yield RecipeError(f"{stage.label}.kl.refresh_mix", stage.kl.refresh_mix, because=because, fix=fix)


def _check_entropy(recipe: Recipe, stage: PolicyGradientStage) -> Problems:
    controls, key = stage.entropy, f"{stage.label}.entropy"
    if controls.kl_cov is not None and stage.updates_in_step == 1:
        because = "with one update per step every ratio is 1, so the penalty has no gradient"
        yield RecipeError(f"{key}.kl_cov", controls.kl_cov, because=because, fix="raise updates_per_step or minibatches")
    if controls.target is not None and not 0 <= stage.entropy_bonus <= controls.max_bonus:
        because = f"it is the first value of a bonus that stays within 0 … {controls.max_bonus:g} (entropy.max_bonus)"
        fix = f"use 0 … {controls.max_bonus:g}, or remove {key}.target"
        yield RecipeError(f"{stage.label}.entropy_bonus", stage.entropy_bonus, because=because, fix=fix)


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
    elif clip.dual is not None and spec.surrogate == "geometric_mean":
        because = "gmpo has no second bound"
        yield RecipeError(f"{key}.dual", clip.dual, because=because, fix="remove it")
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


def _check_dro_tau(recipe: Recipe, stage: Grpo) -> Problems:
    if stage.dro_tau is not None and stage.spec.surrogate != "dro":
        because = f"only dro has this penalty, and the objective is {stage.objective}"
        yield RecipeError(f"{stage.label}.dro_tau", stage.dro_tau, because=because, fix='remove it, or use objective = "dro"')


def _check_advantage(recipe: Recipe, stage: Grpo | Trpo) -> Problems:
    baseline, scale = advantage_settings(stage)
    k, key = stage.advantage.k, f"{stage.label}.advantage"
    if k is not None and baseline != "best_of_others":
        because = f'only the baseline "best_of_others" reads it, and the baseline is "{baseline}"'
        yield RecipeError(f"{key}.k", k, because=because, fix='remove it, or use objective = "pass_at_k"')
    elif k is not None and k > stage.group_size:
        because = f"a group has {stage.group_size} completions (group_size), so there is no best of {k}"
        yield RecipeError(f"{key}.k", k, because=because, fix=f"use {stage.group_size} or less, or raise group_size")
    if scale == "per_reward" and baseline != "mean":
        because = "each reward is centred on its group's mean before they are summed"
        yield RecipeError(f"{key}.baseline", baseline, because=because, fix='remove it, or use another scale than "per_reward"')
    if scale == "mean" and stage.overlong is not None and stage.overlong.weight > 0:
        because = "a reward of 0 would become negative, and advantages are divided by the group's mean reward"
        fix = "remove it, use mask_cut = true, or another scale"
        yield RecipeError(f"{stage.label}.overlong", "set", because=because, fix=fix)
    if scale == "mean" and isinstance(stage, Grpo) and stage.kl.beta and stage.kl_place == "reward":
        because = "a reward of 0 minus a KL is negative, and advantages are divided by the group's mean reward"
        yield RecipeError(f"{stage.label}.kl.where", "reward", because=because, fix='use kl.where = "loss", or another scale')
    if scale == "per_reward" and isinstance(stage, Grpo) and stage.kl.beta and stage.kl_place == "reward":
        because = "rewards are normalised one by one, and the KL is not one of them"
        yield RecipeError(f"{stage.label}.kl.where", "reward", because=because, fix='use kl.where = "loss"')


def _check_distillation(recipe: Recipe, stage: Distil) -> Problems:
    key, teachers = stage.label, stage.all_teachers
    for label, count in Counter(teacher.label for teacher in teachers).items():
        if count > 1:
            because = f"{count} teachers have this name, and rows select teachers by name"
            yield RecipeError(f"{key}.teachers", label, because=because, fix="give each its own name")
    if stage.teachers and stage.teacher_column is None:
        because = "rows select one of several teachers by a column of the task"
        yield RecipeError(f"{key}.teacher_column", "unset", because=because, fix="name the column, or use one teacher")
    if stage.teach_by == "advantage" and stage.divergence != "reverse_kl":
        because = "log π_teacher − log π of sampled tokens estimates the reverse KL"
        yield RecipeError(f"{key}.divergence", stage.divergence, because=because, fix='use teach_by = "gradient"')
    if stage.divergence != "jsd" and stage.jsd_beta != Distil.model_fields["jsd_beta"].default:
        because = f"only jsd has a β, and the divergence is {stage.divergence}"
        yield RecipeError(f"{key}.jsd_beta", stage.jsd_beta, because=because, fix='remove it, or use divergence = "jsd"')
    if stage.kl.beta and stage.kl_place == "reward" and not stage.reward_weight:
        because = "the KL would be subtracted from rewards, and they are recorded only"
        yield RecipeError(f"{key}.kl.where", "reward", because=because, fix='use kl.where = "loss", or set reward_weight')
    if stage.iterate is not None:
        yield RecipeError(f"{key}.iterate", "set", because="only grpo stages train a reward model", fix="use a grpo stage")
    if stage.no_signal == "resample" and not stage.reward_weight:
        because = "rewards are recorded only, and every group has a teacher's signal"
        yield RecipeError(f"{key}.no_signal", "resample", because=because, fix="remove it, or set reward_weight")
    if stage.updates_in_step > 1 and any(teacher.model == SELF and teacher.base_url is None for teacher in teachers):
        because = "the policy teaches itself with the weights of the step's start, which are gone after the first update"
        fix = "use updates_per_step = 1 and minibatches = 1, or another teacher"
        yield RecipeError(f"{key}.teacher.model", SELF, because=because, fix=fix)


def _check_surrogate_of_distillation(recipe: Recipe, stage: Distil) -> Problems:
    """With the teacher's gradient alone every advantage is 0. Then only kl_cov and dro give the surrogate a gradient."""
    if stage.reward_weight or stage.teach_by == "advantage":
        return
    values: dict[str, object] = {"clip": None if stage.clip is None else "set"}
    if stage.spec.surrogate != "dro":
        values |= {
            "entropy.top_share": stage.entropy.top_share if stage.entropy.top_share != 1 else None,
            "entropy.clip_cov": stage.entropy.clip_cov,
        }
    if stage.spec.surrogate != "dro" and stage.entropy.kl_cov is None:
        values |= {name: getattr(stage, name) for name in ("importance_cap", "mismatch_limit", "correction", "off_policy_kl")}
    for name, value in values.items():
        if value is not None:
            because = "it acts on advantages, and the stage learns from the teacher's divergence alone"
            fix = 'remove it, set reward_weight, or use teach_by = "advantage"'
            yield RecipeError(f"{stage.label}.{name}", value, because=because, fix=fix)


def _check_correction(recipe: Recipe, stage: PolicyGradientStage) -> Problems:
    for key in ("importance_cap", "mismatch_limit"):
        value = getattr(stage, key)
        if stage.correction is not None and value is not None:
            because = f"{stage.label}.correction = {stage.correction} already weights what sampler and learner disagree on"
            yield RecipeError(f"{stage.label}.{key}", value, because=because, fix=f"set either {key} or correction")


def _check_carry_over(recipe: Recipe, stage: Grpo) -> Problems:
    """`carry_over` needs one process that samples and learns, and prompts that are known before a step starts."""
    key, count = f"{stage.label}.carry_over", stage.carry_over
    if not count:
        return
    if count >= stage.prompts_per_step:
        because = f"a step has {stage.prompts_per_step} groups (prompts_per_step), and the first step would train on none"
        yield RecipeError(key, count, because=because, fix=f"use {max(stage.prompts_per_step - 1, 0)} or less")
    elif stage.minibatches > stage.prompts_per_step - count:
        because = f"the first step has {stage.prompts_per_step - count} groups, fewer than the {stage.minibatches} mini-batches"
        yield RecipeError(key, count, because=because, fix="use less, or raise prompts_per_step")
    others = {
        f"{stage.label}.type": (stage.type, isinstance(stage, Distil)),
        f"{stage.label}.curriculum": ("set", stage.curriculum is not None),
        f"{stage.label}.no_signal": ("resample", stage.no_signal == "resample"),
        f"{stage.label}.routing_replay": (stage.routing_replay, stage.routing_replay),
        f"{stage.label}.balance_loss": (stage.balance_loss, stage.balance_loss > 0),
        "scale.engine": (recipe.scale.engine, recipe.scale.engine != "native"),
        "scale.ranks": (recipe.scale.ranks, recipe.scale.ranks > 1),
        "scale.samplers": (recipe.scale.samplers, recipe.scale.samplers > 0),
    }
    for other, (value, conflicts) in others.items():
        if conflicts:
            because = f"{key} continues a step's own groups in one process with the native engine, and nothing else yet"
            yield RecipeError(other, value, because=because, fix=f"change it, or remove {key}")


def _check_curriculum(recipe: Recipe, stage: Grpo) -> Problems:
    curriculum, key, size = stage.curriculum, f"{stage.label}.curriculum", stage.group_size
    if curriculum is None:
        return
    if recipe.scale.max_staleness:
        because = "later steps are sampled before the results of this one are known, and the curriculum selects by them"
        yield RecipeError("scale.max_staleness", recipe.scale.max_staleness, because=because, fix=f"use 0, or remove {key}")
    first, largest = curriculum.first_samples, curriculum.max_group_size
    if first is None:
        return
    if not 2 <= first < size:
        because = f"it takes two completions to disagree, and at least one of group_size = {size} must remain for later"
        fix = f"use {max(2, size // 2)}, or raise group_size" if size > 2 else "remove it, or use a group_size of 3 or more"
        yield RecipeError(f"{key}.first_samples", first, because=because, fix=fix)
    if largest is not None and largest < size:
        because = f"a step has group_size = {size} completions for each prompt, and they would not fit"
        yield RecipeError(f"{key}.max_group_size", largest, because=because, fix=f"use {size} or more")
    if stage.no_signal == "resample":
        because = "an adaptive group size spends a fixed number of samples, and resampling adds to them"
        yield RecipeError(f"{stage.label}.no_signal", "resample", because=because, fix=f"remove it, or {key}.first_samples")
    baseline, _ = advantage_settings(stage)
    if baseline == "best_of_others":
        because = f"a group of {first} completions may stay that small, and the baseline is the best of k of the others"
        yield RecipeError(f"{key}.first_samples", first, because=because, fix="remove it, or use another baseline")


def _check_requests(recipe: Recipe, stage: TrainingFree) -> Problems:
    for key in ("top_k", "min_p", "min_new_tokens"):
        value = getattr(stage.sampling, key)
        if value:
            because = "completions come from an endpoint, and the OpenAI API has no such option"
            fix = "remove it; temperature, top_p, max_new_tokens and stop are sent"
            yield RecipeError(f"{stage.label}.sampling.{key}", value, because=because, fix=fix)
    if stage.mask_cut:
        because = "no weights are trained, so there is no loss to leave completions out of"
        yield RecipeError(f"{stage.label}.mask_cut", "true", because=because, fix="remove it")


RECIPE_CHECKS: tuple[Callable[[Recipe], Problems], ...] = (
    _check_stage_names,
    _check_reward_names,
    _check_tiny_context,
    _check_agents,
    _check_history,
    _check_drafts,
    _check_kv_dtype,
    _check_float16,
)
STAGE_CHECKS: dict[type[StageBase], tuple[Callable[[Recipe, Any], Problems], ...]] = {
    StageBase: (_check_warmup,),
    Sft: (_check_patience, _check_sft_data),
    RolloutStage: (
        _check_heldout_patience,
        _check_has_reward,
        _check_tasks_of_rewards,
        _check_reward_models,
        _check_prompts_for_ranks,
        _check_temperature,
        _check_overlong,
    ),
    PolicyGradientStage: (_check_kl_weight, _check_refresh_mix, _check_entropy, _check_minibatches, _check_correction),
    Trpo: (_check_advantage,),
    TrainingFree: (_check_requests,),
    Distil: (_check_distillation, _check_surrogate_of_distillation),
    Grpo: (
        _check_advantage,
        _check_dro_tau,
        _check_group_of_one,
        _check_routing,
        _check_kl_in_reward,
        _check_clip,
        _check_fixed_advantage,
        _check_length_budget,
        _check_iterated_reward,
        _check_curriculum,
        _check_carry_over,
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
