"""Activation checkpointing: the same gradient, and as few layers as fit into memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from oncurve.training.learner.activation_checkpointing import (
    MAX_FRACTION,
    checkpoint_layers,
    decoder_layers,
    layers_to_checkpoint,
    saved_bytes_per_token,
)
from tests.models.architectures import make_model, tokenizer
from tests.models.test_every_family import CharacterTokenizer
from tests.models.test_pack_attention import far_apart, gradients, groups_of, weighted
from tests.models.tiny_families import tiny_model


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_the_gradient_is_the_same_with_any_number_of_layers(name: str) -> None:
    policy = Policy(make_model(name), tokenizer())
    policy.fast_backbone = None  # through transformers' modules, which every architecture has
    pack = build_pack(groups_of("ragged"), policy.device)
    layer: Any = policy.backbone.layers[0]  # type: ignore[index]
    calls: list[bool] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    results = []
    for count in (0, 1, 2, 0):
        checkpoint_layers(policy, count)
        calls.clear()
        results.append(gradients(policy.model, weighted(*policy.pack_logps(pack, 0.9))))
        assert len(calls) == 1
    for other in results[1:]:
        assert all(far_apart(a, b) < 1e-6 for a, b in zip(other, results[0], strict=True))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("bloom", "falcon", "hrm_text", "mpt", "opt", "qwen3_next")]


@pytest.mark.parametrize("family", ["gpt2", *SLOW])
def test_families_that_name_their_layers_otherwise(family: str) -> None:
    policy = Policy(tiny_model(family), CharacterTokenizer())
    pack = build_pack(groups_of("ragged"), policy.device)
    layers = decoder_layers(policy.backbone)
    calls: list[nn.Module] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: calls.append(module))
    results = []
    for count in (0, len(layers)):
        checkpoint_layers(policy, count)
        results.append(gradients(policy.model, weighted(*policy.pack_logps(pack, 0.9))))
    assert set(calls) == set(layers), "each of them is run"
    assert sum(len(list(layer.parameters())) for layer in layers) > 0.5 * len(list(policy.backbone.parameters()))
    assert all(far_apart(a, b) < 1e-6 for a, b in zip(*results, strict=True))


def test_as_few_layers_as_possible_are_checkpointed() -> None:
    """Each of 2 layers saves 40 tokens × saved bytes; a checkpointed one saves only 40 × the residual, and is recomputed."""
    policy = Policy(make_model("llama"), tokenizer())
    each, residual = 40 * saved_bytes_per_token(policy), 40 * 4 * policy.model.config.hidden_size
    assert layers_to_checkpoint(policy, 40, int(2 * each / MAX_FRACTION) + 2) == 0
    assert layers_to_checkpoint(policy, 40, int((each + 2 * residual) / MAX_FRACTION) + 2) == 2
    assert layers_to_checkpoint(policy, 40, 0) == 2


def test_saved_bytes_of_the_fast_path_by_hand() -> None:
    """Two residuals, q, k, v and attention's output, gate and up in float32, and a log-sum-exp per head."""
    policy = Policy(make_model("llama"), tokenizer())
    config = policy.model.config
    d = config.hidden_size // config.num_attention_heads
    wide = 2 * config.hidden_size + (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * d
    assert saved_bytes_per_token(policy) == 4 * (wide + 2 * config.intermediate_size) + 4 * config.num_attention_heads
