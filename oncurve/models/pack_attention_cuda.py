"""The layout of a pack on a GPU: attention by the kernels in kernels/attention.py, and the tables that they walk by.

Legend: ``N`` input tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oncurve.kernels import pack_attention as kernels
from oncurve.kernels.pack_attention import AttentionRule, Tiling
from oncurve.models.packing import to_device
from oncurve.records import Ints


class CudaPackAttention:
    """``prompts`` are (start, length), ``completions`` (start, length, prompt): contiguous, each after its prompt."""

    def __init__(
        self, prompts: Sequence[tuple[int, int]], completions: Sequence[tuple[int, int, int]], position_N: Tensor, longest: int
    ) -> None:
        self.position_N, self.longest = position_N, longest
        group_end = np.array([start + length for start, length in prompts], np.int64)
        for start, length, p in completions:
            group_end[p] = max(group_end[p], start + length)
        # A row for each prompt and completion: start, end, its prompt's start and end (0, 0 for a prompt), end of its queries.
        rows = [(a, a + n, 0, 0, group_end[p]) for p, (a, n) in enumerate(prompts)]
        rows += [(a, a + n, prompts[p][0], sum(prompts[p]), a + n) for a, n, p in completions if n]
        self.segments = np.array(rows, np.int64)
        self._tables: dict[tuple[str, int], Tensor] = {}
        start, end, prompt, prompt_end, _ = self.segments.T
        self.keys = float(np.average((end - start) / 2 + prompt_end - prompt, weights=end - start))

    def query_blocks(self, size: int) -> Tensor:
        """[blocks, 5]: first query, end and start of its segment, start and end of its prompt; the longest work first."""
        return self._table("queries", size)

    def key_blocks(self, size: int) -> Tensor:
        """[blocks, 3]: first key, end of its segment, end of the queries that see it; the longest work first."""
        return self._table("keys", size)

    def _table(self, kind: str, size: int) -> Tensor:
        if (kind, size) not in self._tables:
            start, end, prompt, prompt_end, last = self.segments.T
            of, first = _blocks(start, end, size)
            columns: tuple[np.ndarray, ...]
            if kind == "queries":
                columns = (first, end[of], start[of], prompt[of], prompt_end[of])
                work = np.minimum(first + size, end[of]) - start[of] + prompt_end[of] - prompt[of]
            else:
                columns, work = (first, end[of], last[of]), last[of] - first
            table = np.stack(columns, 1)[np.argsort(-work, kind="stable")].astype(np.int32)
            self._tables[kind, size] = to_device(table, self.position_N.device)
        return self._tables[kind, size]

    def _tiling(self, q: Tensor) -> Tiling:
        return kernels.tiling(q.shape[-1], q.dtype, round(self.keys))

    def rule(self, scale: float, window: int | None, softcap: float | None) -> AttentionRule:
        """A window wider than the longest sequence is none."""
        return AttentionRule(scale, None if window is None or window >= self.longest else window, softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
        """(out, log-sum-exp) of q [N, H, d] and k, v [N, K, d]."""
        tiles = self._tiling(q).forward
        return kernels.forward(q, k, v, self.query_blocks(tiles.queries), self.position_N, rule, tiles)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, rule: AttentionRule,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Writes the gradients of q, k and v into ``into``."""
        tiles = self._tiling(q)
        queries, keys = self.query_blocks(tiles.queries_backward.queries), self.key_blocks(tiles.keys_backward.keys)
        kernels.backward(q, k, v, out, lse, d_out, into, queries, keys, self.position_N, rule, tiles)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """By the door of attention.py: [1, heads, N, d] in, [1, N, heads, d] out."""
        dense = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = _Attention.apply(*dense, self, self.rule(scale, window, softcap))  # type: ignore[no-untyped-call]
        return out[None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout: CudaPackAttention, rule: AttentionRule):  # type: ignore[no-untyped-def]
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = layout.forward(q, k, v, rule)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.rule = layout, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        ctx.layout.backward(q, k, v, out, lse, d_out.contiguous(), ctx.rule, (dq, dk, dv))
        return dq, dk, dv, None, None


def _blocks(start: Ints, end: Ints, size: int) -> tuple[Ints, Ints]:
    """Segments cut into blocks: (segment of each block, its first token)."""
    counts = -(-(end - start) // size)
    of = np.repeat(np.arange(len(start)), counts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    return of, start[of] + number * size
