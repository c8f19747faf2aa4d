"""The planner's routes return the same as the planner for the same input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oncurve.plan.hardware import GPUS
from oncurve.plan.memory import memory_limit, memory_of
from oncurve.plan.model_table import find_shape
from oncurve.plan.plan import make_plan, plan_data, report_data, side_by_side
from oncurve.plan.request import default_lora_rank, job_for
from tests.studio.serving import Served


def plan_output(studio: Served, **request_body: Any) -> Any:
    data = studio.ask("/api/plan", body=request_body)
    assert data.status == 200, data.body
    return data.json


def test_the_page_s_plan_is_the_planner_s(studio: Served) -> None:
    settings = {"group_size": 16, "new_tokens": 2048, "lora_rank": 16, "beta": 0.1}
    job = job_for(find_shape("Qwen/Qwen3-4B"), GPUS["A100-80GB"], **settings)
    data = plan_output(studio, model="Qwen/Qwen3-4B", gpu="A100-80GB", **settings)
    assert data == report_data(job, side_by_side(job, default_lora_rank()))


def test_what_is_not_ticked_is_not_wished_for(studio: Served) -> None:
    plain = plan_output(studio, model="Qwen/Qwen3-0.6B")
    assert plan_output(studio, model="Qwen/Qwen3-0.6B", checkpointing=False, optimiser_on_cpu=None) == plain
    assert plan_output(studio, model="Qwen/Qwen3-0.6B", checkpointing=True)["plan"] != plain["plan"]


def test_a_run_is_planned_by_its_recipe_and_its_longest_prompt(studio: Served) -> None:
    data = plan_output(studio, run="sums-1", gpu="cpu")["asked"]
    assert (data["group_size"], data["prompts"], data["beta"]) == (4, 3, 0.01)
    assert data["prompt_tokens"] == 4
    assert data["gpu"]["name"] == "cpu"


@pytest.mark.parametrize(
    ("request_body", "status"),
    [({}, 422), ({"model": "no-such-model-at-all"}, 422), ({"model": "7B", "gpu": "toaster"}, 422),
     ({"run": "nope"}, 404), ({"run": "../sums-1"}, 404), ({"model": "7B", "group_size": 0}, 422),
     ({"model": "7B", "x": 1}, 422)],
)  # fmt: skip
def test_bad_questions(studio: Served, request_body: dict[str, Any], status: int) -> None:
    assert studio.ask("/api/plan", body=request_body).status == status


@pytest.mark.parametrize("model", ["7B", "13B", "70B"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("group_size", [1, 8, 64])
def test_the_demo_s_numbers_are_the_planner_s(studio: Served, model: str, lora: bool, group_size: int) -> None:
    data = studio.ask(f"/api/plan/compare?model={model}&group_size={group_size}&lora={lora}&reward_model=true").json
    shape, rank = find_shape(model), default_lora_rank() if lora else None
    job = job_for(
        shape, GPUS["B200"],
        prompts=64, group_size=group_size, prompt_tokens=512, new_tokens=1024, checkpointing=True, beta=0.04, lora_rank=rank,
        reward_model=find_shape("7B"),
    )  # fmt: skip
    if data["gpus"] > 1:
        job = replace(job, gpus=data["gpus"], sharding="full")
    for name in ("ppo", "grpo"):
        assert data[name] == plan_data(make_plan(replace(job, algorithm=name), default_lora_rank()))
    assert data["grpo"]["memory"]["peak"]["total"] < data["ppo"]["memory"]["peak"]["total"]
    ppo = replace(job, algorithm="ppo")
    assert memory_of(ppo).peak.total <= memory_limit(ppo), "the demo's machine holds PPO"
    fewer = replace(ppo, gpus=data["gpus"] // 2, sharding="full" if data["gpus"] > 2 else "none") if data["gpus"] > 1 else None
    assert fewer is None or memory_of(fewer).peak.total > memory_limit(fewer), "and half of it would not"
