"""Token sampling on the GPU in two passes: statistics of each tile of the vocabulary, then one program per slot.

A token is sampled by inverting the cumulative distribution at the slot's uniform, as in ``oncurve/engines/token_sampling.py``:
the masses of tiles are summed in float64, then those of the tokens within the chosen tile in float32. The uniform is that of
``oncurve/rng.py``, computed here from the slot's key and position. Three log-probs of each token are stored in float32: at the
sampling temperature, as sampled (end tokens banned before the minimum length), and at temperature 1. A slot of suffix length −1
is idle.

Token sampling with per-slot parameters, for `oncurve serve`.

The same sampling as above, with temperature, minimum length and truncation read from the device by slot, so that
one captured step serves all requests. A program reads only its own slot, so a request's settings change no bit of another's.

Top-k, top-p and min-p keep the first tokens in the order of their logits; top-p counts the mass of what top-k leaves. The last
logit that is kept is found without a sort, by bisection: each pass over the row halves the interval in which it lies, until one
value is left. Equal logits are kept in the order of their ids, as by a stable sort.
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
    p mod C. ``forced`` [S, T] holds tokens that replace the sampled ones, −1 at positions without one; T is 0 if no tokens are
    ever forced.
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
    """Sample a token for every slot that is not idle and advance it. ``logits_SV`` lack the model's scale and soft cap."""
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


WIDE = 8192
"""Logits that the search for the threshold reads at once."""
MANY = tl.constexpr(1 << 30)


@dataclass(frozen=True, slots=True)
class SlotSamplingParams:
    """The sampling settings of each slot; tensors on the device that keep their addresses.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep all tokens. ``top`` likeliest tokens are reported
    at each position, in ``top_ids`` and ``top_logps`` [C, S, most], which are rings as in ``Slots``.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    min_tokens: Tensor
    top: Tensor
    top_ids: Tensor
    top_logps: Tensor


@triton.jit
def _allowed(logits, is_end, n, V, ban, scale, softcap, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits, with −inf for banned end tokens."""
    z = _logits(logits, n, V, scale, softcap, SCALE, SOFTCAP)
    banned = tl.load(is_end + n, mask=(n < V) & ban, other=0).to(tl.int1)  # not read if none is banned
    return tl.where(banned, float("-inf"), z)


@triton.jit
def _inv_temperature(temperature):
    return 1.0 / tl.maximum(tl.where(temperature > 0, temperature, 1.0), 1e-6)


@triton.jit
def _sums(logits, suffix_length, is_end, temperature, min_tokens, tops, full, raw, kept, best, best_at, lowest, V, scale,
          softcap, TILE: tl.constexpr, TILES: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    """Of one tile: its maximum; the sums of e^((z − max)/temperature) over all tokens and over those that may be sampled, and
    of e^(z − max); and of those that may be sampled the likeliest token and the lowest logit."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot, tile = tl.program_id(0), tl.program_id(1)
    length = tl.load(suffix_length + slot)
    if length >= 0:
        inv_temperature = _inv_temperature(tl.load(temperature + slot))
        n = tile * TILE + tl.arange(0, TILE)
        base = logits + slot.to(tl.int64) * V
        z = _logits(base, n, V, scale, softcap, SCALE, SOFTCAP)
        may = _allowed(base, is_end, n, V, length < tl.load(min_tokens + slot), scale, softcap, SCALE, SOFTCAP)
        at = slot * TILES + tile
        top = tl.max(z, 0)
        p = tl.exp((z - top) * inv_temperature)
        tl.store(tops + at, top)
        tl.store(full + at, tl.sum(p, 0))
        tl.store(raw + at, tl.sum(tl.exp(z - top), 0))
        tl.store(kept + at, tl.sum(tl.where(may == float("-inf"), 0.0, p), 0))
        tl.store(best + at, tl.max(may, 0))
        tl.store(best_at + at, tile * TILE + tl.argmax(may, 0, tie_break_left=True))
        tl.store(lowest + at, tl.min(tl.where(may == float("-inf"), float("inf"), may), 0))


@triton.jit
def _above(logits, is_end, V, ban, middle, top, inv_temperature, scale, softcap, WIDE: tl.constexpr, SCALE: tl.constexpr,
           SOFTCAP: tl.constexpr):  # fmt: skip
    """Of the tokens above ``middle``: their number, mass and lowest logit; and the highest logit of the others."""
    count = tl.zeros([WIDE], tl.int32)
    mass = tl.zeros([WIDE], tl.float32)
    lowest = tl.full([WIDE], float("inf"), tl.float32)
    highest = tl.full([WIDE], float("-inf"), tl.float32)
    for start in range(0, V, WIDE):
        z = _allowed(logits, is_end, start + tl.arange(0, WIDE), V, ban, scale, softcap, SCALE, SOFTCAP)
        over = z > middle
        count += over.to(tl.int32)
        mass += tl.where(over, tl.exp((z - top) * inv_temperature), 0.0)
        lowest = tl.minimum(lowest, tl.where(over, z, float("inf")))
        highest = tl.maximum(highest, tl.where(over, float("-inf"), z))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def _last_kept(logits, is_end, V, ban, low, high, most, mass_limit, top, inv_temperature, scale, softcap, WIDE: tl.constexpr,
               SCALE: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """The logit in [low, high] at which ``most`` tokens or a mass of ``mass_limit`` are reached; number and mass of those
    above it."""
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle >= high, low, middle)
        count, mass, over, under = _above(
            logits, is_end, V, ban, middle, top, inv_temperature, scale, softcap, WIDE, SCALE, SOFTCAP
        )
        enough = (count >= most) | (mass >= mass_limit)
        low = tl.where(enough, over, low)
        high = tl.where(enough, high, under)
    count, mass, over, under = _above(logits, is_end, V, ban, low, top, inv_temperature, scale, softcap, WIDE, SCALE, SOFTCAP)
    return low, count, mass


@triton.jit
def _cut(logits, suffix_length, is_end, temperature, top_p, min_p, top_k, min_tokens, tops, kept, best, lowest, cut,
         cut_at, V, scale, softcap, TILE: tl.constexpr, TILES: tl.constexpr, WIDE: tl.constexpr, SCALE: tl.constexpr,
         SOFTCAP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The threshold of a slot's truncation: tokens above ``cut`` are kept, and those equal to it up to the id ``cut_at``.
    Writes the mass that is left in each tile."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0)
    length = tl.load(suffix_length + slot)
    if length >= 0:
        slot_temperature, k = tl.load(temperature + slot), tl.load(top_k + slot)
        p, floor = tl.load(top_p + slot), tl.load(min_p + slot)
        if (slot_temperature > 0) & ((k > 0) | (p < 1.0) | (floor > 0.0)):
            inv_temperature, ban = _inv_temperature(slot_temperature), length < tl.load(min_tokens + slot)
            base = logits + slot.to(tl.int64) * V
            t = tl.arange(0, TILES)
            in_range = t < (V + TILE - 1) // TILE
            at_T = slot * TILES + t
            top_T = tl.load(tops + at_T, mask=in_range, other=float("-inf"))
            top = tl.max(top_T, 0)
            total = tl.sum(tl.load(kept + at_T, mask=in_range, other=0.0) * tl.exp((top_T - top) * inv_temperature), 0)
            high = tl.max(tl.load(best + at_T, mask=in_range, other=float("-inf")), 0)
            low = tl.min(tl.load(lowest + at_T, mask=in_range, other=float("inf")), 0)
            at_least = high + tl.log(tl.maximum(floor, 1e-38)) / inv_temperature
            most = tl.where(k > 0, k, MANY)
            if (k > 0) & (p < 1.0):  # top-p applies to what top-k leaves
                kth, above, mass = _last_kept(base, is_end, V, ban, low, high, most, float("inf"), top, inv_temperature, scale,
                                              softcap, WIDE, SCALE, SOFTCAP)  # fmt: skip
                total = tl.minimum(total, mass + (most - above) * tl.exp((kth - top) * inv_temperature))
            mass_limit = tl.where(p < 1.0, p * total, float("inf"))
            if (k == 0) & (p >= 1.0):
                high = low
            low, count, mass = _last_kept(base, is_end, V, ban, low, high, most, mass_limit, top, inv_temperature, scale,
                                          softcap, WIDE, SCALE, SOFTCAP)  # fmt: skip
            by_mass = tl.ceil(tl.minimum((mass_limit - mass) / tl.exp((low - top) * inv_temperature), 1e9)).to(tl.int32)
            ties = tl.maximum(tl.minimum(most - count, by_mass), 1)
            ties = tl.where(at_least > low, MANY, ties)
            low = tl.maximum(low, at_least)
            counted, last = 0, -1
            for tile in range((V + TILE - 1) // TILE):
                n = tile * TILE + tl.arange(0, TILE)
                z = _allowed(base, is_end, n, V, ban, scale, softcap, SCALE, SOFTCAP)
                same = z == low
                tied = same & (tl.cumsum(same.to(tl.int32), 0) + counted <= ties)
                left = tl.exp((z - tl.load(tops + slot * TILES + tile)) * inv_temperature)
                tl.store(kept + slot * TILES + tile, tl.sum(tl.where((z > low) | tied, left, 0.0), 0))
                last = tl.maximum(last, tl.max(tl.where(tied, n, -1), 0))
                counted += tl.sum(same.to(tl.int32), 0)
            tl.store(cut + slot, low)
            tl.store(cut_at + slot, last)
        else:
            tl.store(cut + slot, float("-inf"))
            tl.store(cut_at + slot, V)


@triton.jit
def _likeliest(logits, suffix_length, counts, tops, raw, top_ids, top_logps, slots, V, most, scale, softcap,
               C: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """The likeliest tokens one after the other: each is the best of the best tile, whose maximum is then computed again."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0)
    length = tl.load(suffix_length + slot)
    if length >= 0:
        t = tl.arange(0, TILES)
        in_range = t < (V + TILE - 1) // TILE
        best_T = tl.load(tops + slot * TILES + t, mask=in_range, other=float("-inf"))
        top = tl.max(best_T, 0)
        total = tl.sum(tl.load(raw + slot * TILES + t, mask=in_range, other=0.0) * tl.exp(best_T - top), 0)
        last, last_at = float("inf"), -1
        for i in range(tl.load(counts + slot)):
            tile = tl.argmax(best_T, 0, tie_break_left=True)
            n = tile * TILE + tl.arange(0, TILE)
            z = _logits(logits + slot.to(tl.int64) * V, n, V, scale, softcap, SCALE, SOFTCAP)
            z = tl.where((z < last) | ((z == last) & (n > last_at)), z, float("-inf"))
            last = tl.max(z, 0)
            last_at = tile * TILE + tl.argmax(z, 0, tie_break_left=True)
            at = ((length % C) * slots + slot) * most + i
            tl.store(top_ids + at, last_at)
            tl.store(top_logps + at, last - top - tl.log(total))
            rest = tl.max(tl.where((z < last) | ((z == last) & (n > last_at)), z, float("-inf")), 0)
            best_T = tl.where(t == tile, rest, best_T)


@triton.jit
def _sample_per_slot(logits, temperature, min_of, tops, full, raw, kept, best, best_at, cut, cut_at, token_S, suffix_length,
            limit, key, sampled_ring, logps, forced, is_end, slots, V, scale, softcap,
            C: tl.constexpr, FORCED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SCALE: tl.constexpr,
            SOFTCAP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """As ``_sample_tokens``, among the tokens that are kept."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0)
    length = tl.load(suffix_length + slot)
    if length >= 0:
        slot_temperature, min_tokens = tl.load(temperature + slot), tl.load(min_of + slot)
        inv_temperature = _inv_temperature(slot_temperature)
        t = tl.arange(0, TILES)
        in_range = t < (V + TILE - 1) // TILE
        at_T = slot * TILES + t
        base = logits + slot.to(tl.int64) * V
        top_T = tl.load(tops + at_T, mask=in_range, other=float("-inf"))
        top = tl.max(top_T, 0)
        raw_total = tl.sum(tl.load(raw + at_T, mask=in_range, other=0.0) * tl.exp(top_T - top), 0)
        shrink_T = tl.exp((top_T - top) * inv_temperature)
        all_total = tl.sum(tl.load(full + at_T, mask=in_range, other=0.0) * shrink_T, 0)
        mass_T = (tl.load(kept + at_T, mask=in_range, other=0.0) * shrink_T).to(tl.float64)
        total = tl.sum(mass_T, 0)
        target = _uniform(tl.load(key + slot), length) * total
        last = tl.max(tl.where(mass_T > 0, t, 0), 0)
        tile = tl.minimum(tl.sum((tl.cumsum(mass_T, 0) <= target).to(tl.int32), 0), last)
        rest = (target - tl.sum(tl.where(t < tile, mass_T, 0.0), 0)).to(tl.float32)
        n = tile * TILE + tl.arange(0, TILE)
        z_n = _allowed(base, is_end, n, V, length < min_tokens, scale, softcap, SCALE, SOFTCAP)
        edge = tl.load(cut + slot)
        stays = (z_n > edge) | ((z_n == edge) & (n <= tl.load(cut_at + slot)))
        p = tl.where(stays, tl.exp((z_n - top) * inv_temperature), 0.0)
        last_n = tl.max(tl.where(p > 0, n, 0), 0)
        token = tl.minimum(tile * TILE + tl.sum((tl.cumsum(p, 0) <= rest).to(tl.int32), 0), last_n)
        z = tl.max(tl.where(n == token, z_n, float("-inf")), 0)
        best_T = tl.load(best + at_T, mask=in_range, other=float("-inf"))
        likeliest = tl.load(best_at + slot * TILES + tl.argmax(best_T, 0, tie_break_left=True))
        token = tl.where(slot_temperature > 0, token, likeliest)
        z = tl.where(slot_temperature > 0, z, tl.max(best_T, 0))
        raw_logp = z - top - tl.log(raw_total)
        logp = tl.where(slot_temperature > 0, (z - top) * inv_temperature - tl.log(all_total), raw_logp)
        sampled = tl.where(slot_temperature > 0, (z - top) * inv_temperature - tl.log(total.to(tl.float32)), 0.0)
        _write_token(token_S, suffix_length, limit, sampled_ring, logps, forced, is_end, slot, slots, token, length, logp,
                     sampled, raw_logp, min_tokens, C, FORCED)  # fmt: skip


def sample_tokens_per_slot(
    logits_SV: Tensor, slots: Slots, params: SlotSamplingParams, is_end_V: Tensor, rule: SamplingRule
) -> None:
    """Sample a token for every slot that is not idle by its own settings, and advance the slot. Of ``rule`` only the model's
    scale and soft cap are used."""
    S, V = logits_SV.shape
    device, tile = logits_SV.device, min(TILE, triton.next_power_of_2(V))
    tiles = triton.cdiv(V, tile)
    padded = triton.next_power_of_2(tiles)
    tops, full, raw, kept, best, lowest = torch.empty((6, S, padded), dtype=torch.float32, device=device)
    best_at = torch.empty((S, padded), dtype=torch.int32, device=device)
    cut, cut_at = torch.empty(S, dtype=torch.float32, device=device), torch.empty(S, dtype=torch.int32, device=device)
    flags = {
        "TILE": tile, "TILES": padded, "SCALE": rule.scale != 1.0, "SOFTCAP": rule.softcap is not None, **pdl_options(device),
    }  # fmt: skip
    model, ring = (rule.scale, rule.softcap or 0.0), slots.sampled.shape[0]
    _sums[(S, tiles)](
        logits_SV, slots.suffix_length, is_end_V, params.temperature, params.min_tokens, tops, full, raw, kept, best, best_at,
        lowest, V, *model, **flags, num_warps=4,
    )  # fmt: skip
    _cut[(S,)](
        logits_SV, slots.suffix_length, is_end_V, params.temperature, params.top_p, params.min_p, params.top_k,
        params.min_tokens, tops, kept, best, lowest, cut, cut_at, V, *model,
        WIDE=min(WIDE, triton.next_power_of_2(V)), **flags, num_warps=16,
    )  # fmt: skip
    _likeliest[(S,)](
        logits_SV, slots.suffix_length, params.top, tops, raw, params.top_ids, params.top_logps, S, V,
        params.top_ids.shape[2], *model, C=ring, **flags, num_warps=4,
    )  # fmt: skip
    _sample_per_slot[(S,)](
        logits_SV, params.temperature, params.min_tokens, tops, full, raw, kept, best, best_at, cut, cut_at, slots.token,
        slots.suffix_length, slots.limit, slots.key, slots.sampled, slots.logps, slots.forced, is_end_V, S, V, *model,
        C=ring, FORCED=slots.forced.shape[1], **flags, num_warps=4,
    )  # fmt: skip
