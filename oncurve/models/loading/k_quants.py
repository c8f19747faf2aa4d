"""Quantisation to the K formats of GGUF (Q4_K, Q6_K), for which the package `gguf` only has the inverse.

A row is cut into super-blocks of 256 weights. Each super-block has 16-bit scales, and each of its sub-blocks a small integer
that multiplies them:

    Q4_K   w ≈ d·s·q − m·t    q in 0 … 15, sub-blocks of 32; s and t have 6 bits, d and m are float16
    Q6_K   w ≈ d·s·(q − 32)   q in 0 … 63, sub-blocks of 16; s is an int8, d is float16

Of a few candidates around "the range divided by the largest level", the scale of a sub-block is the one with the smallest
squared error; for each candidate, the best scale (and offset) given the rounded levels is the least-squares solution. Errors of
large weights count more, because they move the output more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SUPER_BLOCK = 256
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
CANDIDATES_Q4 = np.linspace(-1.0, 1.0, 21, dtype=np.float32)
"""Candidates for a block's scale: each is added to 15, the largest level, before the range is divided by the sum."""
CANDIDATES_Q6 = np.linspace(-0.9, 0.9, 19, dtype=np.float32)
"""Candidates for a block's scale: each is added to 32, the largest level, before the largest weight is divided by the sum."""


def quantise_q4_k(weights: Floats) -> Bytes:
    """Super-blocks of 144 bytes: d, m, eight 6-bit pairs (s, t), and 256 levels of 4 bits."""
    blocks = np.ascontiguousarray(weights, np.float32).reshape(-1, 8, 32)
    count = len(blocks)
    scale, offset = _fit_range(blocks)
    d = scale.max(axis=1, keepdims=True) / 63
    m = offset.max(axis=1, keepdims=True) / 63
    s = np.clip(np.rint(_divide(scale, d)), 0, 63).astype(np.uint8)
    t = np.clip(np.rint(_divide(offset, m)), 0, 63).astype(np.uint8)
    d16, m16 = d.astype(np.float16), m.astype(np.float16)
    real_scale = (d16.astype(np.float32) * s)[..., None]
    real_offset = (m16.astype(np.float32) * t)[..., None]
    q = np.clip(np.rint(_divide(blocks + real_offset, real_scale)), 0, 15).astype(np.uint8)
    low, high = q.reshape(count, 4, 2, 32).transpose(2, 0, 1, 3)
    levels = (low | high << 4).reshape(count, 128)
    return np.concatenate([d16.view(np.uint8), m16.view(np.uint8), _pack_pairs(s, t), levels], axis=1)


def _fit_range(blocks: Floats) -> tuple[Floats, Floats]:
    """(scale, offset) of each sub-block with w ≈ scale·q − offset, scale and offset ≥ 0."""
    weight = np.sqrt((blocks**2).mean(axis=-1, keepdims=True)) + np.abs(blocks)
    low = np.minimum(blocks.min(axis=-1, keepdims=True), 0)
    span = blocks.max(axis=-1, keepdims=True) - low
    sum_w = weight.sum(axis=-1, keepdims=True)
    sum_x = (weight * blocks).sum(axis=-1, keepdims=True)
    best_scale, best_low = span / 15, low
    best_error = np.full_like(span, np.inf)
    for change in CANDIDATES_Q4:
        q = np.clip(np.rint(_divide((15 + change) * (blocks - low), span)), 0, 15)
        sum_q, sum_qq = (weight * q).sum(-1, keepdims=True), (weight * q * q).sum(-1, keepdims=True)
        sum_xq = (weight * blocks * q).sum(-1, keepdims=True)
        determinant = sum_w * sum_qq - sum_q**2
        scale = _divide(sum_w * sum_xq - sum_x * sum_q, determinant)
        base = _divide(sum_qq * sum_x - sum_q * sum_xq, determinant)
        above = base > 0  # an offset can only be subtracted
        scale, base = np.where(above, _divide(sum_xq, sum_qq), scale), np.where(above, 0, base)
        error = (weight * (scale * q + base - blocks) ** 2).sum(-1, keepdims=True)
        better = (error < best_error) & (scale > 0)
        best_scale, best_low = np.where(better, scale, best_scale), np.where(better, base, best_low)
        best_error = np.where(better, error, best_error)
    return best_scale[..., 0], -best_low[..., 0]


def _pack_pairs(s: Bytes, t: Bytes) -> Bytes:
    """Eight pairs of 6-bit numbers in 12 bytes. Eight bytes have the first four pairs and the two high bits of the others,
    whose low bits are in the last four bytes."""
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = t[:, :4] | (t[:, 4:] >> 4) << 6
    third = (s[:, 4:] & 0x0F) | (t[:, 4:] & 0x0F) << 4
    return np.concatenate([first, second, third], axis=1)


def quantise_q6_k(weights: Floats) -> Bytes:
    """Super-blocks of 210 bytes: low 4 bits of 256 levels, their high 2 bits, sixteen int8 scales, and d."""
    blocks = np.ascontiguousarray(weights, np.float32).reshape(-1, 16, 16)
    count = len(blocks)
    scale = _fit_scale(blocks)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1, keepdims=True), axis=1)
    d16 = (largest / -128).astype(np.float16)  # the largest scale becomes −128, which has one more step than 127
    s = np.clip(np.rint(_divide(scale, d16.astype(np.float32))), -128, 127).astype(np.int8)
    real_scale = (d16.astype(np.float32) * s)[..., None]
    q = (np.clip(np.rint(_divide(blocks, real_scale)), -32, 31) + 32).astype(np.uint8)
    halves = q.reshape(count, 2, 4, 32)  # each half of 128 levels is stored as four rows of 32
    low, high = halves & 0x0F, halves >> 4
    low_bytes = low[:, :, :2] | low[:, :, 2:] << 4
    high_bytes = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate(
        [low_bytes.reshape(count, 128), high_bytes.reshape(count, 64), s.view(np.uint8), d16.view(np.uint8)], axis=1
    )


def _fit_scale(blocks: Floats) -> Floats:
    """The scale of each sub-block with w ≈ scale·q, q in −32 … 31. It is negative if the largest weight is positive: −32 has
    one more step than 31."""
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    weight = blocks**2
    best_scale: Floats = extreme / np.float32(-32)
    best_gain = np.full_like(extreme, -np.inf)
    for change in CANDIDATES_Q6:
        q = np.clip(np.rint(_divide(-(32 + change) * blocks, extreme)), -32, 31)
        sum_xq, sum_qq = (weight * blocks * q).sum(-1, keepdims=True), (weight * q * q).sum(-1, keepdims=True)
        gain = _divide(sum_xq**2, sum_qq)  # by how much the least-squares scale lowers the squared error
        better = gain > best_gain
        best_scale = np.where(better, _divide(sum_xq, sum_qq), best_scale)
        best_gain = np.where(better, gain, best_gain)
    result: Floats = best_scale[..., 0]
    return result


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    """0 if the denominator is 0: a block of zeros has scale 0."""
    result: Floats = np.divide(
        numerator, denominator, out=np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape), np.float32),
        where=denominator != 0,
    )  # fmt: skip
    return result
