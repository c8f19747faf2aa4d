"""Matrix products of a decode step: y = x·Wᵀ (+ b), and act(x·Gᵀ)·(x·Uᵀ) in one launch, for few rows and 16-bit factors.

By itself a library's product is slightly faster. But it starts only when the previous kernel has ended, and the next kernel
starts only when the product has ended. The products here start early, like all kernels of a step (``launch.py``), and the next
kernel sums their parts or is fused with them. They are used if one launch fills the GPU about once; otherwise torch's products
are used.

A long inner dimension is split into parts, whose float32 sums the next kernel adds in a fixed order, so the bits are always the
same. ``N`` is the number of outputs, ``I`` the width of the gated unit.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.kernels.activations import activate
from oncurve.kernels.launch import gpu_of, pdl_options


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tile of one program: its rows, its outputs and its step along the inner dimension, which is split into ``parts``."""

    rows: int
    outputs: int
    inner: int
    warps: int
    stages: int
    parts: int = 1

    def programs(self, rows: int, outputs: int, inner: int) -> int | None:
        """Programs of a launch; None if the matrix can't be split like this."""
        if outputs % self.outputs or inner % (self.parts * self.inner):
            return None
        return -(-rows // self.rows) * (outputs // self.outputs) * self.parts


MANY = ProductTiles(128, 64, 64, warps=4, stages=6)
FEW = ProductTiles(64, 64, 64, warps=4, stages=8, parts=2)
GATED = ProductTiles(128, 64, 64, warps=8, stages=5)
"""The fastest tiles on an H200 with 256 rows: for many outputs, for few outputs and a long inner dimension, and for gate and
up."""


def block_for(x_SD: Tensor, outputs: int, *, gated: bool = False) -> ProductTiles | None:
    """How our product is split; None if torch's product is the better one, as without PDL, or with little shared memory."""
    gpu = gpu_of(x_SD.device)
    if x_SD.dtype not in (torch.bfloat16, torch.float16) or not (gpu.is_hopper and gpu.has_room):
        return None
    for block in (GATED,) if gated else (MANY, FEW):
        programs = block.programs(x_SD.shape[0], outputs, x_SD.shape[1])
        if programs is not None and gpu.multiprocessors * 2 // 3 <= programs <= gpu.multiprocessors:
            return block
    return None


@triton.jit(do_not_specialize=["slots"])
def _product(x, w, bias, out, slots, N: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, NAME: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Neighbouring programs share rows of the matrix. GATED: N outputs of gate, followed by N of up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.cdiv(slots, BM)
    pid, part = tl.program_id(0), tl.program_id(1)
    m = pid % tiles * BM + tl.arange(0, BM)
    n = pid // tiles * BN + tl.arange(0, BN)
    k = part * SPAN + tl.arange(0, BK)
    from_x = x + (m % slots)[:, None] * D + k[None, :]
    from_w = w + n[:, None] * D + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    up = acc
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, SPAN, BK):
        a = tl.load(from_x + start)
        acc = tl.dot(a, tl.trans(tl.load(from_w + start)), acc)
        if GATED:
            up = tl.dot(a, tl.trans(tl.load(from_w + N * D + start)), up)
    if BIAS:
        acc += tl.load(bias + n, mask=(n < N) & (part == 0), other=0.0)[None, :].to(tl.float32)
    if GATED:
        acc = activate(acc, NAME) * up
    to = out + (part * slots + m)[:, None] * N + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(m < slots)[:, None])


def product(x_SD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, block: ProductTiles) -> Tensor:
    """x·Wᵀ + b: [S, N] in x's dtype, or its float32 parts [parts, S, N]."""
    S, N = len(x_SD), len(weight_ND)
    shape, dtype = ((S, N), x_SD.dtype) if block.parts == 1 else ((block.parts, S, N), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x_SD.device)
    _launch(x_SD, weight_ND, bias_N, out, N, block, gated=False, activation="silu")
    return out


def gated_product(x_SD: Tensor, weight_2ID: Tensor, block: ProductTiles, activation: str = "silu") -> Tensor:
    """activation(gate)·up of x: [S, I] in x's dtype."""
    assert block.parts == 1
    out = torch.empty((len(x_SD), len(weight_2ID) // 2), dtype=x_SD.dtype, device=x_SD.device)
    _launch(x_SD, weight_2ID, None, out, out.shape[1], block, gated=True, activation=activation)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, N: int, block: ProductTiles, *, gated: bool, activation: str
) -> None:
    S, D = x.shape
    _product[(triton.cdiv(S, block.rows) * (N // block.outputs), block.parts)](
        x, weight, x if bias is None else bias, out, S, N=N, D=D, SPAN=D // block.parts, BM=block.rows, BN=block.outputs,
        BK=block.inner, BIAS=bias is not None, GATED=gated, NAME=activation, num_warps=block.warps, num_stages=block.stages,
        **pdl_options(x.device),
    )  # fmt: skip
