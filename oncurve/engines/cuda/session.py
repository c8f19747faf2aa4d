"""Serving on a GPU: the captured step, over slots that come and go, each with settings of its own.

The same queue, pages, rounds and prefill as in ``cuda_batch.py``. Settings lie on the device by slot and are read there by the
kernels that draw (``kernels/choosing.py``), so that one graph serves whatever is asked. All slots are decoded at every step,
idle or not: a completion with a seed is the same bits alone and in a crowd. Few slots taken: the host looks at every token;
many: at every few.

A completion that was sent back to the queue because the pool ran full starts again with the same numbers: what it has told
before comes out the same, and is not told twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.cuda.decode_step import BufferSizes, DecodeBuffers, products
from oncurve.engines.cuda.graph_decoder import TILE_ROWS, GraphDecoder
from oncurve.engines.cuda.paged_kv_cache import PAGE, PagedKVCache, pages_for
from oncurve.engines.cuda.scheduler import CudaSampleRequest as Call
from oncurve.engines.cuda.scheduler import CudaScheduler, CudaSequence, DecodeRound
from oncurve.engines.native.sequence import ends_with_stop
from oncurve.engines.native.session import NAME, TOP, SampledToken, SampleRequest
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.kernels.sampling import SamplingRule
from oncurve.kernels.sampling_per_slot import SlotSamplingParams, sample_tokens_per_slot
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import StopReason
from oncurve.rng import signed_sampling_key

RING = 4
"""Most tokens of a round."""
PREFILL_TOKENS = 1024
"""Prompts of one bucket are prefilled together up to this many tokens: fewer than in training, as one often comes alone."""
AHEAD = 32
"""Prompts that are prefilled together, while those who are served wait."""
FEW = 4
"""With up to so many slots taken the host looks at every token; with up to RING times as many, at every other."""


class ServingDecoder(GraphDecoder):
    """The captured step with settings by slot."""

    wishes: SlotSamplingParams

    def open(self, slots: int, limit: int) -> tuple[DecodeBuffers, PagedKVCache]:
        """A board for requests of any length that memory allows, and a pool that stays open."""
        whole, own = pages_for(self.policy.max_positions), pages_for(limit)
        self.pool.open(slots, slots * (whole + own), self.settings.pool_share)
        members = max(1, TILE_ROWS // (self.shape.heads // self.shape.key_heads))
        limits = BufferSizes(slots, members, min(whole, self.pool.limit), own, RING)
        self.board = DecodeBuffers(limits, self.shape, self.policy.head.weight_VD.shape[0], self.policy.device)
        self.board.clear(self.policy.eos_ids)
        self.boards[(slots, members, RING, False)] = self.board
        self.wishes = _empty_slot_params(slots, self.policy.device)
        self._see_addresses()
        return self.board, self.pool

    def _step(self, reach: LaunchShape, how: Sampling) -> None:
        assert self.board is not None
        assert self.pool.data is not None
        head, board = self.policy.head, self.board
        logits_SV = products(head, self.step.hidden(board, self.pool.data, reach))
        sample_tokens_per_slot(
            logits_SV, board.slots, self.wishes, board.is_end_V, SamplingRule(scale=head.scale, softcap=head.softcap)
        )


def _empty_slot_params(slots: int, device: torch.device) -> SlotSamplingParams:
    def filled(value: float, dtype: torch.dtype, *size: int) -> Tensor:
        return torch.full((*size, slots), value, dtype=dtype, device=device)

    one, none, no = filled(1.0, torch.float32), filled(0.0, torch.float32), filled(0, torch.int32)
    rings = [torch.zeros((RING, slots, TOP), dtype=dtype, device=device) for dtype in (torch.int32, torch.float32)]
    return SlotSamplingParams(one, one.clone(), none, no, no.clone(), no.clone(), *rings)


@dataclass(eq=False)
class ServedSequence(CudaSequence):
    """A completion in the making, as far as it is decoded; ``told`` tokens of it have been handed out."""

    ids: list[int] = field(default_factory=list)
    told: int = 0

    def start_again(self) -> None:
        super().start_again()
        self.ids = []


class CudaSession(CudaScheduler):
    """A session that captured graphs decode. ``context`` is what the model addresses and memory holds."""

    ahead = AHEAD
    sampler: ServingDecoder

    def __init__(self, sampler: ServingDecoder, slots: int, limit: int) -> None:
        super().__init__(sampler, Call((), (), 0, Sampling(max_new_tokens=limit), 0, 0), slots)
        self.limit, self.context = limit, min(sampler.policy.max_positions, (self.pool.limit - 1) * PAGE)
        self.asks: dict[int, SampleRequest] = {}
        self.wished: dict[int, SampleRequest] = {}
        """By slot, settings that the device has not been told of yet."""
        self.under_way: DecodeRound | None = None
        self._numbers = count()
        self._ends = frozenset(sampler.policy.eos_ids)

    @classmethod
    @torch.inference_mode()
    def over(cls, policy: Policy, slots: int, limit: int) -> CudaSession | None:
        """A session by captured graphs; None (and the log says why) where the model's layers don't fit pages."""
        sampler = ServingDecoder.of(policy, Engine())
        return None if sampler is None else cls(sampler, slots, limit)

    def warm(self) -> None:
        """Compile, capture and prefill once, so that nobody who asks waits for it."""
        self.submit(SampleRequest(np.zeros(2, np.int64), 1, Sampling(max_new_tokens=2), seed=0))
        while self.asks:
            self.step()

    def close(self) -> None:
        self.pool.close()

    def submit(self, ask: SampleRequest) -> int:
        number = next(self._numbers)
        self.asks[number], self.prompt_ids[number], self.missing[number] = ask, ask.prompt_ids, ask.samples
        self.rows[number] = [ServedSequence(number, sample) for sample in range(ask.samples)]
        self.waiting.extend(self.rows[number])
        return number

    def cancel(self, number: int) -> None:
        if number not in self.asks:
            return
        self.waiting = deque(row for row in self.waiting if row.group != number)
        for slot, row in enumerate(self.row_in):
            if row is not None and row.group == number:
                self._release_slot(slot)
        self._forget(number)

    @torch.inference_mode()
    def step(self) -> list[SampledToken]:
        """Seats what waits, sends the next round on its way, and tells what the one before has drawn."""
        self._admit()
        following = self._launch()
        told = [] if self.under_way is None else self._sampled_tokens(self.under_way)
        self.under_way = following
        return told

    def how_of(self, group: int) -> Sampling:
        return self.asks[group].how

    def key_of(self, row: CudaSequence) -> int:
        return signed_sampling_key(self.asks[row.group].seed, 0, NAME, row.sample)

    def _prepare(self, slots: int) -> tuple[DecodeBuffers, PagedKVCache]:
        return self.sampler.open(slots, self.how.max_new_tokens)

    def _assign_slot(self, slot: int, row: CudaSequence) -> None:
        super()._assign_slot(slot, row)
        self.wished[slot] = self.asks[row.group]

    def _upload_state(self) -> None:
        if self.wished:
            wishes, asks = self.sampler.wishes, list(self.wished.values())
            slots = self._send(np.array(list(self.wished), np.int64))
            shares = [(ask.how.temperature, ask.how.top_p, ask.how.min_p) for ask in asks]
            counts = [(ask.how.top_k, ask.how.min_new_tokens, ask.top) for ask in asks]
            floats, ints = self._send(np.array(shares, np.float32).T), self._send(np.array(counts, np.int32).T)
            for target, values in zip((wishes.temperature, wishes.top_p, wishes.min_p), floats, strict=True):
                target.index_copy_(0, slots, values)
            for target, values in zip((wishes.top_k, wishes.min_tokens, wishes.top), ints, strict=True):
                target.index_copy_(0, slots, values)
            self.wished.clear()
        super()._upload_state()

    def _prefill_tokens(self) -> int:
        return PREFILL_TOKENS

    def _round(self, live: int) -> int:
        return 1 if live <= FEW else 2 if live <= FEW * RING else RING

    def _outputs(self) -> tuple[Tensor, ...]:
        """The likeliest tokens too, where somebody asks for them."""
        asked = any(row is not None and self.asks[row.group].top for row in self.row_in)
        wishes = self.sampler.wishes
        return (*super()._outputs(), *((wishes.top_ids, wishes.top_logps) if asked else ()))

    def _reach(self) -> LaunchShape:
        """In very few sizes: a graph that is not there yet makes everybody wait, and idle programs cost next to nothing."""
        limits, used = self.board.limits, max(t for t, group in enumerate(self.table_group) if group >= 0) + 1
        prompts = max(len(self.prompt_ids[group]) - 1 for group in self.table_group if group >= 0)
        return LaunchShape(
            min(limits.slots, _power(used, 4)),
            min(limits.prompt_pages, _power(max(1, pages_for(prompts)), 2)),
            min(limits.suffix_pages, _power(max(map(len, self.own_pages)), 2)),
        )

    def _sampled_tokens(self, done: DecodeRound) -> list[SampledToken]:
        """What a round has drawn, of completions that are still seated."""
        done.wait()
        drawn, logps, tops = done.drawn.tolist(), done.logps[:, 2].tolist(), [x.numpy() for x in done.read[2:]]
        told: list[SampledToken] = []
        for slot in np.flatnonzero((done.age_S > 0) & (done.age_S == self.age_S)).tolist():
            row = self.row_in[slot]
            assert isinstance(row, ServedSequence)
            ask, first = self.asks[row.group], int(done.start_S[slot])
            for place in range(first, min(first + done.tokens, int(self.limit_S[slot]))):
                ring = place % RING
                row.ids.append(drawn[ring][slot])
                row.stop = self._why_stop(row, ask.how)
                if place == row.told:
                    row.told += 1
                    top = _pairs(tops, ring, slot, min(ask.top, len(self.is_end_V))) if ask.top else ()
                    told.append(SampledToken(row.group, row.sample, row.ids[-1], logps[ring][slot], top, row.stop))
                if row.stop is not None:
                    self._end_line(slot, row)
                    break
        return told

    def _why_stop(self, row: ServedSequence, how: Sampling) -> StopReason | None:
        if row.ids[-1] in self._ends and len(row.ids) > how.min_new_tokens:
            return "end"
        if how.stop and ends_with_stop(self.sampler.policy, row.ids, how.stop):
            return "stop_string"
        return "length" if len(row.ids) == how.max_new_tokens else None

    def _end_line(self, slot: int, row: ServedSequence) -> None:
        self._release_slot(slot)
        self.missing[row.group] -= 1
        if not self.missing[row.group]:
            self._forget(row.group)

    def _forget(self, number: int) -> None:
        self.pool.free.extend(self.prompt_pages.pop(number, ()))
        del self.asks[number], self.prompt_ids[number], self.rows[number], self.missing[number]


def _pairs(tops: list[np.ndarray], ring: int, slot: int, most: int) -> tuple[tuple[int, float], ...]:
    ids, logps = (x[ring, slot, :most].tolist() for x in tops)
    return tuple(zip(ids, logps, strict=True))


def _power(number: int, base: int) -> int:
    """The next power of a base."""
    found = 1
    while found < number:
        found *= base
    return found
