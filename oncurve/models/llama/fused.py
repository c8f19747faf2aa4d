"""Fused modules for the Llama family: the same backbone in about a third of the operations. Fast path on a CPU, base on a GPU.

A tiny model spends its time between operations, not in them. Here q, k and v are one matrix product, gate and up another, and
the norms and SwiGLU have hand-written backward passes. The weights are the model's own parameters: they are moved once into
shared storages, where the weights of fused layers are adjacent, and the optimiser trains them there. `Policy` uses this path
only if it agrees with the model's own modules on a few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from oncurve.model_families import FUSED_FAMILIES
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.models.llama.c_backbone import run_layers as run_c_layers
from oncurve.models.lora import adapter_of, base_linear, is_plain
from oncurve.models.pack_attention import PackAttention

if TYPE_CHECKING:
    from oncurve.models.llama.cuda_lora import JointLora

SUPPORTED_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that depend only on the position, so one table serves every call."""


@dataclass
class FusedLinear:
    """Several linear layers of one input as one matrix product.

    ``weight`` is the joint tensor that the layers' weights are views of. If they have adapters (``lora``), the adapters' A
    matrices follow it in the same storage.
    """

    layers: list[Any]

    def __post_init__(self) -> None:
        self.parts = [base_linear(layer) for layer in self.layers]
        self.sizes = [part.out_features for part in self.parts]
        adapters = [adapter_of(layer) for layer in self.layers]
        attached = [adapter for adapter in adapters if adapter is not None]
        joint = _share_storage([*(part.weight for part in self.parts), *(adapter.a for adapter in attached)])
        self.columns = sum(self.sizes)
        self.weight = joint[: self.columns]
        has_bias = self.parts[0].bias is not None
        self.bias = _share_storage([part.bias for part in self.parts]) if has_bias else None
        self.lora: JointLora | None = None
        if attached:
            from oncurve.models.llama.cuda_lora import JointLora  # needs Triton

            self.lora = JointLora(self.sizes, adapters, joint, _share_storage([adapter.b for adapter in attached]))

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return functional.linear(x, self.weight, self.bias)
        biases = [part.bias for part in self.parts] if self.bias is not None else []
        out: Tensor = _FusedProduct.apply(x, self, *(part.weight for part in self.parts), *biases)  # type: ignore[no-untyped-call]
        return out

    @property
    def is_fused(self) -> bool:
        """False once the model's parameters have been moved to other storages (``model.to``, for example)."""
        return self.parts[0].weight.data_ptr() == self.weight.data_ptr()


def _share_storage(parameters: list[Tensor]) -> Tensor:
    """Concatenate parameters into one tensor and make each a view of its rows."""
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
    """The parameters of one decoder layer, looked up once. They are the model's own, so optimiser updates need no copy."""

    def __init__(self, layer: Any, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = FusedLinear([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = base_linear(attention.o_proj), base_linear(mlp.down_proj)
        self.out_lora, self.down_lora = _lora_of(attention.o_proj), _lora_of(mlp.down_proj)
        self.input_norm, self.post_attention_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.window = getattr(attention, "sliding_window", window)


def _lora_of(layer: Any) -> JointLora | None:
    return None if adapter_of(layer) is None else FusedLinear([layer]).lora


class FusedBackbone:
    """The backbone of a Llama-like model, with the same parameters and the same results up to rounding."""

    device = "cpu"
    """The device type that this path is for."""
    supports_lora = False
    """Whether it runs layers with LoRA adapters."""
    uses_c = False
    """Whether packs are run by the C functions (c_backbone.py)."""
    checkpointed = 0
    """Layers, counted from the first, that save only their input for the backward pass. Used by `CudaBackbone`."""
    accumulator: GradAccumulator | None = None
    """Where `CudaBackbone` adds gradients; without it they are returned to autograd."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.backbone = model.base_model
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        attention = self.backbone.layers[0].self_attn
        self.head_size = attention.head_dim
        self.scale = attention.scaling
        # Mistral's layers read the window from the config; those of other families have their own attribute, or no window.
        self.window: int | None = config.sliding_window if type(self.backbone).__name__ == "MistralModel" else None
        self._fuse()
        positions = torch.arange(config.max_position_embeddings, device=model.device)[None]
        cos, sin = self.backbone.rotary_emb(self.backbone.embed_tokens.weight, positions)
        half = self.head_size // 2
        self.cos = cos[0][:, None].detach().clone()  # [positions, 1, d]
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None].detach().clone()

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedBackbone | None:
        """The fast path for this model, or None if the model is not supported."""
        return cls(model) if model.device.type == cls.device and _is_supported(model, cls.supports_lora) else None

    def _fuse(self) -> None:
        self.blocks = [Block(layer, self.window) for layer in self.backbone.layers]

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        """The last hidden state, [batch, length, D]."""
        if not self.blocks[0].qkv.is_fused:
            self._fuse()
        shape = input_ids.shape
        embedding, final_norm = self.backbone.embed_tokens, self.backbone.norm
        x = functional.embedding(input_ids.flatten(), embedding.weight, embedding.padding_idx)
        position_N = position_ids.expand(shape).flatten()
        if self.uses_c and x.dtype == torch.float32 and isinstance(attention, PackAttention) and self._sees_all(attention):
            x = run_c_layers(self, x, position_N, attention.groups)
        else:
            x = self._run_layers(x, position_N, shape, attention)
        return rms_norm(x, final_norm.weight, final_norm.variance_epsilon).view(*shape, -1)

    def _run_layers(self, x: Tensor, position_N: Tensor, shape: torch.Size, attention: AttentionContext) -> Tensor:
        cos, sin = self.cos[position_N], self.sin[position_N]
        for i, block in enumerate(self.blocks):
            x = self._attention(i, block, x, cos, sin, shape, attention)
            h = swiglu(block.gate_up(rms_norm(x, block.post_attention_norm.weight, block.post_attention_norm.variance_epsilon)))
            x = torch.addmm(x, h, block.down.weight.t())
        return x

    def _sees_all(self, attention: PackAttention) -> bool:
        """Whether no layer's sliding window is shorter than a sequence of the pack."""
        windows = [block.window for block in self.blocks if block.window is not None]
        return not windows or min(windows) > int(attention.position_N.max())

    def _attention(
        self, i: int, block: Block, x: Tensor, cos: Tensor, sin: Tensor, shape: torch.Size, attention: AttentionContext
    ) -> Tensor:
        H, K, d = self.heads, self.kv_heads, self.head_size
        qkv = block.qkv(rms_norm(x, block.input_norm.weight, block.input_norm.variance_epsilon)).view(-1, H + 2 * K, d)
        qk, v = qkv[:, : H + K], qkv[:, H + K :]
        if block.q_norm is not None and block.k_norm is not None:
            weight = torch.cat((block.q_norm.weight.expand(H, d), block.k_norm.weight.expand(K, d)))
            qk = rms_norm(qk, weight, block.q_norm.variance_epsilon)
        swapped = torch.cat((qk[..., d // 2 :], qk[..., : d // 2]), -1)
        qk = torch.addcmul(qk * cos, swapped, sin)
        q, k, v = (y.view(*shape, -1, d).transpose(1, 2) for y in (qk[:, :H], qk[:, H:], v))
        out = attention.attend(i, q, k, v, self.scale, block.window, None).reshape(-1, H * d)
        if block.out.bias is not None:
            x = x + block.out.bias
        return torch.addmm(x, out, block.out.weight.t())


def _is_supported(model: PreTrainedModel, supports_lora: bool) -> bool:
    """Whether a model is of the Llama family, with plain linear layers (and plain adapters, if the path supports them), SiLU,
    no
    MLP bias, and rotary embeddings that depend only on the position."""
    backbone, config = model.base_model, model.config
    if type(backbone).__name__ not in FUSED_FAMILIES.values():
        return False
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    plain = all(_is_layer_supported(layer, supports_lora) for layer in backbone.layers)
    return plain and config.hidden_act == "silu" and rope in SUPPORTED_ROPE


def _is_layer_supported(layer: Any, supports_lora: bool) -> bool:
    """Whether a decoder layer's linear layers are plain, and the adapters of layers that are fused have one rank and scale."""
    fused = [[getattr(layer.self_attn, f"{x}_proj") for x in "qkv"], [layer.self_attn.o_proj],
             [layer.mlp.gate_proj, layer.mlp.up_proj], [layer.mlp.down_proj]]  # fmt: skip
    if not all(is_plain(linear) for linears in fused for linear in linears) or any(
        base_linear(linear).bias is not None for linear in (*fused[2], *fused[3])
    ):
        return False
    kinds = [{(len(a.a), a.scale) for a in map(adapter_of, linears) if a is not None} for linears in fused]
    return all(len(kind) <= supports_lora for kind in kinds)
