"""Sessions on a GPU: the captured step with separate sampling settings for every slot.

Settings are stored on the device by slot and are read there by the sampling kernels (``kernels/sampling.py``), so that
one graph serves all requests. All slots are decoded at every step, idle or not: a completion with a seed has the same bits
whether it runs alone or with others. With few live slots the host reads after every token, with many after several.

With drafts a slot has several rows, which have its settings; drafts come from the request's prompt and its own text.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.base import PassCounts, SampleRequest
from oncurve.engines.cuda.decode_step import BufferSizes, DecodeBuffers, accept_rows, product_logits
from oncurve.engines.cuda.graph_decoder import TILE_ROWS, TILE_ROWS_DRAFTED, GraphDecoder
from oncurve.engines.cuda.paged_kv_cache import PagedPrefill, pages_for
from oncurve.engines.cuda.runner import CudaRunner
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.session import TOP
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.kernels.drafting import MAX_MATCH, DraftState
from oncurve.kernels.sampling import SamplingRule, SlotSamplingParams, sample_tokens_per_slot
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Ints

RING = 4
"""The maximum number of tokens in a round."""
PREFILL_TOKENS = 1024
"""Prompts of one bucket are prefilled together up to this many tokens: fewer than in training, as prompts often come singly.
Parts of a prompt after its first are prefilled in chunks of this many tokens."""
PROMPTS_AHEAD = 32
"""Prompts that are prefilled together, while running requests wait."""
SOURCES = 2
"""Texts of a slot in which drafts are looked for: the request's prompt, and its own text."""
FEW = 4
"""With up to this many live slots the host reads after every token; with up to RING times as many, after every second."""


class PerSlotGraphDecoder(GraphDecoder):
    """The captured step with sampling settings by slot."""

    params: SlotSamplingParams
    tops: tuple[Tensor, ...] = ()
    """With drafts, the likeliest tokens by position and slot, as rings; the last place of a ring takes those of idle rows."""
    slot_R: Tensor
    """With drafts, each row's slot."""

    def open(self, slots: int, max_new_tokens: int, width: int) -> DecodeBuffers:
        """Buffers for requests of any length that memory allows, and a KV cache that stays open. ``width``: rows of a slot."""
        prompt_pages, own = pages_for(self.policy.max_positions), pages_for(max_new_tokens)
        self.cache.open(slots, slots * (prompt_pages + own), self.settings.pool_share)
        rep = self.shape.heads // self.shape.key_heads
        members = max(1, (TILE_ROWS if width == 1 else TILE_ROWS_DRAFTED) // (rep * width))
        sizes = BufferSizes(slots, members, min(prompt_pages, self.cache.limit), own, RING, width=width)
        if width > 1:
            longest = max(self.policy.max_positions, max_new_tokens)
            sizes = replace(sizes, texts=SOURCES * slots, text_width=MAX_MATCH + longest, sources=SOURCES)
        self.buffers = DecodeBuffers(sizes, self.shape, self.policy.head.weight_VD.shape[0], self.policy.device)
        self.buffers.clear(self.policy.eos_ids)
        self.buffers_by_kind[(slots, members, RING, False, width, sizes.sources)] = self.buffers
        self.params = _default_params(slots * width, RING if width == 1 else 1, self.policy.device)
        if width > 1:
            self.tops = tuple(
                torch.zeros((RING * width + width + 1, slots, TOP), dtype=dtype, device=self.policy.device)
                for dtype in (torch.int32, torch.float32)
            )
            self.slot_R = torch.arange(slots, device=self.policy.device).repeat_interleave(width)
        self._check_addresses()
        return self.buffers

    def _step(self, launch: LaunchShape, sampling: Sampling) -> None:
        assert self.buffers is not None
        head, buffers = self.policy.head, self.buffers
        logits_SV = product_logits(head, self.step.hidden(buffers, self.cache.data, launch))
        rule, drafts = SamplingRule(scale=head.scale, softcap=head.softcap), buffers.drafts
        at_R = None if drafts is None else buffers.slots.suffix_length.long()
        sample_tokens_per_slot(logits_SV, buffers.slots, self.params, buffers.is_end_V, rule)
        if drafts is not None and at_R is not None:
            self._store_tops(at_R)
            accept_rows(buffers, drafts, own=True)

    def _store_tops(self, at_R: Tensor) -> None:
        """Every row's likeliest tokens at its position. Those of rows that are not accepted are overwritten later: a ring has
        room for the rows after the last position of a round."""
        for ring, rows in zip(self.tops, (self.params.top_ids, self.params.top_logps), strict=True):
            places, slots, most = ring.shape
            place_R = torch.where(at_R < 0, places - 1, at_R % (places - 1))
            ring.view(-1, most).index_copy_(0, place_R * slots + self.slot_R, rows[0])


def _default_params(rows: int, ring: int, device: torch.device) -> SlotSamplingParams:
    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    ones, zeros, counts = filled(1.0, torch.float32), filled(0.0, torch.float32), filled(0, torch.int32)
    rings = [torch.zeros((ring, rows, TOP), dtype=dtype, device=device) for dtype in (torch.int32, torch.float32)]
    return SlotSamplingParams(ones, ones.clone(), zeros, counts, counts.clone(), counts.clone(), *rings)


class PerSlotCudaRunner(CudaRunner):
    """Decodes slots that each have their own sampling settings.

    The prompt of a request that may be continued keeps its pages until others need them. A request that continues it takes
    them over, and only what is new is prefilled.
    """

    prompts_ahead = PROMPTS_AHEAD
    decoder: PerSlotGraphDecoder

    def __init__(self, decoder: PerSlotGraphDecoder, slots: int, max_new_tokens: int, width: int) -> None:
        super().__init__(decoder, decoder.open(slots, max_new_tokens, width), Sampling(max_new_tokens=max_new_tokens))
        self._new_params: dict[int, SampleRequest] = {}
        """By slot, a request whose settings are not on the device yet."""
        self._top_S = np.zeros(slots, np.int64)
        self._counts = PassCounts()
        self._in_parts: dict[int, tuple[SampleRequest, int]] = {}
        """By request number, a request that is prefilled part by part, and how many tokens of its prompt are done: all but the
        last of these are in its pages."""
        self._kept: dict[int, tuple[SampleRequest, list[int]]] = {}
        """By the number of a request that has ended, its prompt and the pages of it; the oldest first."""

    @property
    def counts(self) -> PassCounts:
        return super().counts + self._counts

    @classmethod
    @torch.inference_mode()
    def open(cls, policy: Policy, slots: int, max_new_tokens: int, width: int = 1) -> Self | None:
        """Build a runner and its decoder. Returns None, with a warning in the log, if the model's layers do not fit a paged KV
        cache."""
        decoder = PerSlotGraphDecoder.build(policy, EngineSettings())
        return None if decoder is None else cls(decoder, slots, max_new_tokens, width)

    def assign(self, slot: int, sequence: Sequence) -> None:
        super().assign(slot, sequence)
        self._new_params[slot], self._top_S[slot] = sequence.request, sequence.request.top

    def release(self, slot: int) -> None:
        super().release(slot)
        self._top_S[slot] = 0

    # Prompts that are kept.

    def can_admit(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        """Kept prompts make room for a request, the oldest first."""
        request = waiting[0].request
        needed = max(self.growth // 2, pages_for(len(request.prompt_ids) - 1)) + 1
        for number in [number for number, (kept, _) in self._kept.items() if not request.continues(kept)]:
            if self.cache.left > needed:
                break
            self._drop_kept(number)
        return super().can_admit(waiting, idle=idle)

    def _drop_kept(self, number: int) -> None:
        self.cache.free.extend(self._kept.pop(number)[1])

    def _drop_prompts(self) -> bool:
        if self._kept:
            self._drop_kept(next(iter(self._kept)))
            return True
        return super()._drop_prompts()

    def _take_prompt_pages(self, sequence: Sequence) -> list[int]:
        request = sequence.request
        if request.parts is None or self.buffers.states:  # decoding advances a recurrent state: the prompt's own is gone
            return super()._take_prompt_pages(sequence)
        continued = [number for number, (kept, _) in self._kept.items() if request.continues(kept)]
        longest = max(continued, key=lambda number: len(self._kept[number][0].prompt_ids), default=None)
        kept, pages = (None, []) if longest is None else self._kept.pop(longest)
        self._in_parts[sequence.group] = (request, 0 if kept is None else len(kept.prompt_ids))
        return pages + [self.cache.take() for _ in range(pages_for(len(request.prompt_ids) - 1) - len(pages))]

    def release_prompt(self, group: int) -> None:
        request, stored = self._in_parts.pop(group, (None, 0))
        if request is not None and stored == len(request.prompt_ids) and self.prompt_pages.get(group):
            self._kept[group] = (request, self.prompt_pages.pop(group))
        super().release_prompt(group)

    def _prefill_batch(self, batch: dict[int, Ints]) -> None:
        for group in [group for group in batch if group in self._in_parts]:
            self._prefill_parts(group, batch.pop(group), *self._in_parts[group])
        super()._prefill_batch(batch)

    def _prefill_parts(self, group: int, ids: Ints, request: SampleRequest, kept: int) -> None:
        """Prefill a prompt part by part, all but its last token. The first ``kept`` − 1 tokens are in its pages already."""
        stored = max(kept - 1, 0)
        self._counts += PassCounts(prefilled=len(ids) - 1 - stored, kept=stored)
        table = self._upload(np.array([self.prompt_pages[group] or [0]], np.int32))
        for end in (*(request.parts or ()), len(ids)):
            if end <= kept:
                continue
            if not stored:
                self._prefill_prompts({group: ids[:end]})
            for start in range(stored, end - 1, PREFILL_TOKENS) if stored else ():
                tokens = min(PREFILL_TOKENS, end - 1 - start)
                length_B = self._upload(np.array([start + tokens], np.int32))
                layout = PagedPrefill(self.cache.data, table, start, tokens, length_B, self.buffers.row_of_layer)
                inputs = self._upload(ids[None, start : start + tokens])
                self.policy.hidden(inputs, layout.positions[None, start:], layout)
            stored = end - 1
        self._in_parts[group] = (request, len(ids))

    def _text_rows(self, slot: int, sequence: Sequence) -> tuple[int, int]:
        return SOURCES * slot + 1, SOURCES * slot

    def _upload_prompts(self, drafts: DraftState) -> None:
        """Copies the prompts of new requests to the device, and each prompt's last tokens to the place before the slot's own
        text."""
        for slot, request in self._new_params.items():
            ids = request.prompt_ids
            texts = np.full((SOURCES, MAX_MATCH + len(ids)), -1, np.int32)
            texts[0, :MAX_MATCH], texts[0, MAX_MATCH:] = -2, ids  # -2 matches nothing
            last = ids[-MAX_MATCH:]
            texts[1, MAX_MATCH - len(last) : MAX_MATCH] = last
            rows = slice(SOURCES * slot, SOURCES * (slot + 1))
            drafts.texts[rows, : texts.shape[1]].copy_(self._upload(texts), non_blocking=True)
            drafts.text_length[SOURCES * slot] = len(ids)

    def _upload_state(self) -> None:
        if self._new_params:
            if self.buffers.drafts is not None:
                self._upload_prompts(self.buffers.drafts)
            params, requests = self.decoder.params, list(self._new_params.values())
            rows = np.array(list(self._new_params), np.int64)[:, None] * self.width + np.arange(self.width)
            slots = self._upload(rows.flatten())  # all rows of a slot have its settings
            settings = [request.sampling for request in requests]
            fractions = [(s.temperature, s.top_p, s.min_p) for s in settings]
            counts = [(r.sampling.top_k, r.sampling.min_new_tokens, r.top) for r in requests]
            floats, ints = self._upload(np.array(fractions, np.float32).T), self._upload(np.array(counts, np.int32).T)
            for target, values in zip((params.temperature, params.top_p, params.min_p), floats, strict=True):
                target.index_copy_(0, slots, values.repeat_interleave(self.width))
            for target, values in zip((params.top_k, params.min_tokens, params.top), ints, strict=True):
                target.index_copy_(0, slots, values.repeat_interleave(self.width))
            self._new_params = {}
        super()._upload_state()

    def _prefill_tokens(self) -> int:
        return PREFILL_TOKENS

    def round_tokens(self, live: int) -> int:
        return 1 if live <= FEW else 2 if live <= FEW * RING else RING

    def _outputs(self) -> tuple[Tensor, ...]:
        """What a round copies to the host; with the likeliest tokens if a running request asks for them."""
        params, tops = self.decoder.params, self.decoder.tops
        rings = tuple(ring[:-1] for ring in tops) if tops else (params.top_ids, params.top_logps)
        return (*super()._outputs(), *(rings if self._top_S.any() else ()))

    def _launch_shape(self) -> LaunchShape:
        """In very few sizes: every request waits while a graph is captured, and idle programs cost next to nothing."""
        sizes, groups = self.buffers.sizes, [group for group in self.table_group if group >= 0]
        used = max(table for table, group in enumerate(self.table_group) if group >= 0) + 1
        return LaunchShape(
            min(sizes.slots, _next_power(used, 4)),
            min(sizes.prompt_pages, _next_power(max(1, *(len(self.prompt_pages[group]) for group in groups)), 2)),
            min(sizes.suffix_pages, _next_power(max(map(len, self.own_pages)), 2)),
        )


def _next_power(number: int, base: int) -> int:
    """The smallest power of ``base`` that is not below ``number``."""
    power = 1
    while power < number:
        power *= base
    return power
