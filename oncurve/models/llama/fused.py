"""Fused modules for the Llama family: the same backbone in about a third of the operations.

They are the fast path on a CPU, and the base of the one on a GPU (cuda_backbone.py).

A tiny model spends its time between operations, not in them. Here q, k and v are one matrix product, gate and up another, and
the norms and SwiGLU have hand-written backward passes. The weights are the model's own parameters: they are moved once into
shared storages, where the weights of fused layers are adjacent, and the optimiser trains them there. `Policy` uses this path
only if it agrees with the model's own modules on a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from oncurve.models.attention_interface import AttentionContext, ScoreRule
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.models.llama.block_description import BlockDescription, DecoderDescription, Mlp, Norm
from oncurve.models.llama.c_backbone import run_layers as run_c_layers
from oncurve.models.lora import adapter_of, base_linear, is_attached
from oncurve.models.pack_attention import PackAttention

if TYPE_CHECKING:
    from oncurve.models.llama.cuda_lora import JointLora

SUPPORTED_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that depend only on the position, so one table serves every call."""


@dataclass
class FusedLinear:
    """Several linear layers of one input as one matrix product.

    ``weight`` is the joint tensor that the layers' weights are views of. With ``joins_lora``, the A matrices of adapters
    follow the weights in the same storage and ``lora`` applies the adapters. Otherwise ``merged`` adds them to a copy.
    """

    layers: Sequence[Any]
    joins_lora: bool = True

    def __post_init__(self) -> None:
        self.parts = [base_linear(layer) for layer in self.layers]
        self.sizes = [part.out_features for part in self.parts]
        self.adapters = [adapter_of(layer) for layer in self.layers]
        attached = [adapter for adapter in self.adapters if adapter is not None]
        below = [adapter.a for adapter in attached] if self.joins_lora else []
        joint = _share_storage([*(part.weight for part in self.parts), *below])
        self.columns = sum(self.sizes)
        self.weight = joint if len(joint) == self.columns else joint[: self.columns]
        has_bias = self.parts[0].bias is not None
        self.bias = _share_storage([part.bias for part in self.parts]) if has_bias else None
        self.lora: JointLora | None = None
        if attached and self.joins_lora:
            from oncurve.models.llama.cuda_lora import JointLora  # needs Triton

            self.lora = JointLora(self.sizes, self.adapters, joint, _share_storage([adapter.b for adapter in attached]))

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_adapted or not torch.is_grad_enabled():
            return functional.linear(x, self.merged(), self.bias)
        biases = [part.bias for part in self.parts] if self.bias is not None else []
        out: Tensor = _FusedProduct.apply(x, self, *(part.weight for part in self.parts), *biases)  # type: ignore[no-untyped-call]
        return out

    @property
    def is_adapted(self) -> bool:
        """Whether a layer has an adapter that is enabled."""
        return any(adapter is not None and adapter.is_enabled for adapter in self.adapters)

    def merged(self) -> Tensor:
        """W + s·B·A of all layers, one below the other: a new tensor, through which A and B get their gradients. Without
        adapters, ``weight`` itself."""
        if not self.is_adapted:
            return self.weight
        merged = [
            part.weight if adapter is None or not adapter.is_enabled
            else torch.addmm(part.weight, adapter.b, adapter.a, alpha=adapter.scale)
            for part, adapter in zip(self.parts, self.adapters, strict=True)
        ]  # fmt: skip
        return merged[0] if len(merged) == 1 else torch.cat(merged)

    @property
    def is_fused(self) -> bool:
        """False once the model's parameters have been moved to other storages (``model.to``, for example)."""
        return self.parts[0].weight.data_ptr() == self.weight.data_ptr()


def _share_storage(parameters: list[Tensor]) -> Tensor:
    """Concatenate parameters into one tensor and make each a view of its rows. One alone is left as it is."""
    if len(parameters) == 1:
        return parameters[0]
    joint = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, torch.split(joint, [len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joint


class _FusedProduct(torch.autograd.Function):
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
        product = grad * normal
        grad_weight = product.sum(tuple(range(grad.dim() - weight.dim())))
        mean = (product.mul_(weight)).mean(-1, keepdim=True)
        out = grad * weight
        out.addcmul_(normal, mean, value=-1).mul_(rstd)
        return out, grad_weight, None


class _SwiGlu(torch.autograd.Function):
    """silu(gate)·up, with gate and up in one [N, 2·I] tensor."""

    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[no-untyped-def]
        gate, up = gate_up.chunk(2, -1)
        ctx.save_for_backward(gate_up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, -1)
        torch.mul(grad, functional.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


def _rstd(x: Tensor, eps: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not torch.is_grad_enabled():
        return (x * _rstd(x, eps)).mul_(weight)
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)
    out: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


class Block:
    """A described decoder block: its linear layers side by side in shared storages, its norms, and the rest as attributes of
    ``description``. All parameters are the model's own, so optimiser updates need no copy."""

    def __init__(self, description: BlockDescription, joins_lora: bool) -> None:
        self.description = description
        self.qkv, self.out = FusedLinear(description.qkv, joins_lora), FusedLinear([description.out], joins_lora)
        mlp = description.mlp
        if isinstance(mlp, Mlp):
            self.gate_up, self.down = FusedLinear(mlp.gate_up, joins_lora), FusedLinear([mlp.down], joins_lora)
        self.q_norm, self.k_norm, self.window = description.q_norm, description.k_norm, description.window

    @property
    def input_norm(self) -> Norm:
        """The norm before attention of a Llama-like block."""
        assert self.description.input_norm is not None
        return self.description.input_norm

    @property
    def mlp_norm(self) -> Norm:
        """The norm before the MLP of a Llama-like block."""
        assert self.description.mlp_norm is not None
        return self.description.mlp_norm


class FusedWeights:
    """A described decoder's blocks with fused weights: what a decode step on a GPU reads (engines/cuda/decode_step.py)."""

    def __init__(self, description: DecoderDescription) -> None:
        self.description = description
        self.heads, self.kv_heads, self.head_size = description.heads, description.kv_heads, description.head_size
        self.fuse()

    joins_lora = True
    """Whether adapters are applied beside the weights, by kernels (cuda_lora.py), and not merged into a copy of them."""

    def fuse(self) -> None:
        """Move the parameters into shared storages: at first, and if they have been moved since."""
        self.blocks = [Block(block, self.joins_lora) for block in self.description.blocks]

    @classmethod
    def can_fuse(cls, description: DecoderDescription) -> bool:
        """Whether linear layers that read one input can be one product: all or none have a bias, and adapters that are applied
        side by side have one rank and scale."""
        return all(
            len({base_linear(layer).bias is None for layer in layers}) == 1
            and (len(_adapter_kinds(layers)) <= 1 or not cls.joins_lora)
            for block in description.blocks
            for layers in (block.qkv, (block.out,), *_mlp_layers(block))
        )

    @property
    def is_fused(self) -> bool:
        return self.blocks[0].qkv.is_fused


class FusedBackbone(FusedWeights):
    """The backbone of a Llama-like model, with the same parameters and the same results up to rounding."""

    joins_lora = False
    uses_c = False
    """Whether packs are run by the C functions (c_backbone.py)."""
    checkpointed = 0
    """Layers, counted from the first, that save only their input for the backward pass. Used by `CudaBackbone`."""
    accumulator: GradAccumulator | None = None
    """Where `CudaBackbone` adds gradients; without it they are returned to autograd."""

    def __init__(self, model: PreTrainedModel, description: DecoderDescription) -> None:
        super().__init__(description)
        self.backbone, self.scale = model.base_model, description.blocks[0].scale
        self.embedding, self.final_norm = description.embedding, description.final_norm
        positions = torch.arange(model.config.max_position_embeddings, device=model.device)[None]
        cos, sin = self.backbone.rotary_emb(self.embedding.weight, positions)
        half = self.head_size // 2
        self.cos = cos[0][:, None].detach().clone()  # [positions, 1, d]
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None].detach().clone()

    @classmethod
    def supports(cls, model: PreTrainedModel, description: DecoderDescription) -> bool:
        """Whether this path computes the model: Llama-like blocks, rotary embeddings that depend only on the position, and
        adapters only in full precision if they are merged."""
        rope = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
        can_adapt = cls.joins_lora or model.dtype == torch.float32 or not is_attached(model)
        return description.is_llama_like and rope in SUPPORTED_ROPE and cls.can_fuse(description) and can_adapt

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        """The last hidden state, [batch, length, D]."""
        if not self.is_fused:
            self.fuse()
        shape = input_ids.shape
        embedding, final_norm = self.embedding, self.final_norm
        x = functional.embedding(input_ids.flatten(), embedding.weight, embedding.padding_idx)
        position_N = position_ids.expand(shape).flatten()
        if self.uses_c and x.dtype == torch.float32 and isinstance(attention, PackAttention) and self._sees_all(attention):
            x = run_c_layers(self, x, position_N, attention.groups)
        else:
            x = self._run_layers(x, position_N, shape, attention)
        return rms_norm(x, final_norm.weight, final_norm.eps).view(*shape, -1)

    def _run_layers(self, x: Tensor, position_N: Tensor, shape: torch.Size, attention: AttentionContext) -> Tensor:
        cos, sin = self.cos[position_N], self.sin[position_N]
        for i, block in enumerate(self.blocks):
            x = self._attention(i, block, x, cos, sin, shape, attention)
            h = swiglu(block.gate_up(rms_norm(x, block.mlp_norm.weight, block.mlp_norm.eps)))
            x = torch.addmm(x, h, block.down.merged().t())
        return x

    def _sees_all(self, attention: PackAttention) -> bool:
        """Whether no layer's sliding window is shorter than a sequence of the pack."""
        windows = [block.window for block in self.blocks if block.window is not None]
        return not windows or min(windows) > int(attention.position_N.max())

    def _attention(
        self, i: int, block: Block, x: Tensor, cos: Tensor, sin: Tensor, shape: torch.Size, attention: AttentionContext
    ) -> Tensor:
        H, K, d = self.heads, self.kv_heads, self.head_size
        qkv = block.qkv(rms_norm(x, block.input_norm.weight, block.input_norm.eps)).view(-1, H + 2 * K, d)
        qk, v = qkv[:, : H + K], qkv[:, H + K :]
        if block.q_norm is not None and block.k_norm is not None:
            weight = torch.cat((block.q_norm.weight.expand(H, d), block.k_norm.weight.expand(K, d)))
            qk = rms_norm(qk, weight, block.q_norm.eps)
        swapped = torch.cat((qk[..., d // 2 :], qk[..., : d // 2]), -1)
        qk = torch.addcmul(qk * cos, swapped, sin)
        q, k, v = (y.view(*shape, -1, d).transpose(1, 2) for y in (qk[:, :H], qk[:, H:], v))
        out = attention.attend(i, q, k, v, ScoreRule(self.scale, block.window)).reshape(-1, H * d)
        if block.out.bias is not None:
            x = x + block.out.bias
        return torch.addmm(x, out, block.out.merged().t())


def _mlp_layers(block: BlockDescription) -> tuple[tuple[Any, ...], ...]:
    return (block.mlp.gate_up, (block.mlp.down,)) if isinstance(block.mlp, Mlp) else ()


def _adapter_kinds(layers: Sequence[Any]) -> set[tuple[int, float]]:
    return {(len(adapter.a), adapter.scale) for adapter in map(adapter_of, layers) if adapter is not None}
