"""The paged KV cache on a GPU, and how a prefill fills it.

A page holds PAGE positions of one prompt or of one suffix, for every layer: [pages, layers, 2, K, PAGE, d]. A group's prompt is
stored once, in pages that all its completions read; a completion owns only the pages of its suffix, taken as it grows.

With ``engine.kv_dtype = "fp8"`` pages hold bytes: FP8 numbers and their scales (see ``kernels/decode_attention.py``). A prefill
then attends to rounded keys and values too, those of the tokens that it computes included.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from oncurve.engines.cuda.virtual_memory import OutOfDeviceMemory, VirtualRange
from oncurve.engines.native.kv_cache import attend_by_scores, attend_to_stored, rounded_to_fp8
from oncurve.kernels.decode_layers import SCALE_BYTES, store
from oncurve.models.attention_interface import ScoreRule, causal_mask
from oncurve.models.device_memory import free_memory
from oncurve.models.policy import Policy
from oncurve.models.recurrent_layers import LayerState, RunLayer

log = logging.getLogger("oncurve.engine")

PAGE = 512
"""Positions of a page, which are the keys that one program of the attention kernel reads. Measured on an H200."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a layer's keys and values, the same for every layer with attention, and the states of recurrent layers."""

    attention_layers: tuple[int, ...]
    heads: int
    key_heads: int
    head_size: int
    dtype: torch.dtype
    states: Mapping[int, LayerState] = field(default_factory=dict)
    """By recurrent layer, the empty state of one sequence."""
    is_fp8: bool = False
    """Whether pages hold FP8 numbers with scales instead of ``dtype``."""

    @property
    def layers(self) -> int:
        """Layers of the KV cache."""
        return len(self.attention_layers)

    @property
    def row_of_layer(self) -> dict[int, int]:
        """By layer with attention, its place in the KV cache."""
        return {layer: row for row, layer in enumerate(self.attention_layers)}

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the cache's tensor."""
        return torch.uint8 if self.is_fp8 else self.dtype

    def pages_shape(self, pages: int) -> tuple[int, ...]:
        """The shape of the cache's tensor."""
        return (pages, self.layers, 2, self.key_heads, PAGE, self.head_size + (SCALE_BYTES if self.is_fp8 else 0))

    @property
    def page_bytes(self) -> int:
        return math.prod(self.pages_shape(1)) * self.stored_dtype.itemsize


class _ShapeProbe:
    """An attention context that records the shape of each layer's queries and keys or its state, and returns zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int, torch.dtype]] = {}
        self.states: dict[int, LayerState] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        self.shapes[layer] = (q.shape[1], k.shape[1], k.shape[3], k.dtype)
        return torch.zeros_like(q).transpose(1, 2)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        out, state = run(hidden, None)
        self.states[layer] = state.map(torch.zeros_like)
        return out


def shape_of(policy: Policy) -> KVShape | str:
    """The model's shape, found by one forward pass; or the reason why it does not fit a paged cache."""
    probe, ids = _ShapeProbe(), torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    policy.hidden(ids, ids, probe)
    shapes = set(probe.shapes.values())
    if not shapes:
        return "no layer has attention"
    if len(shapes) != 1:
        return f"layers of unequal heads ({len(shapes)} kinds)"
    return KVShape(tuple(sorted(probe.shapes)), *shapes.pop(), probe.states)


class PagedKVCache:
    """Pages on the device. ``open`` takes memory for a call of ``sample``, and ``close`` returns it for the learner."""

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.range: VirtualRange | None = None
        self._data: Tensor | None = None
        self.free: list[int] = []
        self.limit = self.mapped = 0
        self._closing: Future[None] | None = None
        if device.type == "cuda":
            try:
                self.range = VirtualRange(torch.cuda.get_device_properties(device).total_memory, device)
            except (OSError, RuntimeError, AttributeError) as error:
                log.warning("the KV cache keeps its memory between steps: addresses can't be reserved on this GPU (%s)", error)

    def open(self, first: int, most: int, share: float) -> None:
        """Take memory for ``first`` pages now and up to ``most`` later, but at most ``share`` of the free memory."""
        if self.device.type == "cuda":
            most = min(most, max(1, int(free_memory(self.device) * share) // self.shape.page_bytes))
        self.limit, self.mapped, self.free = most, 0, []
        if self.range is None:
            self._allocate(most)
        elif not self._map(min(first, most)):
            raise torch.OutOfMemoryError(f"no memory for {min(first, most)} pages of the KV cache")

    @property
    def data(self) -> Tensor:
        """The pages: [pages, layers, 2, K, PAGE, d], or [pages, layers, 2, K, PAGE, d + SCALE_BYTES] bytes with FP8."""
        assert self._data is not None, "the cache has not been opened"
        return self._data

    @property
    def left(self) -> int:
        """Pages that can still be taken."""
        return len(self.free) + self.limit - self.mapped

    def take(self) -> int:
        """Take a free page; pages are backed by memory as they are needed. ``left`` must not be 0."""
        if not self.free and not self._map(min(self.limit, self.mapped + max(16, self.mapped // 4))):
            raise torch.OutOfMemoryError("another process took the memory that was free when the KV cache was opened")
        return self.free.pop()

    def _map(self, pages: int) -> bool:
        """Map memory for this many pages in total. If there is not enough, torch's allocator releases its cached memory, and
        the mapping is tried again. Returns False if that fails too."""
        assert self.range is not None
        for attempt in range(2):
            try:
                self.range.grow(pages * self.shape.page_bytes)
                break
            except OutOfDeviceMemory:
                torch.cuda.empty_cache()
                if attempt:
                    return False
        if self._data is None:
            pages_in_range = self.range.size // self.shape.page_bytes
            self._data = self.range.tensor(self.shape.pages_shape(pages_in_range), self.shape.stored_dtype)
        self.free.extend(range(pages - 1, self.mapped - 1, -1))
        self.mapped = pages
        return True

    def _allocate(self, pages: int) -> None:
        if self._data is None or len(self._data) < pages:
            self._data = None
            self._data = torch.zeros(self.shape.pages_shape(pages), dtype=self.shape.stored_dtype, device=self.device)
        self.free, self.mapped = list(range(pages - 1, -1, -1)), pages

    def begin_to_close(self) -> None:
        """Start to close in a thread, as the driver takes some ms to unmap gigabytes. ``close`` must still be called."""
        if self.range is not None and self._closing is None:
            self._closing = self._thread.submit(self._release, self.range)

    def close(self) -> None:
        """Return the memory to the driver. The addresses stay reserved, so captured graphs stay valid."""
        self.begin_to_close()
        if self._closing is not None:
            closing, self._closing = self._closing, None
            closing.result()

    def _release(self, virtual_range: VirtualRange) -> None:
        torch.cuda.synchronize(virtual_range.location.id)  # by number: the current device of this thread may be another one
        virtual_range.release()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="oncurve-kv-cache")


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def _aligned(x: Tensor) -> Tensor:
    """x with rows that start at multiples of 16 bytes. Rows of v may start elsewhere: under LoRA they are in one tensor with
    the adapter's product, which is as wide as the rank (cuda_lora.py). Some of torch's attention kernels read 16 bytes at once
    without a check."""
    return x if all(step * x.itemsize % 16 == 0 for step in x.stride()[:-1]) else x.contiguous()


class PagedPrefill:
    """Causal attention of one chunk of B prompts, [B, tokens] from position ``start`` on: its tokens attend to the stored
    positions before the chunk and to the chunk itself.

    ``prompts`` holds each prompt's length, and its state in each recurrent layer, which the chunk advances.
    """

    def __init__(
        self,
        cache: Tensor,
        table_BP: Tensor,
        start: int,
        tokens: int,
        length_B: Tensor,
        row_of_layer: Mapping[int, int],
        prompts: Sequence[tuple[int, dict[int, LayerState]]] = (),
    ) -> None:
        self.cache, self.table_BP, self.start, self.length_B = cache, table_BP, start, length_B
        self.row_of_layer, self.prompts = row_of_layer, prompts
        self.start_B = torch.full_like(length_B, start)
        self.positions = torch.arange(start + tokens, device=cache.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        layer = self.row_of_layer[layer]
        k, v = _store_rounded(k, v, self.cache, layer, self.table_BP, self.start_B, self.length_B)
        sees_all = rule.window is None or rule.window >= len(self.positions)
        if rule.has_kernel and sees_all and not self.start:
            q, k, v = (_aligned(x) for x in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=True)
            return out.transpose(1, 2)
        if self.start:
            stored = _read_pages(self.cache, layer, self.table_BP, self.start, k.dtype)
            k, v = (torch.cat((x, y), 2) for x, y in zip(stored, (k, v), strict=True))
        mask = causal_mask(self.positions[self.start :, None], self.positions[None, :], rule.window)
        if not rule.has_kernel:
            return attend_by_scores(q, k, v, mask, rule)
        rep = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale).transpose(1, 2)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        """Runs prompt by prompt and without the padding, which would enter the state."""
        out = torch.zeros_like(hidden)
        for i, (length, states) in enumerate(self.prompts):
            tokens = min(length - self.start, hidden.shape[1])
            if tokens > 0:
                out[i : i + 1, :tokens], states[layer] = run(hidden[i : i + 1, :tokens], states.get(layer))
        return out


def _store_rounded(
    k: Tensor, v: Tensor, cache: Tensor, row: int, table_BP: Tensor, start_B: Tensor, length_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Store keys and values, and return them as the cache has them."""
    store(k, v, cache, row, table_BP, start_B, length_B)
    return (rounded_to_fp8(k), rounded_to_fp8(v)) if cache.dtype == torch.uint8 else (k, v)


def _read_pages(cache: Tensor, row: int, table_BP: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of the first ``length`` positions of these pages, [B, K, length, d]."""
    pages = cache[:, row][table_BP[:, : -(-length // PAGE)].long()]  # [B, pages, 2, K, PAGE, d]
    if cache.dtype == torch.uint8:
        d = cache.shape[5] - SCALE_BYTES
        rows = pages.flatten(4)
        codes, scales = rows[..., : PAGE * d], rows[..., PAGE * d :].contiguous().view(torch.float32)
        numbers = codes.reshape(*pages.shape[:5], d).view(torch.float8_e4m3fn).float()
        pages = (numbers * scales[..., None]).to(dtype)
    k, v = (pages[:, :, i].transpose(1, 2).flatten(2, 3)[:, :, :length] for i in (0, 1))
    return k, v


class PagedReply:
    """Attention of an environment's reply, n tokens of one slot: to the prompt, to the suffix before it and to itself."""

    def __init__(
        self,
        cache: Tensor,
        prompt_pages: Tensor,
        own_pages: Tensor,
        prompt_length: int,
        start: int,
        tokens: int,
        row_of_layer: Mapping[int, int],
    ) -> None:
        self.cache, self.prompt_pages, self.own_pages, self.row_of_layer = cache, prompt_pages, own_pages, row_of_layer
        self.prompt_length, self.start = prompt_length, start
        self.start_B = torch.full((1,), start, dtype=torch.int32, device=cache.device)
        self.end_B = self.start_B + tokens
        self.positions = torch.arange(prompt_length + start + tokens, device=cache.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        row = self.row_of_layer[layer]
        k, v = _store_rounded(k, v, self.cache, row, self.own_pages, self.start_B, self.end_B)
        prompt, suffix = (
            _read_pages(self.cache, row, pages, length, k.dtype)
            for pages, length in ((self.prompt_pages, self.prompt_length), (self.own_pages, self.start))
        )
        k, v = (torch.cat(parts, 2) for parts in zip(prompt, suffix, (k, v), strict=True))
        return attend_to_stored(q, k, v, rule)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        raise NotImplementedError("torch decodes a hybrid with an environment")
