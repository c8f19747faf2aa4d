"""Gradient checkpointing: a layer keeps only its input, and computes the rest again in the backward pass.

Which layers do is chosen by what memory is left: as few as fit. The gradient is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oncurve.models import lora
from oncurve.models.heads.lm_head import chunk_rows
from oncurve.models.policy import Policy

SPARE = 0.9
"""Share of the free memory that activations may take: the rest is for what the allocator can't join."""


def kept_bytes(policy: Policy) -> int:
    """What one layer keeps of a token for the backward pass.

    By the fast path: two residual sums, q, k, v, attention's output, gate and up, a float32 per head, and x Aᵀ of adapters. By
    modules and autograd about three times the residuals and norms, and twice the MLP.
    """
    config = policy.model.config.get_text_config()
    wide, D, heads = policy.model.dtype.itemsize, config.hidden_size, config.num_attention_heads
    mlp = int(getattr(config, "intermediate_size", None) or 4 * D)
    ranks = (
        sum(len(p) for name, p in lora.adapter_parameters(policy.model).items() if "lora_A" in name) // config.num_hidden_layers
    )
    lean: int = wide * (2 * D + 2 * (heads + policy.key_heads) * policy.head_size + 2 * mlp + ranks) + 4 * heads
    return lean if policy.fast_backbone is not None else lean + wide * (6 * D + 2 * mlp) + 8 * D


def layers_to_checkpoint(policy: Policy, tokens: int, free: int) -> int:
    """The fewest layers, from the first, such that what all layers keep of ``tokens`` fits into ``free`` bytes."""
    layers = int(policy.model.config.get_text_config().num_hidden_layers)
    each = tokens * kept_bytes(policy)
    saved = each - tokens * policy.model.dtype.itemsize * policy.model.config.get_text_config().hidden_size
    over = layers * each - int(SPARE * free)
    return 0 if over <= 0 else min(layers, -(-over // max(saved, 1)))


def in_flight_bytes(policy: Policy, tokens: int) -> int:
    """What a pass holds beside what layers keep: one layer's gradients on their way, both ends, and a chunk of logits."""
    config, wide = policy.model.config.get_text_config(), policy.model.dtype.itemsize
    mlp = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    chunk: int = min(tokens, chunk_rows(config.vocab_size)) * config.vocab_size * (4 + wide)
    return int(tokens * wide * (4 * mlp + 8 * config.hidden_size)) + chunk


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that is free, or held by torch's allocator and in no tensor."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def checkpoint_layers(policy: Policy, count: int) -> None:
    """The first ``count`` layers compute their activations again in the backward pass; the others keep theirs."""
    if policy.fast_backbone is not None:
        policy.fast_backbone.checkpointed = count
        return
    layers = getattr(policy.backbone, "layers", None)
    assert isinstance(layers, nn.ModuleList)
    for i, layer in enumerate(layers):
        plain = type(layer).forward.__get__(layer)
        layer.forward = partial(_again, plain) if i < count else plain


def _again(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given, **named)
    return checkpoint(forward, *given, use_reentrant=False, **named)
