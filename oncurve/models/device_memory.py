"""How much memory a device has free, and the most that this process has used."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

CPU = torch.device("cpu")


def free_memory(device: torch.device = CPU) -> int:
    """Bytes that can still be allocated on a device.

    On a GPU: free memory, plus what torch's allocator has reserved and does not use. On a CPU: `MemAvailable` of Linux, or the
    machine's physical memory on systems that do not report it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    available = _read_kib(Path("/proc/meminfo"), "MemAvailable:")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if available is None else 1024 * available


def peak_memory_mib(device: torch.device) -> float:
    """Peak so far: of torch's allocator on a GPU, else the process's resident memory, of which libraries are about 400 MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = _read_kib(Path("/proc/self/status"), "VmHWM:")
    # Not on Linux: there getrusage also counts what the parent process held before it forked.
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else peak) / 1024


def _read_kib(file: Path, name: str) -> int | None:
    """The value of a line of /proc, in KiB; None if there is none."""
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))
    except (OSError, StopIteration, ValueError):
        return None
