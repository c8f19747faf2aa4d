"""Attention within a pack on a GPU, by the kernels in oncurve/kernels/pack_attention.py and the block tables they read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oncurve.kernels import pack_attention as kernels
from oncurve.kernels.launch import gpu_of
from oncurve.kernels.pack_attention import AttentionRule, Tiling
from oncurve.models.attention_interface import ScoreRule
from oncurve.models.pack_attention import pack_groups
from oncurve.models.packing import to_device
from oncurve.models.recurrent_layers import RunLayer, recur_in_pack
from oncurve.records import Ints


class CudaPackAttention:
    """``prompts`` holds (start, length), ``completions`` (start, length, prompt index): contiguous, each after its prompt."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, int]],
        completions: Sequence[tuple[int, int, int]],
        position_N: Tensor,
        max_length: int,
    ) -> None:
        self.position_N, self.max_length = position_N, max_length
        self.groups = pack_groups(prompts, completions)
        group_end = np.array([start + length for start, length in prompts], np.int64)
        for start, length, p in completions:
            group_end[p] = max(group_end[p], start + length)
        # One row per segment (prompt or completion): start, end, start and end of its prompt (0, 0 for a prompt), and the end
        # of the queries that attend to it.
        rows = [(a, a + n, 0, 0, group_end[p]) for p, (a, n) in enumerate(prompts)]
        rows += [(a, a + n, prompts[p][0], sum(prompts[p]), a + n) for a, n, p in completions if n]
        self.segments = np.array(rows, np.int64)
        self._tables: dict[tuple[str, int], Tensor] = {}
        start, end, prompt, prompt_end, _ = self.segments.T
        self.mean_keys = float(np.average((end - start) / 2 + prompt_end - prompt, weights=end - start))
        """Keys that a query attends to, on average: chooses the tile sizes."""

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        return recur_in_pack(self.groups, hidden, run)

    def query_blocks(self, size: int) -> Tensor:
        """[blocks, 5]: first query, end and start of its segment, start and end of its prompt. Longest work first."""
        return self._table("queries", size)

    def key_blocks(self, size: int) -> Tensor:
        """[blocks, 3]: first key, end of its segment, end of the queries that attend to it. Longest work first."""
        return self._table("keys", size)

    def _table(self, kind: str, size: int) -> Tensor:
        if (kind, size) not in self._tables:
            start, end, prompt, prompt_end, last_query = self.segments.T
            segment, first = _split_into_blocks(start, end, size)
            columns: tuple[np.ndarray, ...]
            if kind == "queries":
                columns = (first, end[segment], start[segment], prompt[segment], prompt_end[segment])
                work = np.minimum(first + size, end[segment]) - start[segment] + prompt_end[segment] - prompt[segment]
            else:
                columns, work = (first, end[segment], last_query[segment]), last_query[segment] - first
            table = np.stack(columns, 1)[np.argsort(-work, kind="stable")].astype(np.int32)
            self._tables[kind, size] = to_device(table, self.position_N.device)
        return self._tables[kind, size]

    def _tiling(self, q: Tensor, *others: Tensor) -> Tiling:
        gpu = gpu_of(q.device)
        has_tma = gpu.is_hopper and kernels.can_use_tma(q, *others)
        return kernels.tiling(q.shape[-1], q.dtype, round(self.mean_keys), gpu, has_tma=has_tma)

    def rule(self, scale: float, window: int | None, softcap: float | None) -> AttentionRule:
        """A window wider than the longest sequence is dropped."""
        return AttentionRule(scale, None if window is None or window >= self.max_length else window, softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
        """(out, log-sum-exp) of q [N, H, d] and k, v [N, K, d]."""
        tiles = self._tiling(q, k, v)
        blocks = self.query_blocks(tiles.forward.queries)
        return kernels.forward(q, k, v, blocks, self.position_N, rule, tiles.forward, uses_tma=tiles.uses_tma)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, rule: AttentionRule,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Write the gradients of q, k and v into ``grads``."""
        tiles = self._tiling(q, k, v, d_out)
        queries = None if tiles.queries_backward is None else self.query_blocks(tiles.queries_backward.queries)
        keys = self.key_blocks(tiles.keys_backward.keys)
        kernels.backward(q, k, v, out, lse, d_out, grads, queries, keys, self.position_N, rule, tiles)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """As `AttentionContext` has it: [1, heads, N, d] in, [1, N, heads, d] out."""
        by_token = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = _Attention.apply(*by_token, rule.sinks_H, self, self.rule(rule.scale, rule.window, rule.softcap))  # type: ignore[no-untyped-call]
        return out[None]


class _Attention(torch.autograd.Function):
    """Attention in a pack, with its gradient. A sink is one more score in the softmax, and its value vector is 0: see
    `oncurve.models.pack_attention`."""

    @staticmethod
    def forward(ctx, q, k, v, sinks_H, pack: CudaPackAttention, rule: AttentionRule):  # type: ignore[no-untyped-def]
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = pack.forward(q, k, v, rule)
        if sinks_H is not None:
            with_sinks = torch.logaddexp2(lse, _in_log2(sinks_H))
            out, lse = (out * torch.exp2(lse - with_sinks).t()[..., None]).to(out.dtype), with_sinks
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pack, ctx.rule, ctx.sinks_H = pack, rule, sinks_H
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        d_out = d_out.contiguous()
        ctx.pack.backward(q, k, v, out, lse, d_out, ctx.rule, (dq, dk, dv))
        d_sinks = None
        if ctx.sinks_H is not None:
            weight_HN = torch.exp2(_in_log2(ctx.sinks_H) - lse)
            d_sinks = -(weight_HN * kernels.delta_of(out, d_out)).sum(1).to(ctx.sinks_H.dtype)
        return dq, dk, dv, d_sinks, None, None


def _in_log2(sinks_H: Tensor) -> Tensor:
    """The sinks as a column, in the kernels' units of log 2."""
    return sinks_H.float()[:, None] * math.log2(math.e)


def _split_into_blocks(start: Ints, end: Ints, size: int) -> tuple[Ints, Ints]:
    """Segments as blocks of ``size`` tokens: (segment of each block, its first token)."""
    counts = -(-(end - start) // size)
    segment = np.repeat(np.arange(len(start)), counts)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    return segment, start[segment] + number * size
