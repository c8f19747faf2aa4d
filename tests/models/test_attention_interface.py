"""Which models run through our attention, which take the general path, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from oncurve.errors import ModelError
from oncurve.models.attention_interface import NAME, attention_forward
from oncurve.models.policy import Policy
from tests.models.architectures import tokenizer

GENERAL: dict[str, dict[str, Any]] = {
    "mamba": {},
    "falcon": {},
    "bloom": {},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "codegen": {"rotary_dim": 4},
    "diffllama": {},
}
"""Recurrent layers that do not receive our context, custom attention, and layers that attend twice."""


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


@pytest.mark.parametrize("family", GENERAL)
def test_a_family_outside_the_attention_interface_takes_the_general_path(family: str) -> None:
    policy = Policy(build(family, **GENERAL[family]), tokenizer())
    assert policy.general_reason is not None
    assert policy.model.config._attn_implementation != NAME


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "nemotron", "qwen3_moe", "stablelm", "starcoder2"])
def test_a_family_inside_it_runs_through_our_attention(family: str) -> None:
    assert Policy(build(family), tokenizer()).general_reason is None


@pytest.mark.parametrize("argument", ["attention_mask", "block_indices", "indices", "position_bias"])
def test_a_tensor_that_no_context_reads_is_never_ignored(argument: str) -> None:
    """MiniMax M3 and DeepSeek V3.2 pass the keys that they chose, Doge a mask, Inkling a bias."""
    arguments: dict[str, Any] = {"attention_mask": None, argument: torch.zeros(1, 1, 2, 2)}
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ModelError, match="of its own"):
        attention_forward(torch.nn.Identity(), x, x, x, **arguments)


def test_a_model_that_is_not_causal_is_refused() -> None:
    model = with_larger_weights(build("bert", is_decoder=False))
    with pytest.raises(ModelError, match="not a causal model") as caught:
        Policy(model, tokenizer())
    assert caught.value.where == type(model).__name__


def test_uniform_weights_are_inconclusive_and_never_passed() -> None:
    uniform = build("llama")
    with torch.no_grad():
        uniform.get_output_embeddings().weight.mul_(1e-4)
    assert not Policy(uniform, tokenizer()).check.conclusive
    assert Policy(with_larger_weights(build("llama")), tokenizer()).check.conclusive


def test_a_window_that_only_the_mask_applies_is_noticed() -> None:
    """PhiMoE's attention modules do not pass their window on; transformers applies it by its mask."""
    policy = Policy(
        with_larger_weights(build("phimoe", sliding_window=24, num_local_experts=2, num_experts_per_tok=1)), tokenizer()
    )
    assert policy.general_reason is not None
    assert policy.model.config.sliding_window == 24


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_positions_end_where_rope_would_switch(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if rope_type == "longrope" else {}
    policy = Policy(build("llama", max_position_embeddings=256, rope_parameters=rope | factors), tokenizer())
    assert policy.max_positions == 64


def with_larger_weights(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model
