"""Weights of which each rank holds a shard (torch's DTensor): this rank's numbers, where they lie, and how to fill them.

Rows are shared out over the ranks that learn from different groups, as torch.chunk would deal them. Where ranks of a tensor
group split a layer, it is first cut into as many parts: by rows, or by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from oncurve.tensor_range import ElementRange

Collective = Callable[[str], AbstractContextManager[None]]
"""Around what ranks do together: it has a name and a time limit."""


def is_shard(tensor: Tensor) -> bool:
    """By what it has and not by its class, which a process that stands alone need not load."""
    return hasattr(tensor, "device_mesh")


def local_elements(tensor: Tensor) -> Tensor:
    """This rank's numbers of a tensor, flat, in the memory where they are; of one that is no shard, all."""
    local: Any = tensor.detach()
    return (local.to_local() if is_shard(tensor) else local).view(-1)  # type: ignore[no-any-return]


def local_range(tensor: Tensor) -> ElementRange:
    """Where in the whole tensor this rank's numbers lie."""
    if not is_shard(tensor):
        return ElementRange(0, tensor.numel())
    shard: Any = tensor
    return range_at(tensor, shard.device_mesh.get_coordinate())


def range_at(tensor: Tensor, coordinate: Sequence[int]) -> ElementRange:
    """Where the numbers lie of the rank that is there in the shard's mesh: (data) or (data, tensor)."""
    shard: Any = tensor
    mesh, rows = shard.device_mesh, tensor.shape[0]
    wide = tensor.numel() // max(rows, 1)
    first, columns = 0, None
    if mesh.ndim == 2:
        part, parts = coordinate[1], mesh.size(1)
        if shard.placements[1].dim == 0:
            rows //= parts
            first = part * rows
        else:
            columns = (part * (wide // parts), (part + 1) * (wide // parts))
    each = -(-rows // mesh.size(0))
    at = coordinate[0] * each
    return ElementRange((first + min(at, rows)) * wide, (first + min(at + each, rows)) * wide, columns)


def is_sharded(tensor: Tensor) -> bool:
    """Whether the ranks of a tensor group have a part of it each; else all of them have the same."""
    shard: Any = tensor
    return is_shard(tensor) and bool(shard.device_mesh.ndim == 2)


@torch.no_grad()
def copy_from_full(tensor: Tensor, whole: Tensor) -> None:
    """Fills a tensor, or this rank's shard of it, with its part of a whole one."""
    if not is_shard(tensor):
        tensor.copy_(whole)
        return
    local_elements(tensor).copy_(local_range(tensor).of(whole))
