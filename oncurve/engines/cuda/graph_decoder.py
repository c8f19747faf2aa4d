"""Decode steps as CUDA graphs: a step is one graph launch, with no work for the host between steps.

A graph holds a complete decode step, sampling included, for one set of buffers, one `Sampling` and one `LaunchShape`. Graphs
are kept from call to call: weights change in place and the KV cache keeps its addresses, so a training run captures each once.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch

from oncurve.engines.base import MAX_EARLIER, SampleRequest
from oncurve.engines.cuda.decode_step import BufferSizes, DecodeBuffers, build_step, compare_steps, sample_step
from oncurve.engines.cuda.paged_kv_cache import KVShape, PagedKVCache, pages_for, shape_of
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.kernels.drafting import MAX_MATCH
from oncurve.models import experts, lora
from oncurve.models.experts import RoutingPass
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft, Sampling
from oncurve.recipe.schema.sections import Engine as EngineSettings

log = logging.getLogger("oncurve.engine")

TILE_ROWS = 32
"""Queries that a program of the attention kernel holds against a prompt: completions × query heads per KV head."""
TILE_ROWS_DRAFTED = 64
"""The same if completions have several rows."""


class GraphKey(NamedTuple):
    """What a graph was captured for. The sampling settings themselves are part of it: a setting can't be forgotten."""

    buffers: DecodeBuffers
    sampling: Sampling
    draft: Draft
    launch: LaunchShape


class GraphDecoder:
    """Runs decode steps, and keeps what lasts from call to call: the KV cache's addresses, the buffers and the captured graphs.

    Each combination of sizes, such as the number of slots, has its own buffers. Training and evaluation, whose groups differ in
    size, therefore don't replace each other's.
    """

    def __init__(self, policy: Policy, settings: EngineSettings, shape: KVShape) -> None:
        self.policy, self.settings, self.shape = policy, settings, shape
        self.cache = PagedKVCache(shape, policy.device)
        self.buffers_by_kind: dict[tuple[int, ...], DecodeBuffers] = {}
        self.buffers: DecodeBuffers | None = None
        self.graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self.graph_memory: Any = None
        self.addresses: tuple[int, ...] = ()
        # FSDP gathers weights to new addresses in each call, and a graph would read the old ones. And before each layer it lets
        # its own streams wait for the current one, which ends a capture.
        self.use_cuda_graphs = policy.device.type == "cuda" and not policy.is_sharded
        self.capture_oom = False  # whether this call had no memory to capture a step
        self.step = build_step(policy)

    @classmethod
    @torch.inference_mode()
    def build(cls, policy: Policy, settings: EngineSettings) -> Self | None:
        """The decoder for this policy; None, with a warning in the log, if the model's layers do not fit a paged KV cache."""
        shape = shape_of(policy)
        if isinstance(shape, str):
            log.warning("%s decodes with plain torch, which is slower: %s", type(policy.model).__name__, shape)
            return None
        if policy.fused_weights is not None and not compare_steps(policy, shape):
            reason = "its results differ from those of the model's modules"
            log.warning("%s: the fused decode step is not used, because %s", type(policy.model).__name__, reason)
            policy.fused_weights = None
        if policy.fast_backbone is None and policy.fused_weights is None:
            what = "adapter (DoRA, dropout, quantised weights or another family)" if lora.is_attached(policy.model) else "class"
            log.info("%s decodes through its own modules: no fused path for this %s", type(policy.model).__name__, what)
        return cls(policy, settings, replace(shape, is_fp8=settings.kv_dtype == "fp8"))

    def prepare(
        self, requests: Sequence[SampleRequest], slots: int, width: int = 1, *, records_routing: bool = False
    ) -> DecodeBuffers:
        """Open the KV cache for a call, find or make buffers that are large enough, and drop graphs with stale addresses.
        ``width``: rows of a slot."""
        follows_template = requests[0].prompt.history == "template"
        longest = max(request.longest_context for request in requests) - 1
        limit = requests[0].sampling.max_new_tokens
        forces = any(request.episodes or request.begun for request in requests)
        own = pages_for(limit)
        rep = self.shape.heads // self.shape.key_heads
        members = min(requests[0].samples, max(1, (TILE_ROWS if width == 1 else TILE_ROWS_DRAFTED) // (rep * width)))
        every = min(self.settings.check_every, limit)
        needed = BufferSizes(
            slots, members, bucket(max(1, pages_for(longest))), bucket(own), every, limit if forces else 0, width,
            experts=self.policy.experts_per_token if records_routing else 0,
        )  # fmt: skip
        if width > 1:
            sources = 1 + requests[0].samples + MAX_EARLIER
            texts, length = (1 << (n - 1).bit_length() for n in (len(requests) * sources, max(longest + 1, limit)))
            needed = replace(needed, texts=texts, text_width=MAX_MATCH + length, sources=sources)
        kind = (slots, members, every, int(forces), width, needed.sources, needed.experts)
        buffers = self.buffers_by_kind.get(kind)
        if buffers is None or not buffers.sizes.are_enough_for(needed):
            new = DecodeBuffers(needed, self.shape, self.policy.head.weight_VD.shape[0], self.policy.device)
            self._drop_graphs(buffers)
            self.buffers_by_kind[kind] = buffers = new
        self.buffers, self.capture_oom = buffers, False
        buffers.clear(self.policy.eos_ids)
        prompts = sum(pages_for(len(request.prompt_ids) - 1) for request in requests)
        most = prompts + slots * (own + (pages_for(longest) if follows_template else 0))
        self.cache.open(prompts + slots, most, self.settings.pool_share)
        self._check_addresses()
        return buffers

    def _check_addresses(self) -> None:
        """Drop all graphs if weights or the KV cache have moved: a graph would read the old addresses."""
        weights = self.policy.fast_backbone or self.policy.fused_weights
        if weights is not None and not weights.is_fused:  # the parameters were moved
            weights.fuse()
        addresses = (self.cache.data.data_ptr(), *(p.data_ptr() for p in self.policy.model.parameters()))
        if addresses != self.addresses:
            for buffers in self.buffers_by_kind.values():
                self._drop_graphs(buffers)
            self.addresses, self.step = addresses, build_step(self.policy)

    def _drop_graphs(self, buffers: DecodeBuffers | None) -> None:
        """Drop the graphs over these buffers. Graphs share a memory pool, which ends with the last of them."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if key.buffers is not buffers}
        if self.use_cuda_graphs and not self.graphs:
            self.graph_memory = torch.cuda.graph_pool_handle()

    def decode(self, launch: LaunchShape, sampling: Sampling, tokens: int) -> None:
        """``tokens`` steps for every slot."""
        graph = self._graph(launch, sampling) if self.use_cuda_graphs and not self.capture_oom else None
        for _ in range(tokens):
            if graph is None:
                self._step(launch, sampling)
            else:
                graph.replay()

    def _step(self, launch: LaunchShape, sampling: Sampling) -> None:
        assert self.buffers is not None
        routing = RoutingPass(fixed_shapes=True, records=bool(self.buffers.sizes.experts))
        with experts.routed(routing):
            hidden = self.step.hidden(self.buffers, self.cache.data, launch)
        if routing.records:
            self.buffers.store_routing(routing.chosen_NE)
        sample_step(self.policy.head, hidden, self.buffers, sampling, self.settings.draft)

    def _graph(self, launch: LaunchShape, sampling: Sampling) -> torch.cuda.CUDAGraph | None:
        """The step as a graph, captured when first needed. None if it can't be; if memory was short, the next call tries
        again."""
        assert self.buffers is not None
        key = GraphKey(self.buffers, sampling, self.settings.draft, launch)
        if key not in self.graphs:
            is_first = not any(known[:-1] == key[:-1] for known in self.graphs)
            if is_first:
                self._run_idle(launch, sampling)
            try:
                if is_first:
                    with refused_waits():
                        self._run_idle(launch, sampling)
                self.graphs[key] = self._capture(launch, sampling)
            except RuntimeError as error:
                torch.cuda.synchronize()
                self.capture_oom = isinstance(error, torch.OutOfMemoryError) or isinstance(
                    error.__context__, torch.OutOfMemoryError
                )
                self.use_cuda_graphs = self.capture_oom
                log.warning(
                    "%s decodes without CUDA graphs%s, which is slower: a step could not be captured (%s)",
                    type(self.policy.model).__name__,
                    " until memory is free" if self.capture_oom else "",
                    str(error).splitlines()[0],
                )
                return None
        return self.graphs[key]

    def _run_idle(self, launch: LaunchShape, sampling: Sampling) -> None:
        """One step with every slot idle: kernels are compiled, libraries make their plans, and nothing is written."""
        assert self.buffers is not None
        states = [self.buffers.tables.suffix_length]
        if self.buffers.drafts is not None:
            states.append(self.buffers.drafts.position)
        before = [state.clone() for state in states]
        for state in states:
            state.fill_(-1)
        try:
            self._step(launch, sampling)
        finally:
            for state, value in zip(states, before, strict=True):
                state.copy_(value)

    def _capture(self, launch: LaunchShape, sampling: Sampling) -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.capture_begin(pool=self.graph_memory, capture_error_mode="thread_local")
            try:
                self._step(launch, sampling)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph


@contextmanager
def refused_waits() -> Iterator[None]:
    """Within this context an operation that waits for the device raises RuntimeError, as it would during a capture. But a
    capture that fails leaves torch before 2.13 in a state in which it releases no cached memory any more."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def bucket(count: int) -> int:
    """Numbers up to 4 unchanged, others rounded up to the next of 6, 8, 12, 16, 24, 32 …: few graphs, and at most half of a
    launch does nothing."""
    if count <= 4:
        return count
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power
