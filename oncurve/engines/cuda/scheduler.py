"""One call of ``sample`` on a GPU: the queue, the slots, the pages, and what has been written.

Completions sit in slots; a slot whose completion has ended is given to the next in the queue, whichever prompt it is of. The
host runs one round behind the device: while a round of C tokens is decoded, it reads what the round before has drawn, frees
and refills slots, and hands out pages. Ends are noticed on the device at once (the slot goes idle) and by the host a round
later.

Which pages a completion has, which slot and which neighbours, changes none of its bits: see ``kernels/attention.py``. Where
the pool is full, completions wait; where it runs full on the way, the youngest go back to the queue and start again with the
same numbers.

Legend: ``S`` slots, ``C`` tokens of a round.

A round of tokens under way on the device, and how the host reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.cuda.decode_step import DecodeBuffers
from oncurve.engines.cuda.paged_kv_cache import PAGE, PagedKVCache, PagedPrefill, pages_for
from oncurve.engines.native.sequence import ends_with_stop
from oncurve.errors import ModelError
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Bools, Floats, Ints, Prompt, StopReason
from oncurve.rng import signed_sampling_key

if TYPE_CHECKING:
    from oncurve.engines.cuda.graph_decoder import GraphDecoder


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """Who sat where (0: nobody), from which position on, how many tokens, and what will be read: tokens, log-probs, and
    whatever else a batch wants."""

    age_S: Ints
    start_S: Ints
    tokens: int
    read: tuple[Tensor, ...]
    done: torch.cuda.Event | None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    @property
    def drawn(self) -> np.ndarray:
        return self.read[0].numpy()

    @property
    def logps(self) -> np.ndarray:
        return self.read[1].numpy()


def read(*written: Tensor) -> tuple[tuple[Tensor, ...], torch.cuda.Event | None]:
    """Copies on the host, complete once the event has happened."""
    if written[0].device.type != "cuda":
        return tuple(x.clone() for x in written), None
    there = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in written)
    for to, x in zip(there, written, strict=True):
        to.copy_(x, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return there, done


BUCKET = 64
"""Prompts are prefilled at lengths rounded up to this."""
PREFILL_TOKENS = 2048
"""Prompts of one bucket are prefilled together up to this many tokens, and longer ones in chunks of it."""
PREFILL_TOKENS_SMALL = 8192
"""Prefilled together of a model so small that the host takes longer to launch a pass than the GPU to compute it."""
SMALL = 1e9
"""Parameters that such a model has at most."""
AHEAD = 64
"""Prompts of the queue that are prefilled together, the one that is due among them."""


@dataclass(eq=False)
class CudaSequence:
    """One completion in the making. ``logps`` is [T, 3]: scaled, as drawn from, and at temperature 1."""

    group: int
    sample: int
    token_ids: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    logps: Floats = field(default_factory=lambda: np.zeros((0, 3), np.float32))
    stop: StopReason | None = None
    versions: dict[int, int] = field(default_factory=dict)

    def start_again(self) -> None:
        """Back to the queue: what is known of it is forgotten."""
        self.versions = {}

    @property
    def loss_mask(self) -> Bools:
        return np.ones(len(self.token_ids), bool)

    @property
    def text_ids(self) -> Ints:
        return self.token_ids[:-1] if self.stop == "end" else self.token_ids


@dataclass(frozen=True, slots=True)
class CudaSampleRequest:
    """One call of ``sample``: prompts by group, and the key of each completion's random numbers. ``prompts`` are there where
    they have environments, which answer back."""

    prompt_ids: Sequence[Ints]
    prompt_names: Sequence[str]
    group_size: int
    how: Sampling
    seed: int
    step: int
    prompts: Sequence[Prompt] = ()

    def key(self, row: CudaSequence) -> int:
        return signed_sampling_key(self.seed, self.step, self.prompt_names[row.group], row.sample)


class CudaScheduler:
    """One call of ``sample``: the queue, the slots, the pages, and what has been written.

    Serving (cuda_serving.py) drives the same machinery with settings that differ by group: it overrides how they are looked up.
    """

    row_type = CudaSequence
    ahead = AHEAD

    def __init__(self, sampler: GraphDecoder, ask: CudaSampleRequest, slots: int) -> None:
        self.sampler, self.ask, self.how = sampler, ask, ask.how
        self.board, self.pool = self._prepare(slots)
        self.prompt_ids = dict(enumerate(ask.prompt_ids))
        self.rows = {g: [self.row_type(g, s) for s in range(ask.group_size)] for g in self.prompt_ids}
        self.waiting = deque(row for group in self.rows.values() for row in group)
        self.missing = dict.fromkeys(self.rows, ask.group_size)
        self.prompt_pages: dict[int, list[int]] = {}
        S, R, limit = slots, self.board.limits.members, ask.how.max_new_tokens
        self.row_in: list[CudaSequence | None] = [None] * S
        self.age_S, self.since_S = np.zeros(S, np.int64), np.zeros(S, np.int64)
        self.seated = 0
        self.own_pages: list[list[int]] = [[] for _ in range(S)]
        self.launched_S, self.limit_S = np.zeros(S, np.int64), np.zeros(S, np.int64)
        self.members = np.full((S, R), -1, np.int32)
        self.table_of: list[int] = [-1] * S
        self.table_group: list[int] = [-1] * S
        self.prompt_page = np.zeros((S, self.board.limits.prompt_pages), np.int32)
        self.suffix_page = np.zeros((S, self.board.limits.suffix_pages), np.int32)
        self.updates: dict[int, tuple[int, ...]] = {}
        self.changed = False
        self.token_ST: Ints = np.zeros((S, limit), np.int64)
        self.logp_ST3 = np.zeros((S, limit, 3), np.float32)
        self.is_end_V = np.zeros(len(self.board.is_end_V), bool)
        self.is_end_V[list(sampler.policy.eos_ids)] = True

    def _prepare(self, slots: int) -> tuple[DecodeBuffers, PagedKVCache]:
        return self.sampler.prepare(self.ask, slots)

    def how_of(self, group: int) -> Sampling:
        return self.how

    def key_of(self, row: CudaSequence) -> int:
        """The key of a completion's random numbers."""
        return self.ask.key(row)

    def run(self) -> Iterator[list[int]]:
        """Decodes until nothing is left; yields the groups whose last completion has ended, round by round."""
        try:
            under_way: DecodeRound | None = None
            self._admit()
            while under_way is not None or any(self.row_in):
                self._take_new_weights()
                following = self._launch()
                if under_way is not None:
                    whole = self._read_round(under_way)
                    if not self.waiting and not any(self.row_in):
                        self.pool.begin_to_close()  # while the last texts are decoded
                    if whole:
                        yield whole
                self._admit()
                under_way = following
        finally:
            self.pool.close()

    def _take_new_weights(self) -> None:
        """As in native.py. What is under way on the device comes before them: both are in one stream."""
        exchange = self.sampler.exchange
        if exchange is None:
            return
        exchange()
        for slot, row in enumerate(self.row_in):
            if row is not None and exchange.version not in row.versions.values():
                row.versions[int(self.launched_S[slot])] = exchange.version

    # Seats.

    def _admit(self) -> None:
        """Fill free slots from the queue, as long as half of what those under way may still need stays free."""
        free = deque(slot for slot, row in enumerate(self.row_in) if row is None)
        if not free or not self.waiting:
            return
        most = (-(-self.limit_S // PAGE)).tolist()
        growing = sum(
            own - len(pages) for row, pages, own in zip(self.row_in, self.own_pages, most, strict=True) if row is not None
        )
        while free and self.waiting and (self.pool.left > growing // 2 or len(free) == len(self.row_in)):
            row = self.waiting[0]
            if row.group not in self.prompt_pages and not self._prefill_due():
                break
            self._assign_slot(free.popleft(), self.waiting.popleft())
            growing += pages_for(self.how_of(row.group).max_new_tokens)

    def _assign_slot(self, slot: int, row: CudaSequence) -> None:
        ids, limit = self.prompt_ids[row.group], self.how_of(row.group).max_new_tokens
        self.row_in[slot], self.launched_S[slot], self.limit_S[slot] = row, 0, limit
        self.age_S[slot] = self.since_S[slot] = self.seated = self.seated + 1
        pages = self.prompt_pages[row.group]
        table = self._table(row.group)
        self.table_of[slot], self.table_group[table] = table, row.group
        lane = int(np.flatnonzero(self.members[table] < 0)[0])
        self.members[table, lane] = slot
        self.prompt_page[table, : len(pages)] = pages
        self.updates[slot] = (slot, int(ids[-1]), len(ids) - 1, 0, limit, self.key_of(row))
        self.changed = True

    def _table(self, group: int) -> int:
        """A table of this group with a lane free, else the first that nobody uses."""
        for table, of in enumerate(self.table_group):
            if of == group and (self.members[table] < 0).any():
                return table
        return self.table_group.index(-1)

    def _release_slot(self, slot: int) -> None:
        table = self.table_of[slot]
        self.members[table][self.members[table] == slot] = -1
        if (self.members[table] < 0).all():
            self.table_group[table] = -1
        self.pool.free.extend(self.own_pages[slot])
        self.own_pages[slot], self.row_in[slot], self.age_S[slot] = [], None, 0
        self.updates[slot] = (slot, 0, 0, -1, 0, 0)
        self.changed = True

    # Prompts.

    def _prefill_due(self) -> bool:
        """Prefill the prompt at the head of the queue, and with it those that come next; False where there are no pages."""
        chosen: list[int] = []
        spare = self.pool.left
        for row in self.waiting:
            needed = pages_for(len(self.prompt_ids[row.group]) - 1)
            if row.group in self.prompt_pages or row.group in chosen:
                continue
            if len(chosen) == self.ahead or needed + 1 > spare or (chosen and spare < self.pool.limit // 2):
                break
            chosen.append(row.group)
            spare -= needed
        if not chosen:
            if not any(self.row_in) and self._drop_prompts():
                return self._prefill_due()
            self._check_one_fits()
            return False
        buckets: dict[int, list[int]] = {}
        for group in chosen:
            tokens = len(self.prompt_ids[group]) - 1
            self.prompt_pages[group] = [self.pool.take() for _ in range(pages_for(tokens))]
            buckets.setdefault(-(-tokens // BUCKET) * BUCKET, []).append(group)
        most = self._prefill_tokens()
        for length, groups in buckets.items():
            size = max(1, most // max(length, 1))
            for start in range(0, len(groups) if length else 0, size):
                self._prefill(length, size, groups[start : start + size])
        return True

    def _prefill_tokens(self) -> int:
        """How many make a batch: one number for a model, as a batch of another shape would round differently."""
        parameters = sum(p.numel() for p in self.sampler.policy.model.parameters())
        return PREFILL_TOKENS if parameters > SMALL else PREFILL_TOKENS_SMALL

    def _prefill(self, length: int, size: int, groups: list[int]) -> None:
        """Prompts of one bucket in batches of one shape: which prompts share a batch changes no bit of any."""
        ids, table = np.zeros((size, length), np.int64), np.zeros((size, max(1, pages_for(length))), np.int32)
        lengths = np.zeros(size, np.int32)
        for i, g in enumerate(groups):
            own = self.prompt_ids[g]
            ids[i, : len(own) - 1], lengths[i] = own[:-1], len(own) - 1
            table[i, : len(self.prompt_pages[g])] = self.prompt_pages[g]
        ids_BT, table_BP, length_B = (self._send(x) for x in (ids, table, lengths))
        for start in range(0, length, PREFILL_TOKENS):
            tokens = min(PREFILL_TOKENS, length - start)
            layout = PagedPrefill(self._data, table_BP, start, tokens, length_B)
            positions = layout.positions[start:].expand(size, -1)
            self.sampler.policy.hidden(ids_BT[:, start : start + tokens], positions, layout)

    def _send(self, array: np.ndarray) -> Tensor:
        """To the device without waiting for it."""
        there = torch.from_numpy(np.ascontiguousarray(array))
        if self.pool.device.type != "cuda":
            return there.clone()
        return there.pin_memory().to(self.pool.device, non_blocking=True)

    @property
    def _data(self) -> Tensor:
        assert self.pool.data is not None
        return self.pool.data

    # Rounds.

    def _launch(self) -> DecodeRound | None:
        """Send the next round on its way."""
        live = [s for s, row in enumerate(self.row_in) if row is not None and self.launched_S[s] < self.limit_S[s]]
        if not live:
            return None
        tokens = min(self._round(len(live)), int((self.limit_S - self.launched_S)[live].max()))
        live = self._find_pages(live, tokens)
        self._upload_state()
        self.sampler.decode(self._reach(), self.how, tokens)
        start_S = self.launched_S.copy()
        self.launched_S[live] += tokens
        return DecodeRound(self.age_S.copy(), start_S, tokens, *read(*self._outputs()))

    def _round(self, live: int) -> int:
        """Tokens of a round with so many slots taken."""
        return self.sampler.settings.check_every

    def _outputs(self) -> tuple[Tensor, ...]:
        """What the host reads after a round: tokens and log-probs first."""
        return self.board.slots.drawn, self.board.slots.logps

    def _reach(self) -> LaunchShape:
        """What the seats taken need, in few sizes. Pages of suffixes are listed where that spares a quarter or more."""
        S, used = len(self.row_in), [t for t, group in enumerate(self.table_group) if group >= 0]
        counts = [len(pages) for pages in self.own_pages]
        most, there = bucket(max(counts)), bucket(sum(counts))
        return LaunchShape(
            min(S, bucket(used[-1] + 1)),
            bucket(max(pages_for(len(self.prompt_ids[g]) - 1) for g in self.table_group if g >= 0)),
            most,
            there if there <= S * most * 3 // 4 else None,
        )

    def _find_pages(self, live: list[int], tokens: int) -> list[int]:
        """A page for every completion that grows into its next; where there is none, the youngest start again later."""
        for slot in sorted(live, key=lambda s: self.since_S[s]):
            if self.row_in[slot] is None:
                continue
            needed = pages_for(min(int(self.launched_S[slot]) + tokens, int(self.limit_S[slot])))
            while len(self.own_pages[slot]) < needed and self.row_in[slot] is not None:
                if not self.pool.left and not self._drop_prompts():
                    self._preempt(max((s for s in live if self.row_in[s] is not None), key=lambda s: self.since_S[s]))
                    continue
                self.own_pages[slot].append(self.pool.take())
                self.suffix_page[slot, len(self.own_pages[slot]) - 1] = self.own_pages[slot][-1]
                self.changed = True
        return [s for s in live if self.row_in[s] is not None]

    def _drop_prompts(self) -> bool:
        """Give back the pages of prompts that were prefilled ahead and that nobody reads yet; True where there were any."""
        idle = set(self.prompt_pages) - set(self.table_group)
        found = [page for group in idle for page in self.prompt_pages.pop(group)]
        self.pool.free.extend(found)
        return bool(found)

    def _preempt(self, slot: int) -> None:
        row = self.row_in[slot]
        assert row is not None
        self._release_slot(slot)
        row.start_again()
        self.waiting.appendleft(row)
        self._check_one_fits()

    def _check_one_fits(self) -> None:
        if any(self.row_in):
            return
        raise ModelError(
            "engine.pool_share",
            f"{self.pool.limit} pages of {PAGE} tokens",
            because="not even one completion of max_new_tokens and its prompt fit the memory that is free for keys and values",
            fix="lower sampling.max_new_tokens, raise engine.pool_share, or free memory on this GPU",
        )

    def _upload_state(self) -> None:
        """What the host has decided, to the device: seats taken and left, tables of pages and members."""
        tables, slots = self.board.tables, self.board.slots
        if self.updates:
            new = self._send(np.array(list(self.updates.values()), np.int64).T)
            for target, values in zip(
                (slots.token, tables.prompt_length, tables.suffix_length, slots.limit, slots.key), new[1:], strict=True
            ):
                target.index_copy_(0, new[0], values.to(target.dtype))
            self.updates.clear()
        if self.changed:
            for target, own in (
                (tables.members, self.members),
                (tables.prompt_page, self.prompt_page),
                (tables.suffix_page, self.suffix_page),
                (tables.suffix_list, self._suffix_list()),
            ):
                target.copy_(self._send(own), non_blocking=True)
            self.changed = False

    def _suffix_list(self) -> np.ndarray:
        """The pages of suffixes that are there, first pages first: the last of a slot is the shortest."""
        width = self.suffix_page.shape[1]
        page, slot = np.nonzero(np.arange(width)[:, None] < np.array([len(pages) for pages in self.own_pages]))
        found = np.full(self.suffix_page.size, -1, np.int32)
        found[: len(slot)] = slot * width + page
        return found

    def _read_round(self, done: DecodeRound) -> list[int]:
        """Write down what a round has drawn; returns the groups that are whole now."""
        done.wait()
        slots = np.flatnonzero((done.age_S > 0) & (done.age_S == self.age_S))  # who has left since is not read
        if not len(slots):
            return []
        limit = self.how.max_new_tokens
        place = done.start_S[slots, None] + np.arange(done.tokens)  # [live, tokens]
        ring, within = place % len(done.drawn), place < limit
        token = done.drawn[ring, slots[:, None]]
        at = np.nonzero(within)
        self.token_ST[slots[at[0]], place[at]] = token[at]
        self.logp_ST3[slots[at[0]], place[at]] = done.logps[ring[at], :, slots[at[0]]]
        ended = self.is_end_V[token] & (place >= self.how.min_new_tokens) & within
        last = ended | (place == limit - 1)
        whole = []
        for i, slot in enumerate(slots.tolist()):
            row = self.row_in[slot]
            assert row is not None
            final = int(last[i].argmax()) if last[i].any() else None
            count = int(place[i, 0]) + (final + 1 if final is not None else done.tokens)
            stop: StopReason | None = None if final is None else "end" if ended[i, final] else "length"
            if self.how.stop:
                count, stop = self._stop_string(slot, int(place[i, 0]), count, stop)
            if stop is not None and self._end(slot, row, count, stop):
                whole.append(row.group)
        return whole

    def _end(self, slot: int, row: CudaSequence, count: int, stop: StopReason) -> bool:
        """Close a completion; True where its group is whole with it."""
        row.token_ids, row.logps, row.stop = self.token_ST[slot, :count].copy(), self.logp_ST3[slot, :count].copy(), stop
        self._release_slot(slot)
        self.missing[row.group] -= 1
        if self.missing[row.group]:
            return False
        self.pool.free.extend(self.prompt_pages.pop(row.group))
        return True

    def _stop_string(self, slot: int, start: int, count: int, stop: StopReason | None) -> tuple[int, StopReason | None]:
        """Where the first stop string is complete, if that is before the completion's end."""
        for n in range(start + 1, count + (stop != "end")):
            if ends_with_stop(self.sampler.policy, self.token_ST[slot, :n], self.how.stop):
                return n, "stop_string"
        return count, stop


def bucket(count: int) -> int:
    """Up to 4 as it is, then the next of 6, 8, 12, 16, 24, 32 …: few graphs, at most half of a launch in vain."""
    if count <= 4:
        return count
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power
