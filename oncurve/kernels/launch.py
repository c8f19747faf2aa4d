"""How the kernels of a decode step follow each other.

On Hopper and later a kernel may be launched while the one before it is still running (programmatic dependent launch). Its
programs take their places as soon as all of the one before have theirs, read what does not change within a step (tables,
norms' weights), and then wait for what the one before has written. A step is some three hundred short kernels, and this hides a
part of the time between them.

The first kernel of a step lets no other begin before it has waited itself: what a step reads early is never of the step before.

How kernels are spread over a device.
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
    """Options of a launch on this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def fetch(start, size, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    """COUNT chunks of ``size`` bytes at ``start`` into the cache, in passing: nothing waits for them."""
    address = start.to(tl.int64) + tl.minimum(tl.arange(0, COUNT) * CHUNK, size - CHUNK).to(tl.int64)
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                              [address, tl.full([COUNT], CHUNK, tl.int32)], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; few in the interpreter, where programs run one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def programs(rows: int, device: torch.device, each: int = 8) -> int:
    """Programs that share the rows among them: ``each`` for a multiprocessor, fixed by the device, so that sums keep order."""
    return max(1, min(rows, each * processors(device)))


def warps_for(elements: int) -> int:
    """Warps for a program that holds so many elements of a row."""
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16
