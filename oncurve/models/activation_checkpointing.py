"""Activation checkpointing: a layer saves only its input, and recomputes the rest in the backward pass.

As few layers as fit into the free memory are checkpointed. The gradient is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oncurve.models import lora
from oncurve.models.heads.lm_head import gpu_chunk_tokens
from oncurve.models.policy import Policy

MAX_FRACTION = 0.9
"""Fraction of the free memory that activations may use; the rest allows for fragmentation."""


def saved_bytes_per_token(policy: Policy) -> int:
    """Bytes that one layer saves per token for the backward pass.

    On the fast path: two residual sums, q, k, v, attention's output, gate and up, a float32 per head, and x Aᵀ of adapters.
    With transformers' modules and autograd: about three times the residuals and norms, and twice the MLP.
    """
    config = policy.model.config.get_text_config()
    itemsize, D, heads = policy.model.dtype.itemsize, config.hidden_size, config.num_attention_heads
    mlp = int(getattr(config, "intermediate_size", None) or 4 * D)
    ranks = (
        sum(len(p) for name, p in lora.adapter_parameters(policy.model).items() if "lora_A" in name) // config.num_hidden_layers
    )
    fused: int = itemsize * (2 * D + 2 * (heads + policy.kv_heads) * policy.head_size + 2 * mlp + ranks) + 4 * heads
    return fused if policy.fast_backbone is not None else fused + itemsize * (6 * D + 2 * mlp) + 8 * D


def layers_to_checkpoint(policy: Policy, tokens: int, free: int) -> int:
    """The fewest layers, counted from the first, that must be checkpointed for ``tokens`` to fit into ``free`` bytes."""
    config = policy.model.config.get_text_config()
    layers = int(config.num_hidden_layers)
    layer_bytes = tokens * saved_bytes_per_token(policy)
    gain = layer_bytes - tokens * policy.model.dtype.itemsize * config.hidden_size
    excess = layers * layer_bytes - int(MAX_FRACTION * free)
    return 0 if excess <= 0 else min(layers, -(-excess // max(gain, 1)))


def transient_bytes(policy: Policy, tokens: int) -> int:
    """Bytes that a pass uses beyond saved activations: one layer's gradients, embedding and head, and a chunk of logits."""
    config, itemsize = policy.model.config.get_text_config(), policy.model.dtype.itemsize
    mlp = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    chunk: int = min(tokens, gpu_chunk_tokens(config.vocab_size)) * config.vocab_size * (4 + itemsize)
    return int(tokens * itemsize * (4 * mlp + 8 * config.hidden_size)) + chunk


def checkpoint_layers(policy: Policy, count: int) -> None:
    """Checkpoint the first ``count`` layers; the others save their activations."""
    if policy.fast_backbone is not None:
        policy.fast_backbone.checkpointed = count
        return
    layers = getattr(policy.backbone, "layers", None)
    assert isinstance(layers, nn.ModuleList)
    for i, layer in enumerate(layers):
        forward = type(layer).forward.__get__(layer)
        layer.forward = partial(_forward_with_recompute, forward) if i < count else forward


def _forward_with_recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
