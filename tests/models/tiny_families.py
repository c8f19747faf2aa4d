"""Tiny models with random weights of every causal decoder family that the installed transformers registers.

Families are found in transformers' own registry. Sizes are set through whichever of the usual attribute names a config has; the
few families that need more than that are in SPECIAL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, WINDOW = 64, 24
MAX_PARAMETERS = 5_000_000
"""A family that stays larger is not built: its sizes have names of their own."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("sliding_window", "attention_window", "window_size"), WINDOW),
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "rotary_dim": 4,
    "state_size": 8,
    "conv_kernel": 4,
    "n_groups": 1,
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "linear_num_heads": 4,
    "chunk_size": 8,
    "embedding_size": 32,
    "is_decoder": True,
}
LATENT = {"num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
PER_LAYER_INPUT = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 16, "crop_size": 32,
}  # fmt: skip
AUDIO = {
    "hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 4, "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32, "input_size": 16,
}  # fmt: skip
QSA = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
}  # fmt: skip
BOS = {"bos_token_id": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), LATENT),
    **dict.fromkeys(("longcat_flash", "youtu"), LATENT),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), LATENT),
    "minicpm3": {**LATENT, "dim_model_base": 32},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    **dict.fromkeys(("gemma3n", "gemma3n_text"), PER_LAYER_INPUT),
    **dict.fromkeys(("cwm", "emu3", "mllama"), BOS),
    "modernbert-decoder": {**BOS, "global_attn_every_n_layers": 2},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "xlstm": {"v_head_dim": None},
    "xlm": {"causal": True, "n_langs": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": WINDOW,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}, "layer_types": ["full_attention"] * 2},
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), QSA),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), PER_LAYER_INPUT),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4},
    },
    "roc_bert": {
        "pronunciation_vocab_size": 8,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": 8,
        "shape_embed_dim": 8,
        "concat_input": False,
    },
    "xmod": {"default_language": "en_XX"},
    "xlnet": {"max_position_embeddings": None, "d_head": 8, "d_inner": 48},
    "prophetnet": {
        "num_hidden_layers": None,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_attention_heads": None,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "is_encoder_decoder": False,
        "add_cross_attention": False,
    },
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 8,
        "num_hidden_layers": None,
    },
    "git": {"vision_config": VISION},
    "phi4_multimodal": {"vision_config": VISION, "audio_config": AUDIO},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "num_key_value_heads": 4,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_shared_experts": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW, "lru_width": 32},
}
"""Settings beyond SIZES; None leaves an attribute at the family's own value."""
NOT_BUILT = {"blt", "gemma4_assistant", "musicgen", "musicgen_melody"}
"""Types that these sizes do not turn into a tiny text decoder: they are not judged."""


def families() -> list[str]:
    """Every model type with a causal LM class, text configs of multimodal models included."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, changes: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedConfig:
    """``changes`` are further settings of the config: a variant of the family. None: the family's default."""
    config = CONFIG_MAPPING[family]()
    with contextlib.suppress(ValueError):  # several text configs: the model's own one
        config = config.get_text_config()
    sizes = {name: value for name, value in SIZES.items() if _has(config, name)} | SPECIAL.get(family, {})
    kept = {name: value for name, value in sizes.items() if value is not None or name == "bos_token_id"}
    own = {} if "layer_types" in (config.attribute_map or {}) else config.to_dict()
    kinds = {name: list(dict.fromkeys(own.get(name) or ())) for name in ("layer_types", "mlp_layer_types")}
    layers = max(2, *(len(names) for names in kinds.values()))
    repeated = {name: (names * layers)[:layers] for name, names in kinds.items() if names}
    if repeated:  # a layer of every type
        kept = {"num_hidden_layers": layers} | repeated | {n: v for n, v in kept.items() if n != "num_hidden_layers"}
    kept = {name: value for name, value in kept.items() if name not in changes}
    return type(config)(**kept, **{name: value for name, value in changes.items() if value is not None})


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # transformers raises an error of its own for an attribute that differs between layers
        return True


def tiny_model(family: str, seed: int = 0, changes: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedModel:
    """In float32, with weights large enough that its next-token distributions differ clearly from uniform."""
    config = tiny_config(family, changes)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or getattr(
        transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    )
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{family}: {size:,} parameters with the sizes above")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind._from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model
