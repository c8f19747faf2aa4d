"""Jobs for tests: a small decoder whose numbers can be computed by hand, and known models on known GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oncurve.plan.hardware import GPUS
from oncurve.plan.job import Job
from oncurve.plan.model_shape import ModelShape
from oncurve.plan.model_table import MODELS
from oncurve.plan.request import job_for

SMALL = ModelShape("small", 2, 64, 4, 2, 16, 96, 1000, 4096, tied=True, family="qwen3")
"""2 layers, 64 wide, 4 query and 2 KV heads of 16, MLP of 96, vocabulary of 1000."""


def job(shape: ModelShape | str = SMALL, gpu: str = "H100-80GB", **changes: Any) -> Job:
    model = MODELS[shape] if isinstance(shape, str) else shape
    defaults = {
        "prompts": 4,
        "group_size": 8,
        "prompt_tokens": 100,
        "new_tokens": 200,
        "mean_tokens": 200.0,
        "checkpointing": "off",
    }
    return replace(job_for(model, GPUS[gpu]), **{**defaults, **changes})
