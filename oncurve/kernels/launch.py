"""How kernels follow each other in a decode step, and how many programs they have.

With programmatic dependent launch (PDL, Hopper and later) a kernel starts while the one before it still runs. Its programs take
their places, read what does not change within a step (tables, norm weights), and then wait for the previous kernel's output. A
step is about three hundred short kernels, and this hides part of the time between them.

The first kernel of a step waits before it lets the next one start, so nothing that is read early belongs to the step before.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

HOPPER = 9


@cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options of a decode kernel: PDL if the device supports it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def fetch(start, size, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    """Prefetch ``size`` bytes at ``start`` into the L2 cache, as COUNT chunks; nothing waits for them."""
    address = start.to(tl.int64) + tl.minimum(tl.arange(0, COUNT) * CHUNK, size - CHUNK).to(tl.int64)
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                              [address, tl.full([COUNT], CHUNK, tl.int32)], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; 3 in the interpreter, which runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def programs(rows: int, device: torch.device, each: int = 8) -> int:
    """Programs that divide the rows: ``each`` per multiprocessor. Fixed by the device, so that sums keep their order."""
    return max(1, min(rows, each * processors(device)))


def warps_for(elements: int) -> int:
    """Warps of a program that holds this many elements of a row."""
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16
