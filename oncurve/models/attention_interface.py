"""The one door through which sampler and learner enter a transformers model.

transformers hands q, k and v of each layer to a named attention function. Ours passes them to a *layout*: an object that
knows how the tokens of this forward pass lie (a packed batch, a prefill, a decode step) and travels as a forward argument. No
mask function is registered under our name, so transformers builds no mask at all.

Shapes: q is [batch, H, tokens, d], k and v [batch, K, tokens, d] with K key heads, H = K·rep. Windows are measured in
positions.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from oncurve.errors import ModelError

NAME = "oncurve"


class AttentionContext(Protocol):
    """How the tokens of one forward pass attend to each other and to what was stored before."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """The attention output as [batch, tokens, H, d]."""
        ...


REFUSED = {
    "s_aux": "attention sinks",
    "position_bias": "a learned position bias",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: AttentionContext | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: hands q, k, v to the layout, refusing by name what a layout can't do faithfully."""
    for argument, feature in REFUSED.items():
        if rest.get(argument) is not None:
            raise unsupported(type(module).__name__, feature)
    if layout is None:
        raise unsupported(type(module).__name__, "layers that drop forward arguments")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = module.layer_idx
    assert isinstance(layer, int)
    return layout.attend(layer, query, key, value, scale, sliding_window, softcap), None


def unsupported(where: str, feature: str) -> ModelError:
    return ModelError(
        where,
        f"attention with {feature}",
        because="the native engine keeps its own keys and values and can't reproduce this faithfully",
        fix="choose a decoder with full or sliding-window attention (Llama, Qwen, Mistral, Gemma, Phi-3, OLMo 2, Granite …)",
    )


def causal_mask(query_position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    """Causal, and within the window where there is one: bool, by broadcasting."""
    seen = key_position <= query_position
    if window is not None:
        seen = seen & (query_position - key_position < window)
    return seen


def soft_capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Gemma's soft cap: softcap · tanh(scores / softcap)."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


AttentionInterface.register(NAME, attention_forward)
