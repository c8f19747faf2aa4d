"""Decode attention over a paged KV cache: a prompt's page is read once for all its completions, a suffix page once.

One program takes one page and one KV head. A program of the prompt holds the queries of up to R completions that share it (a
tile of R·rep rows, rep = H/K); a program of the suffix holds the rep queries of one completion. Each writes its part of the
softmax: the maximum m, the sum l and the weighted values, not yet divided. ``merge`` adds a completion's parts in page order:

    M = max m_i,  out = Σ 2^(m_i − M)·acc_i / Σ 2^(m_i − M)·l_i          (scores are in units of log 2)

An attention sink is one more part, with m the sink's score, l = 1 and acc = 0.

A slot may have W queries at consecutive positions, its last token and drafted ones: its *rows*. They are part of the same
tiles, so a page is read once for all of them, and each attends to the positions up to its own.

What a program computes for a query depends on its own page and that query alone, and a page that is not there is not added: a
completion's bits depend neither on its neighbours, nor on what was drafted, nor on the size of the launch.

The cache is [pages, layers, 2, K, PAGE, d]. A table lists up to R members: slots that share a prompt. A slot or row whose
suffix length is −1 is idle.

A cache of bytes is [pages, layers, 2, K, PAGE, d + 4]. The PAGE · d codes of a head's keys or values come first, FP8 (e4m3)
numbers, and then one float32 scale for each position. Codes are converted exactly, to the dtype of the queries. The scales of
keys multiply scores, and those of values multiply weights, so no key or value is rounded a second time.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.kernels.launch import INTERPRETER, Gpu, fetch, gpu_of, pdl_options

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The keys that a program reads at once, its warps and its pipeline stages."""

    keys: int
    warps: int
    stages: int


def tiles(head_size: int, dtype: torch.dtype, gpu: Gpu) -> Tiles:
    """Small tiles and two warps, so that many programs keep a multiprocessor's memory busy. Measured on an H200. If a program
    has little shared memory, keys of a kilobyte (heads of 256 in float32) are read without a pipeline."""
    wide = triton.next_power_of_2(head_size) * dtype.itemsize
    return Tiles(max(16, min(64, 8192 // wide)), 2, 1 if wide >= 1024 and not gpu.has_room else 3)


AHEAD = 32
"""Keys and values that a program prefetches into the L2 cache before it waits for its queries."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The size of a launch: tables of members, the most pages of a prompt and of a suffix, and, if ``listed``, the number of
    suffix pages in all, which is then smaller than slots × pages."""

    tables: int
    prompt_pages: int
    suffix_pages: int
    listed: int | None = None

    @property
    def parts(self) -> int:
        return self.prompt_pages + self.suffix_pages


@dataclass(frozen=True, slots=True)
class PageTables:
    """Where each slot's KV cache is stored: int32 tensors on the device that keep their addresses.

    ``members`` [tables, R]: slots that share a prompt, −1 if unused; ``prompt_page`` [tables, pages]; ``suffix_page`` [S,
    pages]; ``suffix_list`` [S · pages]: the suffix pages in use, as slot · pages + page, then −1. ``prompt_length`` and
    ``suffix_length`` [S] count stored positions; the new token's keys and values are stored at ``suffix_length``.

    With W > 1 rows per slot, ``suffix_page``, ``prompt_length`` and ``suffix_length`` have S · W rows: row w of a slot stores
    its token at its own ``suffix_length``, one more than the row before it.
    """

    members: Tensor
    prompt_page: Tensor
    suffix_page: Tensor
    suffix_list: Tensor
    prompt_length: Tensor
    suffix_length: Tensor
    width: int = 1
    """W, rows of a slot."""


@dataclass(frozen=True, slots=True)
class PartialSoftmax:
    """What the programs write for ``merge``: ``out`` [parts, S · W, H, d], ``top`` and ``total`` [parts, S · W, H], float32."""

    out: Tensor
    top: Tensor
    total: Tensor


@triton.jit
def _from_e4m3(code, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers that e4m3 codes stand for. Without NATIVE the bits are moved into a float16, for GPUs that have no
    instruction for it: its exponents are 8 higher."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(dtype)
    bits = code.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)


@triton.jit
def _attend_page(q, keys, values, first_M, count_M, low, count, scale, softcap,
          D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
          SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
          NATIVE: tl.constexpr):  # fmt: skip
    """Softmax parts of a tile of queries over keys [low, count) of one page; a query attends to those from ``first_M`` on and,
    if CAUSAL, to those before ``count_M``."""
    at = tl.arange(0, DP)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], DP], tl.float32)
    for start in range(low, count, BN):
        n = start + tl.arange(0, BN)
        where = n[:, None] * D + at[None, :]
        inside = n[:, None] < count
        if D != DP:
            inside = inside & (at[None, :] < D)
        k = tl.load(keys + where, mask=inside, other=0)
        if FP8:
            k = _from_e4m3(k, q.dtype, NATIVE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if FP8:
            s *= tl.load((keys + PAGE * D).to(tl.pointer_type(tl.float32)) + n, mask=n < count, other=0.0)[None, :]
        if SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))  # tanh
        visible = n[None, :] < count
        if WINDOW:
            visible = visible & (n[None, :] >= first_M[:, None])
        if CAUSAL:
            visible = visible & (n[None, :] < count_M[:, None])
        s = tl.where(visible, s * LOG2E, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(values + where, mask=inside, other=0)
        weight = p
        if FP8:
            v = _from_e4m3(v, q.dtype, NATIVE)
            scales = tl.load((values + PAGE * D).to(tl.pointer_type(tl.float32)) + n, mask=n < count, other=0.0)
            weight = p * (scales[None, :] * 256.0)  # 256, so that a float16 does not lose small weights
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(p, 1)
        top = new
    if FP8:
        acc *= 1 / 256
    return acc, top, total


@triton.jit
def _write_part(q, out, tops, totals, keys, values, row_M, head_M, live_M, first_M, count_M, low, count, part, q_stride, scale,
           softcap, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
           CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
           NATIVE: tl.constexpr):  # fmt: skip
    """Compute and write the part of one page for the queries of these rows and heads."""
    at = tl.arange(0, DP)
    inside = live_M[:, None] & (at < D)[None, :]
    tile = tl.load(q + row_M[:, None] * q_stride + head_M[:, None] * D + at[None, :], mask=inside, other=0.0)
    acc, top, total = _attend_page(tile, keys, values, first_M, count_M, low, count, scale, softcap,
                            D, DP, BN, WINDOW, CAUSAL, SOFTCAP, PRECISION, PAGE, FP8, NATIVE)  # fmt: skip
    to_M = part + row_M * H + head_M
    tl.store(out + to_M[:, None] * D + at[None, :], acc, mask=inside)
    tl.store(tops + to_M, top, mask=live_M)
    tl.store(totals + to_M, total, mask=live_M)


@triton.jit(do_not_specialize=["tables", "prompt_pages", "listed", "slots"])
def _parts(q, cache, members, prompt_page, suffix_page, suffix_list, prompt_length, suffix_length, out, tops, totals,
           tables, prompt_pages, listed, slots, page_stride, prompt_table_width, suffix_table_width, q_stride, scale,
           softcap, window,
           R: tl.constexpr, W: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
           PAGE: tl.constexpr, BM_PROMPT: tl.constexpr, BM_SUFFIX: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
           SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, LISTED: tl.constexpr, AHEAD: tl.constexpr,
           FP8: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Programs of prompts come first, because they take longest. Neighbouring programs have the same page index, so that the
    slots of one group, whose tables point at the same pages, find them in the L2 cache. With LISTED, suffixes differ in length
    and there is one program for each page in use, by a list; otherwise there is one for every page of every slot.

    Tables, lengths and the KV cache of earlier tokens do not change within a step, so they are read before q is computed.
    """
    REP: tl.constexpr = H // K
    BYTES: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth // 8
    ROW: tl.constexpr = D + 4 if FP8 else D  # with the scale
    CHUNKS: tl.constexpr = 32 if FP8 else 64
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    m = tl.arange(0, BM_PROMPT)
    slot_M = tl.zeros([BM_PROMPT], tl.int32)
    of_prompt = n < tables * prompt_pages * K
    if of_prompt:
        head = n // tables % K
        page = n // tables // K
        table = n % tables
        slot_M = tl.load(members + table * R + m // (REP * W), mask=m < R * REP * W, other=-1)
        slot = tl.max(slot_M, 0)
        length = tl.load(prompt_length + slot * W, mask=slot >= 0, other=0)
        number = tl.load(prompt_page + table * prompt_table_width + page)
    else:
        n -= tables * prompt_pages * K
        if LISTED:
            place = tl.load(suffix_list + n % listed)
            head = n // listed
            slot = tl.maximum(place, 0) // suffix_table_width
            page = tl.maximum(place, 0) % suffix_table_width
        else:
            slot = n % slots
            head = n // slots % K
            page = n // slots // K
        length = tl.load(suffix_length + slot * W) + 1
        for w in tl.static_range(1, W):
            length = tl.maximum(length, tl.load(suffix_length + slot * W + w) + 1)
        if LISTED:
            length = tl.where(place < 0, 0, length)
        number = tl.load(suffix_page + slot * W * suffix_table_width + page)
    start = page * PAGE
    count = tl.minimum(length - start, PAGE)
    keys = cache + number.to(tl.int64) * page_stride + head * PAGE * ROW
    values = keys + K * PAGE * ROW
    if PDL and AHEAD > 0:  # noqa: SIM102 (the outer condition is known at compile time)
        if count > 0:
            size = tl.minimum(count, AHEAD) * D * BYTES
            fetch(keys, size, AHEAD * D * BYTES // CHUNKS, CHUNKS)
            fetch(values, size, AHEAD * D * BYTES // CHUNKS, CHUNKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count > 0:
        if of_prompt:
            live_M = slot_M >= 0
            row_M = tl.maximum(slot_M, 0) * W + m // REP % W
            first_M = length + tl.load(suffix_length + row_M, mask=live_M, other=1 << 30) - window + 1 - start
            low = 0
            if WINDOW:
                low = tl.maximum(tl.min(first_M, 0), 0) // BN * BN
            _write_part(q, out, tops, totals, keys, values, row_M, head * REP + m % REP, live_M, first_M, first_M, low, count,
                   page.to(tl.int64) * slots * W * H, q_stride, scale, softcap,
                   H, D, DP, BN, WINDOW, False, SOFTCAP, PRECISION, PAGE, FP8, NATIVE)  # fmt: skip
        else:
            r = tl.arange(0, BM_SUFFIX)
            row_R = slot * W + tl.minimum(r // REP, W - 1)
            end_R = tl.load(suffix_length + row_R) + 1 - start
            low = 0
            if WINDOW:
                low = tl.minimum(tl.maximum(tl.load(suffix_length + slot * W) + 1 - window - start, 0), PAGE) // BN * BN
            _write_part(q, out, tops, totals, keys, values, row_R, head * REP + r % REP, r < REP * W, end_R - window, end_R,
                   low, count, (prompt_pages + page).to(tl.int64) * slots * W * H, q_stride, scale, softcap,
                   H, D, DP, BN, WINDOW, W > 1, SOFTCAP, PRECISION, PAGE, FP8, NATIVE)  # fmt: skip


@triton.jit(do_not_specialize=["prompt_pages", "slots"])
def _merge(out, parts, tops, totals, prompt_length, suffix_length, sinks, prompt_pages, slots,
           H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
           SINKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """PARTS parts are read at once; those that are not there have weight 0."""
    slot, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at, i = tl.arange(0, DP), tl.arange(0, PARTS)
    own = tl.load(suffix_length + slot) + 1
    of_prompt = tl.where(own > 0, (tl.load(prompt_length + slot) + PAGE - 1) // PAGE, 0)
    count = of_prompt + (own + PAGE - 1) // PAGE
    skipped = prompt_pages - of_prompt
    row = slot * H + head
    if PDL:
        tl.extra.cuda.gdc_wait()
    best = float("-inf")
    acc = tl.zeros([DP], tl.float32)
    total = 0.0
    for first in range(0, count, PARTS):
        n = first + i
        in_range = n < count
        where = tl.where(n < of_prompt, n, n + skipped).to(tl.int64) * slots * H + row
        top_N = tl.load(tops + where, mask=in_range, other=float("-inf"))
        total_N = tl.load(totals + where, mask=in_range, other=0.0)
        tile = tl.load(parts + where[:, None] * D + at[None, :], mask=in_range[:, None] & (at < D)[None, :], other=0.0)
        new = tl.maximum(best, tl.max(top_N, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight_N = tl.exp2(top_N - base)
        shrink = tl.exp2(best - base)
        acc = acc * shrink + tl.sum(weight_N[:, None] * tile, 0)
        total = total * shrink + tl.sum(weight_N * total_N, 0)
        best = new
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        new = tl.maximum(best, sink)
        acc = acc * tl.exp2(best - new)
        total = total * tl.exp2(best - new) + tl.exp2(sink - new)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * D + at, (acc / total).to(out.dtype.element_ty), mask=at < D)


def _converts_fp8(device: torch.device) -> bool:
    """Whether there is an instruction that converts FP8; the interpreter converts it too."""
    gpu = gpu_of(device)
    return gpu is INTERPRETER or gpu.capability >= (8, 9)


def attend(
    q: Tensor,
    cache: Tensor,
    layer: int,
    tables: PageTables,
    launch: LaunchShape,
    parts: PartialSoftmax,
    scale: float,
    window: int | None,
    softcap: float | None,
    tile: Tiles | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of the rows of each slot, q [S · W, H, d], over its prompt and suffix, the new tokens included; [S · W, H, d]
    in q's dtype."""
    rows, H, d = q.shape
    _, _, _, K, page, _ = cache.shape
    R, W, rep = tables.members.shape[1], tables.width, H // K
    S = rows // W
    tile = tile or tiles(d, q.dtype, gpu_of(q.device))
    padded = max(16, triton.next_power_of_2(d))
    of_suffixes = S * launch.suffix_pages if launch.listed is None else launch.listed
    programs = (launch.tables * launch.prompt_pages + of_suffixes) * K
    _parts[(programs,)](
        q, cache[:, layer], tables.members, tables.prompt_page, tables.suffix_page, tables.suffix_list, tables.prompt_length,
        tables.suffix_length, parts.out, parts.top, parts.total, launch.tables, launch.prompt_pages, of_suffixes, S,
        cache.stride(0), tables.prompt_page.shape[1], tables.suffix_page.shape[1], q.stride(0), scale, softcap or 0.0,
        window or 0,
        R=R, W=W, H=H, K=K, D=d, DP=padded, PAGE=page, BM_PROMPT=max(16, triton.next_power_of_2(R * W * rep)),
        BM_SUFFIX=max(16, triton.next_power_of_2(W * rep)), BN=tile.keys, WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
        LISTED=launch.listed is not None, AHEAD=AHEAD if d == padded else 0, FP8=cache.dtype == torch.uint8,
        NATIVE=_converts_fp8(q.device), **pdl_options(q.device),
    )  # fmt: skip
    out = torch.empty((rows, H, d), dtype=q.dtype, device=q.device)
    _merge[(rows, H)](
        out, parts.out, parts.top, parts.total, tables.prompt_length, tables.suffix_length,
        parts.top if sinks_H is None else sinks_H, launch.prompt_pages, rows,
        H=H, D=d, DP=padded, PAGE=page, PARTS=4, SINKS=sinks_H is not None,
        num_warps=1 if padded <= 128 else 2, **pdl_options(q.device),
    )  # fmt: skip
    return out
