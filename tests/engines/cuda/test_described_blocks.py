"""The fused decode step of blocks that are described, not coded: the families people train, against transformers' own forward.

In Triton's interpreter, float32. Weights of norms are random: a norm of 1 + weight must not pass for one of weight.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.cuda.decode_step import FusedStep, ModuleStep
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.models import lora
from oncurve.models.llama.block_description import DecoderDescription, describe
from oncurve.models.llama.fused import FusedWeights
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion, Ints
from tests.engines.cuda.test_graph_decoder import complete, small_pages  # noqa: F401 (a fixture)
from tests.engines.native.plain import assert_logps, next_logits, prompt_of
from tests.models.architectures import adapted, tokenizer
from tests.models.tiny_families import tiny_config, tiny_model

WINDOW = 6
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 12},
    "gemma3_text": {"layer_types": LAYERS, "query_pre_attn_scalar": 12},
    "olmo2": {},
    "olmo3": {"layer_types": LAYERS},
    "granite": {
        "attention_multiplier": 0.3, "embedding_multiplier": 4.0, "residual_multiplier": 0.5, "logits_scaling": 0.7,
    },
    "phi3": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {},
    "cohere2": {"layer_types": LAYERS},
    "exaone4": {"layer_types": LAYERS},
    "starcoder2": {},
    "arcee": {},
    "ernie4_5": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {},
    "olmoe": {},
    "mixtral": {},
    "glm4_moe": {},
    "nemotron": {},
    "stablelm": {"use_parallel_residual": True},
}  # fmt: skip

QUICK = ("gemma3_text", "olmo2", "cohere2", "glm4", "qwen3_moe")


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    config, tokens = tiny_config(family), tokenizer()
    settings = {
        **config.to_dict(), "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id,
        "tie_word_embeddings": False, **FAMILIES[family],
        **({"sliding_window": WINDOW} if getattr(config, "sliding_window", None) else {}),
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(type(config)(**settings), attn_implementation="eager")
        with torch.no_grad():
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    if parameter.dim() >= 2:
                        parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
                    else:
                        parameter.uniform_(0.2, 1.0)
    return model.float().eval()


def fused(model: PreTrainedModel) -> Policy:
    """The policy with fused weights as on a GPU, on a CPU."""
    policy = Policy(model, tokenizer())
    policy.fast_backbone, policy.fused_weights = None, FusedWeights(described(policy.model))
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_the_description_does_not_depend_on_the_precision(family: str) -> None:
    model = make_model(family)
    exact, rounded = described(model), described(model.bfloat16())
    for one, other in zip(exact.blocks, rounded.blocks, strict=True):
        assert dataclasses.replace(one, residual_scale=0.0) == dataclasses.replace(other, residual_scale=0.0)
        assert other.residual_scale == pytest.approx(one.residual_scale, rel=1e-3)
    assert rounded.embedding_scale == float(torch.tensor(exact.embedding_scale).bfloat16())


def described(model: PreTrainedModel) -> DecoderDescription:
    description = describe(model)
    assert isinstance(description, DecoderDescription), description
    return description


@torch.inference_mode()
def sample_one(policy: Policy, prompt_length: int, sampling: Sampling) -> tuple[Ints, Completion]:
    """A prompt's tokens and a completion of it, in one slot."""
    decoder, prompt = GraphDecoder.build(policy, Engine(check_every=2)), prompt_of(prompt_length)
    assert decoder is not None
    assert isinstance(decoder.step, FusedStep)
    ids = policy.encode(prompt)
    return ids, complete(decoder, [SampleRequest(prompt, ids, 1, sampling, SampleKey(0, 1))], 1)[0][0]


@pytest.mark.parametrize("family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_logps_and_greedy_tokens_are_those_of_transformers(family: str) -> None:
    """The prompt is longer than a chunk and than the windows."""
    model = make_model(family)
    ids, completion = sample_one(fused(copy.deepcopy(model)), 10, Sampling(temperature=0, max_new_tokens=4))
    assert next_logits(model, ids, completion.token_ids).argmax(-1).tolist() == completion.token_ids.tolist()
    assert_logps(model, ids, completion, temperature=1.0, within=1e-5)


def test_an_adapter_on_a_described_block() -> None:
    model = adapted(make_model("gemma3_text"))
    ids, completion = sample_one(fused(copy.deepcopy(model)), 6, Sampling(temperature=0, max_new_tokens=2))
    assert_logps(lora.merge_copy(model), ids, completion, temperature=1.0, within=1e-5)


@torch.inference_mode()
def test_a_wrong_description_is_not_used() -> None:
    """A step that differs from the modules is noticed when the decoder is built, and the modules decode."""
    policy = fused(make_model("gemma3_text"))
    weights = policy.fused_weights
    assert weights is not None
    wrong = dataclasses.replace(weights.description, embedding_scale=2 * weights.description.embedding_scale)
    policy.fused_weights = FusedWeights(wrong)
    decoder = GraphDecoder.build(policy, Engine())
    assert decoder is not None
    assert isinstance(decoder.step, ModuleStep)


@pytest.mark.parametrize("family", ["llama", "granite", "cohere2", "gemma3_text"])
def test_blocks_beside_massive_activations_are_described_in_16_bits(family: str) -> None:
    """A few elements of a pretrained model's residual stream are thousands of times as large as what a block adds: a difference
    of two rounded sums says nothing about the scale of what was added."""
    model = make_model(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, :2] *= 3000.0
    exact, rounded = describe(model), describe(copy.deepcopy(model).bfloat16())
    assert isinstance(exact, DecoderDescription), exact
    assert isinstance(rounded, DecoderDescription), rounded
    assert [block.residual_scale for block in rounded.blocks] == [block.residual_scale for block in exact.blocks]
    assert rounded.blocks[0].residual_scale == (0.5 if family == "granite" else 1.0)


def test_what_present_weights_hide_is_not_described() -> None:
    """A norm after the rotary embedding whose weight is still uniform, a projection of zeros, a scale of 1 that is trained."""
    assert describe(tiny_model("hunyuan_v1_dense")) == "a norm of q and k after the rotary embedding"
    config = tiny_config("ministral3")
    assert isinstance(describe(AutoModelForCausalLM.from_config(config)), DecoderDescription)
    config.rope_parameters["original_max_position_embeddings"] = 400  # from where on queries are scaled
    assert describe(AutoModelForCausalLM.from_config(config)) == "a rotary embedding of another form"
    model = make_model("llama")
    nn.init.zeros_(model.base_model.layers[1].self_attn.o_proj.weight)
    nn.init.zeros_(model.base_model.layers[1].self_attn.o_proj.bias)
    assert describe(model) == "weights of zero, with which the use of a linear layer's output can't be traced"
    model = make_model("llama")
    model.base_model.layers[0].mlp.scale = nn.Parameter(torch.ones(1))
    assert describe(model) == "parameters besides linear layers and norms (layers.0.mlp.scale)"
