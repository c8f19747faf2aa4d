"""The gated unit silu(gate)·up of one [N, 2·I] product of both, and its derivative, which also recomputes the unit's value.

With σ = sigmoid(gate): d gate = g·up·σ·(1 + gate·(1 − σ)), d up = g·gate·σ. ``I`` is the width of the MLP.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gate_forward(both, out, stride, I: tl.constexpr, B: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    gate = tl.load(both + row * stride + at, mask=at < I, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride + I + at, mask=at < I, other=0.0).to(tl.float32)
    tl.store(out + row * I + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=at < I)


@triton.jit
def _gate_backward(both, grad, d_both, out, stride, d_stride, I: tl.constexpr, B: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    gate = tl.load(both + row * stride + at, mask=at < I, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride + I + at, mask=at < I, other=0.0).to(tl.float32)
    g = tl.load(grad + row * I + at, mask=at < I, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    kind = out.dtype.element_ty
    tl.store(out + row * I + at, (silu * up).to(kind), mask=at < I)
    tl.store(d_both + row * d_stride + at, (g * up * s * (1.0 + gate * (1.0 - s))).to(kind), mask=at < I)
    tl.store(d_both + row * d_stride + I + at, (g * silu).to(kind), mask=at < I)


def swiglu(both: Tensor) -> Tensor:
    """silu(gate)·up, [N, I]; ``both`` may have any row stride."""
    N, I = both.shape[0], both.shape[1] // 2  # noqa: E741
    out = torch.empty(N, I, dtype=both.dtype, device=both.device)
    _gate_forward[(N, triton.cdiv(I, BLOCK))](both, out, both.stride(0), I=I, B=BLOCK, num_warps=4)
    return out


def swiglu_backward(both: Tensor, grad: Tensor, d_both: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(gradient of ``both``, written into ``d_both`` if that is passed; the unit's value)."""
    N, I = grad.shape  # noqa: E741
    d_both = torch.empty_like(both) if d_both is None else d_both
    out = torch.empty_like(grad)
    _gate_backward[(N, triton.cdiv(I, BLOCK))](
        both, grad, d_both, out, both.stride(0), d_both.stride(0), I=I, B=BLOCK, num_warps=4
    )
    return d_both, out
