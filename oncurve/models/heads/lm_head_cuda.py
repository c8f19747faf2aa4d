"""The LM head in chunks on a GPU: one matrix product and one kernel per chunk, forward and backward.

Products of 16-bit factors give float32 logits: rounding a logit of 20 to bfloat16 would change a log-prob by 0.06. With one
chunk, its logits are saved for the backward pass; with several, each chunk's are recomputed. The formulas are in
models/heads/lm_head.py. Local shape letter: ``C`` tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oncurve.kernels.lm_head import HeadShape, gradient, statistics
from oncurve.models.gradient_buffers import GradAccumulator, add_product
from oncurve.models.heads.lm_head import gpu_chunk_tokens


class CudaHead(torch.autograd.Function):
    """(log-prob, entropy) of each target. The weight gradient goes to ``accumulator``, or to autograd if there is none."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, bias_V, target_M, shape: HeadShape, accumulator: GradAccumulator | None):  # type: ignore[no-untyped-def]
        logp_M, entropy_M, lse_M = torch.empty(3, len(target_M), device=hidden_MD.device)
        logits_CV = None
        for rows, logits_CV in _chunks(hidden_MD, weight_VD):
            logp_M[rows], entropy_M[rows], lse_M[rows] = statistics(logits_CV, target_M[rows], shape)
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, target_M, entropy_M, lse_M)
        ctx.shape, ctx.accumulator = shape, accumulator
        ctx.saved_logits = logits_CV if len(hidden_MD) <= gpu_chunk_tokens(len(weight_VD)) else None
        ctx.set_materialize_grads(False)
        return logp_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_M, grad_entropy_M):  # type: ignore[no-untyped-def]
        hidden_MD, weight_VD, bias_V, target_M, entropy_M, lse_M = ctx.saved_tensors
        if grad_logp_M is None:
            grad_logp_M = torch.zeros_like(lse_M)
        grad_hidden = torch.empty_like(hidden_MD)
        grad_weight, grad_bias = (
            _gradient_buffer(x, ctx.accumulator) if ctx.needs_input_grad[i] else None for i, x in ((1, weight_VD), (2, bias_V))
        )
        saved, ctx.saved_logits = ctx.saved_logits, None  # a float32 gradient overwrites it
        low = None
        for rows, logits_CV in _chunks(hidden_MD, weight_VD) if saved is None else [(slice(0, len(hidden_MD)), saved)]:
            if low is None:
                low = logits_CV if logits_CV.dtype == hidden_MD.dtype else torch.empty_like(logits_CV, dtype=hidden_MD.dtype)
            grad_entropy = None if grad_entropy_M is None else grad_entropy_M[rows].contiguous()
            grad_CV = low[: len(logits_CV)]
            grad_logp, statistics_M = grad_logp_M[rows].contiguous(), (entropy_M[rows], lse_M[rows])
            gradient(logits_CV, target_M[rows], ctx.shape, statistics_M, grad_logp, grad_entropy, grad_CV)
            torch.mm(grad_CV, weight_VD, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight, grad_CV, hidden_MD[rows])
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0, dtype=torch.float32)
        if ctx.accumulator is not None:
            return grad_hidden, None, None, None, None, None
        weight, bias = (None if g is None else g.to(x.dtype) for g, x in ((grad_weight, weight_VD), (grad_bias, bias_V)))
        return grad_hidden, weight, bias, None, None, None


def _gradient_buffer(weight: Tensor, accumulator: GradAccumulator | None) -> Tensor:
    if accumulator is not None:
        return accumulator.buffer_for(weight)
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _chunks(hidden_MD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their raw logits), in one buffer that the next chunk overwrites."""
    M, C = len(hidden_MD), gpu_chunk_tokens(len(weight_VD))
    buffer = torch.empty(min(M, C), len(weight_VD), dtype=torch.float32, device=hidden_MD.device)
    for start in range(0, M, C):
        rows = slice(start, min(start + C, M))
        out = buffer[: rows.stop - start]
        if hidden_MD.dtype == torch.float32:
            torch.mm(hidden_MD[rows], weight_VD.t(), out=out)
        else:
            torch.ops.aten.mm.dtype_out(hidden_MD[rows], weight_VD.t(), torch.float32, out=out)
        yield rows, out
