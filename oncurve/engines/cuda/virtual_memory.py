"""Device memory that keeps its address while what backs it comes and goes.

Captured graphs hold addresses. So the pool of keys and values reserves a stretch of addresses once, as long as the whole
card, and maps memory under it only while completions are sampled; before the learner's update the memory goes back to the
driver and the addresses stay. CUDA's own calls for this (virtual memory management: cuMemAddressReserve, cuMemCreate,
cuMemMap) are called through the driver's library, which is there wherever a GPU is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

OUT_OF_MEMORY = 2


class OutOfDeviceMemory(Exception):
    """The card has no room for a mapping."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of one device, no handle for other processes."""

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
    """Reserved addresses on one GPU; the first ``mapped`` bytes of them are backed by memory."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # the driver's context is there from now on
        self.location = _Location(1, device.index if device.index is not None else torch.cuda.current_device())
        self.properties = _Properties(1, 0, self.location, None)
        grain = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self.properties), 0)
        self.grain = grain.value
        self.size, self.mapped = self._whole(size), 0
        self.handles: list[tuple[ctypes.c_ulonglong, int, int]] = []
        self.start = ctypes.c_ulonglong()
        none = ctypes.c_ulonglong(0)  # no alignment, no address and no flags of our own
        _call("cuMemAddressReserve", ctypes.byref(self.start), ctypes.c_size_t(self.size), ctypes.c_size_t(0), none, none)

    def _whole(self, size: int) -> int:
        return -(-size // self.grain) * self.grain

    def grow(self, size: int) -> None:
        """Back the first ``size`` bytes; raises NoMemory, and changes nothing, where the card has no room."""
        more = self._whole(size) - self.mapped
        if more <= 0:
            return
        handle, at = ctypes.c_ulonglong(), ctypes.c_ulonglong(self.start.value + self.mapped)
        _call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(more), ctypes.byref(self.properties), ctypes.c_ulonglong(0))
        _call("cuMemMap", at, ctypes.c_size_t(more), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        access = _Access(self.location, 3)  # read and write
        _call("cuMemSetAccess", at, ctypes.c_size_t(more), ctypes.byref(access), ctypes.c_size_t(1))
        self.handles.append((handle, self.mapped, more))
        self.mapped += more

    def release(self) -> None:
        """Give all memory back; the addresses stay."""
        for handle, offset, size in self.handles:
            _call("cuMemUnmap", ctypes.c_ulonglong(self.start.value + offset), ctypes.c_size_t(size))
            _call("cuMemRelease", handle)
        self.handles, self.mapped = [], 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The stretch as a tensor; something must be mapped when it is made."""
        whole = {2: "<i2", 4: "<i4", 8: "<i8"}[dtype.itemsize]
        about = {"shape": tuple(shape), "typestr": whole, "data": (self.start.value, False), "version": 3}
        raw: Tensor = torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": about})(), device="cuda")
        return raw.view(dtype)
