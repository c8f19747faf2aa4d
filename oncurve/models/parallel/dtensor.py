"""Sharded weights (torch's DTensor): this rank's elements, their range in the full tensor, and how to fill them.

FSDP2 shards rows over the data-parallel ranks as `torch.chunk` would. With tensor parallelism, a weight is first split over the
ranks of a tensor group, by rows or by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from oncurve.tensor_range import ElementRange

Collective = Callable[[str], AbstractContextManager[None]]
"""Wraps a collective operation: gives it a name and a timeout."""


def is_dtensor(tensor: Tensor) -> bool:
    """Checks an attribute and not the class, which a single process need not import."""
    return hasattr(tensor, "device_mesh")


def local_elements(tensor: Tensor) -> Tensor:
    """This rank's elements as a flat view; all elements if the tensor is not sharded."""
    local: Any = tensor.detach()
    return (local.to_local() if is_dtensor(tensor) else local).view(-1)  # type: ignore[no-any-return]


def local_range(tensor: Tensor) -> ElementRange:
    """The range of this rank's elements in the full tensor."""
    if not is_dtensor(tensor):
        return ElementRange(0, tensor.numel())
    shard: Any = tensor
    return range_at(tensor, shard.device_mesh.get_coordinate())


def range_at(tensor: Tensor, coordinate: Sequence[int]) -> ElementRange:
    """The element range of the rank at a coordinate of the shard's mesh: (data,) or (data, tensor)."""
    shard: Any = tensor
    mesh, rows = shard.device_mesh, tensor.shape[0]
    width = tensor.numel() // max(rows, 1)
    first, columns = 0, None
    if mesh.ndim == 2:
        index, size = coordinate[1], mesh.size(1)
        if shard.placements[1].dim == 0:
            rows //= size
            first = index * rows
        else:
            columns = (index * (width // size), (index + 1) * (width // size))
    rows_per_rank = -(-rows // mesh.size(0))
    start = coordinate[0] * rows_per_rank
    return ElementRange((first + min(start, rows)) * width, (first + min(start + rows_per_rank, rows)) * width, columns)


def is_tensor_parallel(tensor: Tensor) -> bool:
    """Whether the weight is split over a tensor group; otherwise it is replicated on the group's ranks."""
    shard: Any = tensor
    return is_dtensor(tensor) and bool(shard.device_mesh.ndim == 2)


@torch.no_grad()
def copy_from_full(tensor: Tensor, full: Tensor) -> None:
    """Fill a tensor, or this rank's shard of it, from the full tensor."""
    if not is_dtensor(tensor):
        tensor.copy_(full)
        return
    local_elements(tensor).copy_(local_range(tensor).of(full))
