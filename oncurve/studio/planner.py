"""The Plan page: the same plans as `oncurve plan --json`; and PPO next to GRPO for the Learn page."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from oncurve.errors import RecipeError
from oncurve.plan.hardware import GPUS, Gpu, find_gpu
from oncurve.plan.job import ALGORITHMS, Job
from oncurve.plan.memory import memory_limit, memory_of
from oncurve.plan.model_table import MODELS, find_shape
from oncurve.plan.plan import make_plan, plan_data, report_data, side_by_side
from oncurve.plan.request import PROMPT_TOKENS, default_lora_rank, job_for, job_of_stage, plannable, with_settings
from oncurve.runs.folder import RunFolder
from oncurve.studio.open_run import find_run, open_reader, recipe_of

planner = APIRouter(prefix="/api/plan")
Size = Annotated[int, Field(ge=1, le=10_000_000)]
DEMO_GPU, MAX_GPUS = "B200", 4096
"""The Learn page's demo uses as many of these as PPO needs, sharded; while sampling, each GPU holds all weights."""
DEMO_REWARD = "7B"
"""The size of the demo's reward model. Every GPU holds a complete copy."""


class PlannerRequest(BaseModel):
    """A request for a plan, with the names of `oncurve plan`'s options: of a run with its recipe and lengths, or of a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str | None = None
    stage: str | None = None
    model: Annotated[str, Field(max_length=200)] | None = None
    gpu: str = "H100-80GB"
    gpus: Size | None = None
    algorithm: str | None = None
    prompts: Size | None = None
    group_size: Size | None = None
    prompt_tokens: Size | None = None
    new_tokens: Size | None = None
    tokens_per_pack: Size | None = None
    updates: Size | None = None
    minibatches: Size | None = None
    beta: Annotated[float, Field(ge=0, le=100)] | None = None
    lora_rank: Size | None = None
    checkpointing: bool | None = None
    moments: Literal["float32", "int8"] | None = None
    optimiser_on_cpu: bool | None = None
    reference_on_cpu: bool | None = None
    sharding: Literal["none", "optimiser", "full"] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The job's settings that the form sets; a box that is not ticked sets nothing."""
        values = self.model_dump(exclude={"run", "stage", "model", "gpu"}, exclude_none=True)
        return {name: value for name, value in values.items() if value is not False}


@planner.get("/known")
def known() -> dict[str, Any]:
    """What the form offers: models, GPUs, algorithms, and the default LoRA rank."""
    gpus = [{"name": gpu.name, "memory": gpu.memory} for gpu in GPUS.values()]
    models = [{"name": name, "parameters": shape.parameters} for name, shape in MODELS.items()]
    return {"models": models, "gpus": gpus, "algorithms": list(ALGORITHMS), "lora_rank": default_lora_rank()}


@planner.post("")
def plan(request: Request, body: PlannerRequest) -> dict[str, Any]:
    """The same data as `oncurve plan --json`."""
    gpu = find_gpu(body.gpu)
    job = _job_of_run(find_run(request.app.state.runs_dir, body.run), body, gpu) if body.run else _job_of_model(body, gpu)
    return report_data(job, side_by_side(job, default_lora_rank()))


def _job_of_model(body: PlannerRequest, gpu: Gpu) -> Job:
    if body.model is None:
        raise RecipeError("model", "missing", because="a plan needs a run or a model", fix="choose one")
    return job_for(find_shape(body.model), gpu, **body.settings)


def _job_of_run(run: RunFolder, body: PlannerRequest, gpu: Gpu) -> Job:
    """The job of the run's recipe, with the longest prompt that the run recorded."""
    recipe = recipe_of(run)
    stages = [stage for stage in plannable(recipe) if body.stage in (None, stage.label)]
    if not stages:
        raise RecipeError(
            "stage", body.stage or "none", because="the planner supports none of the recipe's stages", fix="choose a model"
        )
    with open_reader(run) as store:
        longest = store.longest_prompt()
    return with_settings(job_of_stage(recipe, stages[-1], gpu, longest or PROMPT_TOKENS), **body.settings)


class MemoryRequest(BaseModel):
    """The settings of the demo."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(max_length=60)]
    group_size: Annotated[int, Field(ge=1, le=64)]
    lora: bool = False
    reference: bool = True
    reward_model: bool = False


@planner.get("/compare")
def compare(settings: Annotated[MemoryRequest, Query()]) -> dict[str, Any]:
    """PPO and GRPO on the same job, on as many GPUs as PPO needs."""
    shape = find_shape(settings.model)
    base = job_for(
        shape, GPUS[DEMO_GPU],
        prompts=64, group_size=settings.group_size, prompt_tokens=512, new_tokens=1024, checkpointing=True,
        beta=0.04 if settings.reference else 0.0, lora_rank=default_lora_rank() if settings.lora else None,
        reward_model=find_shape(DEMO_REWARD) if settings.reward_model else None,
    )  # fmt: skip
    job = _on_enough_gpus(replace(base, algorithm="ppo"))
    plans = {name: plan_data(make_plan(replace(job, algorithm=name), default_lora_rank())) for name in ("ppo", "grpo")}
    return {"gpu": job.gpu.name, "gpus": job.gpus, "parameters": shape.parameters, **plans}


def _on_enough_gpus(job: Job) -> Job:
    """The job on the fewest GPUs that hold it, a power of two; sharded if there are several."""
    gpus = 1
    while memory_of(job).peak.total > memory_limit(job) and gpus < MAX_GPUS:
        gpus *= 2
        job = replace(job, gpus=gpus, sharding="full")
    return job
