"""Time: FLOPs and bytes by hand, properties, and measured steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oncurve.plan.fixes import fits
from oncurve.plan.hardware import CPU_CORE_FLOPS, GIB, GPUS, this_cpu
from oncurve.plan.job import Job
from oncurve.plan.memory import memory_of
from oncurve.plan.model_shape import ModelShape
from oncurve.plan.model_table import MODELS
from oncurve.plan.request import job_for
from oncurve.plan.step_time import Rates, Seconds, decode_seconds, decode_steps, pass_seconds, seconds_of
from tests.plan.jobs import job

BIG = "Qwen/Qwen3-8B"
RATES = Rates(GPUS["H100-80GB"])


def test_an_update_of_a_large_model_is_compute_bound() -> None:
    """6 FLOPs per weight and token are at least half of an update's time at the achievable rate."""
    planned = job(BIG, prompts=32, prompt_tokens=256, new_tokens=1024, mean_tokens=1024.0)
    tokens = 32 * 256 + 256 * 1024
    assert planned.step_tokens == tokens
    floor = 6 * MODELS[BIG].multiplied * tokens / (RATES.flops * RATES.of.products)
    assert floor < pass_seconds(planned.shape, planned, RATES, backward=True) < 2 * floor


def test_a_decode_step_is_memory_bound() -> None:
    """16 GB of weights and 32 · (100 + 100) tokens of KV cache at 3.0 TB/s."""
    planned = job(BIG)
    shape = planned.shape
    cached = 4 * 100 + 32 * 100
    floor = (2 * (shape.multiplied + shape.head_parameters) + cached * 147_456) / RATES.bytes
    assert floor < decode_seconds(planned, RATES) < 3 * floor


def test_decode_steps() -> None:
    assert decode_steps(job()) == 200  # 32 completions in 256 slots: as many steps as the longest has tokens
    assert decode_steps(job(slots=8)) == 32 * 200 / 8
    assert decode_steps(job(mean_tokens=50.0)) == 200  # the longest still runs to its limit
    assert decode_steps(job(slots=8, mean_tokens=100.0)) == 32 * 100 / 8


def test_checkpointing_costs_about_a_third() -> None:
    plain, again = (seconds_of(job(BIG, checkpointing=c)).phases["update"] for c in ("off", "on"))
    assert 1.2 < again / plain < 1.4


def test_lora_saves_matrix_products_but_is_slow_on_quantised_weights() -> None:
    """Measured on an H200 at 0.6B: 0.64 s instead of 0.58 s, and 1.36 s with transformers' modules. Matrix products dominate
    more in larger models."""
    (full, adapted, modules), big = (
        [
            pass_seconds(MODELS[name], job(name, lora_rank=r, quantise=q), RATES, backward=True)
            for r, q in ((None, None), (16, None), (16, "nf4"))
        ]
        for name in ("Qwen/Qwen3-0.6B", BIG)
    )
    assert 1.0 < adapted / full < 1.4
    assert 1.7 < modules / full < 2.6
    assert big[1] / big[0] < adapted / full
    assert big[2] / big[0] < modules / full


def test_ppo_pays_for_its_critic() -> None:
    grpo, ppo = (seconds_of(job(BIG, algorithm=name)) for name in ("grpo", "ppo"))
    assert ppo.phases["critic"] > grpo.phases["update"] * 0.8
    assert ppo.phases["sample"] == grpo.phases["sample"]


def test_without_a_reference_there_is_no_reference_pass() -> None:
    assert "reference" not in seconds_of(job()).phases
    with_one = seconds_of(job(beta=0.04)).phases
    assert with_one["reference"] < with_one["update"]


def test_samples_per_day() -> None:
    seconds = seconds_of(job(BIG))
    assert seconds.samples_per_day == pytest.approx(86400 / seconds.step * 32)


def test_gradients_are_all_reduced() -> None:
    """A ring of 4 moves 2 · 3/4 of the gradients' bytes over each link."""
    seconds = seconds_of(job(BIG, gpus=4)).phases["between GPUs"]
    moved = 2 * 3 / 4 * 2 * MODELS[BIG].parameters
    assert seconds == pytest.approx(moved / (GPUS["H100-80GB"].link * RATES.of.network))
    assert "between GPUs" not in seconds_of(job(BIG)).phases


@st.composite
def some_job(draw: st.DrawFn) -> Job:
    tokens = draw(st.integers(1, 3000))
    return job(
        draw(st.sampled_from(["Qwen/Qwen3-0.6B", BIG, "google/gemma-2-2b"])),
        algorithm=draw(st.sampled_from(["grpo", "ppo", "dpo", "sft", "trpo"])),
        prompts=draw(st.integers(1, 100)),
        group_size=draw(st.integers(1, 64)),
        prompt_tokens=draw(st.integers(1, 2000)),
        new_tokens=tokens,
        mean_tokens=tokens * draw(st.sampled_from([0.3, 1.0])),
        beta=draw(st.sampled_from([0.0, 0.1])),
        lora_rank=draw(st.sampled_from([None, 16])),
        updates=draw(st.integers(1, 3)),
        minibatches=draw(st.integers(1, 3)),
    )


@settings(max_examples=60, deadline=None)
@given(some_job(), st.sampled_from(["prompts", "group_size", "prompt_tokens", "updates"]), st.integers(1, 500))
def test_more_work_never_takes_less_time(planned: Job, what: str, more: int) -> None:
    assert seconds_of(replace(planned, **{what: getattr(planned, what) + more})).step >= seconds_of(planned).step * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(some_job())
def test_a_faster_gpu_is_never_slower(planned: Job) -> None:
    """If it fits the slower one: a job that does not fit is planned with an impossible KV cache."""
    assume(fits(replace(planned, gpu=GPUS["A100-80GB"])))
    assert seconds_of(replace(planned, gpu=GPUS["H200"])).step <= seconds_of(replace(planned, gpu=GPUS["A100-80GB"])).step


def test_float32_matrix_products_are_slow() -> None:
    """An H100 has 989 TFLOP/s in bfloat16 and 67 in float32, in which a natural gradient is always solved."""
    fast, slow = (Rates(GPUS["H100-80GB"], kind).flops for kind in ("bfloat16", "float32"))
    assert fast / slow == pytest.approx(989 / 67)
    assert seconds_of(job(BIG, algorithm="trpo")).phases["update"] > 11 * seconds_of(job(BIG)).phases["update"]


RESULTS = Path(__file__).parents[2] / "bench" / "results"


def on_h200(model: str, prompt: int, new: int, beta: float = 0.0, rank: int | None = None) -> tuple[Seconds, float]:
    """The plan of 32 × 8 with packs of complete groups, and the update's GiB without the driver's context and the sampler."""
    group = prompt + 8 * new
    settings = {"prompts": 32, "group_size": 8, "prompt_tokens": prompt, "new_tokens": new, "beta": beta, "lora_rank": rank}
    planned = job_for(MODELS[model], GPUS["H200"], **settings, tokens_per_pack=16384 // group * group)
    (parts,) = (phase.parts for phase in memory_of(planned).phases if phase.name == "update")
    return seconds_of(planned), (sum(parts.values()) - parts["cuda context"] - parts["sampling"]) / GIB


@pytest.mark.parametrize("index", [0, 1], ids=["without a reference", "with one"])
def test_a_gpu_step_as_it_was_measured(index: int) -> None:
    """bench/step.py on an H200."""
    result = json.loads((RESULTS / "step.json").read_text())["step"][index]
    seconds, memory = on_h200("Qwen/Qwen3-0.6B", 128, 256, result["beta"])
    assert result["peer"] == "oncurve"
    assert seconds.step == pytest.approx(result["step_s"], rel=0.3)
    assert seconds.phases["sample"] == pytest.approx(result["phases_s"]["sample"], rel=0.3)
    learned = seconds.phases.get("reference", 0.0) + seconds.phases["update"] + seconds.phases["optimiser"]
    assert learned == pytest.approx(result["phases_s"]["update"], rel=0.3)
    assert memory == pytest.approx(result["peak_gib"], rel=0.1)


@pytest.mark.parametrize("index", [0, 1], ids=["all weights", "LoRA"])
def test_a_step_with_an_adapter_as_it_was_measured(index: int) -> None:
    """bench/step.py --only lora on an H200."""
    result = json.loads((RESULTS / "step.json").read_text())["lora"][index]
    seconds, memory = on_h200("Qwen/Qwen3-0.6B", 128, 256, rank=result["rank"] or None)
    assert seconds.phases["sample"] == pytest.approx(result["sample_s"], rel=0.3)
    assert seconds.phases["update"] + seconds.phases["optimiser"] == pytest.approx(result["update_s"], rel=0.3)
    assert memory == pytest.approx(result["peak_gib"], rel=0.1)


@pytest.mark.parametrize(("index", "model"), [(0, "Qwen/Qwen3-1.7B"), (1, "Qwen/Qwen3-4B")])
def test_an_update_of_larger_models_as_it_was_measured(index: int, model: str) -> None:
    result = json.loads((RESULTS / "step.json").read_text())["mfu"][index]
    seconds, memory = on_h200(model, result["prompt"], result["new"])
    assert seconds.phases["update"] + seconds.phases["optimiser"] == pytest.approx(result["seconds"], rel=0.3)
    assert memory == pytest.approx(result["peak_gib"], rel=0.1)


@pytest.mark.parametrize("index", [0, 1])
def test_sampling_as_it_was_measured(index: int) -> None:
    """bench/rollout.py on an H200: 32 × 8 of 128 + 256, and of 512 + 1024."""
    result = json.loads((RESULTS / "rollout.json").read_text())
    work = result["works"][index]
    rates = list(result["peers"]["oncurve"]["rates"].values())[index]
    seconds, _ = on_h200("Qwen/Qwen3-0.6B", work["prompt_tokens"], work["new_tokens"])
    tokens = work["prompts"] * work["group_size"] * work["new_tokens"]
    assert seconds.phases["sample"] == pytest.approx(tokens / sorted(rates)[len(rates) // 2], rel=0.3)


@pytest.mark.parametrize("index", [0, 1], ids=["short prompts", "long prompts"])
def test_a_cpu_step_as_it_was_measured(index: int) -> None:
    """bench/step_cpu.py on two cores: the step within 15 %, sampling and update within 30 %."""
    result = json.loads((RESULTS / "step_cpu.json").read_text())["results"][index]
    work, measured = result["work"], result["medians"]["oncurve"]
    shape = ModelShape("bench", 4, 128, 4, 2, 32, 384, 512, 4096, tied=True, family="qwen3")
    settings = {name: work[name] for name in ("prompts", "group_size", "prompt_tokens", "new_tokens")}
    cpu = replace(this_cpu(), flops=2 * CPU_CORE_FLOPS, float32=2 * CPU_CORE_FLOPS)
    planned = seconds_of(job_for(shape, cpu, **settings))
    assert planned.step == pytest.approx(measured["step"], rel=0.15)
    assert planned.phases["sample"] == pytest.approx(measured["sample"], rel=0.3)
    assert planned.phases["update"] + planned.phases["optimiser"] == pytest.approx(measured["update"], rel=0.3)
