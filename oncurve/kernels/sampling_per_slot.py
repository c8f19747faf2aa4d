"""Token sampling with per-slot parameters, for `oncurve serve`.

The same sampling as in ``sampling.py``, with temperature, minimum length and truncation read from the device by slot, so that
one captured step serves all requests. A program reads its own slot alone: a request's settings change no bit of another's.

Top-k, top-p and min-p keep the first tokens in the order of their logits; top-p counts the mass of what top-k leaves. The last
logit that is kept is found without a sort, by bisection: each pass over the row halves the interval in which it lies, until one
value is left. Equal logits are kept in the order of their ids, as a stable sort has it.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oncurve.kernels.launch import pdl_options
from oncurve.kernels.sampling import TILE, SamplingRule, Slots, _logits, _uniform, _write_token

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
    Writes the mass of each tile that is left."""
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
    """As ``_sample_tokens`` of sampling.py, among the tokens that are kept."""
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
