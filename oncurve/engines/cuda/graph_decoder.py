"""The native engine on a GPU: one captured graph per token, nothing between the steps.

A graph holds a whole decode step, sampling included, for one *reach* (tables of members, pages of prompts and suffixes). Graphs
are kept from call to call: weights change in place, the pool keeps its addresses, and so a training run captures each once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Self

import torch

from oncurve.engines.base import WeightSource
from oncurve.engines.cuda.decode_step import BufferSizes, DecodeBuffers, sample_step, step_of
from oncurve.engines.cuda.paged_kv_cache import KVShape, PagedKVCache, pages_for, shape_of
from oncurve.engines.cuda.scheduler import CudaSampleRequest, CudaScheduler, bucket
from oncurve.engines.cuda.turns import CudaTurnScheduler
from oncurve.engines.native.engine import completion_of
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.models import lora
from oncurve.models.parallel.dtensor import is_dtensor
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Completion

log = logging.getLogger("oncurve.engine")

TILE_ROWS = 32
"""Most queries that a program of the attention kernel holds against a prompt: completions × query heads per key head."""


class GraphDecoder:
    """What lasts from call to call: the pool's addresses, the boards, the captured graphs.

    There is a board for each number of slots and members: training and evaluation, whose groups differ, keep theirs.
    """

    def __init__(self, policy: Policy, settings: EngineSettings, shape: KVShape) -> None:
        self.policy, self.settings, self.shape = policy, settings, shape
        self.pool = PagedKVCache(shape, policy.device)
        self.boards: dict[tuple[int, int, int, bool], DecodeBuffers] = {}
        self.board: DecodeBuffers | None = None
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self.memory: Any = None
        self.addresses: tuple[int, ...] = ()
        # Weights that are gathered for each call lie elsewhere in the next, and a graph reads where they were.
        self.by_graph = policy.device.type == "cuda" and not is_dtensor(next(policy.model.parameters()))
        self.crowded = False  # whether this call found no memory to capture a step
        self.step = step_of(policy)
        self.exchange: WeightSource | None = None

    @classmethod
    @torch.inference_mode()
    def of(cls, policy: Policy, settings: EngineSettings) -> Self | None:
        """The fast engine for this policy, or None (and the log says why) where its layers don't fit pages."""
        shape = shape_of(policy)
        if isinstance(shape, str):
            log.warning("%s decodes by plain torch: %s", type(policy.model).__name__, shape)
            return None
        if policy.fast_backbone is None:
            what = "adapter (DoRA, dropout, quantised weights or another family)" if lora.is_attached(policy.model) else "class"
            log.info("%s decodes through its own modules: no fused path for this %s", type(policy.model).__name__, what)
        return cls(policy, settings, shape)

    def prepare(self, ask: CudaSampleRequest, slots: int) -> tuple[DecodeBuffers, PagedKVCache]:
        """A board large enough for this call, room in the pool, and no graph that reads where nothing is any more."""
        longest = max(len(ids) - 1 for ids in ask.prompt_ids)
        own = pages_for(ask.how.max_new_tokens)
        rep = self.shape.heads // self.shape.key_heads
        members = min(ask.group_size, max(1, TILE_ROWS // rep))
        pages, every, given = bucket(max(1, pages_for(longest))), self.settings.check_every, len(ask.prompts) > 0
        needed = BufferSizes(slots, members, pages, bucket(own), every, ask.how.max_new_tokens if given else 0)
        kind = (slots, members, every, given)
        board = self.boards.get(kind)
        if board is None or not _holds(board.limits, needed):
            board = DecodeBuffers(needed, self.shape, self.policy.head.weight_VD.shape[0], self.policy.device)
            self._forget(self.boards.get(kind))
            self.boards[kind] = board
        self.board, self.crowded = board, False
        board.clear(self.policy.eos_ids)
        prompts = sum(pages_for(len(ids) - 1) for ids in ask.prompt_ids)
        self.pool.open(prompts + slots, prompts + slots * own, self.settings.pool_share)
        self._see_addresses()
        return board, self.pool

    def _see_addresses(self) -> None:
        """Where weights or the pool were moved, what was captured reads the old place."""
        assert self.pool.data is not None
        if self.policy.fast_backbone is not None and not self.policy.fast_backbone.blocks[0].qkv.is_fused:
            shape_of(self.policy)  # somebody moved the parameters: a forward pass lays them side by side again
        addresses = (self.pool.data.data_ptr(), *(p.data_ptr() for p in self.policy.model.parameters()))
        if addresses != self.addresses:
            for board in self.boards.values():
                self._forget(board)
            self.addresses, self.step = addresses, step_of(self.policy)

    def _forget(self, board: DecodeBuffers | None) -> None:
        """Drop what was captured for a board. Graphs share memory of their own, which ends with the last of them."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] is not board}
        if self.by_graph and not self.graphs:
            self.memory = torch.cuda.graph_pool_handle()

    def completions(self, ask: CudaSampleRequest, slots: int) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        """Each group's number and completions, as soon as it is whole; the texts of a round are decoded together."""
        batch = CudaTurnScheduler(self, ask, slots) if ask.prompts else CudaScheduler(self, ask, slots)
        for whole in batch.run():
            rows = [row for group in whole for row in batch.rows[group]]
            texts = iter(self.policy.decode_all([row.text_ids for row in rows]))
            for group in whole:
                yield group, tuple(completion_of(row, next(texts)) for row in batch.rows[group])

    def decode(self, reach: LaunchShape, how: Sampling, tokens: int) -> None:
        """``tokens`` steps for every slot."""
        graph = self._graph(reach, how) if self.by_graph and not self.crowded else None
        for _ in range(tokens):
            if graph is None:
                self._step(reach, how)
            else:
                graph.replay()

    def _step(self, reach: LaunchShape, how: Sampling) -> None:
        assert self.board is not None
        assert self.pool.data is not None
        hidden = self.step.hidden(self.board, self.pool.data, reach)
        sample_step(self.policy.head, hidden, self.board, how)

    def _graph(self, reach: LaunchShape, how: Sampling) -> torch.cuda.CUDAGraph | None:
        """The step for this reach as a graph, captured when first asked for; short of memory, the next call tries again."""
        key = (self.board, how.temperature, how.top_k, how.top_p, how.min_p, how.min_new_tokens, reach)
        if key not in self.graphs:
            if not any(known[:-1] == key[:-1] for known in self.graphs):
                self._warm(reach, how)
            try:
                self.graphs[key] = self._capture(reach, how)
            except RuntimeError as error:
                torch.cuda.synchronize()
                self.crowded = isinstance(error, torch.OutOfMemoryError) or isinstance(
                    error.__context__, torch.OutOfMemoryError
                )
                self.by_graph = self.crowded
                log.warning(
                    "%s decodes without CUDA graphs%s, and slower: a step can't be captured (%s)",
                    type(self.policy.model).__name__,
                    " until memory is free" if self.crowded else "",
                    str(error).splitlines()[0],
                )
                return None
        return self.graphs[key]

    def _warm(self, reach: LaunchShape, how: Sampling) -> None:
        """One step with every slot idle: kernels are compiled, libraries make their plans, and nothing is written."""
        assert self.board is not None
        kept = self.board.tables.suffix_length.clone()
        self.board.tables.suffix_length.fill_(-1)
        self._step(reach, how)
        self.board.tables.suffix_length.copy_(kept)

    def _capture(self, reach: LaunchShape, how: Sampling) -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
            try:
                self._step(reach, how)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph


def _holds(have: BufferSizes, needed: BufferSizes) -> bool:
    return all(x >= y for x, y in zip(_sizes(have), _sizes(needed), strict=True))


def _sizes(limits: BufferSizes) -> tuple[int, ...]:
    return limits.prompt_pages, limits.suffix_pages, limits.given
