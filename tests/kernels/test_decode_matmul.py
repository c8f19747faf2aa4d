"""Products of a decode step against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oncurve.kernels import decode_matmul
from oncurve.kernels.decode_matmul import FEW, GATED, MANY, ProductTiles, block_for, gated_product, product
from oncurve.kernels.launch import Gpu
from oncurve.models.llama.block_description import ACTIVATIONS, Activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
SMALL = ProductTiles(32, 32, 64, warps=4, stages=2)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, SIXTEEN)


def off(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    "block", [SMALL, ProductTiles(32, 32, 64, 4, 2, parts=2), ProductTiles(16, 16, 32, 4, 3, parts=4), MANY, FEW]
)
@pytest.mark.parametrize("rows", [16, 150])
def test_parts_add_up_to_the_product(rows: int, block: ProductTiles, with_bias: bool) -> None:
    outputs = 64 if block.outputs == 64 else 96
    x, w, b = noise(rows, 256), noise(outputs, 256, seed=1), noise(outputs, seed=2) if with_bias else None
    want = x.double() @ w.double().t() + (0 if b is None else b.double())
    found = product(x, w, b, block)
    assert found.shape == ((rows, outputs) if block.parts == 1 else (block.parts, rows, outputs))
    assert off(found.view(block.parts, rows, outputs).double().sum(0), want) < (4e-3 if block.parts == 1 else 1e-6)


@pytest.mark.parametrize("block", [ProductTiles(16, 32, 64, 4, 2), GATED])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_the_gated_unit_behind_its_product(name: Activation, block: ProductTiles) -> None:
    x, w = noise(150, 128), noise(128, 128, seed=1) / 8
    gate, up = (x.double() @ w.double().t()).chunk(2, -1)
    assert off(gated_product(x, w, block, name), ACTIVATIONS[name](gate) * up) < 4e-3


def test_a_row_depends_on_no_other() -> None:
    x, w = noise(64, 256), noise(96, 256, seed=1)
    others = x.clone()
    others[:40] = noise(40, 256, seed=3)
    assert torch.equal(product(x, w, None, SMALL)[40:], product(others, w, None, SMALL)[40:])


def test_ours_is_taken_where_a_launch_fills_the_gpu_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(
        rows: int, outputs: int, inner: int, *, gated: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> ProductTiles | None:
        return block_for(torch.empty(rows, inner, dtype=dtype), outputs, gated=gated)

    assert chosen(256, 4096, 1024) is None, "no launch begins early on a CPU"
    monkeypatch.setattr(decode_matmul, "gpu_of", lambda device: Gpu((9, 0), 132, 227 << 10))
    assert (chosen(256, 4096, 1024), chosen(256, 1024, 2048), chosen(256, 1024, 3072)) == (MANY, FEW, FEW)
    assert chosen(256, 3072, 1024, gated=True) == GATED
    assert chosen(512, 4096, 1024) is None
    assert chosen(64, 1024, 1024) is None
    assert chosen(256, 4096, 1000) is None
    assert chosen(256, 4100, 1024) is None
    assert chosen(256, 4096, 1024, dtype=torch.float32) is None
    monkeypatch.setattr(decode_matmul, "gpu_of", lambda device: Gpu((12, 0), 132, 99 << 10))
    assert chosen(256, 4096, 1024) is None, "its programs have too little shared memory"
