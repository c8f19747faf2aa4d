"""Attention inside a pack [prompt | completion 1 | … | completion G | next prompt …]: one launch forward, three backward.

In pack indices a query q attends to a key k if k ≤ q < end(k): end is the group's end for a prompt's key, and the completion's
end for a completion's. So a query block goes over its prompt's keys and then its own, with one running softmax over both; a key
block goes over one contiguous range of queries. A prompt's keys are stored once for all of its completions.

Backward, with P = exp(S − lse) and δ = Σ dO·O: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − δ), dQ = dS K, dK = dSᵀ Q (FlashAttention-2, arXiv
2307.08691). δ, dQ, and dK with dV are three launches, so that nothing is added with atomics.

On Hopper and later GPUs tiles of long packs are copied by the tensor memory accelerator (TMA): the tensors q, k, v and dO are
passed as descriptors, and a tile is one instruction. Rows past a segment's end are then real rows of another segment instead of
zeros. Nothing changes by that: their weights are 0, and their results are not stored. Measured on an H200 with heads of 128 and
2 × 16,384 tokens: forward 448 → 499 TFLOP/s, backward 333 → 380.

A row of ``query_blocks`` is (first query, end and start of its segment, start and end of its prompt); a row of ``key_blocks``
is (first key, end of its segment, end of its queries).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from oncurve.kernels.launch import Gpu

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class PackTiles:
    """The queries and keys of one program's block, its warps and its pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of the forward launch, of dQ, and of dK with dV. In ``keys_backward`` the size of a key block is a multiple of the
    query block's."""

    forward: PackTiles
    queries_backward: PackTiles | None
    keys_backward: PackTiles
    uses_tma: bool = False


def tiling(head_size: int, dtype: torch.dtype, keys: int, gpu: Gpu, *, has_tma: bool) -> Tiling:
    """Measured on an H200 for 16-bit numbers and heads of 128, by the number of keys that a query attends to.

    Wider numbers and larger heads take smaller tiles, to fit, and so do GPUs with less shared memory for a program, on which
    nothing was measured: ``tests/kernels/test_compiled.py`` compiles all tiles and compares what they need.
    """
    if gpu.shared_memory < 96 << 10:  # Turing
        fits = dtype.itemsize == 2 and head_size <= 128
        small = PackTiles(32, 32, 4, 1) if fits else PackTiles(16, 16, 4, 1)
        return Tiling(small, small, small)
    if dtype.itemsize > 2 or head_size > 128:
        fits = dtype.itemsize == 2 or head_size <= 128 or gpu.has_room
        small = PackTiles(32, 32, 4, 1) if fits else PackTiles(16, 16, 4, 1)
        return Tiling(small, small, small)
    if keys < LONG:
        return Tiling(PackTiles(64, 32, 4, 3), PackTiles(64, 64, 4, 2), PackTiles(32, 64, 4, 2))
    if has_tma and gpu.has_room and keys >= VERY_LONG and head_size in (64, 128):
        return Tiling(PackTiles(128, 128, 8, 3), PackTiles(128, 64, 8, 3), PackTiles(64, 64, 4, 2), uses_tma=True)
    stages = 3 if gpu.has_room or head_size <= 64 else 2
    return Tiling(PackTiles(64, 64, 4, 3), PackTiles(128, 64, 8, stages), PackTiles(64, 64, 4, 2))


LONG = 512
"""From this many keys on, larger tiles are faster."""
VERY_LONG = 2048
"""From this many keys on, loading by TMA is worth its descriptors."""


def can_use_tma(*tensors: Tensor) -> bool:
    """Whether heads lie side by side in each [N, heads, d] tensor, and rows begin at multiples of 16 bytes."""
    return all(
        x.stride(1) == x.shape[2] and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in tensors
    )


def _source(x: Tensor, rows: int, *, uses_tma: bool) -> Tensor | TensorDescriptor:
    """The source from which a kernel loads tiles of ``rows`` rows of one head: a TMA descriptor, or the tensor itself."""
    N, heads, d = x.shape
    return TensorDescriptor(x, [N, heads * d], [x.stride(0), 1], [rows, d]) if uses_tma else x


@triton.jit
def _load_tile(source, first, rows, end, stride_row, column, D: tl.constexpr, DP: tl.constexpr, TMA: tl.constexpr):
    """Rows ``first`` … of a head that begins at ``column``. With TMA, rows past ``end`` are those of the next segment."""
    return source.load([first, column]) if TMA else _load_rows(source + column, rows, end, stride_row, D, DP)


@triton.jit
def _load_rows(base, rows, end, stride_row, D: tl.constexpr, DP: tl.constexpr):
    """Rows of a [tokens, d] matrix, zeros past ``end`` and past the head's size."""
    at = tl.arange(0, DP)
    where = base + rows.to(tl.int64)[:, None] * stride_row + at[None, :]
    real = rows[:, None] < end
    if D != DP:
        real = real & (at[None, :] < D)
    return tl.load(where, mask=real, other=0.0)


@triton.jit
def _store_rows(base, value, rows, end, stride_row, D: tl.constexpr, DP: tl.constexpr):
    at = tl.arange(0, DP)
    where = base + rows.to(tl.int64)[:, None] * stride_row + at[None, :]
    tl.store(where, value.to(base.dtype.element_ty), mask=(rows[:, None] < end) & (at[None, :] < D))


@triton.jit
def _visible(rows, cols, col_end, position, tokens, window, CAUSAL: tl.constexpr, ENDS: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the queries ``rows`` attend to which of the keys ``cols``: [rows, cols]."""
    visible = (rows[:, None] >= 0) & (cols[None, :] >= 0)
    if ENDS:
        visible = visible & (cols[None, :] < col_end)
    if CAUSAL:
        visible = visible & (cols[None, :] <= rows[:, None])
    if WINDOW:
        at_rows = tl.load(position + rows, mask=rows < tokens, other=0)
        at_cols = tl.load(position + cols, mask=cols < tokens, other=0)
        visible = visible & (at_rows[:, None] - at_cols[None, :] < window)
    return visible


@triton.jit
def _softcap(s, softcap):
    """softcap · tanh(s / softcap), and its derivative."""
    t = 1.0 - 2.0 / (tl.exp(s * 2.0 / softcap) + 1.0)
    return t * softcap, 1.0 - t * t


@triton.jit
def _forward_over(q, k, v, k_column, v_column, kn, vn, m, total, acc, rows, lo, hi, end, position, tokens, scale, softcap,
                  window, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, ENDS: tl.constexpr,
                  WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The running softmax over keys lo … hi; maxima are in units of log 2."""
    factor = LOG2E if SOFTCAP else scale * LOG2E
    for j in range(lo, hi, BN):
        cols = j + tl.arange(0, BN)
        k_tile = _load_tile(k, j, cols, end, kn, k_column, D, DP, TMA)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if SOFTCAP:
            s, _ = _softcap(s * scale, softcap)
        if CAUSAL or ENDS or WINDOW:
            s = tl.where(_visible(rows, cols, end, position, tokens, window, CAUSAL, ENDS, WINDOW), s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1) * factor)
        # A window can hide a complete block from a query; without one every query attends to a key of its first block.
        base = tl.where(new == float("-inf"), 0.0, new) if WINDOW else new
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(m - base)
        v_tile = _load_tile(v, j, cols, end, vn, v_column, D, DP, TMA)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(p, 1)
        m = new
    return m, total, acc


@triton.jit(do_not_specialize=["tokens"])
def _attend_forward(q, k, v, out, lse, blocks, position, tokens, scale, softcap, window,
                    qn, qh, kn, kh, vn, vh, on, oh,
                    H: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) % H
    block = blocks + (tl.program_id(0) // H) * 5
    first, end, start = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    prompt, prompt_end = tl.load(block + 3), tl.load(block + 4)
    rows = first + tl.arange(0, BM)
    kc, vc = (head // REP) * kh, (head // REP) * vh
    q_tile = _load_tile(q, first, rows, end, qn, head * qh, D, DP, TMA)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    full = prompt + (prompt_end - prompt) // BN * BN
    m, total, acc = _forward_over(q_tile, k, v, kc, vc, kn, vn, m, total, acc, rows, prompt, full, prompt_end, position, tokens,
                                  scale, softcap, window, D, DP, BN, False, False, WINDOW, SOFTCAP, PRECISION, TMA)  # fmt: skip
    m, total, acc = _forward_over(q_tile, k, v, kc, vc, kn, vn, m, total, acc, rows, full, prompt_end, prompt_end, position,
                                  tokens, scale, softcap, window, D, DP, BN, False, True, WINDOW, SOFTCAP, PRECISION,
                                  TMA)  # fmt: skip
    full = start + (first - start) // BN * BN
    m, total, acc = _forward_over(q_tile, k, v, kc, vc, kn, vn, m, total, acc, rows, start, full, end, position, tokens, scale,
                                  softcap, window, D, DP, BN, False, False, WINDOW, SOFTCAP, PRECISION, TMA)  # fmt: skip
    m, total, acc = _forward_over(q_tile, k, v, kc, vc, kn, vn, m, total, acc, rows, full, tl.minimum(first + BM, end), end,
                                  position, tokens, scale, softcap, window, D, DP, BN, True, False, WINDOW, SOFTCAP,
                                  PRECISION, TMA)  # fmt: skip
    _store_rows(out + head * oh, acc / total[:, None], rows, end, on, D, DP)
    tl.store(lse + head * tokens + rows, m + tl.log2(total), mask=rows < end)


@triton.jit(do_not_specialize=["tokens"])
def _attend_delta(out, d_out, delta, tokens, on, oh, gn, gh,
                  H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) % H
    rows = (tl.program_id(0) // H) * BM + tl.arange(0, BM)
    o = _load_rows(out + head * oh, rows, tokens, on, D, DP).to(tl.float32)
    g = _load_rows(d_out + head * gh, rows, tokens, gn, D, DP).to(tl.float32)
    tl.store(delta + head * tokens + rows, tl.sum(o * g, 1), mask=rows < tokens)


@triton.jit
def _weights(s, lse, scale, softcap, SOFTCAP: tl.constexpr):
    """P = exp(S − lse) from raw scores and a log-sum-exp that broadcasts, and the derivative of the scores' soft cap."""
    if SOFTCAP:
        s, slope = _softcap(s * scale, softcap)
        p = tl.exp2(s * LOG2E - lse)
    else:
        slope = 1.0
        p = tl.exp2(s * (scale * LOG2E) - lse)
    return p, slope


@triton.jit
def _queries_over(q, k, v, g, k_column, v_column, kn, vn, lse, delta, acc, rows, lo, hi, end, position, tokens, scale, softcap,
                  window, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, ENDS: tl.constexpr,
                  WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """dQ = Σ dS K over keys lo … hi."""
    for j in range(lo, hi, BN):
        cols = j + tl.arange(0, BN)
        k_tile = _load_tile(k, j, cols, end, kn, k_column, D, DP, TMA)
        p, slope = _weights(tl.dot(q, tl.trans(k_tile), input_precision=PRECISION), lse[:, None], scale, softcap, SOFTCAP)
        if CAUSAL or ENDS or WINDOW:
            p = tl.where(_visible(rows, cols, end, position, tokens, window, CAUSAL, ENDS, WINDOW), p, 0.0)
        v_tile = _load_tile(v, j, cols, end, vn, v_column, D, DP, TMA)
        dp = tl.dot(g, tl.trans(v_tile), input_precision=PRECISION)
        acc = tl.dot((p * (dp - delta[:, None]) * slope).to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _attend_backward_queries(q, k, v, d_out, lse, delta, dq, blocks, position, tokens, scale, softcap, window,
                             qn, qh, kn, kh, vn, vh, gn, gh, dn, dh,
                             H: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
                             BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                             PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) % H
    block = blocks + (tl.program_id(0) // H) * 5
    first, end, start = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    prompt, prompt_end = tl.load(block + 3), tl.load(block + 4)
    rows = first + tl.arange(0, BM)
    kc, vc = (head // REP) * kh, (head // REP) * vh
    q_tile = _load_tile(q, first, rows, end, qn, head * qh, D, DP, TMA)
    g = _load_tile(d_out, first, rows, end, gn, head * gh, D, DP, TMA)
    lse_rows = tl.load(lse + head * tokens + rows, mask=rows < end, other=float("inf"))
    delta_rows = tl.load(delta + head * tokens + rows, mask=rows < end, other=0.0)
    acc = tl.zeros([BM, DP], tl.float32)
    full = prompt + (prompt_end - prompt) // BN * BN
    acc = _queries_over(q_tile, k, v, g, kc, vc, kn, vn, lse_rows, delta_rows, acc, rows, prompt, full, prompt_end, position,
                        tokens, scale, softcap, window, D, DP, BN, False, False, WINDOW, SOFTCAP, PRECISION, TMA)  # fmt: skip
    acc = _queries_over(q_tile, k, v, g, kc, vc, kn, vn, lse_rows, delta_rows, acc, rows, full, prompt_end, prompt_end,
                        position, tokens,
                        scale, softcap, window, D, DP, BN, False, True, WINDOW, SOFTCAP, PRECISION, TMA)  # fmt: skip
    full = start + (first - start) // BN * BN
    acc = _queries_over(q_tile, k, v, g, kc, vc, kn, vn, lse_rows, delta_rows, acc, rows, start, full, end, position, tokens,
                        scale, softcap, window, D, DP, BN, False, False, WINDOW, SOFTCAP, PRECISION, TMA)  # fmt: skip
    acc = _queries_over(q_tile, k, v, g, kc, vc, kn, vn, lse_rows, delta_rows, acc, rows, full, tl.minimum(first + BM, end),
                        end, position, tokens, scale, softcap, window, D, DP, BN, True, False, WINDOW, SOFTCAP,
                        PRECISION, TMA)  # fmt: skip
    _store_rows(dq + head * dh, acc * scale, rows, end, dn, D, DP)


@triton.jit
def _keys_over(q, k, v, g, q_column, g_column, qn, gn, lse, delta, dq, dq_column, dqn, dk, dv, cols, lo, hi, last, end,
               position, tokens, scale, softcap, window, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
               EDGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
               TMA: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """dK = Σ dSᵀ Q and dV = Σ Pᵀ dO over queries lo … hi, of one query head. With ADD, dS K is added to dQ in memory."""
    for i in range(lo, hi, BM):
        rows = i + tl.arange(0, BM)
        q_tile = _load_tile(q, i, rows, last, qn, q_column, D, DP, TMA)
        lse_rows = tl.load(lse + rows, mask=rows < last, other=float("inf"))
        raw = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)  # keys × queries
        p, slope = _weights(raw, lse_rows[None, :], scale, softcap, SOFTCAP)
        if EDGE or WINDOW:
            visible = _visible(rows, cols, end, position, tokens, window, EDGE, EDGE and ADD, WINDOW)
            p = tl.where(tl.trans(visible), p, 0.0)
        g_tile = _load_tile(g, i, rows, last, gn, g_column, D, DP, TMA)
        dv = tl.dot(p.to(g_tile.dtype), g_tile, dv, input_precision=PRECISION)
        delta_rows = tl.load(delta + rows, mask=rows < last, other=0.0)
        ds = (p * (tl.dot(v, tl.trans(g_tile), input_precision=PRECISION) - delta_rows[None, :]) * slope).to(q_tile.dtype)
        dk = tl.dot(ds, q_tile, dk, input_precision=PRECISION)
        if ADD:
            _add_tile(dq, tl.dot(tl.trans(ds), k, input_precision=PRECISION), i, rows, last, dqn, dq_column, D, DP, TMA)
    return dk, dv


@triton.jit
def _add_tile(into, value, first, rows, end, stride_row, column, D: tl.constexpr, DP: tl.constexpr, TMA: tl.constexpr):
    """Add to a tile in memory, to which other programs add too. With TMA, 0 is added to rows past ``end``."""
    if TMA:
        into.atomic_add([first, column], value)
    else:
        at = tl.arange(0, DP)
        where = into + column + rows.to(tl.int64)[:, None] * stride_row + at[None, :]
        tl.atomic_add(where, value, mask=(rows[:, None] < end) & (at[None, :] < D), sem="relaxed")


@triton.jit(do_not_specialize=["tokens"])
def _attend_backward_keys(q, k, v, d_out, lse, delta, dq, dk, dv, blocks, position, tokens, scale, softcap, window,
                          qn, qh, kn, kh, vn, vh, gn, gh, dqn, dqh, dkn, dkh, dvn, dvh,
                          K: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
                          BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
                          TMA: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) % K
    block = blocks + (tl.program_id(0) // K) * 3
    first, end, last = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    cols = first + tl.arange(0, BN)
    k_tile = _load_tile(k, first, cols, end, kn, head * kh, D, DP, TMA)
    v_tile = _load_tile(v, first, cols, end, vn, head * vh, D, DP, TMA)
    dk_acc = tl.zeros([BN, DP], tl.float32)
    dv_acc = tl.zeros([BN, DP], tl.float32)
    # Some of these queries see only a part of the block's keys. If the segment ends within the block, that is true of all.
    edge = tl.minimum(first + BN, last)
    if ADD:
        edge = tl.where(first + BN > end, last, edge)
    for r in range(REP):
        own = head * REP + r
        dk_acc, dv_acc = _keys_over(q, k_tile, v_tile, d_out, own * qh, own * gh, qn, gn, lse + own * tokens,
                                    delta + own * tokens, dq, own * dqh, dqn, dk_acc, dv_acc, cols, first, edge, last, end,
                                    position, tokens, scale, softcap, window, D, DP, BM, True, WINDOW, SOFTCAP, PRECISION,
                                    TMA, ADD)  # fmt: skip
        dk_acc, dv_acc = _keys_over(q, k_tile, v_tile, d_out, own * qh, own * gh, qn, gn, lse + own * tokens,
                                    delta + own * tokens, dq, own * dqh, dqn, dk_acc, dv_acc, cols, edge, last, last, end,
                                    position, tokens, scale, softcap, window, D, DP, BM, False, WINDOW, SOFTCAP, PRECISION,
                                    TMA, ADD)  # fmt: skip
    _store_rows(dk + head * dkh, dk_acc * scale, cols, end, dkn, D, DP)
    _store_rows(dv + head * dvh, dv_acc, cols, end, dvn, D, DP)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores are computed: scale, soft cap, and a window in positions."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    def options(self, q: Tensor) -> dict[str, object]:
        d = q.shape[-1]
        return {
            "D": d, "DP": max(16, triton.next_power_of_2(d)), "WINDOW": self.window is not None,
            "SOFTCAP": self.softcap is not None, "PRECISION": "tf32" if q.dtype.itemsize == 2 else "ieee",
        }  # fmt: skip

    @property
    def numbers(self) -> tuple[float, float, int]:
        return self.scale, self.softcap or 1.0, self.window or 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, position_N: Tensor, rule: AttentionRule, tiles: PackTiles,
    *, uses_tma: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [N, H, d], log-sum-exp in units of log 2 [H, N]) of q [N, H, d], k and v [N, K, d], whose last axis is dense."""
    N, H, _ = q.shape
    sources = _source(q, tiles.queries, uses_tma=uses_tma), *(_source(x, tiles.keys, uses_tma=uses_tma) for x in (k, v))
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty(H, N, device=q.device)
    _attend_forward[(H * len(blocks),)](
        *sources, out, lse, blocks, position_N, N, *rule.numbers, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *out.stride()[:2], H=H, REP=H // k.shape[1], BM=tiles.queries, BN=tiles.keys, TMA=uses_tma,
        num_warps=tiles.warps, num_stages=tiles.stages, **rule.options(q),
    )  # fmt: skip
    return out, lse


def delta_of(out: Tensor, d_out: Tensor, rows: int = 32) -> Tensor:
    """δ = Σ_d dO·O, [H, N]."""
    N, H, d = out.shape
    delta = torch.empty(H, N, device=out.device)
    _attend_delta[(H * triton.cdiv(N, rows),)](
        out, d_out, delta, N, *out.stride()[:2], *d_out.stride()[:2], H=H, D=d, DP=max(16, triton.next_power_of_2(d)), BM=rows
    )
    return delta


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, into: tuple[Tensor, Tensor, Tensor],
    query_blocks: Tensor | None, key_blocks: Tensor, position_N: Tensor, rule: AttentionRule, tiles: Tiling,
) -> None:  # fmt: skip
    """Write dq, dk and dv into the three tensors of ``into``, of any strides with a dense last axis."""
    N, H, d = q.shape
    dq, dk, dv = into
    delta = delta_of(out, d_out)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *d_out.stride()[:2])
    rep, t, u = H // k.shape[1], tiles.queries_backward, tiles.keys_backward

    def sources(part: PackTiles) -> list[Tensor | TensorDescriptor]:
        rows = (part.queries, part.keys, part.keys, part.queries)
        return [_source(x, n, uses_tma=tiles.uses_tma) for x, n in zip((q, k, v, d_out), rows, strict=True)]

    adds = t is None
    sums = torch.zeros(N, H, d, device=q.device) if adds else dq
    _attend_backward_keys[(k.shape[1] * len(key_blocks),)](
        *sources(u), lse, delta, _source(sums, u.queries, uses_tma=adds and tiles.uses_tma), dk, dv, key_blocks, position_N, N,
        *rule.numbers, *strides, *sums.stride()[:2], *dk.stride()[:2], *dv.stride()[:2],
        K=k.shape[1], REP=rep, BM=u.queries, BN=u.keys, TMA=tiles.uses_tma, ADD=adds, num_warps=u.warps,
        num_stages=u.stages, **rule.options(q),
    )  # fmt: skip
    if t is None or query_blocks is None:
        dq.copy_(sums.mul_(rule.scale))
        return
    _attend_backward_queries[(H * len(query_blocks),)](
        *sources(t), lse, delta, dq, query_blocks, position_N, N, *rule.numbers, *strides, *dq.stride()[:2],
        H=H, REP=rep, BM=t.queries, BN=t.keys, TMA=tiles.uses_tma, num_warps=t.warps, num_stages=t.stages, **rule.options(q),
    )  # fmt: skip
