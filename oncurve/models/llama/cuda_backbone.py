"""The Llama family on a GPU: the whole backbone as one differentiable function, its derivative written out by hand.

Forward and backward are products of matrices with the fewest kernels between them (models/kernels): residual sum and norm are
one, q/k norm and rotary embedding are one, the gated unit is one; norms and the unit's value are computed again in the backward
pass, not kept. Kept of a layer are its two residual sums, the joint product of q, k and v, attention's output and log-sum-exp,
and the joint product of gate and up. A layer under *checkpointing* keeps its first residual sum alone.

Weights are the module's own, side by side as models/llama/fused.py lays them; layers may have LoRA adapters (cuda_lora.py). A
frozen weight gets no gradient, and none is computed. Gradients go straight into float32 sums where the caller collects them,
else they are returned to autograd like any other.

Legend: ``N`` tokens, ``D`` width, ``H``/``K`` query/key heads, ``d`` head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from oncurve.kernels.rms_norm import add_norm, norm_backward
from oncurve.kernels.rope import NormedRope
from oncurve.kernels.swiglu import swiglu, swiglu_backward
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.gradient_buffers import GradAccumulator, add_product
from oncurve.models.llama.cuda_lora import JointLora
from oncurve.models.llama.fused import FusedBackbone, FusedLinear
from oncurve.models.pack_attention_cuda import CudaPackAttention


@dataclass(slots=True)
class _SavedActivations:
    """What the backward pass needs of a layer; all but ``x`` are None under checkpointing. Of adapted layers that is also x Aᵀ:
    in the last columns of the joint products, or by itself."""

    x: Tensor
    qkv: Tensor | None = None
    attended: Tensor | None = None
    lse: Tensor | None = None
    middle: Tensor | None = None
    gate_up: Tensor | None = None
    out_low: Tensor | None = None
    down_low: Tensor | None = None


class CudaBackbone(FusedBackbone):
    """Same parameters as the module's, same results up to rounding."""

    device = "cuda"
    adapts = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        # In float32, as the sampler has them: a cosine of three digits turns position 1000 by the width of several.
        positions = torch.arange(model.config.max_position_embeddings, device=model.device)[None]
        cos, sin = self.backbone.rotary_emb(torch.zeros(1, device=model.device), positions)
        half = self.head_size // 2  # the other half has the same angles
        self.cos, self.sin = cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionContext) -> Tensor:
        """The last hidden state, [batch, length, D]."""
        if not self.blocks[0].qkv.is_fused:
            self._fuse()  # somebody moved the parameters
        shape = input_ids.shape
        ids, at = input_ids.flatten(), position_ids.expand(shape).flatten()
        if torch.is_grad_enabled() and isinstance(layout, CudaPackAttention):
            run = _BackbonePass(self, ids, at, layout)
            out: Tensor = _Backbone.apply(run, *run.parameters)  # type: ignore[no-untyped-call]
            return out.view(*shape, -1)
        return self._without_gradient(ids, at, shape, layout).view(*shape, -1)

    def _without_gradient(self, ids: Tensor, at: Tensor, shape: torch.Size, layout: AttentionContext) -> Tensor:
        x, more = functional.embedding(ids, self.backbone.embed_tokens.weight), None
        for i, block in enumerate(self.blocks):
            x, normal = add_norm(x, more, block.before.weight, block.before.variance_epsilon)
            qkv = _joint(normal, block.qkv)
            qk = self.turning(block, at).forward(qkv)
            q, k, v = (y.reshape(*shape, -1, self.head_size).transpose(1, 2) for y in self.split(qk, qkv))
            attended = layout.attend(i, q, k, v, self.scale, block.window, None).reshape(len(ids), -1)
            y, _ = _linear(attended, block.out, block.out_lora)
            x, normal = add_norm(x, y, block.between.weight, block.between.variance_epsilon)
            value = swiglu(_joint(normal, block.gate_up)[:, : block.gate_up.columns])
            more, _ = _linear(value, block.down, block.down_lora)
        last = self.backbone.norm
        return add_norm(x, more, last.weight, last.variance_epsilon)[1]

    def turning(self, block: Any, at: Tensor) -> NormedRope:
        """The q/k norm and rotary embedding of a layer at these positions."""
        weights = None if block.q_norm is None else (block.q_norm.weight, block.k_norm.weight)
        eps = 0.0 if block.q_norm is None else block.q_norm.variance_epsilon
        return NormedRope(self.heads, self.kv_heads, self.head_size, weights, eps, (self.cos, self.sin), at)

    def split(self, qk: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [N, heads, d] of the turned ones, and v of the joint product."""
        H, K, d = self.heads, self.kv_heads, self.head_size
        return qk[:, :H], qk[:, H:], qkv[:, (H + K) * d : (H + 2 * K) * d].view(-1, K, d)


def _linear(x: Tensor, layer: nn.Linear, lora: JointLora | None) -> tuple[Tensor, Tensor | None]:
    """A layer's product, and x Aᵀ where it is adapted."""
    if not lora:
        return functional.linear(x, layer.weight, layer.bias), None
    return lora.product(x, layer.bias)


def _joint(x: Tensor, layer: FusedLinear) -> Tensor:
    """The joint product; where it is adapted, with more columns."""
    if not layer.lora:
        return functional.linear(x, layer.weight, layer.bias)
    return layer.lora.wide(x, layer.bias)


class _Backbone(torch.autograd.Function):
    """Parameters are inputs only so that autograd knows that there is a gradient."""

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
    """One forward and backward pass over the layers."""

    def __init__(self, decoder: CudaBackbone, ids: Tensor, at: Tensor, layout: CudaPackAttention) -> None:
        self.decoder, self.ids, self.at, self.layout = decoder, ids, at, layout
        self.parameters = [p for p in decoder.backbone.parameters() if p.requires_grad]
        self.collected = decoder.accumulator is not None
        self.sums = GradAccumulator(self.parameters) if decoder.accumulator is None else decoder.accumulator
        self.kept: list[_SavedActivations] = []
        self.total = torch.empty(0)

    # Forward.

    def forward(self) -> Tensor:
        decoder = self.decoder
        x, more = functional.embedding(self.ids, decoder.backbone.embed_tokens.weight), None
        for i, block in enumerate(decoder.blocks):
            x, normal = add_norm(x, more, block.before.weight, block.before.variance_epsilon)
            kept = _SavedActivations(x)
            x, more = self._layer(block, x, normal, kept if i >= decoder.checkpointed else _SavedActivations(x))
            self.kept.append(kept)
        last = decoder.backbone.norm
        self.total, out = add_norm(x, more, last.weight, last.variance_epsilon)
        return out

    def _layer(self, block: Any, x: Tensor, normal: Tensor, kept: _SavedActivations) -> tuple[Tensor, Tensor]:
        """From a layer's first norm to (its second residual sum, what its MLP adds to it), noting what backward needs."""
        kept.qkv = _joint(normal, block.qkv)
        qk = self.decoder.turning(block, self.at).forward(kept.qkv)
        kept.attended, kept.lse = self.layout.forward(*self.decoder.split(qk, kept.qkv), self._rule(block))
        y, low = _linear(kept.attended.flatten(1), block.out, block.out_lora)
        kept.out_low = None if low is None else low.clone()
        kept.middle, normal = add_norm(x, y, block.between.weight, block.between.variance_epsilon)
        kept.gate_up = _joint(normal, block.gate_up)
        more, low = _linear(swiglu(kept.gate_up[:, : block.gate_up.columns]), block.down, block.down_lora)
        kept.down_low = None if low is None else low.clone()
        return kept.middle, more

    def _rule(self, block: Any) -> Any:
        return self.layout.rule(self.decoder.scale, block.window, None)

    # Backward.

    @torch.no_grad()
    def backward(self, grad: Tensor) -> None:
        last = self.decoder.backbone.norm
        grad, _, d_weight = norm_backward(self.total, last.weight, last.variance_epsilon, grad.contiguous(), None, again=False)
        self.total = torch.empty(0)
        self._add(last.weight, d_weight)
        for block in reversed(self.decoder.blocks):
            kept = self.kept.pop()
            if kept.qkv is None:
                _, normal = add_norm(kept.x, None, block.before.weight, block.before.variance_epsilon)
                self._layer(block, kept.x, normal, kept)
            grad = self._attention_backward(block, kept, self._mlp_backward(block, kept, grad))
        self._embedding_backward(grad)

    def _mlp_backward(self, block: Any, kept: _SavedActivations, grad: Tensor) -> Tensor:
        assert kept.gate_up is not None
        assert kept.middle is not None
        d_value, wide = _input_gradient(grad, block.down.weight, block.down_lora)
        d_both, both = torch.empty_like(kept.gate_up), block.gate_up.columns
        _, value = swiglu_backward(kept.gate_up[:, :both], d_value, d_both[:, :both])
        low, kept.gate_up = kept.gate_up[:, both:].clone(), None
        self._add_product(block.down.weight, grad, value)
        self._add_lora(block.down_lora, wide, kept.down_low, value)
        d_normal, wide = _input_gradient(d_both, block.gate_up.weight, block.gate_up.lora)
        d_middle, normal, d_weight = norm_backward(
            kept.middle, block.between.weight, block.between.variance_epsilon, d_normal, grad
        )
        kept.middle = None
        self._add(block.between.weight, d_weight)
        self._add_joint(block.gate_up, d_both, normal)
        self._add_lora(block.gate_up.lora, wide, low, normal)
        return d_middle

    def _attention_backward(self, block: Any, kept: _SavedActivations, grad: Tensor) -> Tensor:
        assert kept.qkv is not None
        assert kept.attended is not None
        assert kept.lse is not None
        decoder, qkv = self.decoder, kept.qkv
        H, K, d = decoder.heads, decoder.kv_heads, decoder.head_size
        self._add_product(block.out.weight, grad, kept.attended.flatten(1))
        self._add_bias(block.out.bias, grad)
        d_attended, wide = _input_gradient(grad, block.out.weight, block.out_lora)
        self._add_lora(block.out_lora, wide, kept.out_low, kept.attended.flatten(1))
        turning = decoder.turning(block, self.at)
        qk = turning.forward(qkv)
        d_qk, d_qkv = torch.empty_like(qk), torch.empty_like(qkv)
        into = (d_qk[:, :H], d_qk[:, H:], d_qkv[:, (H + K) * d : (H + 2 * K) * d].view(-1, K, d))
        d_heads = d_attended.view(-1, H, d)
        self.layout.backward(*decoder.split(qk, qkv), kept.attended, kept.lse, d_heads, self._rule(block), into)
        of_norms = turning.backward(qkv, d_qk, d_qkv)
        if of_norms is not None:
            self._add(block.q_norm.weight, of_norms[0])
            self._add(block.k_norm.weight, of_norms[1])
        low = qkv[:, block.qkv.columns :].clone()
        del qkv
        kept.qkv = kept.attended = kept.lse = None
        d_normal, wide = _input_gradient(d_qkv, block.qkv.weight, block.qkv.lora)
        d_x, normal, d_weight = norm_backward(kept.x, block.before.weight, block.before.variance_epsilon, d_normal, grad)
        self._add(block.before.weight, d_weight)
        self._add_joint(block.qkv, d_qkv, normal)
        self._add_lora(block.qkv.lora, wide, low, normal)
        return d_x

    def _embedding_backward(self, grad: Tensor) -> None:
        words = self.decoder.backbone.embed_tokens
        if not words.weight.requires_grad:
            return
        if words.padding_idx is not None:
            grad = grad.masked_fill((self.ids == words.padding_idx)[:, None], 0.0)
        # By sorting, on a GPU: rows of equal tokens are added in one order.
        self.sums.buffer_for(words.weight).index_put_((self.ids,), grad.float(), accumulate=True)

    # Where gradients go. Frozen weights get none, and cost none.

    def _add(self, weight: Tensor, value: Tensor) -> None:
        if weight.requires_grad:
            self.sums.buffer_for(weight).add_(value)

    def _add_product(self, weight: Tensor, grad_NO: Tensor, input_NI: Tensor) -> None:
        if weight.requires_grad:
            add_product(self.sums.buffer_for(weight), grad_NO, input_NI)

    def _add_bias(self, bias: Tensor | None, grad_NO: Tensor) -> None:
        if bias is not None and bias.requires_grad:
            self.sums.buffer_for(bias).add_(grad_NO.sum(0, dtype=torch.float32))

    def _add_joint(self, layer: FusedLinear, grad_NO: Tensor, input_NI: Tensor) -> None:
        """By one product where all of the parts are trained."""
        grad_NO = grad_NO[:, : layer.columns]
        if all(p.requires_grad for part in layer.parts for p in part.parameters()):
            add_product(self.sums.buffer_for(layer.weight), grad_NO, input_NI)
            if layer.bias is not None:
                self.sums.buffer_for(layer.bias).add_(grad_NO.sum(0, dtype=torch.float32))
            return
        for part, own_NO in zip(layer.parts, torch.split(grad_NO, layer.sizes, 1), strict=True):
            self._add_product(part.weight, own_NO, input_NI)
            self._add_bias(part.bias, own_NO)

    def _add_lora(self, lora: JointLora | None, wide: Tensor | None, low: Tensor | None, input_NI: Tensor) -> None:
        if lora is not None and wide is not None and low is not None:
            lora.add_gradients(self.sums, wide, low, input_NI)

    def gradients(self) -> list[Tensor | None]:
        """One for each parameter, for autograd; None where they went into the caller's sums."""
        return [None if self.collected else self.sums.buffer_for(p).to(p.dtype) for p in self.parameters]


def _input_gradient(grad: Tensor, weight: Tensor, lora: JointLora | None) -> tuple[Tensor, Tensor | None]:
    """Of a linear layer's input; and where it is adapted, the gradient with that of x Aᵀ beside it."""
    if not lora:
        return grad @ weight, None
    wide = lora.wide_gradient(grad)
    return wide @ lora.whole, wide
