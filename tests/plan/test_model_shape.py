"""Shapes: parameters equal those of transformers, the KV cache by hand, configs read or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oncurve.errors import ModelError
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.plan.model_shape import ModelShape, read_config, shape_of_config, tiny_shape
from oncurve.plan.model_table import MODELS, find_shape
from oncurve.recipe.schema.model import TinyModel

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
    outer = {"model_type": "gemma3", "text_config": {**SMALL, "model_type": "gemma3_text", "head_dim": 32}}
    inner = shape_of_config(outer["text_config"], "x")  # type: ignore[arg-type]
    assert shape_of_config(outer, "x") == inner


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
