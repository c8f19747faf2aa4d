"""From a recipe's stage, or from a few words on the command line, to the planner's question.

What is not said is as the recipe's sections have it. Lengths that only data can tell are the caller's to give.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from oncurve.errors import ModelError, RecipeError
from oncurve.plan.hardware import Gpu
from oncurve.plan.job import ALGORITHMS, DTYPE_BYTES, Job, find_algorithm
from oncurve.plan.model_shape import ModelShape, tiny_shape
from oncurve.plan.model_table import find_shape
from oncurve.recipe.defaults import rewards_for_stage
from oncurve.recipe.schema.model import Lora, Model
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Dpo, Grpo, PolicyGradientStage, Ppo, RewardModel, RolloutStage, Sft, Stage

PROMPT_TOKENS = 256
"""Tokens of a prompt where neither a task nor the user says."""
SLOTS = {"cpu": 128, "gpu": 512}
"""Most completions that the engine decodes at once where a recipe leaves it open."""
PRINTABLE = 96
"""Characters of the built-in model's vocabulary where its task does not list them: ASCII and the line break."""
TINY_TOKENS = 7
"""Tokens of the built-in model beside its characters: four tags, padding, end, unknown."""


@dataclass(frozen=True, slots=True)
class PlanOverrides:
    """Changes to a job by the names of its fields; None leaves a field as it is."""

    gpus: int | None = None
    algorithm: str | None = None
    prompts: int | None = None
    group_size: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    mean_tokens: float | None = None
    tokens_per_pack: int | None = None
    updates: int | None = None
    minibatches: int | None = None
    beta: float | None = None
    dtype: str | None = None
    slots: int | None = None
    lora_rank: int | None = None
    checkpointing: bool | str | None = None
    """auto, on or off; True is on."""
    moments: str | None = None
    optimiser_on_cpu: bool | None = None
    reference_on_cpu: bool | None = None
    sharding: str | None = None
    quantise: str | None = None
    reward_model: ModelShape | None = None
    critic: ModelShape | None = None

    @property
    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


CHOICES = {
    "checkpointing": ("auto", "on", "off"),
    "dtype": tuple(DTYPE_BYTES),
    "moments": ("float32", "int8"),
    "sharding": ("none", "optimiser", "full"),
    "quantise": ("nf4", "int8"),
}


def job_for(shape: ModelShape, gpu: Gpu, wishes: PlanOverrides) -> Job:
    """A job without a recipe: what is not wished for is as in a grpo stage with nothing set."""
    base = _of_surrogate(Grpo(), shape, gpu, PROMPT_TOKENS)
    return with_overrides(replace(base, dtype="float32" if gpu.is_cpu else "bfloat16"), wishes)


def with_overrides(job: Job, wishes: PlanOverrides) -> Job:
    """The job with the wishes put in, checked."""
    said = wishes.as_dict
    if isinstance(said.get("checkpointing"), bool):
        said["checkpointing"] = "on" if said["checkpointing"] else "off"
    for key, allowed in CHOICES.items():
        if key in said and said[key] not in allowed:
            raise RecipeError(f"--{key}", said[key], because=f"{key} is one of {', '.join(allowed)}", fix="name one of them")
    if "algorithm" in said:
        find_algorithm(said["algorithm"])
    if "new_tokens" in said and "mean_tokens" not in said:
        said["mean_tokens"] = float(said["new_tokens"])
    return _checked(replace(job, **said))


def _checked(job: Job) -> Job:
    if job.mean_tokens > job.new_tokens:
        because = f"completions are cut at {job.new_tokens} tokens"
        raise RecipeError("--mean-tokens", job.mean_tokens, because=because, fix=f"use {job.new_tokens} or less")
    room = job.shape.context
    if room and job.prompt_tokens + job.new_tokens > room:
        raise ModelError(
            job.shape.name,
            f"{job.prompt_tokens} tokens of prompt and {job.new_tokens} new ones",
            because=f"it addresses {room} positions",
            fix="ask for fewer tokens, or name a model with a longer context",
        )
    if job.quantise is not None and job.lora_rank is None:
        raise RecipeError("--quantise", job.quantise, because="quantised weights stay frozen", fix="add --lora")
    if job.sharding != "none" and job.gpus == 1:
        raise RecipeError("--sharding", job.sharding, because="there is one GPU to share with", fix="use --gpus 2 or more")
    return job


def job_of_stage(recipe: Recipe, stage: Stage, gpu: Gpu, prompt_tokens: int, alphabet: str | None = None) -> Job:
    """The job of one stage of a recipe."""
    shape = shape_of_model(recipe.model, alphabet)
    base = replace(job_of(stage, shape, gpu, prompt_tokens), dtype=recipe.model.dtype, **_adapter(recipe.model))
    if recipe.engine.slots is not None:
        base = replace(base, slots=recipe.engine.slots)
    base = replace(base, pool_share=recipe.engine.pool_share)
    if recipe.scale.ranks > 1:
        scale = recipe.scale
        base = replace(base, gpus=scale.ranks, sharding=scale.shard, gather=scale.gather, tensor=scale.tensor)
    return _checked(replace(base, reward_model=_reward_model(recipe, stage, shape)))


def _adapter(model: Model) -> dict[str, Any]:
    return {"lora_rank": None if model.lora is None else model.lora.rank, "quantise": model.quantise}


def shape_of_model(model: Model, alphabet: str | None) -> ModelShape:
    """The shape of the model that a recipe names."""
    if model.source == "tiny":
        return tiny_shape(model.tiny, TINY_TOKENS + (PRINTABLE if alphabet is None else len(set(alphabet))))
    return find_shape(model.source)


def job_of(stage: Stage, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
    """A stage as a job; stages that neither sample nor learn from sequences have no plan."""
    if isinstance(stage, PolicyGradientStage):
        return _of_surrogate(stage, shape, gpu, prompt_tokens)
    if isinstance(stage, RolloutStage):
        return _of_sampled(stage, shape, gpu, prompt_tokens)
    assert isinstance(stage, Sft | Dpo), stage
    return _of_examples(stage, shape, gpu, prompt_tokens)


def plannable(recipe: Recipe) -> list[Stage]:
    """The stages that the planner knows."""
    return [stage for stage in recipe.stages if algorithm_of(stage) in ALGORITHMS]


def algorithm_of(stage: Stage) -> str:
    """The stage's type; for grpo its objective, where that is an algorithm of its own name."""
    return stage.objective if isinstance(stage, Grpo) and stage.objective in ALGORITHMS else stage.type


def _of_sampled(stage: RolloutStage, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
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


def _of_surrogate(stage: Grpo | Ppo, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
    return replace(
        _of_sampled(stage, shape, gpu, prompt_tokens),
        algorithm=algorithm_of(stage),
        updates=stage.updates_per_step,
        minibatches=stage.minibatches,
        beta=stage.kl.beta,
        reference_on_cpu=stage.kl.on_cpu,
    )


def _of_examples(stage: Sft | Dpo, shape: ModelShape, gpu: Gpu, prompt_tokens: int) -> Job:
    """Worked examples or pairs: a batch is an update. Completions are taken to be as long as prompts until the data tells."""
    like = _of_sampled(Grpo(prompts_per_step=stage.batch_size), shape, gpu, prompt_tokens)
    return replace(
        like,
        algorithm=stage.type,
        tokens_per_pack=stage.tokens_per_pack,
        checkpointing=stage.checkpointing,
        moments=stage.optimiser.moments,
        optimiser_on_cpu=stage.optimiser.on_cpu,
        new_tokens=prompt_tokens,
        mean_tokens=float(prompt_tokens),
        reference_free=isinstance(stage, Dpo) and stage.loss == "simpo",
    )


def _reward_model(recipe: Recipe, stage: Stage, policy: ModelShape) -> ModelShape | None:
    """The largest learned reward model of a stage that lies on the GPU."""
    if not isinstance(stage, RolloutStage):
        return None
    rewards = [r for r in rewards_for_stage(recipe, stage) if r.type == "model" and r.options.get("device", "cpu") != "cpu"]
    shapes = [_judge(recipe, str(r.options["model"]), policy) for r in rewards if "model" in r.options]
    return max(shapes, key=lambda shape: shape.parameters, default=None)


def _judge(recipe: Recipe, name: str, policy: ModelShape) -> ModelShape:
    """The shape of a learned reward; one that a stage of the recipe trains has the policy's, unless the stage names another."""
    trained = next((s for s in recipe.stages if isinstance(s, RewardModel) and name == f"stage:{s.label}"), None)
    if trained is None:
        return find_shape(name)
    return policy if trained.source is None else find_shape(trained.source)


def usual_rank() -> int:
    """The rank of a LoRA adapter where nobody says."""
    return Lora().rank
