"""Models with layers outside of transformers' attention interface are refused when they are loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from oncurve.errors import ModelError
from oncurve.models.policy import Policy
from tests.models.architectures import tokenizer

HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "qwen3_next": {**HYBRID, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "falcon": {},
    "bloom": {},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "codegen": {"rotary_dim": 4},
    "diffllama": {},
}
"""Recurrent states, custom attention, and layers that attend twice."""


def build(family: str, **special: Any) -> PreTrainedModel:
    tokens = tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokens),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape | special)).eval()


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_outside_the_attention_interface_is_refused_by_name(family: str) -> None:
    model = build(family, **REFUSED[family])
    with pytest.raises(ModelError) as caught:
        Policy(model, tokenizer())
    assert caught.value.where == type(model).__name__


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3_moe", "starcoder2"])
def test_a_family_inside_it_is_accepted(family: str) -> None:
    Policy(build(family), tokenizer())
