"""Plans: verdicts, the cheapest change that makes a job fit, algorithms side by side, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from oncurve.engines import base
from oncurve.engines.cuda import paged_kv_cache
from oncurve.engines.native import kv_cache
from oncurve.errors import ModelError, RecipeError
from oncurve.models.heads import lm_head
from oncurve.plan import memory, request
from oncurve.plan.fixes import find_fixes, fits
from oncurve.plan.hardware import GIB, GPUS, find_gpu
from oncurve.plan.job import RECIPE_KEYS, Job, recipe_setting
from oncurve.plan.memory import memory_of
from oncurve.plan.model_table import MODELS, find_shape
from oncurve.plan.plan import make_plan, plan_data, report_data, scaling_points, side_by_side, smallest_gpus
from oncurve.plan.request import job_for, job_of_stage, plannable, with_settings
from oncurve.plan.step_time import seconds_of
from oncurve.recipe.load import load_recipe, parse_recipe
from oncurve.recipe.schema.stages import Grpo
from oncurve.training.learner import activation_checkpointing
from tests.plan.jobs import job

LARGE = job("Qwen/Qwen3-8B", prompts=32, prompt_tokens=256, new_tokens=1024, mean_tokens=1024.0)


def test_a_job_that_fits_needs_no_change() -> None:
    assert fits(job())
    assert find_fixes(job(), 16) == []


def test_the_cheapest_change_fits_and_needs_all_of_its_parts() -> None:
    best, *others = find_fixes(LARGE, 16)
    assert fits(best.job)
    assert best.peak <= memory.memory_limit(LARGE)
    for omitted in best.changes:
        rest = LARGE
        for change in best.changes:
            rest = rest if change is omitted else change.apply(rest)
        assert not fits(rest), omitted.words
    assert all(best.cost <= other.cost for other in others)


def test_changes_that_cost_only_time_come_first() -> None:
    """Only the packs are too large for the GPU: smaller packs or checkpointing, tier 0, are enough."""
    large = job("Qwen/Qwen3-0.6B", "RTX4090", prompts=32, prompt_tokens=128, new_tokens=256, mean_tokens=256.0)
    assert not fits(large)
    best = find_fixes(large, 16)[0]
    assert best.cost[0] == 0
    assert {change.family for change in best.changes} <= {"packs", "checkpointing", "slots"}


def test_a_model_beyond_one_gpu_is_sharded_or_adapted() -> None:
    best = find_fixes(job("Qwen/Qwen3-32B", "H100-80GB"), 16)[0]
    assert best.job.lora_rank == 16 or best.job.gpus > 1
    assert fits(best.job)


def test_sharding_over_the_present_gpus_comes_before_more_gpus() -> None:
    """7 billion parameters on each of 8 GPUs do not fit; with a sharded optimiser they do, at the cost of time only."""
    large = job("7B", "H100-80GB", gpus=8)
    best = find_fixes(large, 16)[0]
    assert (best.job, best.cost[0]) == (replace(large, sharding="optimiser"), 0)
    assert [change.recipe_settings for change in best.changes] == [["scale.shard=optimiser"]]


@pytest.mark.parametrize(("model", "options"), [("14B", {"algorithm": "ppo"}), ("32B", {"lora_rank": 16})], ids=["ppo", "LoRA"])
def test_no_fix_is_proposed_that_a_recipe_refuses(model: str, options: dict[str, Any]) -> None:
    """A critic and an adapter need all weights on each rank."""
    fixes = find_fixes(job(f"Qwen/Qwen3-{model}", "H100-80GB", gpus=8, **options), 16, count=50)
    assert fixes
    assert all(fix.job.sharding != "full" for fix in fixes)


def test_a_model_whose_weights_exceed_a_gpu_cannot_be_sampled_there() -> None:
    """Sharded weights are gathered for sampling, so sharding does not help."""
    assert find_fixes(job("70B", "H100-80GB"), 16) == []


def test_a_reference_on_the_cpu_costs_only_time() -> None:
    base = job("Qwen/Qwen3-1.7B", "A100-40GB", beta=0.04)
    room = memory.memory_of(replace(base, beta=0.0)).peak.total / 0.97
    tight = replace(base, gpu=replace(base.gpu, memory=int(room) + GIB))
    assert not fits(tight)
    reference_only = [fix for fix in find_fixes(tight, 16, count=50) if [c.family for c in fix.changes] == ["reference"]]
    assert reference_only[0].cost[0] == 0
    assert reference_only[0].host == 2 * 2 * base.shape.parameters


def test_no_fix_if_even_one_layer_is_too_large() -> None:
    small_gpu = replace(GPUS["T4"], memory=100 << 20)
    plan = make_plan(replace(job("70B"), gpu=small_gpu), 16)
    assert plan.fixes == ()
    assert not plan.fits
    assert plan.is_impossible


def test_only_a_job_that_exceeds_the_margin_is_impossible() -> None:
    """A plan may be wrong by 10 %: a job that is slightly too large is reported, not refused."""
    peak = memory.memory_of(LARGE).peak.total
    near = replace(LARGE, gpu=replace(LARGE.gpu, memory=int(peak * 0.95)))
    far = replace(LARGE, gpu=replace(LARGE.gpu, memory=int(peak * 0.85)))
    assert [make_plan(x, 16).fits for x in (near, far)] == [False, False]
    assert [make_plan(x, 16).is_impossible for x in (near, far)] == [False, True]


def test_the_verdict_is_one_line() -> None:
    text = make_plan(LARGE, 16).verdict
    assert "\n" not in text
    assert text.startswith("does not fit an H100-80GB: ")
    assert "of 79.6 GiB at the peak (update)" in text
    assert "per step" not in text  # the time of a run that can't happen
    fitting = make_plan(job(gpu="B200"), 16).verdict
    assert fitting.startswith("fits a B200: ")
    assert fitting.endswith(" per step")


def test_grpo_and_ppo_side_by_side_full_and_with_lora() -> None:
    plans = side_by_side(LARGE, 16)
    assert [p.title for p in plans] == ["grpo, full", "ppo, full", "grpo, LoRA", "ppo, LoRA"]
    grpo, ppo, grpo_lora, ppo_lora = plans
    assert ppo.memory.peak.total > 1.4 * grpo.memory.peak.total
    critic = MODELS["Qwen/Qwen3-8B"].parameters - MODELS["Qwen/Qwen3-8B"].head_parameters
    assert ppo.trained - grpo.trained == ppo.resident_parameters - grpo.resident_parameters == critic
    assert grpo_lora.trained == MODELS["Qwen/Qwen3-8B"].adapter_parameters(16)
    assert ppo_lora.resident_parameters - grpo_lora.resident_parameters == critic + grpo_lora.trained


def test_another_algorithm_is_added_to_them() -> None:
    titles = [p.title for p in side_by_side(replace(LARGE, algorithm="rloo"), 16)]
    assert titles == ["grpo, full", "ppo, full", "rloo, full", "grpo, LoRA", "ppo, LoRA", "rloo, LoRA"]


def test_gpus_on_which_a_job_fits_smallest_first() -> None:
    names = smallest_gpus(job("Qwen/Qwen3-1.7B", tokens_per_pack=2048))
    assert names == sorted(names, key=lambda name: GPUS[name].memory)
    assert "T4" not in names
    assert "H200" in names


def test_scaling_changes_one_setting_at_a_time() -> None:
    rows = scaling_points(LARGE)
    assert {row.what for row in rows} == {"group size", "new tokens", "model"}
    assert sum(row.asked for row in rows) == 3
    for what in ("group size", "new tokens"):
        times = [row.step_seconds for row in rows if row.what == what]
        assert times == sorted(times)
    # A model that barely fits waits for KV cache pages, so time need not grow with every size; memory does.
    peaks = [row.peak for row in rows if row.what == "model"]
    assert peaks == sorted(peaks)


def test_json() -> None:
    data = json.loads(json.dumps(report_data(LARGE, side_by_side(LARGE, 16))))
    assert data["asked"]["model"]["parameters"] == MODELS["Qwen/Qwen3-8B"].parameters
    own = data["plan"]
    assert own["algorithm"] == "grpo"
    assert own["memory"]["fits"] is False
    assert own["fixes"][0]["peak"] <= own["memory"]["limit"]
    assert set(own["memory"]["peak"]["parts"]) <= set(data["parts"])
    assert all(p["total"] == sum(p["parts"].values()) for p in own["memory"]["phases"])
    assert own["time"]["step"] == pytest.approx(sum(own["time"]["phases"].values()))
    assert [p["title"] for p in data["side_by_side"]] == ["grpo, full", "ppo, full", "grpo, LoRA", "ppo, LoRA"]


def test_defaults_are_those_of_the_recipe() -> None:
    planned = job_for(MODELS["7B"], GPUS["H200"])
    stage = Grpo()
    assert (planned.prompts, planned.group_size, planned.new_tokens) == (stage.prompts_per_step, stage.group_size, 256)
    assert planned.tokens_per_pack == stage.tokens_per_pack
    assert planned.beta == stage.kl.beta


def test_constants_are_those_of_engine_and_learner() -> None:
    assert {"cpu": base.SLOTS_CPU, "gpu": base.SLOTS_GPU} == request.SLOTS
    assert (paged_kv_cache.PAGE, kv_cache.PAGE) == (memory.PAGE_GPU, memory.PAGE_CPU)
    assert (memory.HEAD_GPU, memory.HEAD_CPU) == (lm_head.GPU_CHUNK_LOGITS, lm_head.CPU_CHUNK_LOGITS)
    assert memory.SPARE == activation_checkpointing.MAX_FRACTION


def test_memory_saving_settings_of_a_recipe() -> None:
    sets = ["grpo.checkpointing=on", "grpo.optimiser.moments=int8", "grpo.optimiser.on_cpu=true", "grpo.kl.beta=0.1"]
    recipe = load_recipe("arithmetic", [*sets, "grpo.kl.on_cpu=true", "engine.pool_share=0.5"])
    planned = job_of_stage(recipe, recipe.stages[-1], GPUS["H200"], 8)
    assert (planned.checkpointing, planned.moments, planned.optimiser_on_cpu, planned.reference_on_cpu) == (
        "on",
        "int8",
        True,
        True,
    )
    assert planned.pool_share == 0.5


def test_a_recipe_becomes_a_job() -> None:
    recipe = load_recipe("arithmetic", ["grpo.kl.beta=0.1", "model.dtype=bfloat16"])
    sft, grpo = plannable(recipe)
    planned = job_of_stage(recipe, grpo, find_gpu("H200"), 8, "0123456789+=")
    assert (planned.algorithm, planned.prompts, planned.group_size, planned.updates) == ("grpo", 32, 8, 2)
    assert (planned.new_tokens, planned.slots, planned.dtype, planned.beta) == (40, 256, "bfloat16", 0.1)
    assert planned.shape.vocabulary == 12 + 7
    assert job_of_stage(recipe, sft, find_gpu("H200"), 8).algorithm == "sft"


def test_an_unknown_gpu_is_refused_with_the_memory_of_the_known_ones() -> None:
    with pytest.raises(RecipeError) as refused:
        find_gpu("RTX3060")
    assert "RTX4090 (24 GiB), RTX3090 (24 GiB), A10G (22 GiB), T4 (15 GiB)" in refused.value.because
    assert refused.value.fix == "use RTX3090 or RTX4090 if you mean it, else one with the memory of your GPU or less"


def test_pairs_are_two_sequences_and_simpo_has_no_reference() -> None:
    data = {"task": {"type": "arithmetic"}, "stages": [{"type": "dpo", "pairs": "pairs.jsonl", "batch_size": 4}]}
    planned = job_of_stage(parse_recipe(data), parse_recipe(data).stages[0], GPUS["H200"], 50)
    assert (planned.algorithm, planned.rows, planned.has_reference) == ("dpo", 8, True)
    data["stages"][0]["loss"] = "simpo"  # type: ignore[index]
    assert not job_of_stage(parse_recipe(data), parse_recipe(data).stages[0], GPUS["H200"], 50).has_reference


def test_objectives_that_the_planner_lists() -> None:
    recipe = load_recipe("arithmetic", ["grpo.objective=rloo"])
    assert job_of_stage(recipe, recipe.stages[-1], find_gpu("H200"), 8).algorithm == "rloo"


def test_adapters_and_reward_models_of_a_recipe() -> None:
    data = {
        "model": {"source": "Qwen/Qwen3-4B", "dtype": "bfloat16", "lora": {"rank": 8}},
        "task": {"type": "arithmetic"},
        "rewards": [{"type": "model", "model": "Qwen/Qwen3-0.6B", "device": "cuda"}, {"type": "format"}],
        "stages": [{"type": "grpo"}],
    }
    planned = job_of_stage(parse_recipe(data), parse_recipe(data).stages[0], GPUS["H200"], 50)
    assert planned.lora_rank == 8
    assert planned.reward_model is MODELS["Qwen/Qwen3-0.6B"]
    on_cpu = parse_recipe(data | {"rewards": [{"type": "model", "model": "Qwen/Qwen3-0.6B"}]})
    assert job_of_stage(on_cpu, on_cpu.stages[0], GPUS["H200"], 50).reward_model is None


SETTINGS: dict[str, dict[str, Any]] = {
    "gpus": {"gpus": 2},
    "sharding": {"gpus": 2, "sharding": "optimiser"},
    "dtype": {"dtype": "bfloat16"},
    "lora_rank": {"lora_rank": 8},
    "quantise": {"lora_rank": 8, "quantise": "nf4"},
    "slots": {"slots": 64},
    "prompts": {"prompts": 8},
    "group_size": {"group_size": 4},
    "new_tokens": {"new_tokens": 100},
    "tokens_per_pack": {"tokens_per_pack": 4096},
    "updates": {"updates": 3},
    "minibatches": {"minibatches": 2},
    "beta": {"beta": 0.1},
    "checkpointing": {"checkpointing": "on"},
    "moments": {"moments": "int8"},
    "optimiser_on_cpu": {"optimiser_on_cpu": True},
    "reference_on_cpu": {"beta": 0.1, "reference_on_cpu": True},
    "teacher_on_cpu": {"teacher_on_cpu": True},
}


@pytest.mark.parametrize("name", RECIPE_KEYS)
def test_a_flag_means_its_recipe_key(name: str) -> None:
    """The flags of `oncurve plan` give the job that the same values in a recipe give."""
    data = {
        "model": {"source": "Qwen/Qwen3-0.6B"},
        "task": {"type": "arithmetic"},
        "rewards": [{"type": "answer"}],
        "stages": [{"name": "grpo", "type": "distil", "teacher": {"model": "Qwen/Qwen3-1.7B"}}],
    }
    plain = parse_recipe(data)
    sets = [recipe_setting(key, value).replace("STAGE", "grpo") for key, value in SETTINGS[name].items()]
    recipe = parse_recipe(data, sets)
    by_flags = with_settings(job_of_stage(plain, plain.stages[0], GPUS["H200"], 50), **SETTINGS[name])
    assert by_flags == job_of_stage(recipe, recipe.stages[0], GPUS["H200"], 50)
    assert by_flags != job_of_stage(plain, plain.stages[0], GPUS["H200"], 50)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"algorithm": "gpro"}, "grpo"),
        ({"dtype": "fp8"}, "bfloat16"),
        ({"sharding": "some"}, "optimiser"),
        ({"sharding": "full"}, "--gpus"),
        ({"mean_tokens": 300.0}, "256"),
        ({"quantise": "nf4"}, "--lora"),
    ],
)
def test_impossible_settings_are_refused_with_their_fix(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(RecipeError) as error:
        with_settings(job(new_tokens=256, mean_tokens=256.0), **settings)
    assert word in str(error.value)


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ModelError, match="4096 positions"):
        with_settings(job("7B"), new_tokens=5000)


def test_smaller_gpus_are_planned_with_checkpointed_layers() -> None:
    """0.6B in 4 bits with an adapter needs no checkpointing on an H200, and fits with it on GPUs of 24 GiB."""
    request = replace(job("Qwen/Qwen3-0.6B", prompts=32, lora_rank=16, quantise="nf4", checkpointing="auto"), gpu=GPUS["H200"])
    plan = make_plan(request, 16)
    assert plan.least < 24 * GIB < plan.memory.peak.total
    assert "RTX4090" in smallest_gpus(request)
    assert plan_data(plan)["memory"]["least"] == plan.least


@pytest.mark.parametrize("checkpointing", ["auto", "on", "off"])
@pytest.mark.parametrize("new_tokens", [256, 4096])
def test_a_job_needs_no_more_than_the_smallest_gpu_that_it_fits(checkpointing: str, new_tokens: int) -> None:
    """The KV cache takes free memory. What the job needs contains only that of one completion."""
    request = job(
        "Qwen/Qwen3-0.6B", prompts=16, new_tokens=new_tokens, mean_tokens=float(new_tokens), checkpointing=checkpointing
    )
    plans = {name: make_plan(replace(request, gpu=GPUS[name]), 16) for name in smallest_gpus(request)}
    assert len(plans) > 3
    for plan in plans.values():
        assert plan.fits
        assert plan.least <= min(other.limit for other in plans.values())
        assert plan.least <= plan.memory.peak.total


def test_a_plan_says_which_part_takes_free_memory() -> None:
    long = job("Qwen/Qwen3-0.6B", prompts=32, group_size=16, new_tokens=4096, mean_tokens=4096.0)
    plan = make_plan(long, 16)
    assert plan.memory.peak.name == "sample"
    kv_cache = plan.memory.peak.parts["kv pool"]
    assert f"of what is left the KV cache takes {kv_cache / GIB:.1f} GiB" in plan.memory_note
    assert plan.memory_note.startswith(f"needs {plan.least / GIB:.1f} GiB ")
    assert plan.least < plan.memory.peak.total - kv_cache / 2
    assert plan_data(plan)["memory"]["note"] == plan.memory_note

    short = make_plan(job("Qwen/Qwen3-0.6B", checkpointing="auto", tokens_per_pack=32768), 16)
    assert short.memory.peak.name == "update"
    assert "; activations take " in short.memory_note
    assert not make_plan(LARGE, 16).memory_note, "it does not fit"
    assert not make_plan(job("Qwen/Qwen3-0.6B", checkpointing="on", algorithm="sft"), 16).memory_note, (
        "nothing takes free memory"
    )


def test_the_largest_model_that_fits_trpo() -> None:
    request = replace(job("Qwen/Qwen3-8B", algorithm="trpo"), gpu=GPUS["H200"])
    plan = make_plan(request, 16)
    assert not plan.fits
    assert plan.largest is not None
    assert 1e9 < plan.largest < request.shape.parameters
    layers = round((plan.largest - replace(request.shape, layers=0).parameters) / request.shape.layer_parameters)
    for more, fits_ in ((0, True), (1, False)):
        deeper = replace(request, shape=replace(request.shape, layers=layers + more))
        assert make_plan(deeper, 16).fits is fits_
    assert make_plan(replace(request, algorithm="grpo"), 16).largest is None
    assert make_plan(replace(request, gpu=GPUS["T4"]), 16).largest == 0


def test_a_recipe_for_several_ranks() -> None:
    recipe = load_recipe("arithmetic", ["scale.ranks=4", "scale.shard=optimiser"])
    large = job_of_stage(recipe, recipe.stages[-1], find_gpu("H200"), 16)
    assert (large.gpus, large.sharding) == (4, "optimiser")


def test_a_teacher_takes_memory_of_its_own_unless_it_shares_the_policys() -> None:
    """Weights and the step's hidden states; on the CPU only the head stays. The base of a LoRA policy takes nothing."""
    data: dict[str, Any] = {
        "name": "d",
        "model": {"source": "qwen2.5-0.5b", "dtype": "bfloat16"},
        "task": {"type": "arithmetic"},
        "rewards": [{"type": "answer"}],
        "stages": [{"type": "distil", "teacher": {"model": "qwen2.5-1.5b"}}],
    }
    gpu, shape = find_gpu("H100-80GB"), find_shape("qwen2.5-1.5b")

    def plan_with(*sets: str) -> tuple[Job, int]:
        recipe = parse_recipe(data, list(sets))
        job = job_of_stage(recipe, recipe.stages[0], gpu, 100)
        return job, memory_of(job).phases[-1].parts.get("teacher", 0)

    job, resident = plan_with()
    states = 2 * job.rows * job.new_tokens * shape.width
    assert resident == 2 * shape.parameters + states
    assert "teacher" in {phase.name for phase in memory_of(job).phases}
    job, on_cpu = plan_with("distil.teacher.on_cpu=true")
    assert on_cpu == 2 * shape.vocabulary * shape.width + states
    assert memory_of(job).host == 2 * shape.parameters
    assert plan_with("model.lora.rank=8", "distil.teacher.model=qwen2.5-0.5b")[1] == 0
    assert plan_with("distil.teacher.model=self", "distil.teacher.context={prompt}!")[1] == 0
    assert seconds_of(plan_with()[0]).phases["teacher"] > 0
