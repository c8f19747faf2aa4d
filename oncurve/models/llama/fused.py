"""A fast path for the Llama family on a CPU: the same backbone in about a third of the operations.

A tiny model spends its time between operations, not in them. Here q, k and v are one product, gate and up another; norms and
the gated unit have hand-written derivatives. The weights are the module's own: its parameters are moved, once, to lie side by
side in one storage, and stay the parameters that the optimiser trains. A model is taken only if, on random tokens, both paths
agree; any other goes through its own modules.

Legend: ``N`` tokens of a forward pass (batch × length), ``D`` hidden size, ``H``/``K`` query/key heads, ``d`` head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from oncurve.models.attention_interface import AttentionContext
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.models.llama.c_backbone import layers as compiled_layers
from oncurve.models.lora import adapter_of, is_plain, linear_of
from oncurve.models.packing import PackAttention

if TYPE_CHECKING:
    from oncurve.models.llama.cuda_lora import JointLora

FAMILY = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
FIXED_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that depend on the position alone, so that one table serves every call."""


@dataclass
class FusedLinear:
    """Several linear layers of one input as one product. ``weight`` is the storage that their weights are views of; where they
    have adapters (``lora``), their A lie below it there."""

    layers: list[Any]

    def __post_init__(self) -> None:
        self.parts = [linear_of(layer) for layer in self.layers]
        self.sizes = [part.out_features for part in self.parts]
        adapters = [adapter_of(layer) for layer in self.layers]
        there = [adapter for adapter in adapters if adapter is not None]
        whole = _side_by_side([*(part.weight for part in self.parts), *(adapter.a for adapter in there)])
        self.columns = sum(self.sizes)
        self.weight = whole[: self.columns]
        with_bias = self.parts[0].bias is not None
        self.bias = _side_by_side([part.bias for part in self.parts]) if with_bias else None
        self.lora: JointLora | None = None
        if there:
            from oncurve.models.llama.cuda_lora import JointLora  # Triton is there only where a GPU is

            self.lora = JointLora(self.sizes, adapters, whole, _side_by_side([adapter.b for adapter in there]))

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return functional.linear(x, self.weight, self.bias)
        biases = [part.bias for part in self.parts] if self.bias is not None else []
        out: Tensor = _OneProduct.apply(x, self, *(part.weight for part in self.parts), *biases)  # type: ignore[no-untyped-call]
        return out

    @property
    def is_fused(self) -> bool:
        return self.parts[0].weight.data_ptr() == self.weight.data_ptr()


def _side_by_side(parameters: list[Tensor]) -> Tensor:
    """One tensor of all rows; each parameter becomes a view of its part."""
    whole = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


class _OneProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer: FusedLinear, *parameters):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.layer = layer
        return functional.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        weights = (grad.T @ x).split(layer.sizes)
        biases = grad.sum(0).split(layer.sizes) if layer.bias is not None else ()
        return (grad @ layer.weight, None, *weights, *biases)


class _RmsNorm(torch.autograd.Function):
    """y = w·x·r with r = (mean x² + eps)^−½; dx = r·(g·w − x̂·mean(g·w·x̂)), dw = Σ g·x̂, x̂ = x·r."""

    @staticmethod
    def forward(ctx, x, weight, eps: float):  # type: ignore[no-untyped-def]
        rstd = _rstd(x, eps)
        normal = x * rstd
        ctx.save_for_backward(normal, rstd, weight)
        return normal * weight

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        normal, rstd, weight = ctx.saved_tensors
        both = grad * normal
        grad_weight = both.sum(tuple(range(grad.dim() - weight.dim())))
        mean = (both.mul_(weight)).mean(-1, keepdim=True)
        out = grad * weight
        out.addcmul_(normal, mean, value=-1).mul_(rstd)
        return out, grad_weight, None


class _SwiGlu(torch.autograd.Function):
    """silu(gate)·up from one [N, 2·I] tensor of both."""

    @staticmethod
    def forward(ctx, both):  # type: ignore[no-untyped-def]
        gate, up = both.chunk(2, -1)
        ctx.save_for_backward(both)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        out = torch.empty_like(both)
        to_gate, to_up = out.chunk(2, -1)
        torch.mul(grad, functional.silu(gate), out=to_up)
        to_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


def _rstd(x: Tensor, eps: float) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not torch.is_grad_enabled():
        return (x * _rstd(x, eps)).mul_(weight)
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def swiglu(both: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        gate, up = both.chunk(2, -1)
        return functional.silu(gate).mul_(up)
    out: Tensor = _SwiGlu.apply(both)  # type: ignore[no-untyped-call]
    return out


class Block:
    """One decoder layer: its parameters, found once. They stay the module's own, so an optimiser's step is seen."""

    def __init__(self, layer: Any, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = FusedLinear([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = linear_of(attention.o_proj), linear_of(mlp.down_proj)
        self.out_lora, self.down_lora = _lora_of(attention.o_proj), _lora_of(mlp.down_proj)
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.window = getattr(attention, "sliding_window", window)


def _lora_of(layer: Any) -> JointLora | None:
    return None if adapter_of(layer) is None else FusedLinear([layer]).lora


class FusedBackbone:
    """The backbone of a Llama-like model. Same parameters, same results up to rounding."""

    device = "cpu"
    """Where this path is the fast one."""
    adapts = False
    """Whether it runs layers with LoRA adapters."""
    compiled = False
    """Whether packs go through the compiled functions (models/compiled)."""
    checkpointed = 0
    """How many layers, from the first, keep only their input for the backward pass, by a path that can."""
    accumulator: GradAccumulator | None = None
    """Where gradients are collected, by a path that can (models/llama/cuda_backbone.py); else autograd has them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.backbone = model.base_model
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        first = self.backbone.layers[0].self_attn
        self.head_size = first.head_dim
        self.scale = first.scaling
        # Mistral's layers read the window from the config; the others' carry their own, or have none.
        self.window: int | None = config.sliding_window if type(self.backbone).__name__ == "MistralModel" else None
        self._fuse()
        positions = torch.arange(config.max_position_embeddings, device=model.device)[None]
        cos, sin = self.backbone.rotary_emb(self.backbone.embed_tokens.weight, positions)
        half = self.head_size // 2
        self.cos = cos[0][:, None].detach().clone()  # [positions, 1, d]
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None].detach().clone()

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedBackbone | None:
        """The fast path for this model, or None where it is of another family."""
        return cls(model) if model.device.type == cls.device and _is_of_the_family(model, cls.adapts) else None

    def _fuse(self) -> None:
        self.blocks = [Block(layer, self.window) for layer in self.backbone.layers]

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionContext) -> Tensor:
        """The last hidden state, [batch, length, D]."""
        if not self.blocks[0].qkv.is_fused:
            self._fuse()  # somebody moved the parameters
        shape = input_ids.shape
        words, last = self.backbone.embed_tokens, self.backbone.norm
        x = functional.embedding(input_ids.flatten(), words.weight, words.padding_idx)
        at = position_ids.expand(shape).flatten()
        if self.compiled and x.dtype == torch.float32 and isinstance(layout, PackAttention) and self._all_in_sight(layout):
            x = compiled_layers(self, x, at, layout.members)
        else:
            x = self._layers(x, at, shape, layout)
        return rms_norm(x, last.weight, last.variance_epsilon).view(*shape, -1)

    def _layers(self, x: Tensor, at: Tensor, shape: torch.Size, layout: AttentionContext) -> Tensor:
        cos, sin = self.cos[at], self.sin[at]
        for i, block in enumerate(self.blocks):
            x = self._attention(i, block, x, cos, sin, shape, layout)
            h = swiglu(block.gate_up(rms_norm(x, block.between.weight, block.between.variance_epsilon)))
            x = torch.addmm(x, h, block.down.weight.t())
        return x

    def _all_in_sight(self, layout: PackAttention) -> bool:
        """Whether no layer's window hides a token of the pack from a later one."""
        windows = [block.window for block in self.blocks if block.window is not None]
        return not windows or min(windows) > int(layout.position_N.max())

    def _attention(
        self, i: int, block: Block, x: Tensor, cos: Tensor, sin: Tensor, shape: torch.Size, layout: AttentionContext
    ) -> Tensor:
        H, K, d = self.heads, self.kv_heads, self.head_size
        qkv = block.qkv(rms_norm(x, block.before.weight, block.before.variance_epsilon)).view(-1, H + 2 * K, d)
        qk, v = qkv[:, : H + K], qkv[:, H + K :]
        if block.q_norm is not None and block.k_norm is not None:
            weight = torch.cat((block.q_norm.weight.expand(H, d), block.k_norm.weight.expand(K, d)))
            qk = rms_norm(qk, weight, block.q_norm.variance_epsilon)
        turned = torch.cat((qk[..., d // 2 :], qk[..., : d // 2]), -1)
        qk = torch.addcmul(qk * cos, turned, sin)
        q, k, v = (y.view(*shape, -1, d).transpose(1, 2) for y in (qk[:, :H], qk[:, H:], v))
        out = layout.attend(i, q, k, v, self.scale, block.window, None).reshape(-1, H * d)
        if block.out.bias is not None:
            x = x + block.out.bias
        return torch.addmm(x, out, block.out.weight.t())


def _is_of_the_family(model: PreTrainedModel, adapts: bool) -> bool:
    """By class, plain linear layers (with plain adapters, where the path ``adapts``), SiLU, no bias in the MLP, and rotary
    embeddings of the position alone."""
    backbone, config = model.base_model, model.config
    if type(backbone).__name__ not in FAMILY:
        return False
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return all(_is_fit(layer, adapts) for layer in backbone.layers) and config.hidden_act == "silu" and rope in FIXED_ROPE


def _is_fit(layer: Any, adapts: bool) -> bool:
    """Whether the linear layers of a decoder layer are plain, and adapters that would be joined have one rank and scale."""
    joints = [[getattr(layer.self_attn, f"{x}_proj") for x in "qkv"], [layer.self_attn.o_proj],
              [layer.mlp.gate_proj, layer.mlp.up_proj], [layer.mlp.down_proj]]  # fmt: skip
    if not all(is_plain(x) for joint in joints for x in joint) or any(
        linear_of(x).bias is not None for x in (*joints[2], *joints[3])
    ):
        return False
    kinds = [{(len(a.a), a.scale) for a in map(adapter_of, joint) if a is not None} for joint in joints]
    return all(len(kind) <= adapts for kind in kinds)
