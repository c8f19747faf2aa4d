"""Where there is no Triton, torch does the work of our kernels; on a GPU: tests/gpu/test_without_triton.py."""

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
def asked_anew() -> Iterator[None]:
    kernels.can_run_kernels.cache_clear()
    yield
    kernels.can_run_kernels.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_kernels_run_on_a_gpu_that_has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    for there in ("a package", None):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest, there=there: there if name == "triton" else real(name, *rest)
        )
        kernels.can_run_kernels.cache_clear()
        assert kernels.can_run_kernels(torch.device("cuda")) == (there is not None)
        assert not kernels.can_run_kernels(torch.device("cpu"))


@pytest.mark.parametrize("there", [True, False])
def test_a_packs_layout_is_the_kernels_where_they_run(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "can_run_kernels", lambda device: there)
    ids = np.arange(3)
    pack = build_pack([PrefixGroup(ids, (ids,), (0,))], torch.device("cpu"))
    assert isinstance(pack.attention, CudaPackAttention if there else PackAttention)
