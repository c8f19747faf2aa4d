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

from oncurve.engines.base import MAX_EARLIER, PassCounts, SampleRequest
from oncurve.engines.cuda.decode_step import DecodeBuffers
from oncurve.engines.cuda.graph_decoder import GraphDecoder, bucket
from oncurve.engines.cuda.paged_kv_cache import PAGE, PagedPrefill, PagedReply, pages_for
from oncurve.engines.native.scheduler import RoundResult, TopTokens
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.torch_runner import LONGEST_FORCED, prefilled_tokens
from oncurve.errors import ModelError
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.kernels.drafting import MAX_MATCH, DraftState
from oncurve.models import experts
from oncurve.models.experts import RoutingPass
from oncurve.models.recurrent_layers import LayerState
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Floats, Ints, Routing
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
    once the event has happened. A position p lies at p mod C. The round has sampled ``tokens`` for each slot, or with drafts as
    many as ``written`` says. ``experts`` is a ring like the others, [C, S, E], if experts are recorded; ``replies`` has those
    of replies that were prefilled: slot, first position, [n, E]."""

    tokens: int
    rings: tuple[Tensor, ...]
    written: Tensor | None
    experts: Tensor | None
    replies: tuple[tuple[int, int, Tensor], ...]
    done: torch.cuda.Event | None

    @classmethod
    def start(
        cls,
        tokens: int,
        rings: abc.Sequence[Tensor],
        written: Tensor | None = None,
        experts: Tensor | None = None,
        replies: abc.Sequence[tuple[int, int, Tensor]] = (),
    ) -> DeviceRound:
        """Begin to copy the tensors to host memory; `wait` returns when the copies are complete."""
        copies = tuple(_start_copy(ring) for ring in rings)
        written, experts = (None if x is None else _start_copy(x) for x in (written, experts))
        of_replies = tuple((slot, first, _start_copy(routing)) for slot, first, routing in replies)
        done = None
        if rings[0].device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return cls(tokens, copies, written, experts, of_replies, done)

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def read(self, slots_n: Ints, start_n: Ints) -> tuple[Ints, Floats, Ints]:
        tokens, logps = self.rings[0].numpy(), self.rings[1].numpy()
        count_n = np.full(len(slots_n), self.tokens) if self.written is None else self.written.numpy()[slots_n] - start_n
        at = (start_n[:, None] + np.arange(count_n.max())) % len(tokens)
        return tokens[at, slots_n[:, None]], logps[at, :, slots_n[:, None]], count_n

    def top(self, slot: int, position: int, most: int) -> TopTokens:
        ids, logps = (ring[position % len(ring), slot, :most].tolist() for ring in self.rings[2:4])
        return tuple(zip(ids, logps, strict=True))

    def routing(self, slots_n: Ints, start_n: Ints) -> Routing | None:
        if self.experts is None:
            return None
        at = (start_n[:, None] + np.arange(self.tokens)) % len(self.experts)
        routing_nCE: Routing = self.experts.numpy()[at, slots_n[:, None]]
        return routing_nCE

    def reply_routing(self) -> list[tuple[int, int, Routing]]:
        return [(slot, first, routing.numpy()) for slot, first, routing in self.replies]


def _start_copy(ring: Tensor) -> Tensor:
    if ring.device.type != "cuda":
        return ring.clone()
    copy = torch.empty(ring.shape, dtype=ring.dtype, pin_memory=True)
    return copy.copy_(ring, non_blocking=True)


class CudaRunner:
    """Decodes all slots with the same sampling settings."""

    rounds_ahead = 1
    can_constrain = False
    prefilling: abc.Collection[int] = ()
    prompts_ahead = PROMPTS_AHEAD

    def __init__(self, decoder: GraphDecoder, buffers: DecodeBuffers, sampling: Sampling) -> None:
        self.decoder, self.policy, self.cache = decoder, decoder.policy, decoder.cache
        self.buffers, self.sampling = buffers, sampling
        sizes = buffers.sizes
        self.width, self.sources, self.steps = sizes.width, sizes.sources, 0
        self.slots, self.max_new_tokens, S = sizes.slots, sampling.max_new_tokens, sizes.slots
        self.context = min(self.policy.max_positions, (self.cache.limit - 1) * PAGE)
        self.prompt_pages: dict[int, list[int]] = {}
        """By request number, the pages of a prompt that is prefilled, or about to be."""
        self.own_pages: list[list[int]] = [[] for _ in range(S)]
        self.page_limit = [0] * S
        self.prompt_length = [0] * S
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
        self._replies: dict[int, tuple[Sequence, int, list[int]]] = {}
        """By slot, a reply that the next round prefills: its sequence, where in the suffix it starts, and the token before it
        with its own."""
        self._to_prefill: list[dict[int, Ints]] = []
        """Batches of prompts that have pages, by request number."""
        self._updates: dict[int, tuple[int, ...]] = {}
        """By slot: slot, token, prompt length, suffix length, limit, key, rows of its texts and minimum length, to be set on
        the device."""
        self._forced: dict[int, Ints] = {}
        """By slot, forced tokens to be set on the device."""
        self._tables_changed = False
        self._prompt_routing: dict[int, list[Tensor]] = {}
        """By request number, the experts of a prompt's chunks, if they are recorded."""
        self._reply_routing: list[tuple[int, int, Tensor]] = []

    @classmethod
    def build(
        cls,
        decoder: GraphDecoder,
        requests: abc.Sequence[SampleRequest],
        slots: int,
        width: int = 1,
        *,
        records_routing: bool = False,
    ) -> CudaRunner:
        """``requests`` must be those that the scheduler gets, in their order; ``width``: rows of a slot."""
        buffers = decoder.prepare(requests, slots, width, records_routing=records_routing)
        runner = cls(decoder, buffers, requests[0].sampling)
        runner._upload_texts(requests)
        return runner

    @property
    def counts(self) -> PassCounts:
        drafts = self.buffers.drafts
        if drafts is None:
            return PassCounts()
        return PassCounts(self.steps * self.slots * self.width, *drafts.counts.sum(0).tolist())

    def _upload_texts(self, requests: abc.Sequence[SampleRequest]) -> None:
        """The texts in which drafts are looked for: by request its prompt, a row for each completion, and earlier answers."""
        drafts = self.buffers.drafts
        if drafts is None:
            return
        texts, lengths = np.full(tuple(drafts.texts.shape), -1, np.int32), np.zeros(len(drafts.texts), np.int32)
        for number, request in enumerate(requests):
            ids, first = request.prompt_ids, number * self.sources
            texts[first, :MAX_MATCH] = -2  # matches nothing
            texts[first, MAX_MATCH : MAX_MATCH + len(ids)], lengths[first] = ids, len(ids)
            last = ids[-MAX_MATCH:]
            texts[first + 1 : first + self.sources, MAX_MATCH - len(last) : MAX_MATCH] = last
            for row, answer in enumerate(request.earlier[:MAX_EARLIER], start=first + 1 + request.samples):
                lengths[row] = min(len(answer), texts.shape[1] - MAX_MATCH)
                texts[row, MAX_MATCH : MAX_MATCH + lengths[row]] = answer[: lengths[row]]
        drafts.texts.copy_(self._upload(texts))
        drafts.text_length.copy_(self._upload(lengths))

    # Slots.

    def free_slots(self, running: abc.Sequence[Sequence | None], waiting: abc.Sequence[Sequence]) -> list[int]:
        return [slot for slot, sequence in enumerate(running) if sequence is None]

    def can_admit(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        """True as long as half of the pages that running sequences may still take stay free."""
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

    def park(self, slot: int) -> None:
        """Make the slot idle. It stays a member of its table: the kernel reads a table's prompt length from any member."""
        self._set_idle(slot, self.prompt_length[slot])

    def _set_idle(self, slot: int, prompt_length: int = 0) -> None:
        self._updates[slot] = (slot, 0, prompt_length, -1, 0, 0, 0, 0, 0)
        self._replies.pop(slot, None)

    def resume(self, slot: int, sequence: Sequence, position: int, last_token: int, forced: abc.Sequence[int]) -> int:
        prefilled = prefilled_tokens(forced, LONGEST_FORCED)
        if prefilled:
            self._replies[slot] = (sequence, position, [last_token, *forced[:prefilled]])
            last_token = forced[prefilled - 1]
        self._set_slot(slot, sequence, position + prefilled, last_token, forced[prefilled:])
        return prefilled

    def _set_slot(self, slot: int, sequence: Sequence, position: int, token: int, forced: abc.Sequence[int]) -> None:
        request = sequence.request
        key = signed_sampling_key(request.key.seed, request.key.step, request.prompt.id, sequence.sample)
        limit, least = request.sampling.max_new_tokens, request.sampling.min_new_tokens
        self.prompt_length[slot] = len(request.prompt_ids) - 1
        texts = self._text_rows(slot, sequence)
        self._updates[slot] = (slot, token, self.prompt_length[slot], position, limit, key, *texts, least)
        if self.buffers.sizes.forced_tokens:
            self._forced[slot] = np.full(self.buffers.sizes.forced_tokens, -1, np.int64)
            self._forced[slot][position : position + len(forced)] = forced

    def _text_rows(self, slot: int, sequence: Sequence) -> tuple[int, int]:
        """Rows of the texts in which drafts are looked for: that of the slot's completion, and that of its prompt."""
        first = sequence.group * self.sources
        return first + 1 + sequence.sample - sequence.request.key.first, first

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
        self._set_idle(slot)
        self._tables_changed = True

    def release_prompt(self, group: int) -> None:
        self.cache.free.extend(self.prompt_pages.pop(group, ()))
        self.prompt_states.pop(group, None)

    def prompt_routing(self, group: int) -> Routing | None:
        if not self.buffers.sizes.experts:
            return None
        parts = self._prompt_routing.pop(group, [torch.zeros((0, self.buffers.sizes.experts), dtype=torch.int16)])
        routing: Routing = torch.cat(parts).cpu().numpy()
        return routing

    def reserve(self, slot: int, tokens: int) -> bool:
        """Take pages for a sequence of this many tokens, if necessary from prompts that were prefilled ahead."""
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
        """Nothing to do. Rounds in flight finish before the change, because both are in one stream."""

    def begin_to_close(self) -> None:
        self.cache.begin_to_close()

    def close(self) -> None:
        self.cache.close()

    # Prompts.

    def _reserve_prompts(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        """Reserve pages for the first waiting prompt and for the next ones; False if there are no pages for the first now."""
        batch: dict[int, Sequence] = {}
        spare = self.cache.left
        for sequence in waiting:
            needed = pages_for(len(sequence.request.prompt_ids) - 1)
            if sequence.group in self.prompt_pages or sequence.group in batch:
                continue
            if len(batch) == self.prompts_ahead or needed + 1 > spare or (batch and spare < self.cache.limit // 2):
                break
            batch[sequence.group] = sequence
            spare -= needed
        if not batch:
            if idle and self._drop_prompts():
                return self._reserve_prompts(waiting, idle=idle)
            if idle:
                raise self.no_room()
            return False
        for group, sequence in batch.items():
            self.prompt_pages[group] = self._take_prompt_pages(sequence)
        self._to_prefill.append({group: sequence.request.prompt_ids for group, sequence in batch.items()})
        return True

    def _take_prompt_pages(self, sequence: Sequence) -> list[int]:
        return [self.cache.take() for _ in range(pages_for(len(sequence.request.prompt_ids) - 1))]

    def _drop_prompts(self) -> bool:
        """Free the pages of prompts that were prefilled ahead and that no slot reads yet; returns whether there were any."""
        idle = set(self.prompt_pages) - set(self.table_group)
        pages = [page for group in idle for page in self.prompt_pages.pop(group)]
        for group in idle:
            self.prompt_states.pop(group, None)
        self.cache.free.extend(pages)
        return bool(pages)

    def prefill(self) -> None:
        batches, self._to_prefill = self._to_prefill, []  # cleared first: if a pass fails, a session continues
        for batch in batches:
            self._prefill_batch(batch)

    def _prefill_batch(self, batch: dict[int, Ints]) -> None:
        self._prefill_prompts(batch)

    def _prefill_prompts(self, prompts: abc.Mapping[int, Ints]) -> None:
        """Prompts of one bucket in batches of one shape: which prompts share a batch changes no bit."""
        buckets: dict[int, list[int]] = {}
        for group, ids in prompts.items():
            buckets.setdefault(-(-(len(ids) - 1) // BUCKET) * BUCKET, []).append(group)
        for length, groups in buckets.items():
            size = max(1, self._prefill_tokens() // max(length, 1))
            for start in range(0, len(groups) if length else 0, size):
                self._prefill_bucket(length, size, {group: prompts[group] for group in groups[start : start + size]})

    def _prefill_tokens(self) -> int:
        """Tokens of a batch: one number for a model, as a batch of another shape would round differently."""
        parameters = sum(p.numel() for p in self.policy.model.parameters())
        return PREFILL_TOKENS if parameters > SMALL else PREFILL_TOKENS_SMALL

    def _prefill_bucket(self, length: int, size: int, prompts: abc.Mapping[int, Ints]) -> None:
        ids, table = np.zeros((size, length), np.int64), np.zeros((size, max(1, pages_for(length))), np.int32)
        lengths = np.zeros(size, np.int32)
        for i, (group, prompt_ids) in enumerate(prompts.items()):
            ids[i, : len(prompt_ids) - 1], lengths[i] = prompt_ids[:-1], len(prompt_ids) - 1
            pages = self.prompt_pages[group][: table.shape[1]]
            table[i, : len(pages)] = pages
        ids_BT, table_BP, length_B = (self._upload(x) for x in (ids, table, lengths))
        states = [(len(prompt_ids) - 1, self.prompt_states.setdefault(group, {})) for group, prompt_ids in prompts.items()]
        for start in range(0, length, PREFILL_TOKENS):
            tokens = min(PREFILL_TOKENS, length - start)
            rows = self.buffers.row_of_layer
            layout = PagedPrefill(self.cache.data, table_BP, start, tokens, length_B, rows, states)
            positions = layout.positions[start:].expand(size, -1)
            routing_NE = self._run(ids_BT[:, start : start + tokens], positions, layout)
            if routing_NE is not None:
                for part, (group, prompt_ids) in zip(routing_NE.view(size, tokens, -1), prompts.items(), strict=False):
                    parts = self._prompt_routing[group] if start else self._prompt_routing.setdefault(group, [])
                    if not start:
                        parts.clear()
                    parts.append(part[: max(0, len(prompt_ids) - 1 - start)].clone())

    def _run(self, ids: Tensor, positions: Tensor, layout: PagedPrefill | PagedReply) -> Tensor | None:
        """A pass that stores its keys and values; returns its experts, [N, E], if they are recorded."""
        routing = RoutingPass(fixed_shapes=True, records=bool(self.buffers.sizes.experts))
        with experts.routed(routing):
            self.policy.hidden(ids, positions, layout)
        return routing.chosen_NE if routing.records else None

    def _prefill_replies(self) -> None:
        for slot, (sequence, start, tokens) in self._replies.items():
            pages, prompt = self.prompt_pages[sequence.group], self.prompt_length[slot]
            of_prompt, own = (self._upload(np.array([x], np.int32)) for x in (pages, self.own_pages[slot]))
            layout = PagedReply(self.cache.data, of_prompt, own, prompt, start, len(tokens) - 1, self.buffers.row_of_layer)
            ids = self._upload(np.array([tokens], np.int64))
            if self.buffers.drafts is not None:
                text = self.buffers.drafts.texts[self._text_rows(slot, sequence)[0], MAX_MATCH + start :]
                text[: len(tokens) - 1].copy_(ids[0, 1:])
            routing_NE = self._run(ids[:, :-1], layout.positions[None, prompt + start :], layout)
            if routing_NE is not None:
                self._reply_routing.append((slot, start, routing_NE))
        self._replies = {}

    # Rounds.

    def round_tokens(self, live: int) -> int:
        return self.buffers.sizes.ring

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        self._upload_state()
        self._prefill_replies()
        self.decoder.decode(self._launch_shape(), self.sampling, tokens)
        self.steps += tokens
        written = None if self.buffers.drafts is None else self.buffers.drafts.written
        routing = self.buffers.routing if self.buffers.sizes.experts else None
        replies, self._reply_routing = self._reply_routing, []
        return DeviceRound.start(tokens, self._outputs(), written, routing, replies)

    def _outputs(self) -> tuple[Tensor, ...]:
        """The rings that the host reads after a round: tokens and log-probs first."""
        rings = self.buffers.drafts or self.buffers.slots
        return rings.sampled, rings.logps

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
            forced = (self.buffers.drafts or slots).forced
            forced.index_copy_(0, at, ids.to(forced.dtype))
            self._forced = {}
        if self._updates:
            new = self._upload(np.array(list(self._updates.values()), np.int64).T)
            for target, values in zip(
                (slots.token, tables.prompt_length, tables.suffix_length, slots.limit, slots.key), new[1:6], strict=True
            ):
                rows = target.view(self.slots, self.width)  # all rows of a slot have its prompt, limit and key
                rows.index_copy_(0, new[0], values.to(target.dtype)[:, None].expand(-1, self.width))
            if self.buffers.drafts is not None:
                self._start_drafts(self.buffers.drafts, list(self._updates.values()))
            self._updates = {}
        if self._tables_changed:
            for target, table in (
                (tables.members, self.members),
                (tables.prompt_page, self.prompt_page),
                (tables.suffix_page, np.repeat(self.suffix_page, self.width, 0)),
                (tables.suffix_list, self._suffix_list()),
            ):
                target.copy_(self._upload(table), non_blocking=True)
            self._tables_changed = False

    def _start_drafts(self, drafts: DraftState, updates: list[tuple[int, ...]]) -> None:
        """A slot that was set has one row in its next step: nothing is drafted yet."""
        new = self._upload(np.array(updates, np.int64).T)
        slot, _, _, position, limit, _, text, first_text, least = new
        for target, values in (
            (drafts.position, position), (drafts.written, position), (drafts.limit, limit), (drafts.text, text),
            (drafts.first_text, first_text), (drafts.min_tokens, least),
        ):  # fmt: skip
            target.index_copy_(0, slot, values.to(target.dtype))
        drafts.draft.index_fill_(0, slot, -1)
        self.buffers.tables.suffix_length.view(self.slots, self.width)[:, 1:].index_fill_(0, slot, -1)
        running = np.array([update for update in updates if update[3] >= 0], np.int64)
        if len(running):
            own = self._upload(running[:, 6])
            drafts.text_length.index_copy_(0, own, self._upload(running[:, 3]).to(drafts.text_length.dtype))

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
        """Copies an array to the device without waiting."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.cache.device.type != "cuda":
            return tensor.clone()
        return tensor.pin_memory().to(self.cache.device, non_blocking=True)
