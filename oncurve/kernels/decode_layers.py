"""What lies between the matrix products of a decode step, one launch each: norms, rotary embedding with the write to the KV
cache, and the MLP's activation.

The residual stream is kept in float32; norms and rotations are computed in float32 and rounded once. ``I`` is the width of the
MLP.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.kernels.activations import activate
from oncurve.kernels.launch import pdl_options


class NormRule(NamedTuple):
    """(x − mean if ``is_centred``) · (mean of its squares + eps)^−½ · (weight + 1 if ``adds_one``) + bias."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    is_centred: bool = False
    adds_one: bool = False

    @property
    def form(self) -> int:
        """What a kernel is compiled for; 0 stands for no norm."""
        return 1 + 2 * self.is_centred + 4 * self.adds_one + 8 * (self.bias is not None)


@triton.jit
def _norm_weight(weight, at, D: tl.constexpr, FORM: tl.constexpr):
    w = tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    if FORM & 4:
        w += 1.0
    return w


@triton.jit
def _norm(x, w, bias, at, eps, D: tl.constexpr, FORM: tl.constexpr):
    if FORM & 2:
        x = tl.where(at < D, x - tl.sum(x, 0) / D, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    y = x * scale * w
    if FORM & 8:
        y += tl.load(bias + at, mask=at < D, other=0.0).to(tl.float32)
    return y


@triton.jit
def _embed_norm(token, table, weight, bias, residual, out, eps, scale, D: tl.constexpr, DP: tl.constexpr, FORM: tl.constexpr,
                SCALED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, DP)
    w = 0.0
    if FORM:
        w = _norm_weight(weight, at, D, FORM)
    x = tl.load(table + tl.load(token + row).to(tl.int64) * D + at, mask=at < D, other=0.0).to(tl.float32)
    if SCALED:
        x *= scale
    tl.store(residual + row * D + at, x, mask=at < D)
    if FORM:
        x = _norm(x, w, bias, at, eps, D, FORM)
    tl.store(out + row * D + at, x.to(out.dtype.element_ty), mask=at < D)


@triton.jit(do_not_specialize=["slots"])
def _add_norm(more, after_weight, after_bias, weight, bias, residual, out, after_eps, eps, scale, slots,
              D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr, FORM: tl.constexpr,
              SCALED: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, DP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = 0.0
    after_w = 0.0
    if FORM:
        w = _norm_weight(weight, at, D, FORM)
    if AFTER:
        after_w = _norm_weight(after_weight, at, D, AFTER)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual + row * D + at, mask=at < D, other=0.0)
    if AFTER or SCALED:
        y = tl.zeros([DP], tl.float32)
        for part in tl.static_range(PARTS):
            y += tl.load(more + (part * slots + row) * D + at, mask=at < D, other=0.0).to(tl.float32)
        if AFTER:
            y = _norm(y, after_w, after_bias, at, after_eps, D, AFTER)
        if SCALED:
            y *= scale
        x += y
    else:
        for part in tl.static_range(PARTS):
            x += tl.load(more + (part * slots + row) * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(residual + row * D + at, x, mask=at < D)
    if FORM:
        x = _norm(x, w, bias, at, eps, D, FORM)
    if WRITE:
        tl.store(out + row * D + at, x.to(out.dtype.element_ty), mask=at < D)


def _warps(width: int) -> int:
    return max(1, min(8, width // 256))


def _norm_arguments(norm: NormRule | None, unused: Tensor) -> tuple[Tensor, Tensor, float, int]:
    """Weight, bias, eps and form; ``unused`` stands for tensors that are not read."""
    if norm is None:
        return unused, unused, 0.0, 0
    return norm.weight, unused if norm.bias is None else norm.bias, norm.eps, norm.form


def embed_norm(token_S: Tensor, table_VD: Tensor, norm: NormRule | None, residual_SD: Tensor, scale: float = 1.0) -> Tensor:
    """residual = scale · table[token]; returns its norm, or itself if there is none, in the table's dtype."""
    S, D = residual_SD.shape
    out = torch.empty((S, D), dtype=table_VD.dtype, device=table_VD.device)
    DP = triton.next_power_of_2(D)
    weight, bias, eps, form = _norm_arguments(norm, table_VD)
    _embed_norm[(S,)](
        token_S, table_VD, weight, bias, residual_SD, out, eps, scale, D=D, DP=DP, FORM=form, SCALED=scale != 1.0,
        num_warps=_warps(DP), **pdl_options(out.device),
    )  # fmt: skip
    return out


def add_norm(
    more: Tensor, norm: NormRule | None, residual_SD: Tensor, dtype: torch.dtype, *, after: NormRule | None = None,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """residual += scale · after(more), in place; returns the norm of the sum, or the sum itself if there is none.

    ``more`` is [S, D], or [parts, S, D] to be summed.
    """
    S, D = residual_SD.shape
    out = torch.empty((S, D), dtype=dtype, device=more.device)
    _add(more, norm, residual_SD, out, after, scale)
    return out


def add(more: Tensor, residual_SD: Tensor, *, after: NormRule | None = None, scale: float = 1.0) -> None:
    """residual += scale · after(more), in place."""
    _add(more, None, residual_SD, None, after, scale)


def _add(
    more: Tensor, norm: NormRule | None, residual_SD: Tensor, out: Tensor | None, after: NormRule | None, scale: float
) -> None:
    S, D = residual_SD.shape
    DP = triton.next_power_of_2(D)
    weight, bias, eps, form = _norm_arguments(norm, more)
    after_weight, after_bias, after_eps, after_form = _norm_arguments(after, more)
    _add_norm[(S,)](
        more, after_weight, after_bias, weight, bias, residual_SD, residual_SD if out is None else out, after_eps, eps, scale,
        S, D=D, DP=DP, PARTS=more.numel() // (S * D), AFTER=after_form, FORM=form, SCALED=scale != 1.0,
        WRITE=out is not None, num_warps=_warps(DP), **pdl_options(residual_SD.device),
    )  # fmt: skip


@triton.jit
def _activate(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if GATED:
        gate = tl.load(both + row * 2 * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        value = activate(gate, NAME) * up
    else:
        value = activate(tl.load(both + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32), NAME)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=at < WIDTH)


def activate_unit(both: Tensor, activation: str = "silu", *, gated: bool = True) -> Tensor:
    """activation(gate)·up of [gate | up], [S, 2I]; without a gate the activation of [S, I]."""
    S, columns = both.shape
    width = columns // 2 if gated else columns
    out = torch.empty((S, width), dtype=both.dtype, device=both.device)
    block = min(1024, triton.next_power_of_2(width))
    _activate[(S, triton.cdiv(width, block))](
        both, out, WIDTH=width, BLOCK=block, NAME=activation, GATED=gated, num_warps=4, **pdl_options(out.device)
    )
    return out


SCALE_BYTES = 4
"""Bytes of the scale of one key or value in a cache of FP8 numbers (see `decode_attention`): a float32."""


@triton.jit
def _e4m3_scale(top):
    """The scale of a vector whose largest number is ``top``, which becomes 448, the largest number of e4m3: none saturates, and
    none is divided by 0."""
    return tl.maximum(top, 2.0**-100) * (1 / 448)


@triton.jit
def _to_e4m3(x, scale):
    """The e4m3 codes of x [N, D] / scale [N], rounded to the nearest number, ties to even; 0x7F or 0xFF for NaN. Done with
    integers, so that every GPU and the interpreter get the same codes."""
    y = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # 3 of 23 bits, and the exponent's bias 7, not 127
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2⁻⁹, as the sum rounds to them
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["slots"])
def _rotate_store(qkv, q_out, cache, page_S, prompt_length, suffix_length, cos, sin, q_weight, k_weight, eps,
                  page_stride, table_width, slots,
                  H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
                  NORM: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, FP8: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Normalises and rotates q and k of one slot, HEADS heads at a time, and stores k and v in the KV cache. A head is read as
    two halves, which rotate together. ``qkv`` is read last: the other loads overlap with the matrix product before it."""
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
        ROW: tl.constexpr = D + 4 if FP8 else D
        of_head = cache + page * page_stride + (h - H) * PAGE * ROW  # values follow keys: head K is the first of values
        to_cache = of_head[:, None] + (length % PAGE) * D + half[None, :]
        is_kv = inside & (h >= H)[:, None]
        if FP8:
            step = _e4m3_scale(tl.maximum(tl.max(tl.abs(rotated_one), 1), tl.max(tl.abs(rotated_two), 1)))
            tl.store(to_cache, _to_e4m3(rotated_one, step), mask=is_kv)
            tl.store(to_cache + D // 2, _to_e4m3(rotated_two, step), mask=is_kv)
            to_scale = (of_head + PAGE * D).to(tl.pointer_type(tl.float32)) + length % PAGE
            tl.store(to_scale, step, mask=(h >= H) & (h < H + 2 * K))
        else:
            tl.store(to_cache, rotated_one.to(cache.dtype.element_ty), mask=is_kv)
            tl.store(to_cache + D // 2, rotated_two.to(cache.dtype.element_ty), mask=is_kv)


@triton.jit(do_not_specialize=["slots"])
def _any_rotate_store(qkv, q_out, cache, page_S, prompt_length, suffix_length, cos, sin, q_weight, k_weight, eps,
                      page_stride, table_width, slots,
                      H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QP: tl.constexpr, KP: tl.constexpr,
                      PAGE: tl.constexpr, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
                      ALL_HEADS: tl.constexpr, ADDS_ONE: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
                      FP8: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """As `_rotate_store`, for any rotary embedding: the first SIZE numbers of a head turn with their partners, which are read a
    second time. ALL_HEADS: the norm is over all heads of q, and of k."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(0)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, DP)
    E: tl.constexpr = (H + 2 * K) * D
    inside = (h < H + 2 * K)[:, None] & (at < D)[None, :]
    is_q, is_v = h < H, h >= H + K
    length = tl.load(suffix_length + slot)
    position = tl.load(prompt_length + slot) + tl.maximum(length, 0)
    page = tl.load(page_S + slot * table_width + tl.maximum(length, 0) // PAGE).to(tl.int64)
    partner, pair, sign = at, at * 0, at * 0.0
    if SIZE > 0:
        if INTERLEAVED:
            first = at % 2 == 0
            partner = tl.where(first, at + 1, at - 1)
            pair = at // 2
        else:
            first = at < SIZE // 2
            partner = tl.where(first, at + SIZE // 2, at - SIZE // 2)
            pair = tl.where(first, at, at - SIZE // 2)
        partner = tl.where(at < SIZE, partner, at)
        sign = tl.where(first, -1.0, 1.0)
        c = tl.load(cos + position * (SIZE // 2) + pair, mask=at < SIZE, other=1.0)[None, :]
        s = tl.load(sin + position * (SIZE // 2) + pair, mask=at < SIZE, other=0.0)[None, :]
    if NORM:
        q_at, k_at = h * 0, h * 0
        if ALL_HEADS:
            q_at, k_at = h * D, (h - H) * D
        of_q, of_k = inside & is_q[:, None], inside & ((h >= H) & (h < H + K))[:, None]
        w = tl.load(q_weight + q_at[:, None] + at[None, :], mask=of_q, other=0.0).to(tl.float32)
        w += tl.load(k_weight + k_at[:, None] + at[None, :], mask=of_k, other=0.0).to(tl.float32)
        w_partner = tl.load(q_weight + q_at[:, None] + partner[None, :], mask=of_q, other=0.0).to(tl.float32)
        w_partner += tl.load(k_weight + k_at[:, None] + partner[None, :], mask=of_k, other=0.0).to(tl.float32)
        if ADDS_ONE:
            w += 1.0
            w_partner += 1.0
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = qkv + slot * E + h[:, None] * D
    x = tl.load(source + at[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(source + part * slots * E + at[None, :], mask=inside, other=0.0).to(tl.float32)
        y += tl.load(source + part * slots * E + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        if ALL_HEADS:
            q_all, k_all = tl.arange(0, QP), tl.arange(0, KP)
            row = qkv + slot * E
            q_row = tl.load(row + q_all, mask=q_all < H * D, other=0.0).to(tl.float32)
            k_row = tl.load(row + H * D + k_all, mask=k_all < K * D, other=0.0).to(tl.float32)
            for part in tl.static_range(1, PARTS):
                q_row += tl.load(row + part * slots * E + q_all, mask=q_all < H * D, other=0.0).to(tl.float32)
                k_row += tl.load(row + part * slots * E + H * D + k_all, mask=k_all < K * D, other=0.0).to(tl.float32)
            mean = tl.where(is_q, tl.sum(q_row * q_row, 0) / (H * D), tl.sum(k_row * k_row, 0) / (K * D))
        else:
            mean = tl.sum(x * x, 1) / D
        scale = tl.rsqrt(mean + eps)[:, None]
        x = tl.where(is_v[:, None], x, x * scale * w)
        y = tl.where(is_v[:, None], y, y * scale * w_partner)
    if SIZE > 0:
        x = tl.where(is_v[:, None], x, x * c + sign[None, :] * y * s)
    tl.store(q_out + slot * H * D + h[:, None] * D + at[None, :], x.to(q_out.dtype.element_ty), mask=inside & is_q[:, None])
    if length >= 0:
        ROW: tl.constexpr = D + 4 if FP8 else D
        of_head = cache + page * page_stride + (h - H) * PAGE * ROW
        to_cache = of_head[:, None] + (length % PAGE) * D + at[None, :]
        if FP8:
            step = _e4m3_scale(tl.max(tl.abs(x), 1))
            tl.store(to_cache, _to_e4m3(x, step), mask=inside & (h >= H)[:, None])
            to_scale = (of_head + PAGE * D).to(tl.pointer_type(tl.float32)) + length % PAGE
            tl.store(to_scale, step, mask=(h >= H) & (h < H + 2 * K))
        else:
            tl.store(to_cache, x.to(cache.dtype.element_ty), mask=inside & (h >= H)[:, None])


class RopeTables(NamedTuple):
    """cos and sin of each pair's angle, [positions, size/2] in float32; pairs are (i, i + size/2), or (2i, 2i + 1)."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False

    @property
    def size(self) -> int:
        return 2 * self.cos.shape[1]


class HeadNorms(NamedTuple):
    """RMSNorm weights of q and k, as wide as a head or as all heads together."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    adds_one: bool = False


def rotate_store(
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    page_SP: Tensor,
    prompt_length_S: Tensor,
    suffix_length_S: Tensor,
    rope: RopeTables | None,
    norms: HeadNorms | None,
    dtype: torch.dtype,
) -> Tensor:
    """Norm q and k if the model does, apply the rotary embedding, and store keys and values in the cache; returns q [S, H, d]
    in ``dtype``.

    ``qkv`` is [S, E], or [parts, S, E] to be summed. A pair (x₁, x₂) becomes (x₁ cos − x₂ sin, x₂ cos + x₁ sin).
    """
    S, E = qkv.shape[-2:]
    _, _, _, K, page, row = cache.shape
    is_fp8 = cache.dtype == torch.uint8
    d = row - SCALE_BYTES if is_fp8 else row
    H = E // d - 2 * K
    q = torch.empty((S, H, d), dtype=dtype, device=qkv.device)
    heads = min(8, triton.next_power_of_2(H + 2 * K))
    q_weight, k_weight, eps, adds_one = norms or (qkv, qkv, 0.0, False)
    all_heads = norms is not None and (q_weight.numel() != d or k_weight.numel() != d)
    tables = (page_SP, prompt_length_S, suffix_length_S, *(rope or (qkv, qkv))[:2])
    rest = (q_weight, k_weight, eps, cache.stride(0), page_SP.shape[1], S)
    sizes = {"H": H, "K": K, "D": d, "PAGE": page, "NORM": norms is not None, "HEADS": heads, "PARTS": qkv.numel() // (S * E)}
    sizes["FP8"] = is_fp8
    grid = (S, triton.cdiv(H + 2 * K, heads))
    if rope is not None and rope.size == d and not (rope.is_interleaved or all_heads or adds_one):
        _rotate_store[grid](
            qkv, q, cache[:, layer], *tables, *rest, HALF=triton.next_power_of_2(d // 2), num_warps=2, **sizes,
            **pdl_options(q.device),
        )  # fmt: skip
        return q
    _any_rotate_store[grid](
        qkv, q, cache[:, layer], *tables, *rest, DP=triton.next_power_of_2(d), QP=triton.next_power_of_2(H * d),
        KP=triton.next_power_of_2(K * d), SIZE=0 if rope is None else rope.size,
        INTERLEAVED=rope is not None and rope.is_interleaved, ALL_HEADS=all_heads, ADDS_ONE=adds_one, num_warps=4, **sizes,
        **pdl_options(q.device),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["tokens"])
def _store(k, v, cache, table, start_B, length_B, k_batch, k_head, k_token, v_batch, v_head, v_token,
           page_stride, table_width, tokens,
           K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, FP8: tl.constexpr,
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
    ROW: tl.constexpr = D + 4 if FP8 else D
    of_head = cache + page * page_stride + head * PAGE * ROW
    to = (of_head + (position % PAGE) * D)[:, None] + at[None, :]
    inside = live[:, None] & (at < D)[None, :]
    from_k = k + b.to(tl.int64) * k_batch + head * k_head + t[:, None] * k_token + at[None, :]
    from_v = v + b.to(tl.int64) * v_batch + head * v_head + t[:, None] * v_token + at[None, :]
    keys = tl.load(from_k, mask=inside, other=0.0)
    values = tl.load(from_v, mask=inside, other=0.0)
    if FP8:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
        k_scale, v_scale = _e4m3_scale(tl.max(tl.abs(keys), 1)), _e4m3_scale(tl.max(tl.abs(values), 1))
        to_scale = (of_head + PAGE * D).to(tl.pointer_type(tl.float32)) + position % PAGE
        tl.store(to_scale, k_scale, mask=live)
        tl.store(to_scale + K * PAGE * ROW // 4, v_scale, mask=live)
        keys, values = _to_e4m3(keys, k_scale), _to_e4m3(values, v_scale)
    tl.store(to, keys, mask=inside)
    tl.store(to + K * PAGE * ROW, values, mask=inside)


def store(k: Tensor, v: Tensor, cache: Tensor, layer: int, table_BP: Tensor, start_B: Tensor, length_B: Tensor) -> None:
    """Store keys and values [B, K, tokens, d] in the cache from position ``start`` on, up to ``length``; nothing if start is
    −1. A cache of FP8 numbers gets them rounded, with their scales."""
    B, K, tokens, d = k.shape
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    block = min(16, triton.next_power_of_2(tokens))
    _store[(B, K, triton.cdiv(tokens, block))](
        k, v, cache[:, layer], table_BP, start_B, length_B, *k.stride()[:3], *v.stride()[:3], cache.stride(0),
        table_BP.shape[1], tokens,
        K=K, D=d, DP=triton.next_power_of_2(d), PAGE=cache.shape[4], BT=block, FP8=cache.dtype == torch.uint8, num_warps=1,
        **pdl_options(k.device),
    )  # fmt: skip
