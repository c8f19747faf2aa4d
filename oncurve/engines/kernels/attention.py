"""Decode attention over a paged pool: a prompt's page is read once for all its completions, a suffix's page once.

One program takes one page and one key head. A program of the prompt holds the queries of up to R completions that share
it (a tile of R·rep rows); a program of the suffix holds the rep queries of one completion. Each leaves its part of the
softmax: the maximum m, the sum l and the weighted values, not yet divided. ``merge`` adds a completion's parts in the
order of their pages:

    M = max m_i,  out = Σ 2^(m_i − M)·acc_i / Σ 2^(m_i − M)·l_i          (scores are in units of log 2)

What a program computes depends on its own page and queries alone, and a page that is not there is not added: a
completion's bits depend neither on its neighbours nor on the size of the launch.

Legend: ``S`` slots, ``N`` tables of members, ``R`` members of each, ``H``/``K`` query/key heads, ``rep = H/K``, ``d``
head size. The pool is [pages, layers, 2, K, PAGE, d]; a slot whose suffix length is −1 is idle.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.engines.kernels.launch import early

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Keys that a program reads at once, and how it is run."""

    keys: int
    warps: int
    stages: int


def tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    """Small tiles and two warps: many programs on a multiprocessor keep its memory busy. Chosen by measurement on an H200."""
    wide = triton.next_power_of_2(head_size) * dtype.itemsize
    return Tiles(max(16, min(64, 8192 // wide)), 2, 3)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a launch goes: tables of members, pages of prompts and of suffixes that any slot may have; and how many pages of
    suffixes there are in all, where that is fewer than every slot's most."""

    tables: int
    prompt_pages: int
    suffix_pages: int
    listed: int | None = None

    @property
    def parts(self) -> int:
        return self.prompt_pages + self.suffix_pages


@dataclass(frozen=True, slots=True)
class Tables:
    """Where everything lies, as tensors of int32 on the device that keep their addresses.

    ``members`` [N, R]: slots that share a prompt, −1 where none; ``prompt_page`` [N, pages]; ``suffix_page`` [S, pages];
    ``suffix_list`` [S · pages]: which of the latter are there, as slot · pages + page, then −1. ``prompt_length`` and
    ``suffix_length`` [S] count stored positions; the new token's keys are stored at ``suffix_length``.
    """

    members: Tensor
    prompt_page: Tensor
    suffix_page: Tensor
    suffix_list: Tensor
    prompt_length: Tensor
    suffix_length: Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """What the programs leave for ``merge``: ``out`` [parts, S, H, d], ``top`` and ``total`` [parts, S, H], float32."""

    out: Tensor
    top: Tensor
    total: Tensor


@triton.jit
def _walk(q, keys, values, first_M, low, count, scale, softcap,
          D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """Softmax parts of a tile of queries over keys [low, count) of one page; a query sees those from ``first_M`` on."""
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
        k = tl.load(keys + where, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))  # tanh
        seen = n[None, :] < count
        if WINDOW:
            seen = seen & (n[None, :] >= first_M[:, None])
        s = tl.where(seen, s * LOG2E, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(values + where, mask=inside, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(p, 1)
        top = new
    return acc, top, total


@triton.jit
def _leave(out, tops, totals, acc, top, total, row_M, live_M, D: tl.constexpr, DP: tl.constexpr):
    at = tl.arange(0, DP)
    where = row_M.to(tl.int64)[:, None] * D + at[None, :]
    inside = live_M[:, None]
    if D != DP:
        inside = inside & (at[None, :] < D)
    tl.store(out + where, acc, mask=inside)
    tl.store(tops + row_M, top, mask=live_M)
    tl.store(totals + row_M, total, mask=live_M)


@triton.jit(do_not_specialize=["tables", "prompt_pages", "listed", "slots"])
def _parts(q, pool, members, prompt_page, suffix_page, suffix_list, prompt_length, suffix_length, out, tops, totals,
           tables, prompt_pages, listed, slots, page_stride, prompt_table_width, suffix_table_width, q_stride, scale,
           softcap, window,
           R: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
           BM_PROMPT: tl.constexpr, BM_SUFFIX: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
           PRECISION: tl.constexpr, LISTED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Programs of prompts first: they are the longest. Within each kind neighbours share a page index, so that the tables of
    one group, which point at the same pages, meet in the cache. LISTED: suffixes differ in length, and programs go by the list
    of pages that are there; else every slot's every page has a program, which need not look it up."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    REP: tl.constexpr = H // K
    pid = tl.program_id(0)
    at = tl.arange(0, DP)
    of_prompts = tables * prompt_pages * K
    if pid < of_prompts:
        table = pid % tables
        head = pid // tables % K
        page = pid // tables // K
        m = tl.arange(0, BM_PROMPT)
        slot_M = tl.load(members + table * R + m // REP, mask=m < R * REP, other=-1)
        live_M = slot_M >= 0
        any_slot = tl.max(slot_M, 0)
        if any_slot >= 0:
            length = tl.load(prompt_length + any_slot)
            start = page * PAGE
            count = tl.minimum(length - start, PAGE)
            if count > 0:
                slot_M = tl.maximum(slot_M, 0)
                first_M = length + tl.load(suffix_length + slot_M, mask=live_M, other=1 << 30) - window + 1 - start
                low = 0
                if WINDOW:
                    low = tl.maximum(tl.min(first_M, 0), 0) // BN * BN
                row_M = slot_M * H + head * REP + m % REP
                q_at = slot_M[:, None] * q_stride + (head * REP + m % REP)[:, None] * D + at[None, :]
                tile = tl.load(q + q_at, mask=live_M[:, None] & (at[None, :] < D), other=0.0)
                number = tl.load(prompt_page + table * prompt_table_width + page).to(tl.int64)
                keys = pool + number * page_stride + head * PAGE * D
                acc, top, total = _walk(tile, keys, keys + K * PAGE * D, first_M, low, count, scale, softcap,
                                        D, DP, BN, WINDOW, SOFTCAP, PRECISION)  # fmt: skip
                part = page.to(tl.int64) * slots * H
                _leave(out + part * D, tops + part, totals + part, acc, top, total, row_M, live_M, D, DP)
    else:
        pid -= of_prompts
        slot = pid % slots
        head = pid // slots % K
        page = pid // slots // K
        if LISTED:
            place = tl.load(suffix_list + pid % listed)
            slot = tl.maximum(place, 0) // suffix_table_width
            head = pid // listed
            page = tl.maximum(place, 0) % suffix_table_width
        length = tl.load(suffix_length + slot) + 1
        if LISTED:
            length = tl.where(place < 0, 0, length)
        start = page * PAGE
        count = tl.minimum(length - start, PAGE)
        if count > 0:
            m = tl.arange(0, BM_SUFFIX)
            live_M = m < REP
            first_M = length - window - start + tl.zeros([BM_SUFFIX], tl.int32)
            low = 0
            if WINDOW:
                low = tl.minimum(tl.maximum(length - window - start, 0), PAGE) // BN * BN
            q_at = slot * q_stride + (head * REP + m)[:, None] * D + at[None, :]
            tile = tl.load(q + q_at, mask=live_M[:, None] & (at[None, :] < D), other=0.0)
            number = tl.load(suffix_page + slot * suffix_table_width + page).to(tl.int64)
            keys = pool + number * page_stride + head * PAGE * D
            acc, top, total = _walk(tile, keys, keys + K * PAGE * D, first_M, low, count, scale, softcap,
                                    D, DP, BN, WINDOW, SOFTCAP, PRECISION)  # fmt: skip
            part = (prompt_pages + page).to(tl.int64) * slots * H
            _leave(out + part * D, tops + part, totals + part, acc, top, total, slot * H + head * REP + m, live_M, D, DP)


@triton.jit(do_not_specialize=["prompt_pages", "slots"])
def _merge(out, parts, tops, totals, prompt_length, suffix_length, prompt_pages, slots,
           H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """PARTS at a time are read at once, not one after the other; those that are not there weigh exactly nothing."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    slot, head = tl.program_id(0), tl.program_id(1)
    at, i = tl.arange(0, DP), tl.arange(0, PARTS)
    row = slot * H + head
    own = tl.load(suffix_length + slot) + 1
    of_prompt = tl.where(own > 0, (tl.load(prompt_length + slot) + PAGE - 1) // PAGE, 0)
    count = of_prompt + (own + PAGE - 1) // PAGE
    skipped = prompt_pages - of_prompt
    best = float("-inf")
    for first in range(0, count, PARTS):
        n = first + i
        where = tl.where(n < of_prompt, n, n + skipped) * slots * H + row
        best = tl.maximum(best, tl.max(tl.load(tops + where, mask=n < count, other=float("-inf")), 0))
    best = tl.where(best == float("-inf"), 0.0, best)
    acc = tl.zeros([DP], tl.float32)
    total = 0.0
    for first in range(0, count, PARTS):
        for more in tl.static_range(PARTS):
            n = first + more
            where = tl.where(n < of_prompt, n, n + skipped).to(tl.int64) * slots * H + row
            weight = tl.exp2(tl.load(tops + where, mask=n < count, other=float("-inf")) - best)
            total += weight * tl.load(totals + where, mask=n < count, other=0.0)
            acc += weight * tl.load(parts + where * D + at, mask=(n < count) & (at < D), other=0.0)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * D + at, (acc / total).to(out.dtype.element_ty), mask=at < D)


def attend(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tables,
    reach: Reach,
    parts: Parts,
    scale: float,
    window: int | None,
    softcap: float | None,
    how: Tiles | None = None,
) -> Tensor:
    """One token per slot: q [S, H, d] over its prompt and suffix, the new token included; [S, H, d] in q's precision."""
    S, H, d = q.shape
    _, _, _, K, page, _ = pool.shape
    R, rep = tables.members.shape[1], H // K
    how = how or tiles(d, q.dtype)
    padded = max(16, triton.next_power_of_2(d))
    of_suffixes = S * reach.suffix_pages if reach.listed is None else reach.listed
    programs = (reach.tables * reach.prompt_pages + of_suffixes) * K
    _parts[(programs,)](
        q, pool[:, layer], tables.members, tables.prompt_page, tables.suffix_page, tables.suffix_list, tables.prompt_length,
        tables.suffix_length, parts.out, parts.top, parts.total, reach.tables, reach.prompt_pages, of_suffixes, S,
        pool.stride(0), tables.prompt_page.shape[1], tables.suffix_page.shape[1], q.stride(0), scale, softcap or 0.0,
        window or 0,
        R=R, H=H, K=K, D=d, DP=padded, PAGE=page, BM_PROMPT=max(16, triton.next_power_of_2(R * rep)),
        BM_SUFFIX=max(16, triton.next_power_of_2(rep)), BN=how.keys, WINDOW=window is not None, SOFTCAP=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=how.warps, num_stages=how.stages,
        LISTED=reach.listed is not None, **early(q.device),
    )  # fmt: skip
    out = torch.empty((S, H, d), dtype=q.dtype, device=q.device)
    _merge[(S, H)](
        out, parts.out, parts.top, parts.total, tables.prompt_length, tables.suffix_length, reach.prompt_pages, S,
        H=H, D=d, DP=padded, PAGE=page, PARTS=4, num_warps=1 if padded <= 128 else 2, **early(q.device),
    )  # fmt: skip
    return out
