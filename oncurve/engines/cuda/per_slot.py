"""Sessions on a GPU: the captured step with separate sampling settings for every slot.

Settings are stored on the device by slot and are read there by the sampling kernels (``kernels/sampling.py``), so that
one graph serves all requests. All slots are decoded at every step, idle or not: a completion with a seed is the same bits alone
and in a crowd. With few live slots the host reads every token, with many every few.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.base import SampleRequest
from oncurve.engines.cuda.decode_step import BufferSizes, DecodeBuffers, product_logits
from oncurve.engines.cuda.graph_decoder import TILE_ROWS, GraphDecoder
from oncurve.engines.cuda.paged_kv_cache import pages_for
from oncurve.engines.cuda.runner import CudaRunner
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.session import TOP
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.kernels.sampling import SamplingRule, SlotSamplingParams, sample_tokens_per_slot
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling

RING = 4
"""The most tokens of a round."""
PREFILL_TOKENS = 1024
"""Prompts of one bucket are prefilled together up to this many tokens: fewer than in training, as prompts often come singly."""
PROMPTS_AHEAD = 32
"""Prompts that are prefilled together, while running requests wait."""
FEW = 4
"""With up to this many live slots the host reads every token; with up to RING times as many, every other."""


class PerSlotGraphDecoder(GraphDecoder):
    """The captured step with sampling settings by slot."""

    params: SlotSamplingParams

    def open(self, slots: int, max_new_tokens: int) -> DecodeBuffers:
        """Buffers for requests of any length that memory allows, and a KV cache that stays open."""
        prompt_pages, own = pages_for(self.policy.max_positions), pages_for(max_new_tokens)
        self.cache.open(slots, slots * (prompt_pages + own), self.settings.pool_share)
        members = max(1, TILE_ROWS // (self.shape.heads // self.shape.key_heads))
        sizes = BufferSizes(slots, members, min(prompt_pages, self.cache.limit), own, RING)
        self.buffers = DecodeBuffers(sizes, self.shape, self.policy.head.weight_VD.shape[0], self.policy.device)
        self.buffers.clear(self.policy.eos_ids)
        self.buffers_by_kind[(slots, members, RING, False)] = self.buffers
        self.params = _default_params(slots, self.policy.device)
        self._check_addresses()
        return self.buffers

    def _step(self, launch: LaunchShape, sampling: Sampling) -> None:
        assert self.buffers is not None
        head, buffers = self.policy.head, self.buffers
        logits_SV = product_logits(head, self.step.hidden(buffers, self.cache.data, launch))
        rule = SamplingRule(scale=head.scale, softcap=head.softcap)
        sample_tokens_per_slot(logits_SV, buffers.slots, self.params, buffers.is_end_V, rule)


def _default_params(slots: int, device: torch.device) -> SlotSamplingParams:
    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((slots,), value, dtype=dtype, device=device)

    ones, zeros, counts = filled(1.0, torch.float32), filled(0.0, torch.float32), filled(0, torch.int32)
    rings = [torch.zeros((RING, slots, TOP), dtype=dtype, device=device) for dtype in (torch.int32, torch.float32)]
    return SlotSamplingParams(ones, ones.clone(), zeros, counts, counts.clone(), counts.clone(), *rings)


class PerSlotCudaRunner(CudaRunner):
    """Decodes slots that each have their own sampling settings."""

    prompts_ahead = PROMPTS_AHEAD
    decoder: PerSlotGraphDecoder

    def __init__(self, decoder: PerSlotGraphDecoder, slots: int, max_new_tokens: int) -> None:
        super().__init__(decoder, decoder.open(slots, max_new_tokens), Sampling(max_new_tokens=max_new_tokens))
        self._new_params: dict[int, SampleRequest] = {}
        """By slot, a request whose settings are not on the device yet."""
        self._top_S = np.zeros(slots, np.int64)

    @classmethod
    @torch.inference_mode()
    def open(cls, policy: Policy, slots: int, max_new_tokens: int) -> Self | None:
        """None, with a warning in the log, if the model's layers do not fit a paged KV cache."""
        decoder = PerSlotGraphDecoder.build(policy, EngineSettings())
        return None if decoder is None else cls(decoder, slots, max_new_tokens)

    def assign(self, slot: int, sequence: Sequence) -> None:
        super().assign(slot, sequence)
        self._new_params[slot], self._top_S[slot] = sequence.request, sequence.request.top

    def release(self, slot: int) -> None:
        super().release(slot)
        self._top_S[slot] = 0

    def _upload_state(self) -> None:
        if self._new_params:
            params, requests = self.decoder.params, list(self._new_params.values())
            slots = self._upload(np.array(list(self._new_params), np.int64))
            settings = [request.sampling for request in requests]
            fractions = [(s.temperature, s.top_p, s.min_p) for s in settings]
            counts = [(r.sampling.top_k, r.sampling.min_new_tokens, r.top) for r in requests]
            floats, ints = self._upload(np.array(fractions, np.float32).T), self._upload(np.array(counts, np.int32).T)
            for target, values in zip((params.temperature, params.top_p, params.min_p), floats, strict=True):
                target.index_copy_(0, slots, values)
            for target, values in zip((params.top_k, params.min_tokens, params.top), ints, strict=True):
                target.index_copy_(0, slots, values)
            self._new_params = {}
        super()._upload_state()

    def _prefill_tokens(self) -> int:
        return PREFILL_TOKENS

    def round_tokens(self, live: int) -> int:
        return 1 if live <= FEW else 2 if live <= FEW * RING else RING

    def _outputs(self) -> tuple[Tensor, ...]:
        """The likeliest tokens too, if a running request asks for them."""
        params = self.decoder.params
        return (*super()._outputs(), *((params.top_ids, params.top_logps) if self._top_S.any() else ()))

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
