"""The Llama family on a GPU: the complete backbone as one differentiable function with a hand-written backward pass.

Forward and backward are matrix products with as few kernels between them as possible (oncurve/kernels): residual sum + norm,
q/k norm + rotary embedding, and SwiGLU are one kernel each. Norms and the SwiGLU output are recomputed in the backward pass. A
layer saves its two residual sums, the fused q/k/v product, attention's output and log-sum-exp, and the fused gate/up product. A
layer under activation checkpointing saves only its first residual sum.

The weights are the model's own, in the storages of models/llama/fused.py; layers may have LoRA adapters (cuda_lora.py). No
gradient is computed for frozen weights. Gradients are added to the caller's float32 accumulator, or returned to autograd if
there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from oncurve.kernels.learner_layers import NormedRope, add_norm, norm_backward, swiglu, swiglu_backward
from oncurve.kernels.pack_attention import AttentionRule
from oncurve.models.attention_interface import AttentionContext, ScoreRule
from oncurve.models.gradient_buffers import GradAccumulator, add_product
from oncurve.models.llama.block_description import DecoderDescription
from oncurve.models.llama.cuda_lora import JointLora
from oncurve.models.llama.fused import Block, FusedBackbone, FusedLinear
from oncurve.models.pack_attention_cuda import CudaPackAttention


@dataclass(slots=True)
class _SavedActivations:
    """What the backward pass needs of a layer; under activation checkpointing all but ``x`` are None.

    For layers with an adapter that includes x Aᵀ: in the last columns of ``qkv`` and ``gate_up``, or as ``out_low``,
    ``down_low``.
    """

    x: Tensor
    qkv: Tensor | None = None
    attended: Tensor | None = None
    lse: Tensor | None = None
    middle: Tensor | None = None
    gate_up: Tensor | None = None
    out_low: Tensor | None = None
    down_low: Tensor | None = None


class CudaBackbone(FusedBackbone):
    """`FusedBackbone` by Triton kernels, with LoRA, activation checkpointing and gradient accumulation."""

    joins_lora = True

    def __init__(self, model: PreTrainedModel, description: DecoderDescription) -> None:
        super().__init__(model, description)
        rope = description.blocks[0].rope
        assert rope is not None
        # In float32, as in the sampler: bfloat16 tables would be off by several positions at position 1000.
        self.cos, self.sin = description.angles(rope, model.config.max_position_embeddings, model.device)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        """The last hidden state, [batch, length, D]."""
        if not self.is_fused:
            self.fuse()
        shape = input_ids.shape
        ids, position_N = input_ids.flatten(), position_ids.expand(shape).flatten()
        if torch.is_grad_enabled() and isinstance(attention, CudaPackAttention):
            run = _BackbonePass(self, ids, position_N, attention)
            out: Tensor = _BackboneFunction.apply(run, *run.parameters)  # type: ignore[no-untyped-call]
            return out.view(*shape, -1)
        return self._forward_only(ids, position_N, shape, attention).view(*shape, -1)

    def _forward_only(self, ids: Tensor, position_N: Tensor, shape: torch.Size, attention: AttentionContext) -> Tensor:
        x, mlp_out = functional.embedding(ids, self.embedding.weight), None
        for i, block in enumerate(self.blocks):
            x, normal = add_norm(x, mlp_out, block.input_norm.weight, block.input_norm.eps)
            qkv = _joint(normal, block.qkv)
            qk = self.rope(block, position_N).forward(qkv)
            q, k, v = (y.reshape(*shape, -1, self.head_size).transpose(1, 2) for y in self.split(qk, qkv))
            attended = attention.attend(i, q, k, v, ScoreRule(self.scale, block.window)).reshape(len(ids), -1)
            y, _ = _linear(attended, block.out)
            x, normal = add_norm(x, y, block.mlp_norm.weight, block.mlp_norm.eps)
            value = swiglu(_joint(normal, block.gate_up)[:, : block.gate_up.columns])
            mlp_out, _ = _linear(value, block.down)
        final_norm = self.final_norm
        return add_norm(x, mlp_out, final_norm.weight, final_norm.eps)[1]

    def rope(self, block: Block, position_N: Tensor) -> NormedRope:
        """A layer's q/k norm and rotary embedding at these positions."""
        norms = None if block.q_norm is None or block.k_norm is None else (block.q_norm.weight, block.k_norm.weight)
        eps = 0.0 if block.q_norm is None else block.q_norm.eps
        return NormedRope(self.heads, self.kv_heads, self.head_size, norms, eps, (self.cos, self.sin), position_N)

    def split(self, qk: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, [N, heads, d], from the rotated tensor, and v from the fused product."""
        H, K, d = self.heads, self.kv_heads, self.head_size
        return qk[:, :H], qk[:, H:], qkv[:, (H + K) * d : (H + 2 * K) * d].view(-1, K, d)


def _linear(x: Tensor, layer: FusedLinear) -> tuple[Tensor, Tensor | None]:
    """A linear layer's output, and x Aᵀ if it has an adapter."""
    if not layer.lora:
        return functional.linear(x, layer.weight, layer.bias), None
    return layer.lora.product(x, layer.bias)


def _joint(x: Tensor, layer: FusedLinear) -> Tensor:
    """The fused layers' output; with adapters, x Aᵀ follows in further columns."""
    if not layer.lora:
        return functional.linear(x, layer.weight, layer.bias)
    return layer.lora.joint_product(x, layer.bias)


class _BackboneFunction(torch.autograd.Function):
    """The parameters are inputs only to tell autograd that they have a gradient."""

    @staticmethod
    def forward(ctx, run: _BackbonePass, *parameters):  # type: ignore[no-untyped-def]
        ctx.run = run
        return run.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        run = ctx.run
        run.backward(grad)
        return (None, *run.gradients())


class _BackbonePass:
    """One forward and backward pass over all layers."""

    def __init__(self, decoder: CudaBackbone, ids: Tensor, position_N: Tensor, attention: CudaPackAttention) -> None:
        self.decoder, self.ids, self.position_N, self.attention = decoder, ids, position_N, attention
        self.parameters = [p for p in decoder.backbone.parameters() if p.requires_grad]
        self.has_accumulator = decoder.accumulator is not None
        self.accumulator = GradAccumulator(self.parameters) if decoder.accumulator is None else decoder.accumulator
        self.saved: list[_SavedActivations] = []
        self.residual = torch.empty(0)

    # Forward.

    def forward(self) -> Tensor:
        decoder = self.decoder
        x, mlp_out = functional.embedding(self.ids, decoder.embedding.weight), None
        for i, block in enumerate(decoder.blocks):
            x, normal = add_norm(x, mlp_out, block.input_norm.weight, block.input_norm.eps)
            saved = _SavedActivations(x)
            x, mlp_out = self._layer(block, x, normal, saved if i >= decoder.checkpointed else _SavedActivations(x))
            self.saved.append(saved)
        final_norm = decoder.final_norm
        self.residual, out = add_norm(x, mlp_out, final_norm.weight, final_norm.eps)
        return out

    def _layer(self, block: Block, x: Tensor, normal: Tensor, saved: _SavedActivations) -> tuple[Tensor, Tensor]:
        """From a layer's first norm to (its second residual sum, its MLP output), saving what the backward pass needs."""
        saved.qkv = _joint(normal, block.qkv)
        qk = self.decoder.rope(block, self.position_N).forward(saved.qkv)
        saved.attended, saved.lse = self.attention.forward(*self.decoder.split(qk, saved.qkv), self._rule(block))
        y, low = _linear(saved.attended.flatten(1), block.out)
        saved.out_low = None if low is None else low.clone()
        saved.middle, normal = add_norm(x, y, block.mlp_norm.weight, block.mlp_norm.eps)
        saved.gate_up = _joint(normal, block.gate_up)
        mlp_out, low = _linear(swiglu(saved.gate_up[:, : block.gate_up.columns]), block.down)
        saved.down_low = None if low is None else low.clone()
        return saved.middle, mlp_out

    def _rule(self, block: Block) -> AttentionRule:
        return self.attention.rule(self.decoder.scale, block.window, None)

    # Backward.

    @torch.no_grad()
    def backward(self, grad: Tensor) -> None:
        final_norm = self.decoder.final_norm
        grad, _, d_weight = norm_backward(
            self.residual, final_norm.weight, final_norm.eps, grad.contiguous(), None, recompute=False
        )
        self.residual = torch.empty(0)
        self._add(final_norm.weight, d_weight)
        for block in reversed(self.decoder.blocks):
            saved = self.saved.pop()
            if saved.qkv is None:
                _, normal = add_norm(saved.x, None, block.input_norm.weight, block.input_norm.eps)
                self._layer(block, saved.x, normal, saved)
            grad = self._attention_backward(block, saved, self._mlp_backward(block, saved, grad))
        self._embedding_backward(grad)

    def _mlp_backward(self, block: Block, saved: _SavedActivations, grad: Tensor) -> Tensor:
        assert saved.gate_up is not None
        assert saved.middle is not None
        d_value, joint_grad = _input_gradient(grad, block.down.weight, block.down.lora)
        d_both, both = torch.empty_like(saved.gate_up), block.gate_up.columns
        _, value = swiglu_backward(saved.gate_up[:, :both], d_value, d_both[:, :both])
        low, saved.gate_up = saved.gate_up[:, both:].clone(), None
        self._add_joint(block.down, grad, value)
        self._add_lora(block.down.lora, joint_grad, saved.down_low, value)
        d_normal, joint_grad = _input_gradient(d_both, block.gate_up.weight, block.gate_up.lora)
        d_middle, normal, d_weight = norm_backward(saved.middle, block.mlp_norm.weight, block.mlp_norm.eps, d_normal, grad)
        saved.middle = None
        self._add(block.mlp_norm.weight, d_weight)
        self._add_joint(block.gate_up, d_both, normal)
        self._add_lora(block.gate_up.lora, joint_grad, low, normal)
        return d_middle

    def _attention_backward(self, block: Block, saved: _SavedActivations, grad: Tensor) -> Tensor:
        assert saved.qkv is not None
        assert saved.attended is not None
        assert saved.lse is not None
        decoder, qkv = self.decoder, saved.qkv
        H, K, d = decoder.heads, decoder.kv_heads, decoder.head_size
        self._add_joint(block.out, grad, saved.attended.flatten(1))
        d_attended, joint_grad = _input_gradient(grad, block.out.weight, block.out.lora)
        self._add_lora(block.out.lora, joint_grad, saved.out_low, saved.attended.flatten(1))
        rope = decoder.rope(block, self.position_N)
        qk = rope.forward(qkv)
        d_qk, d_qkv = torch.empty_like(qk), torch.empty_like(qkv)
        grads = (d_qk[:, :H], d_qk[:, H:], d_qkv[:, (H + K) * d : (H + 2 * K) * d].view(-1, K, d))
        d_heads = d_attended.view(-1, H, d)
        self.attention.backward(*decoder.split(qk, qkv), saved.attended, saved.lse, d_heads, self._rule(block), grads)
        d_norms = rope.backward(qkv, d_qk, d_qkv)
        if d_norms is not None and block.q_norm is not None and block.k_norm is not None:
            self._add(block.q_norm.weight, d_norms[0])
            self._add(block.k_norm.weight, d_norms[1])
        low = qkv[:, block.qkv.columns :].clone()
        del qkv
        saved.qkv = saved.attended = saved.lse = None
        d_normal, joint_grad = _input_gradient(d_qkv, block.qkv.weight, block.qkv.lora)
        d_x, normal, d_weight = norm_backward(saved.x, block.input_norm.weight, block.input_norm.eps, d_normal, grad)
        self._add(block.input_norm.weight, d_weight)
        self._add_joint(block.qkv, d_qkv, normal)
        self._add_lora(block.qkv.lora, joint_grad, low, normal)
        return d_x

    def _embedding_backward(self, grad: Tensor) -> None:
        embedding = self.decoder.embedding
        if not embedding.weight.requires_grad:
            return
        if embedding.padding_idx is not None:
            grad = grad.masked_fill((self.ids == embedding.padding_idx)[:, None], 0.0)
        # On a GPU this sorts by token and adds equal tokens in a fixed order, so the bits are reproducible.
        self.accumulator.buffer_for(embedding.weight).index_put_((self.ids,), grad.float(), accumulate=True)

    # Gradients of the weights. Frozen weights get none, and none is computed.

    def _add(self, weight: Tensor, value: Tensor) -> None:
        if weight.requires_grad:
            self.accumulator.buffer_for(weight).add_(value)

    def _add_product(self, weight: Tensor, grad_NO: Tensor, input_NI: Tensor) -> None:
        if weight.requires_grad:
            add_product(self.accumulator.buffer_for(weight), grad_NO, input_NI)

    def _add_bias(self, bias: Tensor | None, grad_NO: Tensor) -> None:
        if bias is not None and bias.requires_grad:
            self.accumulator.buffer_for(bias).add_(grad_NO.sum(0, dtype=torch.float32))

    def _add_joint(self, layer: FusedLinear, grad_NO: Tensor, input_NI: Tensor) -> None:
        """Gradients of fused layers: by one product if all of them are trained."""
        grad_NO = grad_NO[:, : layer.columns]
        if all(p.requires_grad for part in layer.parts for p in part.parameters()):
            add_product(self.accumulator.buffer_for(layer.weight), grad_NO, input_NI)
            if layer.bias is not None:
                self.accumulator.buffer_for(layer.bias).add_(grad_NO.sum(0, dtype=torch.float32))
            return
        for part, part_NO in zip(layer.parts, torch.split(grad_NO, layer.sizes, 1), strict=True):
            self._add_product(part.weight, part_NO, input_NI)
            self._add_bias(part.bias, part_NO)

    def _add_lora(self, lora: JointLora | None, joint_grad: Tensor | None, low: Tensor | None, input_NI: Tensor) -> None:
        if lora is not None and joint_grad is not None and low is not None:
            lora.add_gradients(self.accumulator, joint_grad, low, input_NI)

    def gradients(self) -> list[Tensor | None]:
        """One per parameter, for autograd; None if they were added to the caller's accumulator."""
        return [None if self.has_accumulator else self.accumulator.buffer_for(p).to(p.dtype) for p in self.parameters]


def _input_gradient(grad: Tensor, weight: Tensor, lora: JointLora | None) -> tuple[Tensor, Tensor | None]:
    """The gradient of a linear layer's input; and with an adapter, [gradient | gradient of x Aᵀ]."""
    if not lora:
        return grad @ weight, None
    joint_grad = lora.joint_gradient(grad)
    return joint_grad @ lora.weight, joint_grad
