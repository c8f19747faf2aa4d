"""From a recipe's stage, or from flags of the command line, to a job for the planner.

Settings that are not given have the defaults of the recipe schema. Lengths that depend on the data come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from oncurve.errors import ModelError, RecipeError
from oncurve.plan.hardware import Gpu
from oncurve.plan.job import ALGORITHMS, RECIPE_KEYS, Job, allowed_values, check_algorithm
from oncurve.plan.model_shape import ModelShape, tiny_shape
from oncurve.plan.model_table import find_shape
from oncurve.recipe.defaults import rewards_for_stage
from oncurve.recipe.schema.model import Lora, Model
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import SELF, Distil, Dpo, Grpo, Ppo, RewardModel, RolloutStage, Sft, Stage, Trpo

PROMPT_TOKENS = 256
"""Tokens of a prompt if neither the task nor the user gives a length."""
SLOTS = {"cpu": 128, "gpu": 512}
"""The engine's maximum number of slots if the recipe does not set one."""
PRINTABLE = 96
"""Characters in the built-in model's vocabulary if its task does not list them: printable ASCII and the line break."""
TINY_TOKENS = 7
"""Further tokens of the built-in model: four tags, padding, end, unknown."""


def job_for(shape: ModelShape, gpu: Gpu, **settings: Any) -> Job:
    """A job without a recipe: what ``settings`` leave out is as in a grpo stage with all defaults."""
    base = _of_policy_gradient(Grpo(), shape, gpu, PROMPT_TOKENS)
    return with_settings(replace(base, dtype="float32" if gpu.is_cpu else "bfloat16"), **settings)


def with_settings(job: Job, **settings: Any) -> Job:
    """The job with settings changed, by the names of its fields; None leaves a field unchanged.

    Values are checked as the recipe would check them. ``checkpointing`` may be a bool.
    """
    changes = {name: value for name, value in settings.items() if value is not None}
    if isinstance(changes.get("checkpointing"), bool):
        changes["checkpointing"] = "on" if changes["checkpointing"] else "off"
    for name, value in changes.items():
        allowed = allowed_values(name) if name in RECIPE_KEYS else ()
        if allowed and value not in allowed:
            raise RecipeError(f"--{name}", value, because=f"{name} is one of {', '.join(allowed)}", fix="choose one of them")
    if "algorithm" in changes:
        check_algorithm(changes["algorithm"])
    if "new_tokens" in changes and "mean_tokens" not in changes:
        changes["mean_tokens"] = float(changes["new_tokens"])
    return _checked(replace(job, **changes))


def _checked(job: Job) -> Job:
    if job.mean_tokens > job.new_tokens:
        because = f"completions are truncated at {job.new_tokens} tokens"
        raise RecipeError("--mean-tokens", job.mean_tokens, because=because, fix=f"use {job.new_tokens} or less")
    room = job.shape.context
    if room and job.prompt_tokens + job.new_tokens > room:
        raise ModelError(
            job.shape.name,
            f"a prompt of {job.prompt_tokens} tokens and {job.new_tokens} new ones don't fit",
            because=f"the model has {room} positions",
            fix="use fewer tokens, or a model with a longer context",
        )
    if job.quantise is not None and job.lora_rank is None:
        raise RecipeError("--quantise", job.quantise, because="quantised weights stay frozen", fix="add --lora")
    if job.quantise is not None and not job.shape.can_be_quantised:
        raise RecipeError(
            "model.quantise", job.quantise,
            because=f"{100 * job.shape.unquantised_share:.0f} % of the weights of its layers are not in linear modules, "
            "which are all that bitsandbytes quantises",
            fix="remove model.quantise; in a mixture of experts the weights stay in 16 bits",
        )  # fmt: skip
    if job.sharding != "none" and job.gpus == 1:
        raise RecipeError("--sharding", job.sharding, because="there is only one GPU", fix="use --gpus 2 or more")
    return job


def job_of_stage(recipe: Recipe, stage: Stage, gpu: Gpu, prompt_tokens: int, alphabet: str | None = None) -> Job:
    """The job of one stage of a recipe."""
    shape = shape_of_model(recipe.model, alphabet)
    base = replace(job_of(stage, shape, gpu, prompt_tokens), dtype=recipe.model.dtype, **_adapter(recipe.model))
    if recipe.engine.slots is not None:
        base = replace(base, slots=recipe.engine.slots)
    base = replace(base, pool_share=recipe.engine.pool_share, kv_dtype=recipe.engine.kv_dtype)
    if recipe.scale.ranks > 1:
        scale = recipe.scale
        base = replace(base, gpus=scale.ranks, sharding=scale.shard, gather=scale.gather, tensor=scale.tensor)
    teacher, on_cpu = _teacher(recipe, stage)
    return _checked(replace(base, reward_model=_reward_model(recipe, stage, shape), teacher=teacher, teacher_on_cpu=on_cpu))


def _adapter(model: Model) -> dict[str, Any]:
    return {"lora_rank": None if model.lora is None else model.lora.rank, "quantise": model.quantise}


def shape_of_model(model: Model, alphabet: str | None) -> ModelShape:
    """The shape of a recipe's model."""
    if model.source == "tiny":
        return tiny_shape(model.tiny, TINY_TOKENS + (PRINTABLE if alphabet is None else len(set(alphabet))))
    return find_shape(model.source)


def job_of(stage: Stage, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
    """A stage as a job. The stage must be one of `plannable`."""
    return JOBS[type(stage)](stage, shape, gpu, prompt_tokens)


def plannable(recipe: Recipe) -> list[Stage]:
    """The stages that the planner supports."""
    return [stage for stage in recipe.stages if algorithm_of(stage) in ALGORITHMS]


def algorithm_of(stage: Stage) -> str:
    """The stage's type, or the objective of a grpo stage if the planner lists it as an algorithm."""
    return stage.algorithm if stage.algorithm in ALGORITHMS else stage.type


def _of_rollout(stage: RolloutStage, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
    return Job(
        shape=shape,
        gpu=gpu,
        gpus=1,
        algorithm=stage.type,
        prompts=stage.prompts_per_step,
        group_size=stage.group_size,
        prompt_tokens=prompt_tokens,
        new_tokens=stage.sampling.max_new_tokens,
        mean_tokens=float(stage.sampling.max_new_tokens),
        tokens_per_pack=stage.tokens_per_pack,
        updates=1,
        minibatches=1,
        beta=0.0,
        dtype=Model().dtype,
        checkpointing=stage.checkpointing,
        moments=stage.optimiser.moments,
        optimiser_on_cpu=stage.optimiser.on_cpu,
        slots=SLOTS["cpu" if gpu.is_cpu else "gpu"],
    )


def _of_policy_gradient(stage: Grpo | Ppo, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
    return replace(
        _of_rollout(stage, shape, gpu, prompt_tokens),
        algorithm=algorithm_of(stage),
        updates=stage.updates_per_step,
        minibatches=stage.minibatches,
        beta=stage.kl.beta,
        reference_on_cpu=stage.kl.on_cpu,
        mixes_reference=stage.kl.refresh_mix != 1,
    )


def _of_examples(stage: Sft | Dpo, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
    """Demonstrations or pairs: a batch is an update. Assumes completions as long as prompts; the data may say otherwise."""
    rollout = _of_rollout(Grpo(prompts_per_step=stage.batch_size), shape, gpu, prompt_tokens)
    return replace(
        rollout,
        algorithm=stage.type,
        tokens_per_pack=stage.tokens_per_pack,
        checkpointing=stage.checkpointing,
        moments=stage.optimiser.moments,
        optimiser_on_cpu=stage.optimiser.on_cpu,
        new_tokens=prompt_tokens,
        mean_tokens=float(prompt_tokens),
    )


def _of_pairs(stage: Dpo, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
    return replace(_of_examples(stage, shape, gpu, prompt_tokens), reference_free=stage.loss == "simpo")


def _teacher(recipe: Recipe, stage: Stage) -> tuple[ModelShape | None, bool]:
    """The largest teacher with weights of its own, and whether they are in CPU memory. An endpoint, the policy itself and the
    base of a LoRA policy have none."""
    if not isinstance(stage, Distil):
        return None, False
    base = recipe.model.source if recipe.model.lora is not None else None
    own = [t for t in stage.all_teachers if t.base_url is None and t.model not in (SELF, base)]
    shapes = [(find_shape(t.model), t.on_cpu) for t in own]
    return max(shapes, key=lambda pair: pair[0].parameters, default=(None, False))


JOBS: Mapping[type[Stage], Callable[[Any, ModelShape, Gpu, int], Job]] = {
    Grpo: _of_policy_gradient,
    Distil: _of_policy_gradient,
    Ppo: _of_policy_gradient,
    Trpo: _of_rollout,
    Sft: _of_examples,
    Dpo: _of_pairs,
}
"""How each stage type becomes a job. A stage type without a row has no plan."""


def _reward_model(recipe: Recipe, stage: Stage, policy: ModelShape) -> ModelShape | None:
    """The largest reward model of a stage that is on the GPU."""
    if not isinstance(stage, RolloutStage):
        return None
    rewards = [r for r in rewards_for_stage(recipe, stage) if r.type == "model" and r.options.get("device", "cpu") != "cpu"]
    shapes = [_reward_model_shape(recipe, str(r.options["model"]), policy) for r in rewards if "model" in r.options]
    return max(shapes, key=lambda shape: shape.parameters, default=None)


def _reward_model_shape(recipe: Recipe, name: str, policy: ModelShape) -> ModelShape:
    """The shape of a reward model. One that a stage of the recipe trains has the policy's, unless the stage names another."""
    trained = next((s for s in recipe.stages if isinstance(s, RewardModel) and name == f"stage:{s.label}"), None)
    if trained is None:
        return find_shape(name)
    return policy if trained.source is None else find_shape(trained.source)


def default_lora_rank() -> int:
    return Lora().rank
