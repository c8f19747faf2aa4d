"""Settings of families that change how they compute: other positions, windows, heads, biases. Each is right, or refused.

Together with `test_every_family.py`, which has every family with its default settings, these are the configurations of an audit
that found 38 of 160 silently wrong in an earlier version.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from oncurve.errors import OncurveError
from oncurve.model_families import family_paths
from tests.models.test_every_family import Verdict, judge
from tests.models.tiny_families import WINDOW, tiny_model

pytestmark = pytest.mark.slow


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Heads of 16, which the C functions support."""
LAYERS = ["full_attention", "sliding_attention"]
WINDOWS = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW, "layer_types": LAYERS}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "falcon, one key head": ("falcon", {"multi_query": True}),
    "falcon, all key heads": ("falcon", {"multi_query": False}),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma3_text, both directions": ("gemma3_text", {"use_bidirectional_attention": True}),
    "llama, longrope": ("llama", rope("longrope", original_max_position_embeddings=64, factor=8.0, **FACTORS)),
    "llama, longrope beyond its switch": (
        "llama",
        rope("longrope", original_max_position_embeddings=32, factor=8.0, **FACTORS),
    ),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 64, **rope("longrope", **FACTORS)}),
    "phi3, longrope beyond its switch": ("phi3", {"original_max_position_embeddings": 32, **rope("longrope", **FACTORS)}),
    "llama4_text, temperature tuning": ("llama4_text", {"attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.5}),
    "llama, dynamic rope": ("llama", rope("dynamic", factor=2.0)),
    "llama, dynamic rope beyond its switch": ("llama", {"max_position_embeddings": 32, **rope("dynamic", factor=2.0)}),
    "llama, heads of 16": ("llama", WIDE),
    "llama, heads of 16, biases, tied": ("llama", {**WIDE, "attention_bias": True, "tie_word_embeddings": True}),
    "llama, heads of 16, one key head": ("llama", {**WIDE, "num_key_value_heads": 1}),
    "llama, heads of 16, partial rope": ("llama", {**WIDE, **rope("default", partial_rotary_factor=0.5)}),
    "llama, heads of 16, yarn": ("llama", {**WIDE, **YARN}),
    "mistral, heads of 16, window": ("mistral", {**WIDE, "sliding_window": WINDOW}),
    "qwen2, heads of 16": ("qwen2", WIDE),
    "qwen2, heads of 16, window": ("qwen2", {**WIDE, **WINDOWS}),
    "qwen3, heads of 16, all key heads": ("qwen3", {**WIDE, "num_key_value_heads": 4}),
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "gemma4_text, shared key-value layers": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": LAYERS[::-1] * 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    ),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "granitemoehybrid, attention only": ("granitemoehybrid", {"layer_types": ["attention", "attention"]}),
    "llama, llama3 rope": ("llama", LLAMA3),
    "llama, MLP biases": ("llama", {"mlp_bias": True}),
    "llama, partial rope": ("llama", rope("default", partial_rotary_factor=0.5)),
    "llama, split matrices": ("llama", {"pretraining_tp": 2}),
    "llama, yarn": ("llama", YARN),
    "ministral3, temperature": (
        "ministral3",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5),
    ),
    "minimax_m3_vl_text, chosen blocks of keys": (
        "minimax_m3_vl_text",
        {
            "layer_types": ["minimax_m3_sparse"] * 2,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 16,
            "index_topk_blocks": 2,
        },
    ),
    "phimoe, no window": ("phimoe", {"sliding_window": None}),
    "phimoe, wide window": ("phimoe", {"sliding_window": 4096}),
    "qwen2, window": ("qwen2", WINDOWS),
    "qwen2_moe, no window": ("qwen2_moe", {"use_sliding_window": False, "layer_types": LAYERS[:1] * 2}),
    "qwen2_moe, window in some layers": ("qwen2_moe", WINDOWS),
    "qwen2_moe, window in all layers": ("qwen2_moe", {**WINDOWS, "max_window_layers": 0, "layer_types": LAYERS[1:] * 2}),
    "qwen3, window": ("qwen3", WINDOWS),
    "qwen3_moe, window": ("qwen3_moe", WINDOWS),
    "smollm3, window": ("smollm3", WINDOWS),
}
REFUSED = {
    "gemma3_text, both directions",  # not a causal model
    "llama, longrope beyond its switch",  # log-probs would depend on the longest text of a batch
    "phi3, longrope beyond its switch",
    "llama, dynamic rope beyond its switch",
}


def verdict_of(variant: str) -> Verdict:
    family, changes = VARIANTS[variant]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return judge(tiny_model(family, changes=changes))
        except OncurveError as error:  # refused once the texts are known
            return Verdict("refused", f"{error.because}; {error.fix}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_right_or_refused(variant: str) -> None:
    family, changes = VARIANTS[variant]
    config = tiny_model(family, changes=changes).config.to_dict()
    assert [name for name, value in changes.items() if value is not None and name not in config] == [], "no such setting"
    verdict = verdict_of(variant)
    assert (verdict.path == "refused") == (variant in REFUSED), verdict
    assert verdict.sampler < 1e-5, verdict
    assert verdict.learner < 1e-5, verdict
    assert verdict.gradient < 1e-4, verdict


def test_few_are_refused() -> None:
    assert len(REFUSED) + sum(family.path == "refused" for family in family_paths().values()) <= 10
