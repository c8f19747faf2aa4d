"""How kernels follow each other in a decode step, and how many programs they have.

With programmatic dependent launch (PDL, Hopper and later) a kernel starts while the one before it still runs. Its programs take
their places, read what does not change within a step (tables, norm weights), and then wait for the previous kernel's output. A
step is about three hundred short kernels, and this hides part of the time between them.

The first kernel of a step waits before it lets the next one start, so nothing that is read early belongs to the step before.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

HOPPER = (9, 0)
"""The compute capability from which a GPU has dependent launch and a tensor memory accelerator (TMA)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice of kernels and tiles depends on. ``shared_memory``: bytes that a program can have."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int

    @property
    def is_hopper(self) -> bool:
        """Hopper or later."""
        return self.capability >= HOPPER

    @property
    def has_room(self) -> bool:
        """Whether a program has the shared memory for the tiles that were measured on an H200. A100, Hopper and data-centre
        Blackwell have it; GPUs for graphics of the same generations have about 100 KiB."""
        return self.shared_memory >= 160 << 10


INTERPRETER = Gpu((0, 0), 3, 1 << 30)
"""It runs programs one after the other, whatever their size."""


@cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:  # its capability is not NVIDIA's
        return Gpu((0, 0), found.multi_processor_count, 64 << 10)
    index = torch.cuda.current_device() if device.index is None else device.index
    limit = driver.active.utils.get_device_properties(index)["max_shared_mem"]  # what Triton compares programs with
    return Gpu((found.major, found.minor), found.multi_processor_count, limit)


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options of a decode kernel: PDL if the device supports it."""
    return {"PDL": True, "launch_pdl": True} if gpu_of(device).is_hopper else {"PDL": False}


@triton.jit
def fetch(start, size, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    """Prefetch ``size`` bytes at ``start`` into the L2 cache, as COUNT chunks; nothing waits for them."""
    address = start.to(tl.int64) + tl.minimum(tl.arange(0, COUNT) * CHUNK, size - CHUNK).to(tl.int64)
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                              [address, tl.full([COUNT], CHUNK, tl.int32)], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


def programs(rows: int, device: torch.device, each: int = 8) -> int:
    """Programs that divide the rows: ``each`` per multiprocessor. Fixed by the device, so that sums keep their order."""
    return max(1, min(rows, each * gpu_of(device).multiprocessors))


def warps_for(elements: int) -> int:
    """Warps of a program that holds this many elements of a row."""
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16
