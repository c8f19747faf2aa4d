"""The second half of a LoRA product: y + s · u Bᵀ, of several adapters side by side, in one launch.

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
    """``table`` [tiles, 4], in units: first column, end, where in u its adapter begins (below 0: none), in B its first row."""

    table: Tensor
    unit: int

    @classmethod
    def of(cls, sizes: Sequence[int], adapted: Sequence[bool], rank: int, device: torch.device, *, every: bool) -> LoraTiles:
        """Tiles of fused layers, of which some have an adapter, all of one rank. ``every``: include layers without one."""
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
