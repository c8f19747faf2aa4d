"""The LM head in chunks on a GPU: one product and one pass of a kernel for each chunk, forward and backward.

Products of 16-bit factors give float32 logits: what bfloat16 would round away of a logit of 20 is 0.06 of a log-prob. Where all
tokens fit one chunk its logits are kept for the backward pass; else each chunk's are computed again. The formulas are in
models/heads/lm_head.py.

Legend: ``M`` predicted tokens, ``C`` rows of a chunk, ``D`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oncurve.kernels.lm_head import HeadShape, gradient, statistics
from oncurve.models.gradient_buffers import GradAccumulator, add_product
from oncurve.models.heads.lm_head import chunk_rows


class CudaHead(torch.autograd.Function):
    """(log-prob, entropy) of each target. ``sums``: where the head's gradient is collected; autograd has it where None."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, bias_V, target_M, shape: HeadShape, sums: GradAccumulator | None):  # type: ignore[no-untyped-def]
        logp_M, entropy_M, lse_M = torch.empty(3, len(target_M), device=hidden_MD.device)
        logits_CV = None
        for rows, logits_CV in _chunks(hidden_MD, weight_VD):
            logp_M[rows], entropy_M[rows], lse_M[rows] = statistics(logits_CV, target_M[rows], shape)
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, target_M, entropy_M, lse_M)
        ctx.shape, ctx.sums = shape, sums
        ctx.kept = logits_CV if len(hidden_MD) <= chunk_rows(len(weight_VD)) else None
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
            _sum_for(x, ctx.sums) if ctx.needs_input_grad[i] else None for i, x in ((1, weight_VD), (2, bias_V))
        )
        kept, ctx.kept = ctx.kept, None  # a gradient in float32 is written over it
        low = None
        for rows, logits_CV in _chunks(hidden_MD, weight_VD) if kept is None else [(slice(0, len(hidden_MD)), kept)]:
            if low is None:
                low = logits_CV if logits_CV.dtype == hidden_MD.dtype else torch.empty_like(logits_CV, dtype=hidden_MD.dtype)
            of_entropy = None if grad_entropy_M is None else grad_entropy_M[rows].contiguous()
            into = low[: len(logits_CV)]
            of_logp, known = grad_logp_M[rows].contiguous(), (entropy_M[rows], lse_M[rows])
            gradient(logits_CV, target_M[rows], ctx.shape, known, of_logp, of_entropy, into)
            torch.mm(into, weight_VD, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight, into, hidden_MD[rows])
            if grad_bias is not None:
                grad_bias += into.sum(0, dtype=torch.float32)
        if ctx.sums is not None:
            return grad_hidden, None, None, None, None, None
        weight, bias = (None if g is None else g.to(x.dtype) for g, x in ((grad_weight, weight_VD), (grad_bias, bias_V)))
        return grad_hidden, weight, bias, None, None, None


def _sum_for(weight: Tensor, sums: GradAccumulator | None) -> Tensor:
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if sums is None else sums.buffer_for(weight)


def _chunks(hidden_MD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their raw logits), in one buffer that the next chunk writes over."""
    M, C = len(hidden_MD), chunk_rows(len(weight_VD))
    buffer = torch.empty(min(M, C), len(weight_VD), dtype=torch.float32, device=hidden_MD.device)
    for start in range(0, M, C):
        rows = slice(start, min(start + C, M))
        out = buffer[: rows.stop - start]
        if hidden_MD.dtype == torch.float32:
            torch.mm(hidden_MD[rows], weight_VD.t(), out=out)
        else:
            torch.ops.aten.mm.dtype_out(hidden_MD[rows], weight_VD.t(), torch.float32, out=out)
        yield rows, out
