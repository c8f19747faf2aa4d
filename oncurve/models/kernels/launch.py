"""How kernels are spread over a device."""

from __future__ import annotations

from functools import cache

import torch


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
