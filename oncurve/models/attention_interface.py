"""Registers our attention with transformers. Sampler and learner both run a model's layers through it.

transformers passes q, k and v of each layer to a named attention function. Ours forwards them to an `AttentionContext`: an
object that knows how the tokens of this forward pass are arranged (a pack, a prefill, a decode step), set for the pass by
`recurrent_layers.running_in`. No mask function is registered under our name, so transformers builds
no mask.

Shapes: q is [batch, H, tokens, d], k and v are [batch, K, tokens, d], H = K·rep. Windows are measured in positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from oncurve.errors import ModelError
from oncurve.models.recurrent_layers import CONTEXT, RunLayer

NAME = "oncurve"


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRule:
    """How a layer turns queries and keys into attention weights.

    Example: ``ScoreRule(scale=0.125, window=4096)``
    """

    scale: float
    window: int | None = None
    """In positions."""
    softcap: float | None = None
    sinks_H: Tensor | None = None
    """A score of each head that takes part in its softmax, as that of a key whose value is 0."""

    @property
    def has_kernel(self) -> bool:
        """Whether torch's own attention can compute this rule."""
        return self.softcap is None and self.sinks_H is None


class AttentionContext(Protocol):
    """How the tokens of one forward pass attend to each other and to the KV cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """The attention output, [batch, tokens, H, d]."""
        ...

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        """The output of a recurrent layer for inputs [batch, tokens, D]; the context provides the states that it needs."""
        ...


IGNORED_ARGUMENTS = {"position_ids"}
"""Tensors that attention may be passed and need not read: queries and keys are rotated already."""


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
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls. Raises for every tensor that no context implements: a mask that the layer
    builds itself (Doge), a position bias (Inkling), or the keys that it chose (DeepSeek V3.2, MiniMax M3).

    Latent attention (DeepSeek) has values that are narrower than its queries and keys: they are padded with zeros, so that
    the KV cache has one size. ``s_aux`` are attention sinks (gpt-oss).
    """
    if attention_mask is not None:
        raise unsupported(type(module).__name__, "a mask of its own")
    for name in arguments.keys() - IGNORED_ARGUMENTS:
        if isinstance(arguments[name], Tensor):
            raise unsupported(type(module).__name__, f"an argument of its own ({name})")
    attention_context: AttentionContext | None = CONTEXT.get()
    if attention_context is None:
        raise unsupported(type(module).__name__, "a call outside of Oncurve's own passes")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = module.layer_idx
    assert isinstance(layer, int)
    width = value.shape[-1]
    if width < query.shape[-1]:
        value = nn.functional.pad(value, (0, query.shape[-1] - width))
    out = attention_context.attend(layer, query, key, value, ScoreRule(scale, sliding_window, softcap, s_aux))
    return out[..., :width], None


def unsupported(where: str, feature: str) -> ModelError:
    return ModelError(
        where,
        f"attention with {feature}",
        because="the native engine has its own KV cache and cannot reproduce this exactly",
        fix="choose a decoder with full or sliding-window attention (Llama, Qwen, Mistral, Gemma, Phi-3, OLMo 2, Granite …)",
    )


def causal_mask(query_position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    """Which keys a query may attend to: causal, and within the window if there is one. Bool, by broadcasting."""
    mask = key_position <= query_position
    if window is not None:
        mask = mask & (query_position - key_position < window)
    return mask


def apply_softcap(scores: Tensor, softcap: float | None) -> Tensor:
    """Gemma's soft cap: softcap · tanh(scores / softcap)."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last axis in float32; ``sinks`` are a further column of the scores that is dropped afterwards."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1, dtype=torch.float32)[..., :-1]


AttentionInterface.register(NAME, attention_forward)
