"""Norm of each query and key head (Qwen3's), then the rotary embedding, of the joint product of q, k and v; and the derivative.

For one head x of size d: n = w · x · r (or x where the model has no such norm), out_j = n_j·cos_j + n_j′·sin_j, where j′ lies
half a head away and sin carries the sign. Backward: dn_j = dout_j·cos_j + dout_j′·sin_j′, then the norm's derivative (norm.py).

Legend: ``N`` tokens, ``J`` heads of q and k together, the first ``H`` of them q's, ``d`` head size.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.models.kernels.launch import programs

ROWS = 32
"""Heads that one program turns at a time."""


@triton.jit
def _place(rows, total, token_stride, J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Offsets of heads, and of their swapped halves, in [tokens, heads, d]; which of them are real; tokens; heads."""
    token, head = rows // J, rows % J
    at = tl.arange(0, BD)
    other = tl.where(at < D // 2, at + D // 2, at - D // 2)
    base = token.to(tl.int64) * token_stride + head * D
    real = (rows < total)[:, None] & (at < D)[None, :]
    return base[:, None] + at[None, :], base[:, None] + other[None, :], real, token, head, at, other


@triton.jit
def _weights(q_weight, k_weight, head, at, H: tl.constexpr, D: tl.constexpr):
    of_q = tl.load(q_weight + at, mask=at < D, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + at, mask=at < D, other=0.0).to(tl.float32)
    return tl.where((head < H)[:, None], of_q[None, :], of_k[None, :])


@triton.jit
def _angles(table, position, token, rows, total, at, D: tl.constexpr):
    place = tl.load(position + token, mask=rows < total, other=0)
    real = (rows < total)[:, None] & (at < D)[None, :]
    return tl.load(table + place[:, None] * D + at[None, :], mask=real, other=0.0).to(tl.float32)


@triton.jit
def _turn_forward(qkv, out, q_weight, k_weight, cos, sin, position, total, stride_in, stride_out, eps,
             J: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
             NORM: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    here, there, real, token, head, at, other = _place(rows, total, stride_in, J, D, BD)
    x = tl.load(qkv + here, mask=real, other=0.0).to(tl.float32)
    turned = tl.load(qkv + there, mask=real, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * r * _weights(q_weight, k_weight, head, at, H, D)
        turned = turned * r * _weights(q_weight, k_weight, head, other, H, D)
    y = x * _angles(cos, position, token, rows, total, at, D) + turned * _angles(sin, position, token, rows, total, at, D)
    place, _, _, _, _, _, _ = _place(rows, total, stride_out, J, D, BD)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _turn_backward(qkv, grad, d_qkv, d_weights, q_weight, k_weight, cos, sin, position, total, stride_in, stride_grad, eps,
              J: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
              NORM: tl.constexpr):  # fmt: skip
    dq_weight = tl.zeros([BD], tl.float32)
    dk_weight = tl.zeros([BD], tl.float32)
    at = tl.arange(0, BD)
    for first in range(tl.program_id(0) * R, total, tl.num_programs(0) * R):
        rows = first + tl.arange(0, R)
        here, there, real, token, head, _, other = _place(rows, total, stride_grad, J, D, BD)
        g = tl.load(grad + here, mask=real, other=0.0).to(tl.float32)
        g_turned = tl.load(grad + there, mask=real, other=0.0).to(tl.float32)
        g = g * _angles(cos, position, token, rows, total, at, D) + g_turned * _angles(
            sin, position, token, rows, total, other, D
        )
        place, _, _, _, _, _, _ = _place(rows, total, stride_in, J, D, BD)
        if NORM:
            x = tl.load(qkv + place, mask=real, other=0.0).to(tl.float32)
            r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            hat = x * r
            both = g * hat
            dq_weight += tl.sum(tl.where((head < H)[:, None], both, 0.0), 0)
            dk_weight += tl.sum(tl.where((head < H)[:, None], 0.0, both), 0)
            gw = g * _weights(q_weight, k_weight, head, at, H, D)
            g = r * (gw - hat * (tl.sum(gw * hat, 1) / D)[:, None])
        tl.store(d_qkv + place, g.to(d_qkv.dtype.element_ty), mask=real)
    if NORM:
        mine = d_weights + tl.program_id(0) * 2 * D
        tl.store(mine + at, dq_weight, mask=at < D)
        tl.store(mine + D + at, dk_weight, mask=at < D)


class Turning:
    """What turns with a position: the norm weights of a layer (None where it has none), the tables, the positions."""

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, weights: tuple[Tensor, Tensor] | None, eps: float,
        tables: tuple[Tensor, Tensor], position_N: Tensor,
    ) -> None:  # fmt: skip
        self.H, self.J, self.d = heads, heads + kv_heads, head_size
        self.weights, self.eps, self.tables, self.position_N = weights, eps, tables, position_N

    @property
    def _sizes(self) -> dict[str, object]:
        BD = triton.next_power_of_2(self.d)
        return {"J": self.J, "H": self.H, "D": self.d, "BD": BD, "R": ROWS, "NORM": self.weights is not None, "num_warps": 4}

    def forward(self, qkv: Tensor) -> Tensor:
        """[N, J, d]: q and k, normed and turned, of the joint product [N, (J + kv heads)·d]."""
        N = len(qkv)
        out = torch.empty(N, self.J, self.d, dtype=qkv.dtype, device=qkv.device)
        q_weight, k_weight = self.weights or (qkv, qkv)
        total = N * self.J
        _turn_forward[(triton.cdiv(total, ROWS),)](
            qkv, out, q_weight, k_weight, *self.tables, self.position_N, total, qkv.stride(0), out.stride(0), self.eps,
            **self._sizes,
        )  # fmt: skip
        return out

    def backward(self, qkv: Tensor, grad: Tensor, d_qkv: Tensor) -> tuple[Tensor, Tensor] | None:
        """Writes the gradient of q and k into their part of ``d_qkv``; returns that of the norm weights in float32."""
        total = len(qkv) * self.J
        count = programs(triton.cdiv(total, ROWS), qkv.device)
        d_weights = torch.empty(count, 2, self.d, device=qkv.device)
        q_weight, k_weight = self.weights or (qkv, qkv)
        _turn_backward[(count,)](
            qkv, grad, d_qkv, d_weights, q_weight, k_weight, *self.tables, self.position_N, total,
            qkv.stride(0), grad.stride(0), self.eps, **self._sizes,
        )  # fmt: skip
        if self.weights is None:
            return None
        of_q, of_k = d_weights.sum(0)
        return of_q, of_k
