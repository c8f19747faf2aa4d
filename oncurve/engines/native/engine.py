"""The native engine: schedule, decode, collect, with the learner's own weights and continuous batching.

A group's prompt is prefilled once, all but its last token; that token opens every completion's suffix, so that the first
sampled token comes from a decode step like all others. Slots come in blocks of R that share a prompt; a block whose completions
have all ended is given to the next in the queue. Finished rows are noticed every ``check_every`` tokens.

Decoding runs at fixed shapes: S slots, whatever is queued. Prefill runs at the shape of the prompt's own length bucket. So on
one machine and setting a completion's tokens are bit-identical whatever else is queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from oncurve import kernels
from oncurve.engines.base import SampleKey, WeightSource, encode_prompts, slots_for
from oncurve.engines.native.c_decoder import can_decode
from oncurve.engines.native.kv_cache import PAGE, DecodeLayout, KVCache, PrefillLayout, slots_per_block
from oncurve.engines.native.sequence import ends_with_stop
from oncurve.engines.token_sampling import SampledTokens, sample_tokens
from oncurve.models.llama.c_build import load_library
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Bools, Completion, Group, Ints, Prompt, StopReason
from oncurve.rng import sampling_uniforms

if TYPE_CHECKING:
    from oncurve.engines.cuda.graph_decoder import GraphDecoder
    from oncurve.engines.cuda.scheduler import CudaSequence as GpuRow

BUCKET = 16
"""Prompts are prefilled at lengths rounded up to this."""
PREFILL_TOKENS = 1024
"""Prompts of one bucket are prefilled together up to about this many tokens."""

Tokens = list[list[int]]
Logps = list[list[tuple[float, float, float]]]
"""What was drawn, by decode step and slot."""


@dataclass
class Row:
    """One completion in the making. ``versions``: by which weights, from which token on."""

    group: int
    sample: int
    token_ids: list[int] = field(default_factory=list)
    logps: list[tuple[float, float, float]] = field(default_factory=list)
    stop: StopReason | None = None
    versions: dict[int, int] = field(default_factory=dict)

    @property
    def loss_mask(self) -> Bools:
        return np.ones(len(self.token_ids), bool)

    @property
    def text_ids(self) -> Ints:
        return np.asarray(self.token_ids[:-1] if self.stop == "end" else self.token_ids, np.int64)


@dataclass
class BlockRequest:
    """A block's worth of completions of one prompt, waiting or running."""

    group: int
    samples: range


class NativeEngine:
    """Samples groups of completions from a policy."""

    shares_weights = True
    """Whether a step's tokens are sampled with the very tensors that learn from them."""

    def __init__(self, policy: Policy, settings: EngineSettings) -> None:
        self.policy, self.settings = policy, settings
        self.weight_source: WeightSource | None = None

    @property
    def log_lines(self) -> tuple[str, ...]:
        """What a run's log should say of how it samples."""
        if self.policy.device.type == "cpu" and self.policy.fast_backbone is not None and load_library() is None:
            return ("no C compiler was found: torch decodes, several times slower for a small model",)
        if self.policy.device.type == "cuda" and not kernels.can_run_kernels(self.policy.device):
            return ("Triton is not installed: torch decodes, several times slower on a GPU",)
        return ()

    def close(self) -> None:
        """Gives back what the engine holds beside the policy; this one holds nothing."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: SampleKey,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """``group_size`` completions of each prompt, in order. ``on_group`` hears of each group as soon as it is whole."""
        prompt_ids = encode_prompts(self.policy, prompts, sampling)
        groups: dict[int, Group] = {}
        # Weights that are gathered on the way must be such that a gradient can go through them later.
        with torch.inference_mode(not self.policy.layer_by_layer), torch.no_grad():
            for part in split_by_environment(prompts):
                asked, ids_of = [prompts[g] for g in part], [prompt_ids[g] for g in part]
                for place, completions in self._completions(asked, ids_of, group_size, sampling, key):
                    g = part[place]
                    groups[g] = Group(prompts[g], prompt_ids[g], completions)
                    if on_group is not None:
                        on_group(g, groups[g])
        return [groups[g] for g in range(len(prompts))]

    def _completions(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Ints], group_size: int, how: Sampling, draws: SampleKey
    ) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        """Each group's number and completions, as soon as it is whole."""
        plain = all(prompt.environment is None for prompt in prompts)
        slots = slots_for(self, len(prompts) * group_size)
        if self.gpu is not None:
            from oncurve.engines.cuda.scheduler import CudaSampleRequest  # Triton is there only where a GPU is

            names = [prompt.id for prompt in prompts]
            self.gpu.exchange = self.weight_source
            told = () if plain else prompts
            yield from self.gpu.completions(
                CudaSampleRequest(prompt_ids, names, group_size, how, draws.seed, draws.step, told), slots
            )
            return
        rows = slots_per_block(group_size)
        pool = KVCache(max(1, slots // rows), rows, how.max_new_tokens)
        batch = self._batch_type(prompts, how)(self.policy, how, pool, draws, prompts, prompt_ids, group_size)
        batch.exchange = self.weight_source
        for g in batch.run(self.settings.check_every):
            yield g, tuple(completion_of(row, self.policy.decode(row.text_ids)) for row in batch.rows[g])

    @cached_property
    def gpu(self) -> GraphDecoder | None:
        """The engine of captured graphs and kernels, on a GPU that has Triton; None: plain torch decodes."""
        if self.policy.layer_by_layer or not kernels.can_run_kernels(self.policy.device):
            return None
        from oncurve.engines.cuda.graph_decoder import GraphDecoder

        return GraphDecoder.of(self.policy, self.settings)

    def _batch_type(self, prompts: Sequence[Prompt], how: Sampling) -> type[Scheduler]:
        """The one in which environments answer back, the compiled one where it can serve, or the plain one."""
        if any(prompt.environment is not None for prompt in prompts):
            from oncurve.engines.native.turns import TurnScheduler  # each of these builds on this file

            return TurnScheduler
        if can_decode(self.policy, how):
            from oncurve.engines.native.c_scheduler import CScheduler

            return CScheduler
        return Scheduler


def completion_of(row: Row | GpuRow, text: str) -> Completion:
    """A row that has ended, as a record."""
    assert row.stop is not None
    ids = np.asarray(row.token_ids, np.int64)
    logps, sampled, raw = np.ascontiguousarray(np.asarray(row.logps, np.float32).T)
    sampled = logps if np.array_equal(sampled, logps) else sampled
    raw = logps if np.array_equal(raw, logps) else raw
    versions = tuple((at, v) for at, v in row.versions.items() if at < len(ids)) or None
    return Completion(ids, text, row.stop, logps, sampled, raw, row.loss_mask, versions)


def split_by_environment(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The prompts' numbers, those with an environment apart from the others: they are decoded by other means, and what is
    queued beside a prompt must not change its bits."""
    parts = [[g for g, p in enumerate(prompts) if (p.environment is None) == plain] for plain in (True, False)]
    return [part for part in parts if part]


class Scheduler:
    """The state of one call of ``sample``: the queue, the slots, and what has been written.

    Serving (serving.py) drives the same machinery with settings that differ by group: it overrides how they are looked up.
    """

    prefill_tokens = PREFILL_TOKENS

    def __init__(
        self,
        policy: Policy,
        how: Sampling,
        pool: KVCache,
        draws: SampleKey,
        prompts: Sequence[Prompt],
        prompt_ids: Sequence[Ints],
        group_size: int,
    ) -> None:
        self.policy, self.how, self.pool, self.draws = policy, how, pool, draws
        self.head = policy.head
        self.prompts, self.prompt_ids = dict(enumerate(prompts)), dict(enumerate(prompt_ids))
        R, device = pool.rows, policy.device
        self.rows = {g: [Row(g, s) for s in range(group_size)] for g in range(len(prompts))}
        self.waiting = deque(BlockRequest(g, range(s, s + R)) for g in range(len(prompts)) for s in range(0, group_size, R))
        self.running: list[BlockRequest | None] = [None] * pool.blocks
        self.row_in: list[Row | None] = [None] * pool.slots
        self.token_S = torch.zeros(pool.slots, dtype=torch.long, device=device)
        self.prompt_length_S = torch.zeros(pool.slots, dtype=torch.long, device=device)
        self.suffix_length_S = torch.zeros(pool.slots, dtype=torch.long, device=device)
        self.uniform_ST = torch.zeros(pool.slots, how.max_new_tokens, dtype=torch.float64, device=device)
        self.slot_S = torch.arange(pool.slots, device=device)
        self.end_ids = torch.tensor(policy.eos_ids, device=device)
        self.exchange: WeightSource | None = None

    def run(self, check_every: int) -> Iterator[int]:
        """Decodes until nothing is left; yields the number of each group when its last completion has ended."""
        left = {g: len(rows) for g, rows in self.rows.items()}
        self._admit()
        while any(self.row_in):
            self._take_new_weights()
            for row in self._decode_round(check_every):
                left[row.group] -= 1
                if not left[row.group]:
                    yield row.group
            self._admit()

    def _take_new_weights(self) -> None:
        """Completions go on with them; keys and values that are there stay as the weights before made them."""
        if self.exchange is None:
            return
        if self.exchange():
            self._weights_changed()
        for slot, row in enumerate(self.row_in):
            if row is not None and self.exchange.version not in row.versions.values():
                row.versions[self._written(slot, row)] = self.exchange.version

    def _weights_changed(self) -> None:
        """For batches that hold weights in a form of their own."""

    def _written(self, slot: int, row: Row) -> int:
        return len(row.token_ids)

    def _admit(self) -> None:
        """Give free blocks to waiting jobs and prefill their prompts."""
        admitted: list[tuple[int, BlockRequest]] = []
        for block, job in enumerate(self.running):
            if job is None and self.waiting:
                new = self.waiting.popleft()
                self.running[block] = new
                admitted.append((block, new))
        if not admitted:
            return
        for block, job in admitted:
            self._assign_slot(block, job)
        self._prefill_all([(block, job.group) for block, job in admitted])

    def _assign_slot(self, block: int, job: BlockRequest) -> None:
        ids = self.prompt_ids[job.group]
        first = block * self.pool.rows
        slots = slice(first, first + self.pool.rows)
        self.token_S[slots] = int(ids[-1])
        self.prompt_length_S[slots] = len(ids) - 1
        self.suffix_length_S[slots] = 0
        prompt, count, draws = self.prompts[job.group].id, self.how_of(job.group).max_new_tokens, self.draws_of(job.group)
        numbers = [sampling_uniforms(draws.seed, draws.step, prompt, s, count) for s in job.samples]
        self.uniform_ST[slots, :count] = torch.from_numpy(np.stack(numbers)).to(self.uniform_ST.device)
        for offset, sample in enumerate(job.samples):
            self.row_in[first + offset] = self.rows[job.group][sample]

    def _prefill_all(self, seats: list[tuple[int, int]]) -> None:
        """Prompts, but for their last tokens, into the blocks they are seated at: (block, group)."""
        buckets: dict[int, list[tuple[int, int]]] = {}
        for block, group in seats:
            buckets.setdefault(-(-(len(self.prompt_ids[group]) - 1) // BUCKET) * BUCKET, []).append((block, group))
        for length, together in buckets.items():
            if length:
                self._prefill(length, together)

    def _prefill(self, length: int, seats: list[tuple[int, int]]) -> None:
        """Prompts of one bucket in batches of one shape: which prompts share a batch changes no bit of any."""
        size = max(1, self.prefill_tokens // length)
        groups = list(dict.fromkeys(g for _, g in seats))
        device = self.policy.device
        positions = torch.arange(length, device=device)
        for start in range(0, len(groups), size):
            chosen = groups[start : start + size]
            ids = np.zeros((size, length), np.int64)
            for i, g in enumerate(chosen):
                ids[i, : len(self.prompt_ids[g]) - 1] = self.prompt_ids[g][:-1]
            pairs = [(chosen.index(g), b) for b, g in seats if g in chosen]
            sources, blocks = (torch.tensor(x, device=device) for x in zip(*pairs, strict=True))
            layout = PrefillLayout(self.pool, sources, blocks, positions)
            self.policy.hidden(torch.from_numpy(ids).to(device), positions.expand(size, -1), layout)

    def _decode_round(self, steps: int) -> list[Row]:
        """So many tokens for every slot; returns the rows that ended."""
        return self._append_tokens([self._decode() for _ in range(steps)])

    def _decode(self) -> SampledTokens:
        """One token for every slot; free and finished slots decode too, and are not read."""
        at_S = self.suffix_length_S
        prompt_pages = -(-int(self.prompt_length_S.max()) // PAGE)
        suffix_pages = int(at_S.max()) // PAGE + 1
        layout = DecodeLayout(self.pool, self.prompt_length_S, at_S, prompt_pages, suffix_pages)
        hidden = self.policy.hidden(self.token_S[:, None], (self.prompt_length_S + at_S)[:, None], layout)[:, 0]
        drawn = self._draw(self.head.logits(hidden), at_S)
        self.token_S = drawn.token_S
        self.suffix_length_S = (at_S + 1).clamp(max=self.how.max_new_tokens - 1)
        return drawn

    def _draw(self, logits_SV: Tensor, at_S: Tensor) -> SampledTokens:
        return sample_tokens(logits_SV, self.uniform_ST[self.slot_S, at_S], self.how, self._barred(logits_SV, at_S, self.how))

    def _barred(self, logits_SV: Tensor, at_S: Tensor, how: Sampling) -> Tensor | None:
        """End tokens, where it is too early for one."""
        if not how.min_new_tokens:
            return None
        barred_SV = torch.zeros(logits_SV.shape, dtype=torch.bool, device=logits_SV.device)
        barred_SV[:, self.end_ids] = (at_S < how.min_new_tokens)[:, None]
        return barred_SV

    def how_of(self, group: int) -> Sampling:
        return self.how

    def draws_of(self, group: int) -> SampleKey:
        return self.draws

    def _append_tokens(self, drawn: list[SampledTokens]) -> list[Row]:
        """Hand the drawn tokens to their rows; returns the rows that ended, and frees the blocks whose rows all have."""
        ended = []
        token_CS = torch.stack([d.token_S for d in drawn]).tolist()
        logp_CS = torch.stack([torch.stack((d.logp_S, d.sampled_logp_S, d.raw_logp_S), -1) for d in drawn]).tolist()
        for slot, row in enumerate(self.row_in):
            if row is not None and self._append(slot, row, token_CS, logp_CS):
                self.row_in[slot] = None
                ended.append(row)
        self._free_blocks()
        return ended

    def _free_blocks(self) -> None:
        """Gives back the blocks whose rows have all ended."""
        R = self.pool.rows
        for block in range(self.pool.blocks):
            if not any(self.row_in[block * R : (block + 1) * R]):
                self.running[block] = None

    def _append(self, slot: int, row: Row, token_CS: Tokens, logp_CS: Logps) -> bool:
        """Hands a slot's tokens to its row, up to the row's end; whether that has come."""
        for token_S, logp_S in zip(token_CS, logp_CS, strict=True):
            row.token_ids.append(token_S[slot])
            row.logps.append(logp_S[slot])
            row.stop = self._stop_reason(row)
            if row.stop is not None:
                return True
        return False

    def _stop_reason(self, row: Row) -> StopReason | None:
        how = self.how_of(row.group)
        if row.token_ids[-1] in self.policy.eos_ids and len(row.token_ids) > how.min_new_tokens:
            return "end"
        if how.stop and self._says(row, how.stop):
            return "stop_string"
        return "length" if len(row.token_ids) == how.max_new_tokens else None

    def _says(self, row: Row, strings: Sequence[str]) -> bool:
        return ends_with_stop(self.policy, row.token_ids, strings)
