"""What lies between the matrix products of a decode step, one launch each: norms, rotary embedding with the write to the KV
cache, and the gated unit.

The residual stream is kept in float32; norms and rotations are computed in float32 and rounded once. ``I`` is the width of the
gated unit.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.kernels.launch import pdl_options


@triton.jit
def _norm(x, w, out, row, eps, D: tl.constexpr, DP: tl.constexpr):
    at = tl.arange(0, DP)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(out + row * D + at, (x * scale * w).to(out.dtype.element_ty), mask=at < D)


@triton.jit
def _embed_norm(token, table, weight, residual, out, eps, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, DP)
    w = tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    x = tl.load(table + tl.load(token + row).to(tl.int64) * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(residual + row * D + at, x, mask=at < D)
    _norm(x, w, out, row, eps, D, DP)


@triton.jit(do_not_specialize=["slots"])
def _add_norm(more, weight, residual, out, eps, slots, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, DP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual + row * D + at, mask=at < D, other=0.0)
    for part in tl.static_range(PARTS):
        x += tl.load(more + (part * slots + row) * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(residual + row * D + at, x, mask=at < D)
    _norm(x, w, out, row, eps, D, DP)


def _warps(width: int) -> int:
    return max(1, min(8, width // 256))


def embed_norm(token_S: Tensor, table_VD: Tensor, weight_D: Tensor, eps: float, residual_SD: Tensor) -> Tensor:
    """residual = table[token]; returns its norm."""
    S, D = residual_SD.shape
    out = torch.empty((S, D), dtype=table_VD.dtype, device=table_VD.device)
    DP = triton.next_power_of_2(D)
    _embed_norm[(S,)](
        token_S, table_VD, weight_D, residual_SD, out, eps, D=D, DP=DP, num_warps=_warps(DP), **pdl_options(out.device)
    )
    return out


def add_norm(more: Tensor, weight_D: Tensor, eps: float, residual_SD: Tensor) -> Tensor:
    """residual += more, in place; returns w·x·(mean x² + eps)^−½ of the sum. ``more`` is [S, D], or [parts, S, D] to be
    summed."""
    S, D = residual_SD.shape
    out = torch.empty((S, D), dtype=weight_D.dtype, device=more.device)
    DP = triton.next_power_of_2(D)
    _add_norm[(S,)](
        more, weight_D, residual_SD, out, eps, S, D=D, DP=DP, PARTS=more.numel() // (S * D), num_warps=_warps(DP),
        **pdl_options(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=at < WIDTH)


def silu_mul(both_S2I: Tensor) -> Tensor:
    """silu(gate)·up of [gate | up]."""
    S, width = both_S2I.shape
    out = torch.empty((S, width // 2), dtype=both_S2I.dtype, device=both_S2I.device)
    block = min(1024, triton.next_power_of_2(width // 2))
    _silu_mul[(S, triton.cdiv(width // 2, block))](
        both_S2I, out, WIDTH=width // 2, BLOCK=block, num_warps=4, **pdl_options(out.device)
    )
    return out


@triton.jit(do_not_specialize=["slots"])
def _rotate_store(qkv, q_out, cache, page_S, prompt_length, suffix_length, cos, sin, q_weight, k_weight, eps,
                  page_stride, table_width, slots,
                  H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
                  NORM: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """HEADS rows of [q heads | k heads | v heads] of one slot, as two halves of the head. Everything but the product itself is
    read before the product is there."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # the attention kernel may start
    slot = tl.program_id(0)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF)
    here = half < D // 2
    inside = (h < H + 2 * K)[:, None] & here[None, :]
    is_q, is_v = h < H, h >= H + K
    length = tl.load(suffix_length + slot)
    position = tl.load(prompt_length + slot) + tl.maximum(length, 0)
    page = tl.load(page_S + slot * table_width + tl.maximum(length, 0) // PAGE).to(tl.int64)
    c = tl.load(cos + position * (D // 2) + half, mask=here, other=0.0)[None, :]
    s = tl.load(sin + position * (D // 2) + half, mask=here, other=0.0)[None, :]
    if NORM:
        q_one = tl.load(q_weight + half, mask=here, other=0.0)[None, :]
        k_one = tl.load(k_weight + half, mask=here, other=0.0)[None, :]
        q_two = tl.load(q_weight + D // 2 + half, mask=here, other=0.0)[None, :]
        k_two = tl.load(k_weight + D // 2 + half, mask=here, other=0.0)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = qkv + slot * (H + 2 * K) * D + h[:, None] * D + half[None, :]
    one = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        more = source + part * slots * (H + 2 * K) * D
        one += tl.load(more, mask=inside, other=0.0).to(tl.float32)
        two += tl.load(more + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / D + eps)
        w_one = tl.where(is_q[:, None], q_one, k_one).to(tl.float32)
        w_two = tl.where(is_q[:, None], q_two, k_two).to(tl.float32)
        one = tl.where(is_v[:, None], one, one * scale[:, None] * w_one)
        two = tl.where(is_v[:, None], two, two * scale[:, None] * w_two)
    rotated_one = tl.where(is_v[:, None], one, one * c - two * s)
    rotated_two = tl.where(is_v[:, None], two, two * c + one * s)
    to_q = q_out + slot * H * D + h[:, None] * D + half[None, :]
    tl.store(to_q, rotated_one.to(q_out.dtype.element_ty), mask=inside & is_q[:, None])
    tl.store(to_q + D // 2, rotated_two.to(q_out.dtype.element_ty), mask=inside & is_q[:, None])
    if length >= 0:
        rows = (h - H)[:, None] * PAGE * D + (length % PAGE) * D  # values follow keys: head K of them is the first of values
        to_cache = cache + page * page_stride + rows + half[None, :]
        is_kv = inside & (h >= H)[:, None]
        tl.store(to_cache, rotated_one.to(cache.dtype.element_ty), mask=is_kv)
        tl.store(to_cache + D // 2, rotated_two.to(cache.dtype.element_ty), mask=is_kv)


def rotate_store(
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    page_SP: Tensor,
    prompt_length_S: Tensor,
    suffix_length_S: Tensor,
    rotations: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Norm q and k if the model does, apply the rotary embedding, and store keys and values in the cache; returns q [S, H, d].

    ``qkv`` is [S, E], or [parts, S, E] to be summed. ``rotations`` are cos and sin of [positions, d/2] in float32:
    (x₁, x₂) ↦ (x₁ cos − x₂ sin, x₂ cos + x₁ sin) of a head's halves.
    """
    S, E = qkv.shape[-2:]
    _, _, _, K, page, d = cache.shape
    H = E // d - 2 * K
    q = torch.empty((S, H, d), dtype=cache.dtype, device=qkv.device)
    heads = min(8, triton.next_power_of_2(H + 2 * K))
    q_weight, k_weight = norms or (qkv, qkv)
    _rotate_store[(S, triton.cdiv(H + 2 * K, heads))](
        qkv, q, cache[:, layer], page_SP, prompt_length_S, suffix_length_S, *rotations, q_weight, k_weight, eps,
        cache.stride(0), page_SP.shape[1], S, H=H, K=K, D=d, HALF=triton.next_power_of_2(d // 2), PAGE=page, NORM=norms is not
        None, HEADS=heads, PARTS=qkv.numel() // (S * E), num_warps=2, **pdl_options(q.device),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["tokens"])
def _store(k, v, cache, table, start_B, length_B, k_batch, k_head, k_token, v_batch, v_head, v_token,
           page_stride, table_width, tokens,
           K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    b, head = tl.program_id(0), tl.program_id(1)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    at = tl.arange(0, DP)
    start = tl.load(start_B + b)
    position = start + t
    live = (t < tokens) & (position < tl.load(length_B + b)) & (start >= 0)
    page = tl.load(table + b * table_width + position // PAGE, mask=live, other=0).to(tl.int64)
    to = cache + (page * page_stride + head * PAGE * D + (position % PAGE) * D)[:, None] + at[None, :]
    inside = live[:, None] & (at < D)[None, :]
    from_k = k + b.to(tl.int64) * k_batch + head * k_head + t[:, None] * k_token + at[None, :]
    from_v = v + b.to(tl.int64) * v_batch + head * v_head + t[:, None] * v_token + at[None, :]
    tl.store(to, tl.load(from_k, mask=inside, other=0.0), mask=inside)
    tl.store(to + K * PAGE * D, tl.load(from_v, mask=inside, other=0.0), mask=inside)


def store(k: Tensor, v: Tensor, cache: Tensor, layer: int, table_BP: Tensor, start_B: Tensor, length_B: Tensor) -> None:
    """Store keys and values [B, K, tokens, d] in the cache from position ``start`` on, up to ``length``; nothing if start is
    −1."""
    B, K, tokens, d = k.shape
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    block = min(16, triton.next_power_of_2(tokens))
    _store[(B, K, triton.cdiv(tokens, block))](
        k, v, cache[:, layer], table_BP, start_B, length_B, *k.stride()[:3], *v.stride()[:3], cache.stride(0),
        table_BP.shape[1], tokens,
        K=K, D=d, DP=triton.next_power_of_2(d), PAGE=cache.shape[4], BT=block, num_warps=1, **pdl_options(k.device),
    )  # fmt: skip
