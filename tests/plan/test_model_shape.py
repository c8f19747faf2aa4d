"""Shapes: parameters equal those of transformers, the KV cache by hand, configs read or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oncurve.errors import ModelError, RecipeError
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.plan.memory import memory_of, slots_in_flight
from oncurve.plan.model_shape import ModelShape, read_config, shape_of_config, tiny_shape
from oncurve.plan.model_table import MODELS, find_shape
from oncurve.plan.request import with_settings
from oncurve.plan.step_time import seconds_of
from oncurve.recipe.schema.model import TinyModel
from tests.plan.jobs import job

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-3-1b": 999_885_952,
    "7B": 6_738_415_616,
    "13B": 13_015_864_320,
    "70B": 68_976_648_192,
}
"""Parameter counts of the published checkpoints."""


def transformers_config(shape: ModelShape, layers: int | None = None, **more: Any) -> Any:
    return AutoConfig.for_model(
        shape.family,
        num_hidden_layers=layers or shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.mlp_width,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        **more,
    )


def count(config: Any) -> int:
    """Parameters of the module, built on the meta device; tied weights count once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum({id(p): p.numel() for p in model.parameters()}.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_the_published_count(name: str) -> None:
    assert MODELS[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_transformers(shape: ModelShape) -> None:
    """Two layers are enough: all layers are equal, and the published counts check their number."""
    config = transformers_config(shape, layers=2)
    assert shape_of_config(config.to_dict(), shape.name).parameters == count(config)


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
         "vocab_size": 50, "pad_token_id": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32, "attention_bias": True}),
        ("phi3", {}),
        ("olmo2", {}),
        ("granite", {}),
        ("gemma", {"head_dim": 32}),
        ("gemma2", {"head_dim": 32}),
        ("gemma3_text", {"head_dim": 32}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}),
        ("smollm3", {}),
    ],
)
def test_every_family_has_the_parameters_of_its_modules(family: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **{**SMALL, **more})
    assert shape_of_config(config.to_dict(), family).parameters == count(config)


HYBRID = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2,
          "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_5_text", HYBRID),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
        ("deepseek_v3", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                         "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "n_group": 1, "topk_group": 1}),
        ("glm4", {}),
        ("starcoder2", {}),
        ("exaone4", {}),
        ("cohere2", {}),
    ],
)  # fmt: skip
def test_families_without_a_formula_are_counted(family: str, more: dict[str, Any]) -> None:
    """Their layers are not Llama's: the formula alone would be wrong for most of them."""
    config = AutoConfig.for_model(family, **{**SMALL, **more})
    shape = shape_of_config(config.to_dict(), family)
    assert shape.parameters == count(config)
    assert 0 < shape.multiplied <= shape.multiplied_in_all < shape.parameters


@pytest.mark.parametrize(("family", "more"), [("qwen3_5_text", HYBRID), ("lfm2", {"layer_types": ["conv", "full_attention"]})])
def test_recurrent_layers_have_no_kv_cache(family: str, more: dict[str, Any]) -> None:
    shape = shape_of_config(AutoConfig.for_model(family, **{**SMALL, **more}).to_dict(), family)
    assert shape.attention_layers == 1
    assert shape.kv_bytes(2) == 2 * shape.kv_width * 2


def test_the_built_in_model() -> None:
    tokenizer = build_tokenizer("0123456789+=")
    model = build_model(TinyModel(), tokenizer, seed=0)
    assert tiny_shape(TinyModel(), len(tokenizer)).parameters == sum(p.numel() for p in model.parameters())


def test_adapters_have_the_parameters_of_peft() -> None:
    import peft

    config = AutoConfig.for_model("qwen3", **SMALL, head_dim=32)
    model = AutoModelForCausalLM.from_config(config)
    peft.inject_adapter_in_model(peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear"), model)
    expected = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert shape_of_config(config.to_dict(), "small").adapter_parameters(3) == expected


def test_kv_cache_of_a_token() -> None:
    """Qwen3-8B: 36 layers × 2 (K and V) × 8 heads of 128 × 2 bytes."""
    assert MODELS["Qwen/Qwen3-8B"].kv_bytes(2) == 36 * 2 * 8 * 128 * 2 == 147_456
    assert MODELS["13B"].kv_bytes(2) == 40 * 2 * 40 * 128 * 2 == 819_200


def test_a_token_is_multiplied_with_all_but_embeddings_and_norms() -> None:
    shape = MODELS["Qwen/Qwen3-8B"]
    assert shape.multiplied == shape.parameters - 2 * shape.head_parameters - shape.width - 36 * (2 * 4096 + 2 * 128)


def test_all_experts_are_in_memory_but_few_are_multiplied() -> None:
    config = {**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    shape = shape_of_config(config, "moe")
    expert = 3 * 64 * 96
    assert shape.multiplied_in_all - shape.multiplied == 2 * 6 * expert


def test_a_layer_without_experts_has_no_idle_ones() -> None:
    """DeepSeek's first layer is dense: 6 of 8 experts of the other are idle."""
    more = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}  # fmt: skip
    shape = shape_of_config(AutoConfig.for_model("deepseek_v3", **{**SMALL, **more}).to_dict(), "moe")
    assert shape.parameters - shape.active_parameters == 6 * 3 * 64 * 32
    assert shape.head_size == 24, "keys of latent attention have a part with and a part without positions"


@pytest.mark.parametrize("name", ["qwen3-8b", "Qwen/Qwen3-8B-Base", "Qwen3-8B"])
def test_a_model_by_any_of_its_names(name: str) -> None:
    assert find_shape(name) is MODELS["Qwen/Qwen3-8B"]


def test_instruct_models_have_the_shape_of_their_base() -> None:
    assert find_shape("meta-llama/Llama-3.1-8B-Instruct") is MODELS["meta-llama/Llama-3.1-8B"]
    assert find_shape("google/gemma-3-1b-it") is MODELS["google/gemma-3-1b"]


def test_a_folder_and_its_config_are_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "qwen3"}))
    assert find_shape(str(tmp_path)).parameters == find_shape(str(tmp_path / "config.json")).parameters


def test_text_inside_a_larger_config_is_read(tmp_path: Path) -> None:
    text = {**SMALL, "model_type": "gemma3_text", "head_dim": 32, "max_position_embeddings": 512}
    outer = {"model_type": "gemma3", "text_config": text}
    assert shape_of_config(outer, "x") == shape_of_config(text, "x")


def test_a_download_in_the_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--some--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_shape("some/model").width == 64


def test_the_error_for_an_unknown_model_names_the_closest_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError) as error:
        find_shape("Qwen/Qwen3-9B")
    assert "Qwen/Qwen3-8B" in error.value.fix


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_config_that_lacks_a_key_is_refused(missing: str) -> None:
    config = {key: value for key, value in SMALL.items() if key != missing}
    with pytest.raises(ModelError, match=missing):
        shape_of_config(config, "half")


@pytest.mark.parametrize("text", ["not json", "[1, 2]"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(path, "x")


def published(**keys: Any) -> dict[str, Any]:
    """A config.json as it is on the hub, with what loading it adds or ignores."""
    return {"torch_dtype": "bfloat16", "transformers_version": "4.56.0", "use_cache": True, "bos_token_id": 1, **keys}


QWEN3_NEXT = published(
    model_type="qwen3_next", hidden_size=2048, num_hidden_layers=8, full_attention_interval=4, num_attention_heads=16,
    num_key_value_heads=2, head_dim=256, partial_rotary_factor=0.25, intermediate_size=5120, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, num_experts=16, num_experts_per_tok=10, decoder_sparse_step=1, mlp_only_layers=[],
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_value_head_dim=128, max_position_embeddings=262_144, rope_scaling=None, rope_theta=10_000_000, vocab_size=151_936,
    tie_word_embeddings=False,
)  # fmt: skip
"""Qwen3-Next-80B-A3B with 8 of 48 layers and 16 of 512 experts."""
LFM2 = published(
    model_type="lfm2", block_auto_adjust_ff_dim=True, block_dim=2048, block_ff_dim=12_288, block_ffn_dim_multiplier=1.0,
    block_multiple_of=256, block_norm_eps=1e-5, block_use_swiglu=True, conv_L_cache=3, conv_bias=False, conv_dim=2048,
    full_attn_idxs=[2, 5, 8, 10, 12, 14], hidden_size=2048, max_position_embeddings=128_000, norm_eps=1e-5,
    num_attention_heads=32, num_heads=32, num_hidden_layers=16, num_key_value_heads=8, rope_theta=1e6, vocab_size=65_536,
)  # fmt: skip
"""LFM2-1.2B."""
NEMOTRON_H = published(
    model_type="nemotron_h", hybrid_override_pattern="M-M*-", num_hidden_layers=5, hidden_size=4096, intermediate_size=21_504,
    attention_head_dim=128, head_dim=128, num_attention_heads=32, num_key_value_heads=8, mamba_head_dim=64,
    mamba_num_heads=128, n_groups=8, ssm_state_size=128, conv_kernel=4, expand=2, chunk_size=128, vocab_size=131_072,
    max_position_embeddings=8192, tie_word_embeddings=False, mlp_hidden_act="relu2", auto_map={"AutoConfig": "code.Config"},
)  # fmt: skip
"""Nemotron-H-8B with 5 of 52 layers. transformers' class has 8 experts by default, and no layer here has any."""
GRANITE4 = published(
    model_type="granitemoehybrid", layer_types=["mamba", "attention"], num_hidden_layers=2, hidden_size=1536,
    intermediate_size=512, shared_intermediate_size=1024, num_local_experts=8, num_experts_per_tok=6, num_attention_heads=12,
    num_key_value_heads=4, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1,
    mamba_n_heads=48, mamba_chunk_size=256, position_embedding_type="nope", vocab_size=100_352, tie_word_embeddings=True,
    max_position_embeddings=131_072, rope_scaling=None, rope_theta=10_000,
)  # fmt: skip
"""Granite 4.0 H Tiny with 2 of 40 layers and 8 of 64 experts."""
GPT2 = {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50_257}  # fmt: skip
MAMBA2 = published(
    model_type="mamba2", hidden_size=768, num_hidden_layers=2, num_heads=24, head_dim=64, state_size=128, n_groups=1,
    conv_kernel=4, expand=2, chunk_size=256, vocab_size=50_288, tie_word_embeddings=True,
    time_step_limit=[0.0, {"__float__": "Infinity"}],
)  # fmt: skip
"""Mamba2-130m with 2 of 24 layers; transformers 5 writes infinity like this."""
FALCON = published(
    model_type="falcon", hidden_size=4544, num_hidden_layers=2, num_attention_heads=71, multi_query=True, parallel_attn=True,
    alibi=False, bias=False, new_decoder_architecture=False, vocab_size=65_024,
)  # fmt: skip
"""Falcon-7B with 2 of 32 layers."""
KIMI_LINEAR = published(
    model_type="kimi_linear", hidden_size=2304, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=32,
    head_dim=72, intermediate_size=9216, first_k_dense_replace=1, moe_intermediate_size=1024, num_experts=16,
    num_experts_per_token=8, num_shared_experts=1, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True, vocab_size=163_840, tie_word_embeddings=False,
    linear_attn_config={"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32,
                        "short_conv_kernel_size": 4},
)  # fmt: skip
"""Kimi-Linear-48B-A3B with 4 of 27 layers and 16 of 256 experts."""


@pytest.mark.parametrize(
    ("config", "attention_layers", "kv", "state"),
    [
        (QWEN3_NEXT, 2, 2 * 2 * 2 * 256, 6 * (2 * 8192 * 4 + 4 * 32 * 128 * 128)),
        (LFM2, 6, 6 * 2 * 8 * 64, 10 * 2 * 2048 * 3),
        (NEMOTRON_H, 1, 2 * 8 * 128, 2 * (2 * 10_240 * 4 + 4 * 128 * 64 * 128)),
        (GRANITE4, 1, 2 * 4 * 128, 2 * 3328 * 4 + 4 * 48 * 64 * 128),
        (GPT2, 12, 12 * 2 * 768, 0),
        (MAMBA2, 0, 0, 2 * (2 * 1792 * 4 + 4 * 24 * 64 * 128)),
        (FALCON, 2, 2 * 2 * 64, 0),
        (KIMI_LINEAR, 1, 2 * 32 * (128 + 64), 3 * (2 * 12_288 * 4 + 4 * 32 * 128 * 128)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_config_of_the_hub_has_its_caches(
    config: dict[str, Any], attention_layers: int, kv: int, state: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The KV cache in numbers per token, and the states in bytes per sequence with weights in 16 bits, computed by hand: the
    inputs of a convolution in 16 bits, and the matrices of the recurrence in float32."""
    shape = shape_of_config(config, "hub")
    assert shape.layers_with_cache == attention_layers
    assert shape.kv_bytes(1) == kv
    assert shape.state_bytes(2) == state
    assert capfd.readouterr().err == "", "transformers' advice about kernels is no part of a plan"


@pytest.mark.parametrize(
    ("config", "parameters", "mlp_width", "context"),
    [(LFM2, 1_170_340_608, 12_288, 128_000), (GPT2, 124_439_808, 3072, 1024)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_config_of_the_hub_has_its_size(config: dict[str, Any], parameters: int, mlp_width: int, context: int) -> None:
    shape = shape_of_config(config, "hub")
    assert (shape.parameters, shape.mlp_width, shape.context) == (parameters, mlp_width, context)


def test_a_model_without_experts_has_none_by_default() -> None:
    shape = shape_of_config(NEMOTRON_H, "dense")
    assert (shape.experts, shape.mlp_width) == (0, 21_504)
    assert shape.active_parameters == shape.parameters


def test_gpt_2_has_adapters_on_its_transposed_layers() -> None:
    """Each layer has q, k and v in one, o, and the MLP's two."""
    widths = (768 + 3 * 768) + (768 + 768) + (768 + 3072) + (3072 + 768)
    assert shape_of_config(GPT2, "gpt2").adapter_parameters(4) == 12 * 4 * widths


def test_a_text_config_without_defaults_is_completed() -> None:
    """As in the config.json of gemma-3-4b."""
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    shape = shape_of_config({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}, "gemma")
    assert shape.parameters == 3_880_263_168
    assert shape.kv_bytes(2) == 34 * 2 * 4 * 256 * 2


def test_a_family_unknown_to_transformers_is_counted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    shape = shape_of_config({**SMALL, "model_type": "brand_new"}, "new")
    assert shape.parameters == shape_of_config({**SMALL, "model_type": "llama"}, "new").parameters
    assert "can't build a model of type brand_new" in caplog.text


def test_a_model_without_attention_can_be_planned() -> None:
    planned = job(shape_of_config(MAMBA2, "mamba2"), new_tokens=200)
    assert memory_of(planned).peak.total > 0
    assert slots_in_flight(planned) == planned.rows
    assert seconds_of(planned).step > 0


EXPERTS = {**SMALL, "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
           "head_dim": 16, "max_position_embeddings": 4096}  # fmt: skip


def test_embeddings_of_layers_do_not_keep_a_model_from_being_quantised() -> None:
    """More than half of the weights of Gemma 3n's layers are in an embedding, which is looked up."""
    config = {"model_type": "gemma3n_text", "vocab_size": 512, "vocab_size_per_layer_input": 512, "num_hidden_layers": 2,
              "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
              "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2,
              "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    shape = shape_of_config(config, "gemma")
    assert shape.counted_embeddings == 512 * 2 * 64 > shape.linear_parameters
    assert shape.can_be_quantised
    assert with_settings(job(shape), quantise="nf4", lora_rank=4).quantise == "nf4"


@pytest.mark.parametrize("config", [EXPERTS, {**EXPERTS, "model_type": "flex_olmo"}], ids=["by formula", "counted"])
def test_experts_are_not_linear_modules(config: dict[str, Any]) -> None:
    shape = shape_of_config(config, "moe")
    assert shape.linear_parameters == 2 * sum(a * b for a, b in shape.attention_matrices)
    assert not shape.can_be_quantised
    with pytest.raises(RecipeError, match=r"model\.quantise.*experts"):
        with_settings(job(shape), quantise="nf4", lora_rank=4)
