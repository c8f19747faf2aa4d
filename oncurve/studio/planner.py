"""The Plan page: the same plans as `oncurve plan --json`; and the numbers of the Learn page's memory demo."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from oncurve.errors import RecipeError
from oncurve.plan.hardware import GPUS, Gpu, find_gpu
from oncurve.plan.job import ALGORITHMS, Job
from oncurve.plan.memory import memory_limit, memory_of, page_bytes
from oncurve.plan.model_table import MODELS, find_shape
from oncurve.plan.plan import report_data, side_by_side
from oncurve.plan.request import PROMPT_TOKENS, default_lora_rank, job_for, job_of_stage, plannable, with_settings
from oncurve.plan.step_time import seconds_of
from oncurve.runs.folder import RunFolder
from oncurve.studio.open_run import find_run, open_reader
from oncurve.trust import load_recipe_of

planner = APIRouter(prefix="/api/plan")
Size = Annotated[int, Field(ge=1, le=10_000_000)]
DEMO_MODELS = {"7B": 8, "13B": 16, "70B": 128}
"""The sizes of the memory demo, and the number of B200 on which its step times are computed."""
DEMO_TIME_GPU, DEMO_ROOM_GPU = "B200", "H100-80GB"
"""The second one answers "the largest model on N GPUs"."""
DEMO_PROMPTS, DEMO_GROUP, DEMO_IN_FLIGHT = 64, 16, 32
DEMO_REWARD = "7B"
"""The size of the demo's reward model."""
DEMO_PARTS = ("weights", "adapter", "master weights", "moments", "gradients", "reference", "reward model", "critic")


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
    recipe = load_recipe_of(run)
    stages = [stage for stage in plannable(recipe) if body.stage in (None, stage.label)]
    if not stages:
        raise RecipeError(
            "stage", body.stage or "none", because="the planner supports none of the recipe's stages", fix="choose a model"
        )
    with open_reader(run) as store:
        longest = store.longest_prompt()
    return with_settings(job_of_stage(recipe, stages[-1], gpu, longest or PROMPT_TOKENS), **body.settings)


def memory_table() -> dict[str, Any]:
    """The numbers of the Learn page's memory demo, which needs no server: `python -m oncurve.studio.planner` writes them."""
    rows = [
        {"model": model, "lora": lora, "reference": reference, "reward_model": reward_model}
        | _compare(model, lora=lora, reference=reference, reward_model=reward_model)
        for model in DEMO_MODELS
        for lora, reference, reward_model in itertools.product((False, True), repeat=3)
    ]
    usable = memory_limit(job_for(find_shape("7B"), GPUS[DEMO_ROOM_GPU]))
    settings = {"prompts": DEMO_PROMPTS, "group_size": DEMO_GROUP, "in_flight": DEMO_IN_FLIGHT}
    return {"time_gpu": DEMO_TIME_GPU, "room_gpu": DEMO_ROOM_GPU, "usable": usable, **settings, "rows": rows}


def _compare(model: str, *, lora: bool, reference: bool, reward_model: bool) -> dict[str, Any]:
    """PPO and GRPO on the same job: bytes of all GPUs together, and the step's time."""
    base = job_for(
        find_shape(model), GPUS[DEMO_TIME_GPU],
        prompts=DEMO_PROMPTS, group_size=DEMO_GROUP, prompt_tokens=512, new_tokens=1024, checkpointing=True,
        beta=0.04 if reference else 0.0, lora_rank=default_lora_rank() if lora else None,
        reward_model=find_shape(DEMO_REWARD) if reward_model else None,
    )  # fmt: skip
    ppo = replace(base, algorithm="ppo")
    gpus = DEMO_MODELS[model]
    jobs = {"ppo": ppo, "ppo_once": replace(ppo, group_size=1), "grpo": replace(base, algorithm="grpo")}
    kv_cache = DEMO_PROMPTS * page_bytes(base, base.prompt_tokens) + DEMO_IN_FLIGHT * page_bytes(base, base.new_tokens)
    return {
        "parameters": base.shape.parameters,
        "gpus": gpus,
        "bytes": {name: _models_of(job) | {"kv cache": round(kv_cache)} for name, job in jobs.items() if name != "ppo_once"},
        "seconds": {
            name: {
                phase: round(value, 2) for phase, value in seconds_of(replace(job, gpus=gpus, sharding="full")).phases.items()
            }
            for name, job in jobs.items()
        },
    }


def _models_of(job: Job) -> dict[str, int]:
    """The models in memory during the update, unsharded: what all GPUs together hold once."""
    update = next(phase for phase in memory_of(replace(job, gpus=1, sharding="none")).phases if phase.name == "update")
    return {name: size for name, size in update.parts.items() if name in DEMO_PARTS}


if __name__ == "__main__":
    print(json.dumps(memory_table(), indent=1))
