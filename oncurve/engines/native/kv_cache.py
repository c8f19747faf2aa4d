"""The KV cache of the torch and C runners, and how a prefill and a decode step attend to it.

The cache has *blocks* of R slots that share one prompt: a block's prompt is stored once and read once for its R completions,
each of which owns only its suffix. Keys are stored in pages of PAGE positions. Every matrix product has a fixed shape, and a
page that a completion does not reach adds exact zeros: a completion does not depend on what else is in the cache. ``rep`` is
the number of query heads per KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from oncurve.models.attention_interface import AttentionContext, ScoreRule, apply_softcap, causal_mask, softmax_with_sinks
from oncurve.models.recurrent_layers import LayerState, RunLayer

PAGE = 64
BLOCK_SLOTS = 16
"""At most this many slots share a block, which is refilled only when all of them have ended."""


FP8_MAX = 448
"""The largest number of e4m3."""


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Keys or values [..., d] as a cache of FP8 numbers returns them: s · e4m3(x / s), with s = max |x| / 448 for each vector.
    So none saturates, the largest number is kept, and numbers down to 1/28672 of it are off by a 16th of themselves at most."""
    numbers = x.float()
    scale = numbers.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) * (1 / FP8_MAX)
    return ((numbers / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


class RoundedLayout:
    """Another layout, whose keys and values are rounded as in a cache of FP8 numbers. They still take the model's dtype."""

    def __init__(self, layout: AttentionContext) -> None:
        self.layout = layout

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        return self.layout.attend(layer, q, rounded_to_fp8(k), rounded_to_fp8(v), rule)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        return self.layout.recur(layer, hidden, run)


def slots_per_block(group_size: int) -> int:
    """R, the slots of a block: the largest divisor of the group size up to BLOCK_SLOTS, so that no slot is wasted."""
    return max(r for r in range(1, min(group_size, BLOCK_SLOTS) + 1) if group_size % r == 0)


def idle_blocks(blocks: int, block_slots: int, width: int = 1) -> int:
    """How many blocks to add so that a step of torch has up to 4 rows, or a multiple of 4.

    On several threads a library splits a product into tiles of rows, and a tile of 1 to 3 rows rounds differently. In a step of
    6 rows on two threads the last two rows are such a tile: a completion's bits would depend on its slot.
    """
    return next(n for n in range(4) if (rows := (blocks + n) * block_slots * width) <= 4 or rows % 4 == 0)


class Page(NamedTuple):
    """Keys […, d, PAGE] and values […, PAGE, d] of one page of every block's prompt (``shared``), or of every slot's suffix."""

    shared: bool
    keys: Tensor
    values: Tensor


class KVCache:
    """Keys and values of every layer: prompts by block, suffixes by slot. A layer is allocated when it is first used."""

    def __init__(
        self, blocks: int, block_slots: int, max_new_tokens: int, idle_blocks: int = 0, *, is_fp8: bool = False
    ) -> None:
        """``idle_blocks`` are computed like the others, and no sequence is assigned to them. ``is_fp8``: passes must round
        keys and values (`RoundedLayout`)."""
        self.is_fp8 = is_fp8
        self.usable_slots = blocks * block_slots
        self.blocks, self.block_slots, self.slots = blocks + idle_blocks, block_slots, (blocks + idle_blocks) * block_slots
        self.suffix_pages = -(-max_new_tokens // PAGE)
        self.prompts: dict[int, list[Tensor]] = {}  # layer -> [k, v], each [pages, blocks, K, PAGE, d]
        self.suffixes: dict[int, list[Tensor]] = {}  # layer -> [k, v], each [pages, blocks, K, R, PAGE, d]
        self.shared_pages: dict[int, list[Page]] = {}  # views of the above, for the products of a decode step
        self.own_pages: dict[int, list[Page]] = {}
        self.states: dict[int, LayerState] = {}
        """By recurrent layer, the state of every slot, [S, …]."""

    def allocate_prompts(self, layer: int, length: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Allocate room for prompts of ``length`` positions in every block; k and v show the shape of one position, [K, d]."""
        pages = -(-length // PAGE)
        stored = self.prompts.get(layer) or [x.new_zeros(0, self.blocks, len(x), PAGE, x.shape[1]) for x in (k, v)]
        if stored[0].shape[0] < pages:
            stored = [torch.cat((x, x.new_zeros(pages - x.shape[0], *x.shape[1:]))) for x in stored]
            self.prompts[layer] = stored
            k_all, v_all = (x.flatten(1, 2) for x in stored)
            self.shared_pages[layer] = [Page(True, a.transpose(1, 2), b) for a, b in zip(k_all, v_all, strict=True)]
        return stored

    def store_prompts(self, layer: int, blocks_n: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values of n prompts, [n, K, tokens, d], in these blocks."""
        stored = self.allocate_prompts(layer, k.shape[2], k[0, :, 0], v[0, :, 0])
        for pages_x, x in zip(stored, (k, v), strict=True):
            for page, start in enumerate(range(0, x.shape[2], PAGE)):
                part = x[:, :, start : start + PAGE]
                pages_x[page, blocks_n, :, : part.shape[2]] = part

    def copy_prompt(self, source: int, target: int) -> None:
        """Copy one block's prompt to another."""
        for stored in self.prompts.values():
            for pages in stored:
                pages[:, target] = pages[:, source]

    def store_state(self, layer: int, blocks_n: Tensor, state: LayerState) -> None:
        """Let every slot of these blocks start from the state of one prompt, [1, …]."""
        if layer not in self.states:
            self.states[layer] = state.map(lambda x: x.new_zeros(self.slots, *x.shape[1:]))
        for stored, new in zip(self.states[layer].tensors, state.tensors, strict=True):
            stored.view(self.blocks, self.block_slots, *stored.shape[1:])[blocks_n] = new[None]

    def clear_states(self, blocks: Sequence[int]) -> None:
        """Let every slot of these blocks start from an empty state. Used for prompts of one token: a prefill leaves out a
        prompt's last token, so it stores no state for them."""
        for state in self.states.values():
            for stored in state.tensors:
                stored.view(self.blocks, self.block_slots, *stored.shape[1:])[list(blocks)] = 0

    def allocate_suffixes(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Allocate room for every slot's suffix; k and v show the shape of one position, [K, d]."""
        shape = (self.suffix_pages, self.blocks, len(k), self.block_slots, PAGE)
        self.suffixes[layer] = [x.new_zeros(*shape, x.shape[1]) for x in (k, v)]
        k_all, v_all = (x.flatten(1, 3) for x in self.suffixes[layer])
        self.own_pages[layer] = [Page(False, a.transpose(1, 2), b) for a, b in zip(k_all, v_all, strict=True)]

    def store_tokens(self, layer: int, row_SKW: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, [S, K, W, d], of W new positions per slot. ``row_SKW`` are their rows if the suffixes are viewed as
        [pages · blocks · K · R · PAGE, d]."""
        if layer not in self.suffixes:
            self.allocate_suffixes(layer, k[0, :, 0], v[0, :, 0])
        for pages, x in zip(self.suffixes[layer], (k, v), strict=True):
            pages.view(-1, x.shape[3]).index_copy_(0, row_SKW, x.flatten(0, 2))


class PrefillLayout:
    """Attention of prompts of one length bucket, padded at the end: causal; keys and values are stored in the cache."""

    def __init__(self, cache: KVCache, sources: Tensor, blocks: Tensor, positions: Tensor, lengths: Sequence[int]) -> None:
        """Row ``sources[i]`` goes to block ``blocks[i]``; ``lengths`` holds each row's tokens without padding."""
        self.cache, self.sources, self.blocks, self.positions, self.lengths = cache, sources, blocks, positions, lengths

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        self.cache.store_prompts(layer, self.blocks, k[self.sources], v[self.sources])
        if rule.has_kernel and (rule.window is None or rule.window >= len(self.positions)):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=True)
            return out.transpose(1, 2)
        mask = causal_mask(self.positions[:, None], self.positions[None, :], rule.window)
        return attend_by_scores(q, k, v, mask, rule).contiguous()  # AFMoE views it

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        """Runs row by row and without the padding, which would enter the state."""
        out = torch.zeros_like(hidden)
        for row, length in enumerate(self.lengths):
            out[row : row + 1, :length], state = run(hidden[row : row + 1, :length], None)
            self.cache.store_state(layer, self.blocks[self.sources == row], state)
        return out


class PromptPartLayout:
    """Attention of a later part of a block's prompt: n tokens from position ``start`` on attend to the stored part and to
    themselves.

    Their keys and values are stored after those of the earlier part. Shapes depend on the prompt and its parts alone.
    """

    def __init__(self, cache: KVCache, block: int, start: int, tokens: int) -> None:
        self.cache, self.block, self.start, self.place_n = cache, block, start, np.arange(start, start + tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        together = []
        stored = self.cache.allocate_prompts(layer, self.start + len(self.place_n), k[0, :, 0], v[0, :, 0])
        for pages, x in zip(stored, (k, v), strict=True):
            of_block = pages[:, self.block]  # [pages, K, PAGE, d]
            of_block[self.place_n // PAGE, :, self.place_n % PAGE] = x[0].transpose(0, 1)
            before = of_block.transpose(0, 1).flatten(1, 2)[:, : self.start]
            together.append(torch.cat((before, x[0]), 1)[None])
        return attend_to_stored(q, together[0], together[1], rule)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        raise NotImplementedError("a recurrent state goes on while completions are decoded: prompts are prefilled at once")


class ReplyLayout:
    """Attention of an environment's reply, n tokens of one slot: to the prompt, to the suffix before it and to itself.

    Keys and values are stored in the slot's suffix. Shapes depend on the slot's own sequence alone.
    """

    def __init__(self, cache: KVCache, slot: int, prompt_length: int, start: int, tokens: int) -> None:
        self.cache, self.slot, self.prompt_length, self.start = cache, slot, prompt_length, start
        self.block, self.row = divmod(slot, cache.block_slots)
        self.place_n = np.arange(start, start + tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        if layer not in self.cache.suffixes:
            self.cache.allocate_suffixes(layer, k[0, :, 0], v[0, :, 0])
        stored = []
        for i, x in enumerate((k, v)):
            suffix = self.cache.suffixes[layer][i][:, self.block, :, self.row]  # [pages, K, PAGE, d]
            suffix[self.place_n // PAGE, :, self.place_n % PAGE] = x[0].transpose(0, 1)
            parts = [suffix.transpose(0, 1).flatten(1, 2)[:, : self.start], x[0]]
            if self.prompt_length:
                prompt = self.cache.prompts[layer][i][:, self.block].transpose(0, 1).flatten(1, 2)
                parts.insert(0, prompt[:, : self.prompt_length])
            stored.append(torch.cat(parts, 1)[None])
        return attend_to_stored(q, stored[0], stored[1], rule)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        state = self.cache.states[layer]
        out, after = run(hidden, state.map(lambda x: x[self.slot : self.slot + 1]))
        for stored, new in zip(state.tensors, after.tensors, strict=True):
            stored[self.slot] = new[0]
        return out


def attend_to_stored(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
    """Causal attention from the last n positions to all of them. q is [1, H, n, d], k and v are [1, K, positions, d]; the
    result is [1, n, H, d]."""
    n, positions, scale = q.shape[2], k.shape[2], rule.scale
    sees_all = rule.window is None or rule.window >= positions
    if rule.has_kernel and q.device.type == "cpu" and positions < 2 * n and sees_all:
        # On a CPU, torch computes every score if it gets a mask, and only half of them with is_causal. That needs a query at
        # each position, so queries are padded; with fewer than n stored positions this costs less than a mask.
        padded = torch.cat((q.new_zeros(1, q.shape[1], positions - n, q.shape[3]), q), 2)
        out = functional.scaled_dot_product_attention(padded, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[:, :, positions - n :].transpose(1, 2)
    position = torch.arange(positions, device=k.device)
    mask = causal_mask(position[-n:, None], position[None, :], rule.window)
    if rule.has_kernel:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)
    return attend_by_scores(q, k, v, mask, rule)


def attend_by_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: ScoreRule) -> Tensor:
    """Attention under a mask with all scores in memory, [batch, n, H, d]: for soft caps and sinks, which torch's kernels don't
    have."""
    rep = q.shape[1] // k.shape[1]
    scores = apply_softcap(q @ k.repeat_interleave(rep, 1).transpose(-1, -2) * rule.scale, rule.softcap)
    sinks = None if rule.sinks_H is None else rule.sinks_H[:, None, None]
    weights = softmax_with_sinks(scores.masked_fill(~mask, -torch.inf), sinks).to(v.dtype)
    return (weights @ v.repeat_interleave(rep, 1)).transpose(1, 2)


class DecodeLayout:
    """Attention in a decode step with W tokens per slot: the last sampled token and W − 1 drafted ones. A token attends to the
    prompt of its block, and to the suffix of its slot up to itself.

    ``prompt_length_S`` counts stored prompt positions, and ``at_SW`` is the position in the suffix where each token is stored.
    """

    def __init__(
        self,
        cache: KVCache,
        prompt_length_S: Tensor,
        at_SW: Tensor,
        prompt_pages: int,
        suffix_pages: int,
        live_S: Tensor | None = None,
    ) -> None:
        """``live_S`` marks the slots whose recurrent states advance; by default all."""
        self.cache, self.prompt_pages, self.suffix_pages, self.live_S = cache, prompt_pages, suffix_pages, live_S
        self.prompt_length_S, self.at_SW = prompt_length_S, at_SW
        self._masks: dict[int | None, Tensor] = {}
        self._rows: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        cache = self.cache
        cache.store_tokens(layer, self._new_rows(k.shape[1]), k, v)
        S, H, W, d = q.shape
        N, R, K = cache.blocks, cache.block_slots, k.shape[1]
        rep = H // K
        q_NKR = q.reshape(N, R, K, rep * W, d).transpose(1, 2).contiguous()  # a block's slots side by side, for each KV head
        q_own, q_block = q_NKR.view(N * K * R, rep * W, d), q_NKR.view(N * K, R * rep * W, d)
        pages = cache.shared_pages[layer][: self.prompt_pages] if self.prompt_pages else []
        pages = pages + cache.own_pages[layer][: self.suffix_pages]
        parts = [torch.bmm(q_block if p.shared else q_own, p.keys).view(N, K, R, rep, W, PAGE) for p in pages]
        sinks = None if rule.sinks_H is None else rule.sinks_H.view(K, 1, rep, 1, 1)
        weights = self._weights(torch.cat(parts, -1), rule, sinks).to(v.dtype)
        by_row, by_block = weights.view(N * K * R, rep * W, -1), weights.view(N * K, R * rep * W, -1)
        out: Tensor | None = None
        for i, page in enumerate(pages):
            weight = (by_block if page.shared else by_row)[:, :, i * PAGE : (i + 1) * PAGE]
            part = torch.bmm(weight, page.values).view(N, K, R, rep, W, d)
            out = part if out is None else out + part  # summed page by page, so that a page of zeros changes no bit
        assert out is not None
        return out.permute(0, 2, 4, 1, 3, 5).reshape(S, W, H, d)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        """One token for every slot. States are updated in place, in the tensors into which a slot's next prefill writes too."""
        states = self.cache.states
        out, after = run(hidden, states.get(layer))
        if self.live_S is not None:
            before = states.get(layer) or after.map(torch.zeros_like)
            parked = [~self.live_S.view(-1, *[1] * (new.dim() - 1)) for new in after.tensors]
            for is_parked, new, old in zip(parked, after.tensors, before.tensors, strict=True):
                new[...] = torch.where(is_parked, old, new)
        if layer not in states:
            states[layer] = after  # no prompt had positions to store: every slot started from an empty state
        else:
            for stored, new in zip(states[layer].tensors, after.tensors, strict=True):
                stored.copy_(new)
        return out

    def _new_rows(self, heads: int) -> Tensor:
        """The row in the cache of each slot's new tokens, [S · K · W]; computed once per step."""
        if heads not in self._rows:
            R, device = self.cache.block_slots, self.at_SW.device
            slot_S11 = torch.arange(self.cache.slots, device=device)[:, None, None]
            head_K1, at_S1W = torch.arange(heads, device=device)[:, None], self.at_SW[:, None]
            page_S1W = at_S1W // PAGE * self.cache.blocks + slot_S11 // R
            row_SKW = (page_S1W * heads + head_K1) * R + slot_S11 % R
            self._rows[heads] = (row_SKW * PAGE + at_S1W % PAGE).flatten()
        return self._rows[heads]

    def _weights(self, scores: Tensor, rule: ScoreRule, sinks: Tensor | None) -> Tensor:
        bias = self._bias(rule.window, scores)
        if rule.softcap is None:
            return softmax_with_sinks(torch.add(bias, scores, alpha=rule.scale), sinks)
        return softmax_with_sinks(apply_softcap(scores * rule.scale, rule.softcap) + bias, sinks)

    def _bias(self, window: int | None, scores: Tensor) -> Tensor:
        """0 for visible keys and −inf for the others, [blocks, 1, R, 1, W, keys]; computed once per step and window."""
        if window not in self._masks:
            N, R, shared = self.cache.blocks, self.cache.block_slots, self.prompt_pages * PAGE
            place = torch.arange(shared + self.suffix_pages * PAGE, device=scores.device)
            length_S11 = self.prompt_length_S[:, None, None]
            at = torch.where(place < shared, place, place - shared + length_S11)  # positions, [S, 1, keys]
            stored = (place >= shared) | (place < length_S11)
            visible = stored & causal_mask(length_S11 + self.at_SW[:, :, None], at, window)
            bias = torch.where(visible, 0.0, -torch.inf).to(scores.dtype)
            self._masks[window] = bias.view(N, R, *bias.shape[1:])[:, None, :, None]
        return self._masks[window]
