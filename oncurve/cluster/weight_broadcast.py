"""Weights from a learner's GPU straight to its samplers': one broadcast over a group of torch.distributed's own.

The group stands beside the learner's ranks, which have another, and is made anew when samplers come or go. Where it fails,
weights go through Ray's object store for that time. On a CPU (and in tests) the same runs over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """Where a group meets: the learner has rank 0 and keeps the store."""

    address: str
    port: int
    size: int
    backend: str
    timeout_s: float


class GroupMembers:
    """One member's end. Made by all at the same time; raises RuntimeError where not all come, or one is gone."""

    def __init__(self, meeting: BroadcastGroup, rank: int, store: Any = None) -> None:
        limit = timedelta(seconds=meeting.timeout_s)
        self.store = store or dist.TCPStore(meeting.address, meeting.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        if meeting.backend == "gloo":
            self.group: Any = dist.ProcessGroupGloo(self.store, rank, meeting.size, limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self.group = dist.ProcessGroupNCCL(self.store, rank, meeting.size, options)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Each becomes the learner's, in place."""
        how = dist.BroadcastOptions()
        how.rootRank = how.rootTensor = 0
        for tensor in tensors:
            self.group.broadcast([tensor], how).wait()
        if tensors and tensors[0].device.type == "cuda":
            torch.cuda.synchronize()


def open_store(address: str, timeout_s: float) -> Any:
    """The learner's: it listens at a port that was free."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
