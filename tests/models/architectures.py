"""Tiny decoders with random weights, one per architecture (Llama twice) that engine and learner must run exactly.

Each architecture's special features matter at the lengths of the tests: windows are shorter than the text, both kinds of layers
alternate, SmolLM3 has a layer without positions, Gemma 2 its soft caps, Granite its multipliers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from oncurve.models import lora
from oncurve.models.loading.load import build_tokenizer
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Lora

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-= "
WINDOW = 24
SLIDING, FULL = "sliding_attention", "full_attention"

ARCHITECTURES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_hidden_layers": 2}),
    "llama_biased": (LlamaConfig, {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {"num_hidden_layers": 2}),
    "qwen3": (Qwen3Config, {"num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 12,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
        },
    ),
    "phi3": (Phi3Config, {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "olmo2": (Olmo2Config, {"num_hidden_layers": 2}),
    "granite": (
        GraniteConfig,
        {
            "num_hidden_layers": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 4.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.7,
        },
    ),
}


def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(ALPHABET)


def make_model(name: str, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """A model with weights large enough for its texts to vary, and tied ones small enough not to repeat the input.

    Attention is transformers' eager one until a Policy wraps the model.
    """
    kind, special = ARCHITECTURES[name]
    tokens = tokenizer()
    common = {
        "vocab_size": len(tokens),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**common | special | shape), attn_implementation="eager")
        _randomise(model)
    return model.float().eval()


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=(1.0 if module is head else 2.0) / module.in_features**0.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.3)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3 if model.config.tie_word_embeddings else 1.0)
        elif "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            module.weight.add_(torch.randn_like(module.weight), alpha=0.2)


def adapted(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """The model with a random (non-zero) adapter."""
    lora.attach(model, Lora.model_validate({"rank": 4, **options}), 0, "base")
    shake(model)
    return model


@torch.no_grad()
def shake(model: nn.Module, seed: int = 0) -> None:
    """Add noise to every A and B of the adapter."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in lora.adapter_parameters(model).items():
        if "lora_A" in name or "lora_B" in name:
            p.add_((0.1 * torch.randn(p.shape, generator=generator)).to(p))


def make_policy(name: str, seed: int = 0) -> Policy:
    return Policy(make_model(name, seed), tokenizer())
