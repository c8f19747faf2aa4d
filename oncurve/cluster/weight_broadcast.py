"""Weights from a learner's GPU straight to its samplers': a broadcast over a separate torch.distributed process group.

The learner ranks have their own group; this one is rebuilt when samplers come or go. If it fails, weights go through Ray's
object store for that push. On a CPU, and in tests, the same code runs over gloo.
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
class BroadcastAddress:
    """Where the members of a broadcast group meet: the learner is rank 0 and hosts the store."""

    address: str
    port: int
    size: int
    backend: str
    timeout_s: float


class BroadcastGroup:
    """One member's side of the group. All members construct it at the same time.

    Raises RuntimeError if one does not come, or is lost later.
    """

    def __init__(self, address: BroadcastAddress, rank: int, store: Any = None) -> None:
        timeout = timedelta(seconds=address.timeout_s)
        self.store = store or dist.TCPStore(address.address, address.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        if address.backend == "gloo":
            self.group: Any = dist.ProcessGroupGloo(self.store, rank, address.size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(self.store, rank, address.size, options)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the learner's, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for tensor in tensors:
            self.group.broadcast([tensor], options).wait()
        if tensors and tensors[0].device.type == "cuda":
            # Not torch.cuda.synchronize: it would end the capture of a decode step that another thread of a sampler has begun.
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            done.synchronize()


def open_store(address: str, timeout_s: float) -> Any:
    """The learner's store, on a free port."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
