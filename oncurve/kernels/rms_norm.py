"""RMSNorm with the residual sum before it: s = x + y, n = w · s · r, r = (mean s² + eps)^−½; and its derivative.

With ŝ = s·r and g the gradient of n: ds = r·(g·w − ŝ·mean(g·w·ŝ)) + the gradient that reaches s past the norm, dw = Σ g·ŝ. The
backward pass recomputes r and n, as it reads s anyway: nothing but s is stored.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.kernels.launch import programs, warps_for


@triton.jit
def _norm_forward(x, y, weight, total, normal, eps, D: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BD)
    inside = at < D
    s = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        s += tl.load(y + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(total.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=inside)
        s = rounded.to(tl.float32)  # the norm of the rounded sum, as the backward pass computes it
    r = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normal + row + at, (s * r * w).to(normal.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(s_in, weight, grad, past, d_in, normal, d_weight, rows, eps,
              D: tl.constexpr, BD: tl.constexpr, PAST: tl.constexpr, NORMAL: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BD)
    inside = at < D
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BD], tl.float32)
    for number in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        row = number * D
        s = tl.load(s_in + row + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
        hat = s * r
        dw += g * hat
        if NORMAL:
            tl.store(normal + row + at, (hat * w).to(normal.dtype.element_ty), mask=inside)
        gw = g * w
        ds = r * (gw - hat * (tl.sum(gw * hat, 0) / D))
        if PAST:
            ds += tl.load(past + row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_in + row + at, ds.to(d_in.dtype.element_ty), mask=inside)
    tl.store(d_weight + tl.program_id(0) * D + at, dw, mask=inside)


def add_norm(x_ND: Tensor, y_ND: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its norm); if y is None, x itself and its norm."""
    N, D = x_ND.shape
    normal = torch.empty_like(x_ND)
    total = x_ND if y_ND is None else torch.empty_like(x_ND)
    BD = triton.next_power_of_2(D)
    _norm_forward[(N,)](
        x_ND, y_ND if y_ND is not None else x_ND, weight_D, total, normal, eps,
        D=D, BD=BD, ADD=y_ND is not None, num_warps=warps_for(BD),
    )  # fmt: skip
    return total, normal


def norm_backward(
    s_ND: Tensor, weight_D: Tensor, eps: float, grad_ND: Tensor, past_ND: Tensor | None, recompute: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of s, the recomputed norm if ``recompute``, gradient of the weight in float32)."""
    N, D = s_ND.shape
    d_in, count = torch.empty_like(s_ND), programs(N, s_ND.device)
    normal = torch.empty_like(s_ND) if recompute else d_in
    d_weight = torch.empty(count, D, device=s_ND.device)
    BD = triton.next_power_of_2(D)
    _norm_backward[(count,)](
        s_ND, weight_D, grad_ND, past_ND if past_ND is not None else s_ND, d_in, normal, d_weight, N, eps,
        D=D, BD=BD, PAST=past_ND is not None, NORMAL=recompute, num_warps=warps_for(BD),
    )  # fmt: skip
    return d_in, normal, d_weight.sum(0)
