"""Memory: figures of the literature, examples by hand, what autograd really saves, and properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from oncurve.models.loading.load import build_tokenizer
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.plan.hardware import GIB, GPUS, this_cpu
from oncurve.plan.job import Job
from oncurve.plan.memory import (
    activation_bytes,
    checkpointed_layers,
    kv_pool,
    layer_bytes,
    memory_of,
    slots_in_flight,
    uses_fused_kernels,
)
from oncurve.plan.model_shape import ModelShape, shape_of_config
from oncurve.plan.model_table import MODELS
from oncurve.plan.step_time import seconds_of
from tests.plan.jobs import SMALL, job

BILLION = ModelShape("1B", 16, 2048, 32, 8, 64, 8192, 128_256, 131_072, tied=True)
"""Llama-3.2-1B: 1,235,814,400 parameters."""


def phases(of: Job) -> dict[str, dict[str, int]]:
    return {phase.name: phase.parts for phase in memory_of(of).phases}


def test_adam_in_mixed_precision_takes_about_16_bytes_a_parameter() -> None:
    """2 of weights, 4 of masters, 8 of moments, and gradients: 2 in the literature, 4 as they are accumulated here."""
    parts, n = phases(job(BILLION))["optimiser"], BILLION.parameters
    state = parts["weights"] + parts["master weights"] + parts["moments"]
    assert state + 2 * n == 16 * n
    assert parts["gradients"] == 4 * n


def test_in_float32_it_is_16_exactly() -> None:
    parts, n = phases(job(BILLION, dtype="float32"))["optimiser"], BILLION.parameters
    assert "master weights" not in parts
    assert parts["weights"] + parts["moments"] + parts["gradients"] == 16 * n


def test_a_critic_costs_about_16_gb_for_a_billion_parameters() -> None:
    """18 bytes per parameter, like the policy; autograd's temporary gradients add 2 between packs, 6 before the update."""
    n = BILLION.parameters
    critic = {name: parts["critic"] for name, parts in phases(job(BILLION, algorithm="ppo")).items()}
    assert set(critic.values()) == {18 * n}
    assert 18 * n == pytest.approx(16 * n, rel=0.15)
    other = replace(BILLION, family="gemma")
    gemma = {name: parts["critic"] for name, parts in phases(job(other, algorithm="ppo")).items()}
    assert (gemma["sample"], gemma["critic update"], gemma["optimiser"]) == (18 * n, 20 * n, 24 * n)
    assert "critic" not in phases(job(BILLION))["update"]


def test_a_critic_has_no_lm_head() -> None:
    untied = replace(BILLION, tied=False)
    one, other = (phases(job(shape, algorithm="ppo"))["update"]["critic"] for shape in (untied, BILLION))
    assert one == other


def test_the_kv_cache_by_hand() -> None:
    """4 prompts of 600 tokens fill 2 pages of 512 each, once; 32 completions of 200 fill one page each.
    A token: 2 layers × 2 (K and V) × 2 heads of 16 × 2 bytes = 256 bytes."""
    assert kv_pool(job(prompt_tokens=600)) == (4 * 2 + 32) * 512 * 256
    assert kv_pool(job(prompt_tokens=600, slots=8)) == (4 * 2 + 8) * 512 * 256
    in_float32 = replace(job(dtype="float32"), gpu=this_cpu())
    assert kv_pool(in_float32) == (4 * 2 + 32 * 4) * 64 * 512  # pages of 64, 4 bytes
    assert kv_pool(replace(job(prompt_tokens=600), kv_dtype="fp8")) == (4 * 2 + 32) * 512 * 2 * 2 * 2 * (16 + 4)  # and a scale
    assert kv_pool(replace(in_float32, kv_dtype="fp8")) == kv_pool(in_float32), "on a CPU numbers are only rounded"


def test_the_kv_cache_takes_a_fraction_of_the_free_memory_and_completions_wait() -> None:
    planned_job = job("Qwen/Qwen3-4B", prompts=64, group_size=8, new_tokens=8192, mean_tokens=8192.0)
    parts = phases(planned_job)["sample"]
    free = planned_job.gpu.memory - (sum(parts.values()) - parts["kv pool"])
    assert parts["kv pool"] == pytest.approx(0.8 * free, rel=1e-6)
    token = 36 * 2 * 8 * 128 * 2
    assert slots_in_flight(planned_job) == int((0.8 * free - 64 * 512 * token) / (8192 * token))
    assert slots_in_flight(job()) == 32


def test_a_layer_by_hand() -> None:
    """Widths: D 64, q 64, kv 32, F 96. The fused kernels save 2·(128 + 128 + 64 + 192) + 4 heads' log-sum-exps of 4 bytes."""
    assert layer_bytes(SMALL, job()) == 2 * (128 + 128 + 64 + 192) + 16
    assert layer_bytes(SMALL, job(lora_rank=4)) == layer_bytes(SMALL, job()) + 2 * 7 * 4


def test_a_layer_with_autograd_by_hand() -> None:
    """Two norms save 4 + 2 + 2 bytes of 64; norms of heads 4 + 2 of 96; q, k, v, out 2·(128 + 64); lse 16; MLP 4 × 2 × 96."""
    gemma = replace(SMALL, family="gemma3_text")
    assert layer_bytes(gemma, job(gemma)) == 4 * 8 * 64 + 6 * 96 + 2 * 192 + 16 + 8 * 96
    four_bits = job(lora_rank=4, quantise="nf4")
    assert layer_bytes(SMALL, four_bits) == 2 * 6 * 64 + 4 * 96 + 2 * 192 + 16 + 8 * 96


def test_checkpointing_keeps_inputs_and_one_layer() -> None:
    plain, less = job(), job(checkpointing="on")
    kept = plain.pack_tokens * (SMALL.layers * layer_bytes(SMALL, plain))
    inputs = plain.pack_tokens * (SMALL.layers * 2 * 64 + layer_bytes(SMALL, plain))
    assert activation_bytes(SMALL, plain) - activation_bytes(SMALL, less) == kept - inputs


def test_packs_are_filled_to_their_budget() -> None:
    """4 groups of 100 + 8 · 200 = 1700 tokens."""
    assert job().pack_tokens == 6800
    assert job(tokens_per_pack=4096).pack_tokens == 4096
    assert job(tokens_per_pack=100).pack_tokens == 300  # a sequence is never cut
    assert job(tokens_per_pack=4096).packs == 2
    assert job(minibatches=2).pack_tokens == 3400


def test_a_reference_is_a_copy_except_with_lora() -> None:
    assert phases(job(beta=0.1))["sample"]["reference"] == 2 * SMALL.parameters
    assert phases(job(beta=0.1, mixes_reference=True))["sample"]["reference"] == (2 + 4) * SMALL.parameters
    assert "reference" not in phases(job(beta=0.1, lora_rank=4))["sample"]
    assert "reference" not in phases(job())["sample"]
    assert "reference" in phases(job(beta=0.1, lora_rank=4))  # its pass is still run


def test_a_reference_on_the_cpu_is_swapped_with_the_policy() -> None:
    planned_job = job(beta=0.1, reference_on_cpu=True)
    assert all("reference" not in parts for parts in phases(planned_job).values())
    assert memory_of(planned_job).host == 2 * 2 * SMALL.parameters


def test_automatic_checkpointing() -> None:
    """Activations of 64k tokens of Qwen3-4B exceed an H100: some layers are checkpointed, and it fits; few tokens need none."""
    planned_job = job(
        "Qwen/Qwen3-4B", prompts=64, new_tokens=1024, mean_tokens=1024.0, tokens_per_pack=65536, optimiser_on_cpu=True
    )
    auto = replace(planned_job, checkpointing="auto")
    assert memory_of(planned_job).peak.total > planned_job.gpu.memory
    assert 0 < checkpointed_layers(auto.shape, auto) <= auto.shape.layers
    assert phases(auto)["update"]["activations"] < phases(planned_job)["update"]["activations"]
    assert memory_of(auto).peak.total < auto.gpu.memory
    assert checkpointed_layers(SMALL, job(checkpointing="auto")) == 0
    assert checkpointed_layers(SMALL, replace(job(checkpointing="auto"), gpu=this_cpu())) == 0


def test_the_optimiser_on_the_cpu_leaves_weights_and_gradients() -> None:
    parts = phases(job(optimiser_on_cpu=True))["optimiser"]
    assert not {"master weights", "moments"} & set(parts)
    assert {"weights", "gradients"} <= set(parts)
    assert memory_of(job(optimiser_on_cpu=True)).host == 12 * SMALL.parameters


def test_eight_bit_moments_are_a_quarter() -> None:
    small, large = (phases(job(moments=kind))["optimiser"]["moments"] for kind in ("int8", "float32"))
    assert small / large == pytest.approx(0.25, rel=0.04)


def test_sharding_splits_the_state_over_gpus() -> None:
    one, four = phases(job())["optimiser"], phases(job(gpus=4, sharding="optimiser"))["optimiser"]
    assert four["weights"] == one["weights"]
    assert four["gradients"] == one["gradients"]
    for part in ("master weights", "moments"):
        assert four[part] * 4 == pytest.approx(one[part], abs=4)


def test_full_sharding_splits_weights_too() -> None:
    big = MODELS["70B"]
    sharded = phases(job(big, gpus=64, sharding="full"))["optimiser"]["weights"]
    share = 2 * big.parameters / 64 + 4 * big.layer_parameters
    assert sharded == pytest.approx(share, rel=1e-6)
    gathered = phases(job(big, gpus=64, sharding="full"))["sample"]["weights"]
    assert gathered == pytest.approx(share + 2 * big.parameters, rel=1e-6)
    by_layers = phases(job(big, gpus=64, sharding="full", gather=False))["sample"]["weights"]
    ends = big.parameters - big.layers * big.layer_parameters
    assert by_layers == pytest.approx(share + 2 * ends, rel=1e-6)


def test_tensor_parallel_layers_are_gathered_and_saved_in_part() -> None:
    """A layer's inner activations are divided; residual sums and norms are not."""
    big = MODELS["70B"]
    unsplit, split = (phases(job(big, gpus=64, sharding="full", checkpointing="off", tensor=t)) for t in (1, 8))
    layer = 2 * big.layer_parameters
    assert unsplit["optimiser"]["weights"] - split["optimiser"]["weights"] == pytest.approx(2 * layer * 7 / 8, rel=1e-6)
    more = split["sample"]["weights"] - split["optimiser"]["weights"]
    assert more == pytest.approx(2 * big.parameters + big.layers * layer / 8, rel=1e-6)
    assert unsplit["update"]["activations"] / 8 < split["update"]["activations"] < unsplit["update"]["activations"] / 2


def test_quantised_bases_are_smaller() -> None:
    shape = MODELS["Qwen/Qwen3-8B"]
    plain, four = (phases(job(shape, lora_rank=16, quantise=q))["sample"]["weights"] for q in (None, "nf4"))
    assert plain - four == pytest.approx((2 - 0.5625) * shape.multiplied, rel=1e-6)


def test_algorithms_that_do_not_sample_have_no_kv_cache() -> None:
    for name in ("sft", "dpo"):
        assert next(iter(phases(job(algorithm=name)))) != "sample"
    assert "reference" in phases(job(algorithm="dpo"))
    assert "reference" not in phases(job(algorithm="sft", beta=0.1))


def test_fused_kernels_run_plain_llama_layers_on_a_gpu() -> None:
    assert uses_fused_kernels(SMALL, job())
    assert uses_fused_kernels(SMALL, job(lora_rank=8))
    assert not uses_fused_kernels(SMALL, job(lora_rank=8, quantise="nf4"))
    assert not uses_fused_kernels(SMALL, replace(job(), gpu=this_cpu()))
    gemma = MODELS["google/gemma-2-2b"]
    assert not uses_fused_kernels(gemma, job(gemma))


def _saved_by_autograd(layers: int, *, lora: bool) -> tuple[int, int]:
    """(bytes that autograd saves in a forward pass in bfloat16, tokens); without parameters, each storage once."""
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    policy = Policy(Qwen3ForCausalLM(config).to(torch.bfloat16), build_tokenizer("0123456789"))
    policy.fast_backbone = None  # transformers' modules, as on a GPU for families without fused kernels
    ids = np.arange(64, dtype=np.int64) % 17
    pack = build_pack([PrefixGroup(ids, tuple(ids for _ in range(4)), tuple(range(4)))], policy.device)
    parameters = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters and tensor.is_floating_point():
            saved[address] = tensor
        return tensor

    if lora:
        policy.model.requires_grad_(False)
        for layer in policy.backbone.layers:  # type: ignore[union-attr]
            for name, module in layer.named_modules():
                if name.endswith("_proj"):
                    module.weight.requires_grad_(True)  # as an adapter's A, it needs the layer's input
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        policy.hidden(pack.input_ids, pack.position_ids, pack.attention)
    return sum(t.untyped_storage().nbytes() for t in saved.values()), pack.tokens


@pytest.mark.parametrize("lora", [False, True])
def test_what_autograd_really_saves_of_a_layer(lora: bool) -> None:
    """Two depths, so that everything outside of layers cancels. The CPU's attention saves its output twice, padded."""
    (more, tokens), (less, _) = (_saved_by_autograd(n, lora=lora) for n in (4, 2))
    measured = (more - less) / 2 / tokens - 2 * 64
    planned = layer_bytes(SMALL, replace(job(lora_rank=8 if lora else None), gpu=this_cpu()))
    assert planned == pytest.approx(measured, rel=0.08)


SHAPES = [
    SMALL,
    replace(SMALL, family="gemma2"),
    MODELS["Qwen/Qwen3-0.6B"],
    MODELS["Qwen/Qwen2.5-7B"],
    MODELS["google/gemma-2-2b"],
]


@st.composite
def some_job(draw: st.DrawFn) -> Job:
    return job(
        draw(st.sampled_from(SHAPES)),
        algorithm=draw(st.sampled_from(["grpo", "ppo", "rloo", "reinforce", "dpo", "sft", "trpo"])),
        prompts=draw(st.integers(1, 300)),
        group_size=draw(st.integers(1, 64)),
        prompt_tokens=draw(st.integers(1, 2000)),
        new_tokens=draw(st.integers(1, 2000)),
        tokens_per_pack=draw(st.sampled_from([512, 4096, 16384, 100_000])),
        beta=draw(st.sampled_from([0.0, 0.04])),
        lora_rank=draw(st.sampled_from([None, 16])),
        checkpointing=draw(st.sampled_from(["on", "off"])),
        minibatches=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


def totals(of: Job) -> dict[str, int]:
    return {phase.name: phase.total for phase in memory_of(of).phases}


@settings(max_examples=60, deadline=None)
@given(some_job(), st.sampled_from(["prompts", "group_size", "prompt_tokens", "new_tokens", "tokens_per_pack", "slots"]),
       st.integers(1, 3000))  # fmt: skip
def test_more_of_anything_never_takes_less_memory(planned_job: Job, what: str, more: int) -> None:
    larger = replace(planned_job, **{what: getattr(planned_job, what) + more})
    before, after = totals(planned_job), totals(larger)
    assert before.keys() == after.keys()
    assert all(after[name] >= before[name] for name in before)


@settings(max_examples=40, deadline=None)
@given(some_job(), st.sampled_from(["layers", "width", "kv_heads", "mlp_width", "vocabulary"]), st.integers(1, 4))
def test_a_larger_model_never_takes_less_memory(planned_job: Job, what: str, times: int) -> None:
    larger = replace(planned_job.shape, **{what: getattr(planned_job.shape, what) * times})
    before, after = totals(planned_job), totals(replace(planned_job, shape=larger))
    rows = (
        min(planned_job.pack_predicted, 4224) * planned_job.shape.vocabulary * 6 if what == "width" else 0
    )  # wider: smaller head chunks
    assert all(after[name] + rows >= before[name] for name in before)


@settings(max_examples=40, deadline=None)
@given(some_job())
def test_an_adapter_holds_less_than_full_training(planned_job: Job) -> None:
    """The state between steps; and all memory, if both save the same activations."""
    full, lora = replace(planned_job, lora_rank=None), replace(planned_job, lora_rank=16)
    if full.shape is SMALL:  # rank 16 of a width of 64 is no small adapter
        return
    assert totals(lora)["optimiser"] <= totals(full)["optimiser"]
    if not uses_fused_kernels(full.shape, full):
        assert all(totals(lora)[name] <= totals(full)[name] for name in totals(full))


@settings(max_examples=40, deadline=None)
@given(some_job())
def test_memory_saving_settings_never_take_more(planned_job: Job) -> None:
    base = replace(planned_job, checkpointing="off", lora_rank=None)
    for setting in ({"checkpointing": "on"}, {"moments": "int8"}, {"optimiser_on_cpu": True}, {"reference_on_cpu": True},
                  {"gpus": 4, "sharding": "optimiser"}):  # fmt: skip
        before, after = totals(base), totals(replace(base, **setting))
        assert max(after.values()) <= max(before.values())


def test_a_small_model_in_full_by_the_sum_of_its_parts() -> None:
    """Qwen3-0.6B, 32 × 8, 128 + 256: 18 bytes per parameter, plus either a pack's activations or the KV cache."""
    planned_job = job("Qwen/Qwen3-0.6B", prompts=32, prompt_tokens=128, new_tokens=256, mean_tokens=256.0)
    by_name = {phase.name: phase for phase in memory_of(planned_job).phases}
    state = 18 * planned_job.shape.parameters
    assert all(state < phase.total == sum(phase.parts.values()) < 32 * GIB for phase in by_name.values())
    assert by_name["sample"].parts["kv pool"] == (32 + 256) * 512 * 114_688


def test_a_config_of_unknown_family_counts_as_a_llama() -> None:
    config = {"model_type": "new", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
              "vocab_size": 50}  # fmt: skip
    llama = shape_of_config({**config, "model_type": "llama"}, "x")
    assert shape_of_config(config, "x").parameters == llama.parameters


@settings(max_examples=40, deadline=None)
@given(some_job())
def test_an_adapter_needs_less_than_full_training(planned_job: Job) -> None:
    """Transformers' modules save more of each layer than the fused kernels if there is room. If there is none, layers are
    checkpointed, and then an adapter's peak is lower."""
    full, lora = (replace(planned_job, lora_rank=rank, checkpointing="on") for rank in (None, 16))
    if full.shape is SMALL or full.shape.width < 512:
        return
    assert memory_of(lora).peak.total <= memory_of(full).peak.total


@pytest.mark.parametrize("gpu", ["H200", "cpu"])
def test_every_slot_has_the_states_of_recurrent_layers(gpu: str) -> None:
    """18 delta-nets of Qwen3.5-0.8B, each with 16 matrices of 128 × 128 in float32: 4.8 GB for 256 slots."""
    matrices = 18 * 16 * 128 * 128
    hybrid = replace(SMALL, state_numbers=1000, float32_state_numbers=matrices)
    device = this_cpu(1) if gpu == "cpu" else GPUS[gpu]
    plain = replace(job(SMALL, prompts=64, slots=256, dtype="bfloat16"), gpu=device)
    more = {
        phase: parts["sampling"] - phases(plain)[phase]["sampling"]
        for phase, parts in phases(replace(plain, shape=hybrid)).items()
    }
    assert set(more.values()) == {256 * (2 * 1000 + 4 * matrices)}
    assert 256 * 4 * matrices == 4_831_838_208
    assert seconds_of(replace(plain, shape=hybrid)).phases["sample"] > seconds_of(plain).phases["sample"]


def test_a_natural_gradient_by_hand() -> None:
    """Always float32: 4 bytes of weights, and 44 of gradient and vectors; the distributions of all tokens, and eight tables of
    those of one group: a tenth of 4 groups, rounded up."""
    planned_job = job(BILLION, algorithm="trpo")
    parts, n = phases(planned_job)["update"], BILLION.parameters
    assert parts["weights"] + parts["moments"] + parts["gradients"] == (4 + 44) * n
    assert "master weights" not in parts
    assert parts["lm head"] == 4 * 128_256 * (32 * 200 + 8 * 8 * 200)
    assert phases(replace(planned_job, dtype="float32")) == phases(planned_job)


@pytest.mark.parametrize("name", ["7B", "13B", "70B", "Qwen/Qwen3-8B"])
def test_ppo_holds_twice_what_grpo_does(name: str) -> None:
    """Policy and critic compared with only the policy, all weights trained: the claim that grpo halves the state."""
    sizes = {a: sum(phases(job(name, algorithm=a))["update"].get(part, 0) for part in STATE) for a in ("grpo", "ppo")}
    headless = 1 - (0 if MODELS[name].tied else MODELS[name].head_parameters / MODELS[name].parameters)
    assert sizes["ppo"] / sizes["grpo"] == pytest.approx(1 + headless, rel=1e-6)
    assert headless > 0.9


STATE = ("weights", "master weights", "moments", "gradients", "critic")
