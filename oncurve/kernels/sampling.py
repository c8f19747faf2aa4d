"""Token sampling on the GPU in two passes: statistics of each tile of the vocabulary, then one program per slot.

A token is sampled by inverting the cumulative distribution at the slot's uniform, as in ``oncurve/engines/token_sampling.py``:
tiles are added in float64, and tokens within the tile in which the uniform falls in float32. The uniform is that of
``oncurve/rng.py``, computed here from the slot's key and position. Log-probs are float32: at the sampling temperature, as
sampled (end tokens banned before the minimum length), and at temperature 1. A slot of suffix length −1 is idle.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.kernels.launch import pdl_options

TILE = 4096
"""The most logits that one program reads."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The state of each slot that sampling reads and updates; tensors on the device that keep their addresses.

    ``token`` was sampled last, ``suffix_length`` counts the tokens before it (−1: idle), ``limit`` is the maximum length, and
    ``key`` seeds the slot's random numbers. ``sampled`` [C, S] and ``logps`` [C, 3, S] are rings: position p is written at
    p mod C. ``forced`` [S, T] holds tokens that replace the sampled one, −1 if in_range is none; T is 0 if no tokens are ever
    forced.
    """

    token: Tensor
    suffix_length: Tensor
    limit: Tensor
    key: Tensor
    sampled: Tensor
    logps: Tensor
    forced: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """Temperature (0: greedy), minimum length, and the model's own scale and soft cap of logits."""

    temperature: float = 1.0
    min_tokens: int = 0
    scale: float = 1.0
    softcap: float | None = None


@triton.jit
def _uniform(key, at):
    """SplitMix64's uniform for a position: 53 bits in [0, 1)."""
    state = key.to(tl.uint64, bitcast=True) + (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _uniforms(key, suffix_length, out, slots, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    at = tl.maximum(tl.load(suffix_length + slot, mask=inside, other=0), 0)
    tl.store(out + slot, _uniform(tl.load(key + slot, mask=inside, other=0), at), mask=inside)


@triton.jit
def _logits(logits, n, V, scale, softcap, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    z = tl.load(logits + n, mask=n < V, other=float("-inf")).to(tl.float32)
    if SCALE:
        z = z * scale
    if SOFTCAP:
        z = tl.where(n < V, softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0)), float("-inf"))
    return z


@triton.jit
def _statistics(logits, suffix_length, is_end, tops, kept, full, raw, best, best_at, V, inv_temperature, min_tokens, scale,
                softcap, TILE: tl.constexpr, TILES: tl.constexpr, GREEDY: tl.constexpr, SCALED: tl.constexpr, MIN: tl.constexpr,
                SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Of one tile: its maximum, and the sums of e^((z − max)/temperature) over what may be sampled and over all, and of
    e^(z − max)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot, tile = tl.program_id(0), tl.program_id(1)
    length = tl.load(suffix_length + slot)
    if length >= 0:
        n = tile * TILE + tl.arange(0, TILE)
        z = _logits(logits + slot.to(tl.int64) * V, n, V, scale, softcap, SCALE, SOFTCAP)
        at = slot * TILES + tile
        top = tl.max(z, 0)
        tl.store(tops + at, top)
        e = tl.exp(z - top)
        tl.store(raw + at, tl.sum(e, 0))
        p = tl.exp((z - top) * inv_temperature) if SCALED else e
        if MIN:
            tl.store(full + at, tl.sum(p, 0))
            banned = tl.load(is_end + n, mask=n < V, other=0).to(tl.int1) & (length < min_tokens)
            p = tl.where(banned, 0.0, p)
            z = tl.where(banned, float("-inf"), z)
        tl.store(kept + at, tl.sum(p, 0))
        if GREEDY:
            tl.store(best + at, tl.max(z, 0))
            tl.store(best_at + at, tile * TILE + tl.argmax(z, 0, tie_break_left=True))


@triton.jit
def _write_token(token_S, suffix_length, limit, sampled_ring, logps, forced, is_end, slot, slots, token, length, logp, sampled,
                 raw, min_tokens, C: tl.constexpr, FORCED: tl.constexpr):  # fmt: skip
    """Write a sampled or forced token, and advance the slot or end it."""
    ring = length % C
    if FORCED:
        forced_token = tl.load(forced + slot * FORCED + length)
        token = tl.where(forced_token >= 0, forced_token.to(token.dtype), token)
    tl.store(sampled_ring + ring * slots + slot, token.to(tl.int32))
    tl.store(logps + (ring * 3) * slots + slot, logp)
    tl.store(logps + (ring * 3 + 1) * slots + slot, sampled)
    tl.store(logps + (ring * 3 + 2) * slots + slot, raw)
    tl.store(token_S + slot, token.to(token_S.dtype.element_ty))
    ended = (tl.load(is_end + token) != 0) & (length >= min_tokens)
    if FORCED:
        ended = ended & (forced_token < 0)
    ended = ended | (length + 1 >= tl.load(limit + slot))
    tl.store(suffix_length + slot, tl.where(ended, -1, length + 1))


@triton.jit
def _sample_tokens(logits, tops, kept, full, raw, best, best_at, token_S, suffix_length, limit, key, sampled_ring, logps,
                   forced, is_end, slots, V, inv_temperature, min_tokens, scale, softcap,
                   C: tl.constexpr, FORCED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GREEDY: tl.constexpr,
                   SCALED: tl.constexpr, MIN: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0)
    length = tl.load(suffix_length + slot)
    if length >= 0:
        t = tl.arange(0, TILES)
        in_range = t < (V + TILE - 1) // TILE
        at_T = slot * TILES + t
        base = logits + slot.to(tl.int64) * V
        top_T = tl.load(tops + at_T, mask=in_range, other=float("-inf"))
        top = tl.max(top_T, 0)
        raw_total = tl.sum(tl.load(raw + at_T, mask=in_range, other=0.0) * tl.exp(top_T - top), 0)
        if GREEDY:
            best_T = tl.load(best + at_T, mask=in_range, other=float("-inf"))
            token = tl.load(best_at + slot * TILES + tl.argmax(best_T, 0, tie_break_left=True))
            z = tl.max(best_T, 0)
            logp = z - top - tl.log(raw_total)
            _write_token(token_S, suffix_length, limit, sampled_ring, logps, forced, is_end, slot, slots, token, length, logp,
                         logp * 0.0, logp, min_tokens, C, FORCED)  # fmt: skip
        else:
            shrink_T = tl.exp((top_T - top) * inv_temperature)
            mass_T = (tl.load(kept + at_T, mask=in_range, other=0.0) * shrink_T).to(tl.float64)
            sum_T = tl.cumsum(mass_T, 0)
            total = tl.sum(mass_T, 0)
            target = _uniform(tl.load(key + slot), length) * total
            last = tl.max(tl.where(mass_T > 0, t, 0), 0)
            tile = tl.minimum(tl.sum((sum_T <= target).to(tl.int32), 0), last)
            rest = (target - tl.sum(tl.where(t < tile, mass_T, 0.0), 0)).to(tl.float32)
            n = tile * TILE + tl.arange(0, TILE)
            z_n = _logits(base, n, V, scale, softcap, SCALE, SOFTCAP)
            p = tl.exp((z_n - top) * inv_temperature)
            if MIN:
                banned = tl.load(is_end + n, mask=n < V, other=0).to(tl.int1) & (length < min_tokens)
                p = tl.where(banned, 0.0, p)
            last_n = tl.max(tl.where(p > 0, n, 0), 0)
            token = tl.minimum(tile * TILE + tl.sum((tl.cumsum(p, 0) <= rest).to(tl.int32), 0), last_n)
            z = tl.max(tl.where(n == token, z_n, float("-inf")), 0)
            sampled = (z - top) * inv_temperature - tl.log(total.to(tl.float32))
            logp = sampled
            if MIN:
                full_total = tl.sum(tl.load(full + at_T, mask=in_range, other=0.0) * shrink_T, 0)
                logp = (z - top) * inv_temperature - tl.log(full_total)
            raw_logp = sampled
            if SCALED or MIN:
                raw_logp = z - top - tl.log(raw_total)
            _write_token(token_S, suffix_length, limit, sampled_ring, logps, forced, is_end, slot, slots, token, length, logp,
                         sampled, raw_logp, min_tokens, C, FORCED)  # fmt: skip


@triton.jit
def _write_tokens(token, logp, token_S, suffix_length, limit, sampled_ring, logps, forced, is_end, slots, min_tokens,
                  C: tl.constexpr, FORCED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0)
    length = tl.load(suffix_length + slot)
    if length >= 0:
        _write_token(token_S, suffix_length, limit, sampled_ring, logps, forced, is_end, slot, slots, tl.load(token + slot),
                     length, tl.load(logp + slot), tl.load(logp + slots + slot), tl.load(logp + 2 * slots + slot),
                     min_tokens, C, FORCED)  # fmt: skip


def sample_tokens(logits_SV: Tensor, slots: Slots, is_end_V: Tensor, rule: SamplingRule) -> None:
    """Sample a token for every slot that is not idle and advance it. Logits come before the model's scale and soft cap."""
    S, V = logits_SV.shape
    tile = min(TILE, triton.next_power_of_2(V))
    tiles = triton.cdiv(V, tile)
    padded = triton.next_power_of_2(tiles)
    tops, kept, full, raw, best = torch.empty((5, S, padded), dtype=torch.float32, device=logits_SV.device)
    best_at = torch.empty((S, padded), dtype=torch.int32, device=logits_SV.device)
    greedy = rule.temperature == 0
    inv_temperature = 1.0 if greedy else 1.0 / rule.temperature
    flags = {
        "TILE": tile, "TILES": padded, "GREEDY": greedy, "SCALED": inv_temperature != 1.0, "MIN": rule.min_tokens > 0,
        "SCALE": rule.scale != 1.0, "SOFTCAP": rule.softcap is not None, **pdl_options(logits_SV.device),
    }  # fmt: skip
    numbers = (inv_temperature, rule.min_tokens, rule.scale, rule.softcap or 0.0)
    _statistics[(S, tiles)](
        logits_SV, slots.suffix_length, is_end_V, tops, kept, full, raw, best, best_at, V, *numbers, **flags, num_warps=4
    )
    _sample_tokens[(S,)](
        logits_SV, tops, kept, full, raw, best, best_at, slots.token, slots.suffix_length, slots.limit, slots.key,
        slots.sampled, slots.logps, slots.forced, is_end_V, S, V, *numbers, C=slots.sampled.shape[0],
        FORCED=slots.forced.shape[1], **flags, num_warps=4,
    )  # fmt: skip


def uniforms(slots: Slots) -> Tensor:
    """The uniform of each slot's next token, [S] in float64."""
    S = len(slots.key)
    out = torch.empty(S, dtype=torch.float64, device=slots.key.device)
    _uniforms[(triton.cdiv(S, 128),)](slots.key, slots.suffix_length, out, S, BLOCK=128, num_warps=1, **pdl_options(out.device))
    return out


def write_tokens(token_S: Tensor, logp_3S: Tensor, slots: Slots, is_end_V: Tensor, min_tokens: int) -> None:
    """Advance slots with tokens that torch sampled, and their three log-probs."""
    _write_tokens[(len(token_S),)](
        token_S, logp_3S, slots.token, slots.suffix_length, slots.limit, slots.sampled, slots.logps, slots.forced,
        is_end_V, len(token_S), min_tokens, C=slots.sampled.shape[0], FORCED=slots.forced.shape[1],
        num_warps=1, **pdl_options(token_S.device),
    )  # fmt: skip
