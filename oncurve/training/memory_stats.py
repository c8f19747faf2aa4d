"""The most memory that this process has held so far."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def peak_memory_mib(device: torch.device) -> float:
    """Of the GPU what torch's allocator gave out; else the process's resident memory, its libraries (some 400 MiB) included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    except (OSError, StopIteration, ValueError):  # not Linux; getrusage would count what the parent held before it forked
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
