"""The planner's routes return the same as the planner for the same input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oncurve.plan.hardware import GPUS
from oncurve.plan.model_table import find_shape
from oncurve.plan.plan import report_data, side_by_side
from oncurve.plan.request import default_lora_rank, job_for
from oncurve.studio.planner import memory_table
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


TABLE = Path(__file__).resolve().parents[2] / "web" / "src" / "learn" / "memory.json"


def test_the_memory_demo_has_the_planner_s_numbers() -> None:
    """If the planner changes: python -m oncurve.studio.planner > web/src/learn/memory.json, and make web."""
    assert json.loads(TABLE.read_text()) == memory_table()


def test_the_memory_demo_shows_what_the_critic_costs() -> None:
    """By hand: 18 bytes per parameter in training (2 + 4 + 4 + 8), 2 for a frozen model; the critic has no LM head."""
    rows = {row["model"]: row for row in memory_table()["rows"] if not (row["lora"] or row["reference"] or row["reward_model"])}
    for model, vocabulary_times_width in (("7B", 32000 * 4096), ("70B", 32000 * 8192)):
        row = rows[model]
        policy = {name: size for name, size in row["bytes"]["grpo"].items() if name != "kv cache"}
        assert sum(policy.values()) == 18 * row["parameters"]
        assert row["bytes"]["ppo"]["critic"] == pytest.approx(18 * (row["parameters"] - vocabulary_times_width), rel=1e-3)
        assert row["bytes"]["ppo"]["kv cache"] == row["bytes"]["grpo"]["kv cache"]
