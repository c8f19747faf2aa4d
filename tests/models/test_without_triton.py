"""Without Triton, torch replaces our kernels. On a GPU: tests/gpu/test_without_triton.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from oncurve import kernels
from oncurve.models.pack_attention import PackAttention
from oncurve.models.pack_attention_cuda import CudaPackAttention
from oncurve.models.packing import PrefixGroup, build_pack


@pytest.fixture
def cleared_cache() -> Iterator[None]:
    kernels.can_run_kernels.cache_clear()
    yield
    kernels.can_run_kernels.cache_clear()


@pytest.mark.usefixtures("cleared_cache")
def test_kernels_run_on_a_gpu_that_has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    for installed in ("a package", None):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest, installed=installed: installed if name == "triton" else real(name, *rest),
        )
        kernels.can_run_kernels.cache_clear()
        assert kernels.can_run_kernels(torch.device("cuda")) == (installed is not None)
        assert not kernels.can_run_kernels(torch.device("cpu"))


@pytest.mark.parametrize("installed", [True, False])
def test_a_pack_uses_the_kernels_if_they_can_run(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "can_run_kernels", lambda device: installed)
    ids = np.arange(3)
    pack = build_pack([PrefixGroup(ids, (ids,), (0,))], torch.device("cpu"))
    assert isinstance(pack.attention, CudaPackAttention if installed else PackAttention)
