"""Activation checkpointing: a layer saves only its input, and recomputes the rest in the backward pass.

As few layers are checkpointed as the free memory requires. The gradient is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oncurve.models import lora
from oncurve.models.device_memory import free_memory
from oncurve.models.heads.lm_head import gpu_chunk_tokens
from oncurve.models.policy import Policy
from oncurve.training.learner.optimiser import Optimiser

Checkpointing = Literal["auto", "on", "off"]
MAX_FRACTION = 0.9
"""Fraction of the free memory that activations may use; the rest allows for fragmentation."""


def saved_bytes_per_token(policy: Policy) -> int:
    """Bytes that one layer saves per token for the backward pass.

    On the fast path: two residual sums, q, k, v, attention's output, gate and up, a float32 per head, and x Aᵀ of adapters.
    With transformers' modules and autograd: about three times the residuals and norms, and twice the MLP.
    """
    config = policy.model.config.get_text_config()
    itemsize, D = policy.model.dtype.itemsize, config.hidden_size
    heads, key_heads, head_size = policy.attention_sizes
    mlp = policy.mlp_width
    ranks = (
        sum(len(p) for name, p in lora.adapter_parameters(policy.model).items() if "lora_A" in name) // config.num_hidden_layers
    )
    fused: int = itemsize * (2 * D + 2 * (heads + key_heads) * head_size + 2 * mlp + ranks) + 4 * heads
    return fused if policy.fast_backbone is not None else fused + itemsize * (6 * D + 2 * mlp) + 8 * D


def layers_to_checkpoint(policy: Policy, tokens: int, free: int) -> int:
    """The fewest layers, counted from the first, that must be checkpointed for ``tokens`` to fit into ``free`` bytes."""
    config = policy.model.config.get_text_config()
    layers = int(config.num_hidden_layers)
    layer_bytes = tokens * saved_bytes_per_token(policy)
    gain = layer_bytes - tokens * policy.model.dtype.itemsize * config.hidden_size
    excess = layers * layer_bytes - int(MAX_FRACTION * free)
    # The backward pass recomputes one checkpointed layer at a time, so the activations of one layer need room too.
    return 0 if excess <= 0 else min(layers, -(-(excess + layer_bytes) // max(gain, 1)))


def transient_bytes(policy: Policy, tokens: int) -> int:
    """Bytes that a pass uses beyond saved activations: one layer's gradients, embedding and head, and a chunk of logits."""
    config, itemsize = policy.model.config.get_text_config(), policy.model.dtype.itemsize
    chunk: int = min(tokens, gpu_chunk_tokens(config.vocab_size)) * config.vocab_size * (4 + itemsize)
    return int(tokens * itemsize * (4 * policy.mlp_width + 8 * config.hidden_size)) + chunk


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers of a backbone: its `layers`, or under another name (`h`, `blocks`) the modules of its outermost lists."""
    named = getattr(backbone, "layers", None)
    if isinstance(named, nn.ModuleList):
        return list(named)
    lists = [module for module in backbone.modules() if isinstance(module, nn.ModuleList)]
    inside = {inner for outer in lists for layer in outer for inner in layer.modules()}
    return [layer for outer in lists if outer not in inside for layer in outer]


class CheckpointedLayers:
    """Chooses how many layers of a policy a stage checkpoints, by its key `checkpointing`."""

    def __init__(self, policy: Policy, checkpointing: Checkpointing) -> None:
        self.policy, self.checkpointing = policy, checkpointing
        self._largest_pack = 0
        """Tokens of the largest pack for which layers were chosen."""

    def choose(self, tokens: int, optimiser: Optimiser) -> None:
        """Chooses the layers for packs of this many tokens, on the first call and whenever packs grow. Every stage chooses
        anew, since an earlier one may have chosen other layers."""
        if tokens <= self._largest_pack:
            return
        self._largest_pack = tokens
        count, device = 0, self.policy.device
        if self.checkpointing == "on":
            count = int(self.policy.model.config.get_text_config().num_hidden_layers)
        elif self.checkpointing == "auto" and device.type == "cuda":
            free = free_memory(device) - optimiser.unallocated_bytes - transient_bytes(self.policy, tokens)
            count = layers_to_checkpoint(self.policy, tokens, free)
        checkpoint_layers(self.policy, count)


def checkpoint_layers(policy: Policy, count: int) -> None:
    """Checkpoint the first ``count`` layers; the others save their activations."""
    if policy.fast_backbone is not None:
        policy.fast_backbone.checkpointed = count
        return
    checkpoint_modules(decoder_layers(policy.backbone), count)


def checkpoint_modules(layers: Sequence[nn.Module], count: int) -> None:
    for i, layer in enumerate(layers):
        forward = type(layer).forward.__get__(layer)
        layer.forward = partial(_forward_with_recompute, forward) if i < count else forward


def _forward_with_recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # The backward pass may run in another thread: it recomputes the layer with what this pass has set.
    return checkpoint(partial(copy_context().run, forward), *args, use_reentrant=False, **kwargs)
