"""Memory at fixed addresses: a mapping that fails leaves nothing behind. The driver is replaced, as there may be no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oncurve.engines.cuda import virtual_memory
from oncurve.engines.cuda.paged_kv_cache import KVShape, PagedKVCache
from oncurve.engines.cuda.virtual_memory import OUT_OF_MEMORY, OutOfDeviceMemory, VirtualRange


class Driver:
    """Counts what is created and mapped; ``failing`` is the call that reports an error."""

    def __init__(self) -> None:
        self.failing, self.code = "", 1
        self.created: list[int] = []
        self.mapped: list[int] = []
        self.freed: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == self.failing:
                return self.code
            if name == "cuMemCreate":
                handle = arguments[0]._obj
                handle.value = 1 + max(self.created, default=0)
                self.created.append(handle.value)
            elif name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = 4
            elif name == "cuMemAddressReserve":
                arguments[0]._obj.value = 1024
            elif name == "cuMemAddressFree":
                self.freed.append((arguments[0].value, arguments[1].value))
            elif name == "cuMemMap":
                self.mapped.append(arguments[0].value)
            elif name == "cuMemUnmap":
                self.mapped.remove(arguments[0].value)
            elif name == "cuMemRelease":
                self.created.remove(arguments[0].value)
            return 0

        return call


@pytest.mark.parametrize(
    ("failing", "code", "error"),
    [
        ("cuMemCreate", OUT_OF_MEMORY, OutOfDeviceMemory),
        ("cuMemMap", 1, RuntimeError),
        ("cuMemSetAccess", OUT_OF_MEMORY, OutOfDeviceMemory),
    ],
)
def test_a_range_that_cannot_grow_stays_as_it_was(
    failing: str, code: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(virtual_memory, "_driver", lambda: driver)
    memory = VirtualRange.__new__(VirtualRange)  # without a GPU there is no address range to reserve
    memory.location = virtual_memory._Location(1, 0)
    memory.properties = virtual_memory._Properties(1, 0, memory.location, None)
    memory.granularity, memory.size, memory.mapped, memory.handles = 4, 64, 0, []
    memory.start = ctypes.c_ulonglong(1024)
    memory.grow(6)
    driver.failing, driver.code = failing, code
    with pytest.raises(error):
        memory.grow(20)
    assert (driver.created, driver.mapped, memory.mapped) == ([1], [1024], 8)
    driver.failing = ""
    memory.grow(20)
    assert (driver.created, driver.mapped, memory.mapped) == ([1, 2], [1024, 1032], 20)
    memory.release()
    assert (driver.created, driver.mapped, memory.mapped) == ([], [], 0)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_range_that_is_not_used_any_more_returns_its_addresses(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(virtual_memory, "_driver", lambda: driver)
    monkeypatch.setattr("torch.cuda.synchronize", lambda gpu: None)
    memory = VirtualRange(62, torch.device("cpu", 0))
    memory.grow(6)
    if is_closed:
        memory.release()
    assert driver.freed == []
    del memory
    assert (driver.created, driver.mapped, driver.freed) == ([], [], [(1024, 64)])


def test_a_cache_waits_for_its_own_gpu_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new thread the current device is GPU 0. With shard = "full" the device of a policy has no number."""
    driver, waited = Driver(), list[Any]()
    monkeypatch.setattr(virtual_memory, "_driver", lambda: driver)
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    cache = PagedKVCache(KVShape((0,), 1, 1, 1, torch.float32), torch.device("cpu"))
    cache.range = VirtualRange(64, torch.device("cpu", 1))
    cache.range.grow(6)
    cache.close()
    assert (driver.created, waited) == ([], [1])
