"""GPU memory that keeps its address while physical memory is mapped and unmapped.

CUDA graphs hold addresses. So the KV cache reserves an address range once, as large as the GPU's memory, and maps memory into
it only while completions are sampled; before the learner's update the memory goes back to the driver and the addresses stay.
The calls (virtual memory management: cuMemAddressReserve, cuMemCreate, cuMemMap) go through the driver's library, which every
machine with a GPU has.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

OUT_OF_MEMORY = 2
Handles = list[tuple[ctypes.c_ulonglong, int, int]]
"""Of memory that is mapped: its handle, its offset in the range, and its size."""


class OutOfDeviceMemory(Exception):
    """The GPU has no memory for a mapping."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of one device, not exported to other processes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code == OUT_OF_MEMORY:
        raise OutOfDeviceMemory(name)
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


class VirtualRange:
    """A reserved address range on one GPU; its first ``mapped`` bytes are backed by memory."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # creates the driver's context
        self.location = _Location(1, device.index if device.index is not None else torch.cuda.current_device())
        self.properties = _Properties(1, 0, self.location, None)
        granularity = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self.properties), 0)
        self.granularity = granularity.value
        self.size, self.mapped = self._round_up(size), 0
        self.handles: Handles = []
        self.start = ctypes.c_ulonglong()
        none = ctypes.c_ulonglong(0)  # default alignment, address and flags
        _call("cuMemAddressReserve", ctypes.byref(self.start), ctypes.c_size_t(self.size), ctypes.c_size_t(0), none, none)
        # Agents have a new session in each step. A process has addresses for about a thousand ranges.
        weakref.finalize(self, _free, self.location.id, self.start.value, self.size, self.handles).atexit = False

    def _round_up(self, size: int) -> int:
        return -(-size // self.granularity) * self.granularity

    def grow(self, size: int) -> None:
        """Back the first ``size`` bytes. Changes nothing if that fails; raises OutOfDeviceMemory if the GPU has too little."""
        more = self._round_up(size) - self.mapped
        if more <= 0:
            return
        handle, at = ctypes.c_ulonglong(), ctypes.c_ulonglong(self.start.value + self.mapped)
        _call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(more), ctypes.byref(self.properties), ctypes.c_ulonglong(0))
        try:
            _call("cuMemMap", at, ctypes.c_size_t(more), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
            access = _Access(self.location, 3)  # read and write
            try:
                _call("cuMemSetAccess", at, ctypes.c_size_t(more), ctypes.byref(access), ctypes.c_size_t(1))
            except BaseException:
                _call("cuMemUnmap", at, ctypes.c_size_t(more))
                raise
        except BaseException:
            _call("cuMemRelease", handle)
            raise
        self.handles.append((handle, self.mapped, more))
        self.mapped += more

    def release(self) -> None:
        """Return all memory; the addresses stay reserved."""
        _unmap(self.start.value, self.handles)
        self.mapped = 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The range as a tensor. Some of it must be mapped when the tensor is made."""
        integer = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[dtype.itemsize]
        interface = {"shape": tuple(shape), "typestr": integer, "data": (self.start.value, False), "version": 3}
        raw: Tensor = torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": interface})(), device="cuda")
        return raw.view(dtype)


def _unmap(start: int, handles: Handles) -> None:
    for handle, offset, size in handles:
        _call("cuMemUnmap", ctypes.c_ulonglong(start + offset), ctypes.c_size_t(size))
        _call("cuMemRelease", handle)
    handles.clear()


def _free(gpu: int, start: int, size: int, handles: Handles) -> None:
    """Return the addresses too."""
    if handles:
        torch.cuda.synchronize(gpu)
        _unmap(start, handles)
    _call("cuMemAddressFree", ctypes.c_ulonglong(start), ctypes.c_size_t(size))
