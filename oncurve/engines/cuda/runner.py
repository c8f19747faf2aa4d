"""Prefill and decode on a GPU: the page tables of every slot, and rounds of graph replays that run ahead of the host.

A slot whose sequence has ended takes the next in the queue, of any prompt. The device notices an end at once (the
slot goes idle), the host a round later. Which pages, which slot and which neighbours a sequence has changes none of its bits:
see ``kernels/decode_attention.py``.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.base import SampleRequest
from oncurve.engines.cuda.decode_step import DecodeBuffers
from oncurve.engines.cuda.graph_decoder import GraphDecoder, bucket
from oncurve.engines.cuda.paged_kv_cache import PAGE, PagedPrefill, PagedReply, pages_for
from oncurve.engines.native.scheduler import RoundResult, TopTokens
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.torch_runner import LONGEST_FORCED, prefilled_tokens
from oncurve.errors import ModelError
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.models.recurrent_layers import LayerState
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Floats, Ints
from oncurve.rng import signed_sampling_key

BUCKET = 64
"""Prompts are prefilled at lengths rounded up to this."""
PREFILL_TOKENS = 2048
"""Prompts of one bucket are prefilled together up to this many tokens, and longer ones in chunks of it."""
PREFILL_TOKENS_SMALL = 8192
"""The same for a model so small that the host takes longer to launch a pass than the GPU to compute it."""
SMALL = 1e9
"""The most parameters of such a model."""
PROMPTS_AHEAD = 64
"""Prompts at the head of the queue that are prefilled together."""


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """Copies of the rings that a round has written (tokens [C, S], log-probs [C, 3, S], perhaps the likeliest tokens), complete
    once the event has happened. A position p lies at p mod C."""

    rings: tuple[Tensor, ...]
    done: torch.cuda.Event | None

    @classmethod
    def start(cls, *rings: Tensor) -> DeviceRound:
        """Begin to copy to the host."""
        if rings[0].device.type != "cuda":
            return cls(tuple(ring.clone() for ring in rings), None)
        copies = tuple(torch.empty(ring.shape, dtype=ring.dtype, pin_memory=True) for ring in rings)
        for copy, ring in zip(copies, rings, strict=True):
            copy.copy_(ring, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return cls(copies, done)

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def read(self, slots_n: Ints, position_nC: Ints) -> tuple[Ints, Floats]:
        tokens, logps = self.rings[0].numpy(), self.rings[1].numpy()
        at = position_nC % len(tokens)
        return tokens[at, slots_n[:, None]], logps[at, :, slots_n[:, None]]

    def top(self, slot: int, position: int, most: int) -> TopTokens:
        ids, logps = (ring[position % len(ring), slot, :most].tolist() for ring in self.rings[2:])
        return tuple(zip(ids, logps, strict=True))


class CudaRunner:
    """Decodes all slots with the same sampling settings."""

    rounds_ahead = 1
    prompts_ahead = PROMPTS_AHEAD

    def __init__(self, decoder: GraphDecoder, buffers: DecodeBuffers, sampling: Sampling) -> None:
        self.decoder, self.policy, self.cache = decoder, decoder.policy, decoder.cache
        self.buffers, self.sampling = buffers, sampling
        sizes = buffers.sizes
        self.slots, self.max_new_tokens, S = sizes.slots, sampling.max_new_tokens, sizes.slots
        self.context = min(self.policy.max_positions, (self.cache.limit - 1) * PAGE)
        self.prompt_pages: dict[int, list[int]] = {}
        """By request number, the pages of a prompt that is prefilled, or about to be."""
        self.own_pages: list[list[int]] = [[] for _ in range(S)]
        self.page_limit = [0] * S
        self.growth = 0
        """Pages that the running sequences may still take."""
        self.members = np.full((S, sizes.members), -1, np.int32)
        self.table_of: list[int] = [-1] * S
        self.table_group: list[int] = [-1] * S
        self.prompt_page = np.zeros((S, sizes.prompt_pages), np.int32)
        self.suffix_page = np.zeros((S, sizes.suffix_pages), np.int32)
        self.prompt_states: dict[int, dict[int, LayerState]] = {}
        """By request number, the states of recurrent layers at the end of a prompt that is prefilled."""
        self._new_states: dict[int, list[int]] = {}
        """By request number, the slots whose states must be set to the prompt's."""
        self._replies: dict[int, tuple[int, int, int, list[int]]] = {}
        """By slot, inputs that the next round prefills: request number, prompt length, where in the suffix they start."""
        self._to_prefill: list[dict[int, Ints]] = []
        """Batches of prompts that have pages, by request number."""
        self._updates: dict[int, tuple[int, ...]] = {}
        """By slot: slot, token, prompt length, suffix length, limit and key, to be set on the device."""
        self._forced: dict[int, Ints] = {}
        """By slot, forced tokens to be set on the device."""
        self._tables_changed = False

    @classmethod
    def build(cls, decoder: GraphDecoder, requests: abc.Sequence[SampleRequest], slots: int) -> CudaRunner:
        return cls(decoder, decoder.prepare(requests, slots), requests[0].sampling)

    # Slots.

    def free_slots(self, running: abc.Sequence[Sequence | None]) -> list[int]:
        return [slot for slot, sequence in enumerate(running) if sequence is None]

    def can_admit(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        """As long as half of the pages that running sequences may still take stay free."""
        if not idle and self.cache.left <= self.growth // 2:
            return False
        return waiting[0].group in self.prompt_pages or self._reserve_prompts(waiting, idle=idle)

    def assign(self, slot: int, sequence: Sequence) -> None:
        request = sequence.request
        pages = self.prompt_pages[sequence.group]
        self.page_limit[slot] = pages_for(request.sampling.max_new_tokens)
        self.growth += self.page_limit[slot]
        table = self._table(sequence.group)
        self.table_of[slot], self.table_group[table] = table, sequence.group
        lane = int(np.flatnonzero(self.members[table] < 0)[0])
        self.members[table, lane] = slot
        self.prompt_page[table, : len(pages)] = pages
        self._set_slot(slot, sequence, 0, int(request.prompt_ids[-1]), ())
        self._new_states.setdefault(sequence.group, []).append(slot)
        self._tables_changed = True

    def resume(self, slot: int, sequence: Sequence, position: int, last_token: int, forced: abc.Sequence[int]) -> int:
        prefilled = prefilled_tokens(forced, LONGEST_FORCED)
        if prefilled:
            prompt = sequence.request.prompt_ids
            self._replies[slot] = (sequence.group, len(prompt) - 1, position, [last_token, *forced[: prefilled - 1]])
            last_token = forced[prefilled - 1]
        self._set_slot(slot, sequence, position + prefilled, last_token, forced[prefilled:])
        return prefilled

    def _set_slot(self, slot: int, sequence: Sequence, position: int, token: int, forced: abc.Sequence[int]) -> None:
        request = sequence.request
        key = signed_sampling_key(request.key.seed, request.key.step, request.prompt.id, sequence.sample)
        limit = request.sampling.max_new_tokens
        self._updates[slot] = (slot, token, len(request.prompt_ids) - 1, position, limit, key)
        if self.buffers.sizes.forced_tokens:
            self._forced[slot] = np.full(self.buffers.sizes.forced_tokens, -1, np.int64)
            self._forced[slot][position : position + len(forced)] = forced

    def _table(self, group: int) -> int:
        """A table of this group with a free lane, else the first unused one."""
        for table, of in enumerate(self.table_group):
            if of == group and (self.members[table] < 0).any():
                return table
        return self.table_group.index(-1)

    def release(self, slot: int) -> None:
        table = self.table_of[slot]
        self.members[table][self.members[table] == slot] = -1
        if (self.members[table] < 0).all():
            self.table_group[table] = -1
        self.growth -= self.page_limit[slot] - len(self.own_pages[slot])
        self.cache.free.extend(self.own_pages[slot])
        self.own_pages[slot] = []
        self._updates[slot] = (slot, 0, 0, -1, 0, 0)
        self._replies.pop(slot, None)
        self._tables_changed = True

    def release_prompt(self, group: int) -> None:
        self.cache.free.extend(self.prompt_pages.pop(group, ()))
        self.prompt_states.pop(group, None)

    def reserve(self, slot: int, tokens: int) -> bool:
        """Pages for a sequence of this many tokens, if need be those of prompts that were prefilled too early."""
        pages, needed = self.own_pages[slot], pages_for(tokens)
        while len(pages) < needed:
            if not self.cache.left and not self._drop_prompts():
                return False
            pages.append(self.cache.take())
            self.suffix_page[slot, len(pages) - 1] = pages[-1]
            self.growth -= 1
            self._tables_changed = True
        return True

    def no_room(self) -> ModelError:
        return ModelError(
            "engine.pool_share",
            f"{self.cache.limit} pages of {PAGE} tokens",
            because="one prompt with a completion of max_new_tokens does not fit into the memory that is free for the KV cache",
            fix="lower sampling.max_new_tokens, raise engine.pool_share, or free memory on this GPU",
        )

    def weights_changed(self) -> None:
        """Rounds in flight come before the change: both are in one stream."""

    def begin_to_close(self) -> None:
        self.cache.begin_to_close()

    def close(self) -> None:
        self.cache.close()

    # Prompts.

    def _reserve_prompts(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        """Pages for the first waiting prompt, and for those that come next; False if there are none now."""
        batch: dict[int, Ints] = {}
        spare = self.cache.left
        for sequence in waiting:
            needed = pages_for(len(sequence.request.prompt_ids) - 1)
            if sequence.group in self.prompt_pages or sequence.group in batch:
                continue
            if len(batch) == self.prompts_ahead or needed + 1 > spare or (batch and spare < self.cache.limit // 2):
                break
            batch[sequence.group] = sequence.request.prompt_ids
            spare -= needed
        if not batch:
            if idle and self._drop_prompts():
                return self._reserve_prompts(waiting, idle=idle)
            if idle:
                raise self.no_room()
            return False
        for group, ids in batch.items():
            self.prompt_pages[group] = [self.cache.take() for _ in range(pages_for(len(ids) - 1))]
        self._to_prefill.append(batch)
        return True

    def _drop_prompts(self) -> bool:
        """Free the pages of prompts that were prefilled ahead and that no slot reads yet; returns whether there were any."""
        idle = set(self.prompt_pages) - set(self.table_group)
        pages = [page for group in idle for page in self.prompt_pages.pop(group)]
        for group in idle:
            self.prompt_states.pop(group, None)
        self.cache.free.extend(pages)
        return bool(pages)

    def prefill(self) -> None:
        """Prompts of one bucket in batches of one shape: which prompts share a batch changes no bit."""
        most = self._prefill_tokens()
        for batch in self._to_prefill:
            buckets: dict[int, list[int]] = {}
            for group, ids in batch.items():
                buckets.setdefault(-(-(len(ids) - 1) // BUCKET) * BUCKET, []).append(group)
            for length, groups in buckets.items():
                size = max(1, most // max(length, 1))
                for start in range(0, len(groups) if length else 0, size):
                    self._prefill_bucket(length, size, {group: batch[group] for group in groups[start : start + size]})
        self._to_prefill = []

    def _prefill_tokens(self) -> int:
        """Tokens of a batch: one number for a model, as a batch of another shape would round differently."""
        parameters = sum(p.numel() for p in self.policy.model.parameters())
        return PREFILL_TOKENS if parameters > SMALL else PREFILL_TOKENS_SMALL

    def _prefill_bucket(self, length: int, size: int, prompts: abc.Mapping[int, Ints]) -> None:
        ids, table = np.zeros((size, length), np.int64), np.zeros((size, max(1, pages_for(length))), np.int32)
        lengths = np.zeros(size, np.int32)
        for i, (group, prompt_ids) in enumerate(prompts.items()):
            ids[i, : len(prompt_ids) - 1], lengths[i] = prompt_ids[:-1], len(prompt_ids) - 1
            table[i, : len(self.prompt_pages[group])] = self.prompt_pages[group]
        ids_BT, table_BP, length_B = (self._upload(x) for x in (ids, table, lengths))
        states = [(len(prompt_ids) - 1, self.prompt_states.setdefault(group, {})) for group, prompt_ids in prompts.items()]
        for start in range(0, length, PREFILL_TOKENS):
            tokens = min(PREFILL_TOKENS, length - start)
            rows = self.buffers.row_of_layer
            layout = PagedPrefill(self.cache.data, table_BP, start, tokens, length_B, rows, states)
            positions = layout.positions[start:].expand(size, -1)
            self.policy.hidden(ids_BT[:, start : start + tokens], positions, layout)

    def _prefill_replies(self) -> None:
        for slot, (group, prompt, start, inputs) in self._replies.items():
            of_prompt, own = (self._upload(np.array([x], np.int32)) for x in (self.prompt_pages[group], self.own_pages[slot]))
            layout = PagedReply(self.cache.data, of_prompt, own, prompt, start, len(inputs), self.buffers.row_of_layer)
            self.policy.hidden(self._upload(np.array([inputs], np.int64)), layout.positions[None, prompt + start :], layout)
        self._replies = {}

    # Rounds.

    def round_tokens(self, live: int) -> int:
        return self.buffers.sizes.ring

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        self._upload_state()
        self._prefill_replies()
        self.decoder.decode(self._launch_shape(), self.sampling, tokens)
        return DeviceRound.start(*self._outputs())

    def _outputs(self) -> tuple[Tensor, ...]:
        """The rings that the host reads after a round: tokens and log-probs first."""
        return self.buffers.slots.sampled, self.buffers.slots.logps

    def _launch_shape(self) -> LaunchShape:
        """What the running slots need, in few sizes. Suffix pages are listed if that saves a quarter of the programs or
        more."""
        used = [table for table, group in enumerate(self.table_group) if group >= 0]
        counts = [len(pages) for pages in self.own_pages]
        most, total = bucket(max(counts)), bucket(sum(counts))
        return LaunchShape(
            min(self.slots, bucket(used[-1] + 1)),
            bucket(max(len(self.prompt_pages[self.table_group[table]]) for table in used)),
            most,
            total if total <= self.slots * most * 3 // 4 else None,
        )

    def _upload_state(self) -> None:
        """Send the host's decisions to the device: slots assigned and released, forced tokens, tables of pages and members."""
        tables, slots = self.buffers.tables, self.buffers.slots
        self._start_states()
        if self._forced:
            at = self._upload(np.array(list(self._forced), np.int64))
            ids = self._upload(np.stack(list(self._forced.values())))
            slots.forced.index_copy_(0, at, ids.to(slots.forced.dtype))
            self._forced = {}
        if self._updates:
            new = self._upload(np.array(list(self._updates.values()), np.int64).T)
            for target, values in zip(
                (slots.token, tables.prompt_length, tables.suffix_length, slots.limit, slots.key), new[1:], strict=True
            ):
                target.index_copy_(0, new[0], values.to(target.dtype))
            self._updates = {}
        if self._tables_changed:
            for target, table in (
                (tables.members, self.members),
                (tables.prompt_page, self.prompt_page),
                (tables.suffix_page, self.suffix_page),
                (tables.suffix_list, self._suffix_list()),
            ):
                target.copy_(self._upload(table), non_blocking=True)
            self._tables_changed = False

    def _start_states(self) -> None:
        """Let new sequences start from their prompt's state, or from an empty one after a prompt of one token."""
        for group, slots in self._new_states.items():
            at, states = self._upload(np.array(slots, np.int64)), self.prompt_states.get(group, {})
            for layer, stored in self.buffers.states.items():
                if layer not in states:
                    for target in stored.tensors:
                        target.index_fill_(0, at, 0)
                    continue
                for target, start in zip(stored.tensors, states[layer].tensors, strict=True):
                    target.index_copy_(0, at, start.to(target.dtype).expand(len(slots), *start.shape[1:]))
        self._new_states = {}

    def _suffix_list(self) -> np.ndarray:
        """The suffix pages in use, first pages first: a slot's last page is its shortest."""
        width = self.suffix_page.shape[1]
        page, slot = np.nonzero(np.arange(width)[:, None] < np.array([len(pages) for pages in self.own_pages]))
        pages = np.full(self.suffix_page.size, -1, np.int32)
        pages[: len(slot)] = slot * width + page
        return pages

    def _upload(self, array: np.ndarray) -> Tensor:
        """To the device without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.cache.device.type != "cuda":
            return tensor.clone()
        return tensor.pin_memory().to(self.cache.device, non_blocking=True)
