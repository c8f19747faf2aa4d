"""Weights of which each rank holds a shard (torch's DTensor, rows shared out): this rank's numbers, and how to fill them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_shard(tensor: Tensor) -> bool:
    """By what it has and not by its class, which a process that stands alone need not load."""
    return hasattr(tensor, "device_mesh")


def own_numbers(tensor: Tensor) -> Tensor:
    """This rank's numbers of a tensor, flat, in the memory where they are; of one that is no shard, all."""
    local: Any = tensor.detach()
    return (local.to_local() if is_shard(tensor) else local).view(-1)  # type: ignore[no-any-return]


def first_number(tensor: Tensor) -> int:
    """The place of this rank's first number in the whole tensor: rows go to ranks as torch.chunk would deal them."""
    if not is_shard(tensor):
        return 0
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    rows = tensor.shape[0]
    each = -(-rows // mesh.size())
    return int(min(mesh.get_local_rank() * each, rows) * (tensor.numel() // max(rows, 1)))


@torch.no_grad()
def put(tensor: Tensor, whole: Tensor) -> None:
    """Fills a tensor, or this rank's shard of it, with its part of a whole one."""
    if not is_shard(tensor):
        tensor.copy_(whole)
        return
    own, start = own_numbers(tensor), first_number(tensor)
    own.copy_(whole.reshape(-1)[start : start + own.numel()])
