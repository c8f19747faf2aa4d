"""Where keys and values live while completions are sampled, and how a prefill and a decode step attend to them.

The pool is cut into *blocks* of R slots that share one prompt: a block's prompt is stored once and read once for its R completions, each of which
owns only its suffix. Keys lie in pages of PAGE positions. Every matrix product has a fixed shape, and a page that a completion does not
reach adds exact zeros: what a completion gets does not depend on what else is in the pool.

Legend: ``S`` slots = ``N`` blocks × ``R``, ``K`` key heads, ``rep`` query heads per key head, ``d`` head size, ``E`` pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oncurve.models.attention import allowed, capped

PAGE = 64


class Pool:
    """Keys and values of every layer: prompts by block, suffixes by slot. A layer is allocated when it first speaks."""

    def __init__(self, blocks: int, rows: int, suffix_limit: int) -> None:
        self.blocks, self.rows, self.slots = blocks, rows, blocks * rows
        self.suffix_pages = -(-suffix_limit // PAGE)
        self._prompts: dict[int, list[Tensor]] = {}  # layer -> [k, v], each [E, N, K, PAGE, d]
        self._suffixes: dict[int, list[Tensor]] = {}  # layer -> [k, v], each [E, S, K, PAGE, d]

    def store_prompts(self, layer: int, blocks_n: Tensor, k: Tensor, v: Tensor) -> None:
        """Keys and values of n prompts, [n, K, tokens, d], into the given blocks."""
        pages = -(-k.shape[2] // PAGE)
        stored = self._prompts.get(layer) or [_pages(pages, self.blocks, x) for x in (k, v)]
        if stored[0].shape[0] < pages:
            stored = [torch.cat((x, x.new_zeros(pages - x.shape[0], *x.shape[1:]))) for x in stored]
        self._prompts[layer] = stored
        for pages_x, x in zip(stored, (k, v), strict=True):
            for page, start in enumerate(range(0, x.shape[2], PAGE)):
                piece = x[:, :, start : start + PAGE]
                pages_x[page, blocks_n, :, : piece.shape[2]] = piece

    def store_tokens(self, layer: int, where: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """One new position per slot, k and v of [S, K, d]; ``where`` is (page, slot, offset within the page), each [S]."""
        if layer not in self._suffixes:
            self._suffixes[layer] = [_pages(self.suffix_pages, self.slots, x.unsqueeze(2)) for x in (k, v)]
        page_S, slot_S, offset_S = where
        for pages_x, x in zip(self._suffixes[layer], (k, v), strict=True):
            pages_x[page_S, slot_S, :, offset_S] = x

    def prompt_pages(self, layer: int, pages: int) -> tuple[Tensor, Tensor]:
        """The first pages of every block's prompt, k and v of [E·N·K, PAGE, d]."""
        k, v = self._prompts[layer]
        return k[:pages].flatten(0, 2), v[:pages].flatten(0, 2)

    def suffix_pages_of(self, layer: int, pages: int) -> tuple[Tensor, Tensor]:
        """The first pages of every slot's suffix, k and v of [E·S·K, PAGE, d]."""
        k, v = self._suffixes[layer]
        return k[:pages].flatten(0, 2), v[:pages].flatten(0, 2)


def _pages(pages: int, owners: int, like: Tensor) -> Tensor:
    """Empty pages for tensors shaped like [n, K, tokens, d]."""
    return like.new_zeros(pages, owners, like.shape[1], PAGE, like.shape[3])


class PrefillLayout:
    """Prompts of one length bucket, padded at the end: causal attention, keys and values kept in the pool."""

    def __init__(self, pool: Pool, sources: Tensor, blocks: Tensor, positions: Tensor) -> None:
        self.pool, self.sources, self.blocks, self.positions = pool, sources, blocks, positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        self.pool.store_prompts(layer, self.blocks, k[self.sources], v[self.sources])
        rep = q.shape[1] // k.shape[1]
        mask = allowed(self.positions[:, None], self.positions[None, :], window)
        scores = capped(q @ k.repeat_interleave(rep, 1).transpose(-1, -2) * scale, softcap)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v.repeat_interleave(rep, 1)).transpose(1, 2)


class DecodeLayout:
    """One token per slot: it attends to its block's prompt and to its own suffix, the new token included.

    ``prompt_length_S`` counts stored prompt positions and ``suffix_length_S`` stored suffix positions before this token.
    """

    def __init__(self, pool: Pool, prompt_length_S: Tensor, suffix_length_S: Tensor, prompt_pages: int, suffix_pages: int) -> None:
        self.pool, self.prompt_pages, self.suffix_pages = pool, prompt_pages, suffix_pages
        slot_S = torch.arange(pool.slots, device=suffix_length_S.device)
        self.where = (suffix_length_S // PAGE, slot_S, suffix_length_S % PAGE)
        self.prompt_length_S, self.suffix_length_S = prompt_length_S, suffix_length_S
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        pool = self.pool
        pool.store_tokens(layer, self.where, k[:, :, 0], v[:, :, 0])
        S, H, _, d = q.shape
        K, R, N, EP, ES = k.shape[1], pool.rows, pool.blocks, self.prompt_pages, self.suffix_pages
        rep = H // K
        suffix_k, suffix_v = pool.suffix_pages_of(layer, ES)
        q_own = (q * scale).view(S * K, rep, d)
        own = torch.bmm(_for_each_page(q_own, ES), suffix_k.transpose(1, 2)).view(ES, S, K, rep, PAGE).permute(1, 2, 3, 0, 4)
        parts = [own.reshape(S, K, rep, ES * PAGE)]
        if EP:
            prompt_k, prompt_v = pool.prompt_pages(layer, EP)
            q_block = q_own.view(N, R, K, rep, d).transpose(1, 2).reshape(N * K, R * rep, d)
            shared = torch.bmm(_for_each_page(q_block, EP), prompt_k.transpose(1, 2)).view(EP, N, K, R, rep, PAGE)
            parts.insert(0, shared.permute(1, 3, 2, 4, 0, 5).reshape(S, K, rep, EP * PAGE))
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        weights = (capped(scores, softcap) + self._bias(window, scores)).softmax(-1, dtype=torch.float32).to(v.dtype)
        own_w = weights[..., EP * PAGE :].reshape(S, K, rep, ES, PAGE).permute(3, 0, 1, 2, 4).reshape(ES * S * K, rep, PAGE)
        out = _sum_pages(torch.bmm(own_w, suffix_v).view(ES, S, K, rep, d))
        if EP:
            block_w = weights[..., : EP * PAGE].reshape(N, R, K, rep, EP, PAGE).permute(4, 0, 2, 1, 3, 5)
            shared_out = torch.bmm(block_w.reshape(EP * N * K, R * rep, PAGE), prompt_v)
            out = out + _sum_pages(shared_out.view(EP, N, K, R, rep, d)).transpose(1, 2).reshape(S, K, rep, d)
        return out.reshape(S, 1, H, d)

    def _bias(self, window: int | None, scores: Tensor) -> Tensor:
        """0 where a key is seen and −inf where not, [S, 1, 1, keys]; made once per step and window."""
        if window not in self._masks:
            device = scores.device
            at = torch.cat((torch.arange(self.prompt_pages * PAGE, device=device).expand(self.pool.slots, -1),
                            torch.arange(self.suffix_pages * PAGE, device=device) + self.prompt_length_S[:, None]), 1)  # fmt: skip
            stored = torch.arange(at.shape[1], device=device) >= self.prompt_pages * PAGE
            stored = stored | (at < self.prompt_length_S[:, None])
            now = (self.prompt_length_S + self.suffix_length_S)[:, None]
            seen = stored & allowed(now, at, window)
            self._masks[window] = torch.where(seen, 0.0, -torch.inf).to(scores.dtype)[:, None, None]
        return self._masks[window]


def _for_each_page(q: Tensor, pages: int) -> Tensor:
    return q if pages == 1 else q.expand(pages, *q.shape).flatten(0, 1)


def _sum_pages(x: Tensor) -> Tensor:
    """Page after page, so that a page of zeros at the end changes no bit."""
    total = x[0]
    for page in x[1:]:
        total = total + page
    return total
