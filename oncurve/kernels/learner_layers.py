"""What lies between the matrix products of the learner: norms, rotary embedding and gated unit, each with its derivative.

RMSNorm with the residual sum before it: s = x + y, n = w · s · r, r = (mean s² + eps)^−½. With ŝ = s·r and g the gradient of n:
ds = r·(g·w − ŝ·mean(g·w·ŝ)) + the gradient that reaches s past the norm, dw = Σ g·ŝ. The backward pass recomputes r and n, as
it reads s anyway: nothing but s is stored.

Norm of each query and key head (Qwen3), then the rotary embedding, of the fused product of q, k and v. For one head x of size
d: n = w · x · r (x if the model has no such norm); its halves a and b are rotated to a·cos − b·sin and b·cos + a·sin. The
backward pass rotates back, then applies the norm's derivative. Tables hold the angles of one half. ``J`` counts the heads of q
and k together; the first ``H`` of them are q's.

The gated unit silu(gate)·up of one [N, 2·I] product of both; its derivative also recomputes the unit's value. With
σ = sigmoid(gate): d gate = g·up·σ·(1 + gate·(1 − σ)), d up = g·gate·σ. ``I`` is the width of the MLP.

The second half of a LoRA product: y + s · u Bᵀ, of several adapters side by side, in one launch.

u [N, R] holds x Aᵀ of every adapter, B [ΣO, r] the rows of every adapter. A tile of columns belongs to one adapter, or to a
layer without one, whose columns are only copied; a table says which. ``O`` are the product's columns, ``r`` a rank, ``R`` all
ranks.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.kernels.launch import programs, warps_for

ROWS, ROWS_BACK = 32, 16
"""Heads that one program rotates at a time, forward and backward; backward holds four sums for each."""
BLOCK = 1024
"""Columns of the gated unit that one program computes."""


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


@triton.jit
def _halves(base, rows, total, token_stride, J: tl.constexpr, D: tl.constexpr, BH: tl.constexpr):
    """Addresses of the first halves of heads in [tokens, heads, d] (the second lie d/2 further), and which of them exist."""
    at = tl.arange(0, BH)
    start = (rows // J).to(tl.int64) * token_stride + (rows % J) * D
    return base + start[:, None] + at[None, :], (rows < total)[:, None] & (at < D // 2)[None, :]


@triton.jit
def _weight(q_weight, k_weight, rows, shift, J: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr):
    """Half of the norm weight of each row: a query head's or a key head's."""
    at = tl.arange(0, BH)
    of_q = tl.load(q_weight + shift + at, mask=at < D // 2, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + shift + at, mask=at < D // 2, other=0.0).to(tl.float32)
    return tl.where((rows % J < H)[:, None], of_q[None, :], of_k[None, :])


@triton.jit
def _angle(table, position, rows, total, J: tl.constexpr, D: tl.constexpr, BH: tl.constexpr):
    """A table's row at each row's position."""
    at = tl.arange(0, BH)
    place = tl.load(position + rows // J, mask=rows < total, other=0)
    real = (rows < total)[:, None] & (at < D // 2)[None, :]
    return tl.load(table + place[:, None] * (D // 2) + at[None, :], mask=real, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["total"])
def _rope_forward(qkv, out, q_weight, k_weight, cos, sin, position, total, stride_in, stride_out, eps,
                  J: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, R: tl.constexpr,
                  NORM: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    here, real = _halves(qkv, rows, total, stride_in, J, D, BH)
    x = tl.load(here, mask=real, other=0.0).to(tl.float32)
    y = tl.load(here + D // 2, mask=real, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        x = x * r * _weight(q_weight, k_weight, rows, 0, J, H, D, BH)
        y = y * r * _weight(q_weight, k_weight, rows, D // 2, J, H, D, BH)
    there, real = _halves(out, rows, total, stride_out, J, D, BH)
    c = _angle(cos, position, rows, total, J, D, BH)
    s = _angle(sin, position, rows, total, J, D, BH)
    tl.store(there, (x * c - y * s).to(out.dtype.element_ty), mask=real)
    tl.store(there + D // 2, (y * c + x * s).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["total"])
def _rope_backward(qkv, grad, d_qkv, d_weights, q_weight, k_weight, cos, sin, position, total, stride_in, stride_grad, eps,
                   J: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, R: tl.constexpr,
                   NORM: tl.constexpr):  # fmt: skip
    # Sums are kept per row and reduced at the end: a sum over rows within the loop would wait for all warps each time.
    dq_first = tl.zeros([R, BH], tl.float32)
    dq_second = tl.zeros([R, BH], tl.float32)
    dk_first = tl.zeros([R, BH], tl.float32)
    dk_second = tl.zeros([R, BH], tl.float32)
    for start in range(tl.program_id(0) * R, total, tl.num_programs(0) * R):
        rows = start + tl.arange(0, R)
        here, real = _halves(grad, rows, total, stride_grad, J, D, BH)
        a = tl.load(here, mask=real, other=0.0).to(tl.float32)
        b = tl.load(here + D // 2, mask=real, other=0.0).to(tl.float32)
        c = _angle(cos, position, rows, total, J, D, BH)
        s = _angle(sin, position, rows, total, J, D, BH)
        g, h = a * c + b * s, b * c - a * s
        if NORM:
            there, real = _halves(qkv, rows, total, stride_in, J, D, BH)
            x = tl.load(there, mask=real, other=0.0).to(tl.float32)
            y = tl.load(there + D // 2, mask=real, other=0.0).to(tl.float32)
            r = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
            x, y = x * r, y * r
            of_q = (rows % J < H)[:, None]
            dq_first += tl.where(of_q, g * x, 0.0)
            dq_second += tl.where(of_q, h * y, 0.0)
            dk_first += tl.where(of_q, 0.0, g * x)
            dk_second += tl.where(of_q, 0.0, h * y)
            g *= _weight(q_weight, k_weight, rows, 0, J, H, D, BH)
            h *= _weight(q_weight, k_weight, rows, D // 2, J, H, D, BH)
            mean = ((tl.sum(g * x, 1) + tl.sum(h * y, 1)) / D)[:, None]
            g, h = r * (g - x * mean), r * (h - y * mean)
        into, real = _halves(d_qkv, rows, total, stride_in, J, D, BH)
        tl.store(into, g.to(d_qkv.dtype.element_ty), mask=real)
        tl.store(into + D // 2, h.to(d_qkv.dtype.element_ty), mask=real)
    if NORM:
        at = tl.arange(0, BH)
        mine, real = d_weights + tl.program_id(0) * 2 * D + at, at < D // 2
        tl.store(mine, tl.sum(dq_first, 0), mask=real)
        tl.store(mine + D // 2, tl.sum(dq_second, 0), mask=real)
        tl.store(mine + D, tl.sum(dk_first, 0), mask=real)
        tl.store(mine + D + D // 2, tl.sum(dk_second, 0), mask=real)


class NormedRope:
    """A layer's norm weights (or None), cos and sin [positions, d/2], and the position of each token."""

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, weights: tuple[Tensor, Tensor] | None, eps: float,
        tables: tuple[Tensor, Tensor], position_N: Tensor,
    ) -> None:  # fmt: skip
        self.H, self.J, self.d = heads, heads + kv_heads, head_size
        self.weights, self.eps, self.tables, self.position_N = weights, eps, tables, position_N

    @property
    def _sizes(self) -> dict[str, object]:
        BH = triton.next_power_of_2(self.d // 2)
        return {"J": self.J, "H": self.H, "D": self.d, "BH": BH, "NORM": self.weights is not None, "num_warps": 4}

    def forward(self, qkv: Tensor) -> Tensor:
        """[N, J, d]: q and k, normed and rotated, of the fused product [N, (J + KV heads)·d]."""
        N = len(qkv)
        out = torch.empty(N, self.J, self.d, dtype=qkv.dtype, device=qkv.device)
        q_weight, k_weight = self.weights or (qkv, qkv)
        total = N * self.J
        _rope_forward[(triton.cdiv(total, ROWS),)](
            qkv, out, q_weight, k_weight, *self.tables, self.position_N, total, qkv.stride(0), out.stride(0), self.eps,
            R=ROWS, **self._sizes,
        )  # fmt: skip
        return out

    def backward(self, qkv: Tensor, grad: Tensor, d_qkv: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write the gradient of q and k into their part of ``d_qkv``; returns that of the norm weights in float32."""
        total = len(qkv) * self.J
        count = programs(triton.cdiv(total, ROWS_BACK), qkv.device)
        d_weights = torch.empty(count, 2, self.d, device=qkv.device)
        q_weight, k_weight = self.weights or (qkv, qkv)
        _rope_backward[(count,)](
            qkv, grad, d_qkv, d_weights, q_weight, k_weight, *self.tables, self.position_N, total,
            qkv.stride(0), grad.stride(0), self.eps, R=ROWS_BACK, **self._sizes,
        )  # fmt: skip
        if self.weights is None:
            return None
        of_q, of_k = d_weights.sum(0)
        return of_q, of_k


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


COLUMNS = 64
"""Columns of a tile."""
NO_PDL: Mapping[str, Any] = {"PDL": False}
"""Options of a launch without PDL."""


@triton.jit(do_not_specialize=["rows"])
def _expand(base, low, b, bias, out, tiles, rows, stride_base, stride_low, stride_out, scale,
            RANK: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
            BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    here = tiles + tl.program_id(0) * 4
    # Multiples of a known unit, so that the compiler can vectorise loads and stores.
    first, end = tl.load(here) * UNIT, tl.load(here + 1) * UNIT
    u_at, b_at = tl.load(here + 2) * UNIT, tl.load(here + 3) * UNIT
    row = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.arange(0, BN)
    real = (row < rows)[:, None] & (first + column < end)[None, :]
    y = tl.load(base + row[:, None] * stride_base + first + column[None, :], mask=real, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + first + column, mask=first + column < end, other=0.0).to(tl.float32)[None, :]
    if u_at >= 0:
        more = tl.zeros([BM, BN], tl.float32)
        for start in range(0, RANK, BK):
            k = start + tl.arange(0, BK)
            u = tl.load(
                low + row[:, None] * stride_low + u_at + k[None, :],
                mask=(row < rows)[:, None] & (k < RANK)[None, :],
                other=0.0,
            )
            w = tl.load(
                b + (b_at + column)[:, None] * RANK + k[None, :],
                mask=(first + column < end)[:, None] & (k < RANK)[None, :],
                other=0.0,
            )
            more += tl.dot(u, tl.trans(w), input_precision="ieee")
        y += scale * more
    tl.store(out + row[:, None] * stride_out + first + column[None, :], y.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """``table`` [tiles, 4], in units: a tile's first column, its end, where its adapter begins in u (below 0: none), and its
    first row in B."""

    table: Tensor
    unit: int

    @classmethod
    def of(cls, sizes: Sequence[int], adapted: Sequence[bool], rank: int, device: torch.device, *, every: bool) -> LoraTiles:
        """The tiles of fused layers, some of which have an adapter; all adapters have the same rank. ``every`` also makes tiles
        for layers without an adapter."""
        rows, column, u_at, b_at = [], 0, 0, 0
        for size, has in zip(sizes, adapted, strict=True):
            for first in range(0, size, COLUMNS) if has or every else ():
                end = column + min(first + COLUMNS, size)
                rows.append([column + first, end, u_at if has else -COLUMNS, b_at + first])
            column += size
            u_at += rank * has
            b_at += size * has
        unit = math.gcd(16, rank, *sizes)
        return cls(torch.tensor(rows, dtype=torch.int32, device=device) // unit, unit)


def expand(
    base_NO: Tensor, low_NR: Tensor, b: Tensor, scale: float, tiles: LoraTiles, bias_O: Tensor | None, out_NO: Tensor,
    launch: Mapping[str, Any] = NO_PDL,
) -> None:  # fmt: skip
    """out = base + bias + scale · low Bᵀ in the columns of the tiles; ``out`` may be ``base``, with any row strides.
    ``launch``: the options of launch.py."""
    N, rank = len(base_NO), b.shape[1]
    BM = 32 if N <= 1024 else 128
    _expand[(len(tiles.table), triton.cdiv(N, BM))](
        base_NO, low_NR, b, base_NO if bias_O is None else bias_O, out_NO, tiles.table, N,
        base_NO.stride(0), low_NR.stride(0), out_NO.stride(0), scale, RANK=rank, UNIT=tiles.unit, BN=COLUMNS, BM=BM,
        BK=max(16, min(64, triton.next_power_of_2(rank))), BIAS=bias_O is not None, num_warps=4, **launch,
    )  # fmt: skip
