"""Norms, rotary positions, the pool's writes and the gated unit against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from oncurve.kernels import decode_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 8


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def close(found: Tensor, want: Tensor, within: float = 1e-6) -> bool:
    return float((found.double() - want.double()).norm() / want.double().norm()) < within


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), eps)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("width", [32, 40, 1024])
def test_residual_and_norm(width: int, dtype: torch.dtype, within: float) -> None:
    table, weight, more = noise(9, width, dtype=dtype), noise(width, dtype=dtype, seed=1), noise(3, width, dtype=dtype, seed=2)
    residual = torch.full((3, width), torch.nan, device=DEVICE)
    token = torch.tensor([8, 0, 3], device=DEVICE)
    found = decode_layers.embed_norm(token, table, weight, 1e-6, residual)
    assert torch.equal(residual, table[token].float())
    assert close(found, normed(residual, weight, 1e-6), within)
    found = decode_layers.add_norm(more, weight, 1e-6, residual)
    assert torch.equal(residual, table[token].float() + more.float())
    assert close(found, normed(residual, weight, 1e-6), within)
    before, parts = residual.clone(), noise(2, 3, width, seed=3)
    found = decode_layers.add_norm(parts, weight, 1e-6, residual)
    assert found.dtype == dtype
    assert torch.equal(residual, before + parts[0] + parts[1])
    assert close(found, normed(residual, weight, 1e-6), within)


@pytest.mark.parametrize("width", [5, 48, 1500])
def test_gated_unit(width: int) -> None:
    both = noise(3, 2 * width)
    gate, up = both.double().chunk(2, -1)
    assert close(decode_layers.silu_mul(both), functional.silu(gate) * up)


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("H", "K", "d"), [(4, 2, 16), (3, 1, 80), (5, 5, 24)])
def test_rotary_positions_and_the_pool(H: int, K: int, d: int, with_norm: bool) -> None:
    """Slot 0 writes into the first place of its second page, slot 1 is idle, slot 2 opens its suffix."""
    qkv, pool = noise(3, (H + 2 * K) * d), torch.full((5, 2, 2, K, PAGE, d), torch.nan, device=DEVICE)
    pages, prompt, suffix = ints(0, 3, 1, 1, 4, 2).view(3, 2), ints(11, 7, 0), ints(PAGE, -1, 0)
    norms = (noise(d, seed=1), noise(d, seed=2)) if with_norm else None
    angle = noise(40, d // 2, seed=3)
    turns = (angle.cos(), angle.sin())
    q = decode_layers.rotate_store(qkv, pool, 1, pages, prompt, suffix, turns, norms, 1e-6)
    summed = decode_layers.rotate_store(
        torch.stack((qkv - 1, torch.ones_like(qkv))), pool.clone(), 1, pages, prompt, suffix, turns, norms, 1e-6
    )
    assert close(summed[[0, 2]], q[[0, 2]], 1e-5)
    heads = qkv.double().view(3, -1, d)
    want_q, want_k, want_v = heads[:, :H], heads[:, H : H + K], heads[:, H + K :]
    if norms is not None:
        want_q, want_k = normed(want_q, norms[0], 1e-6), normed(want_k, norms[1], 1e-6)
    at = torch.tensor([11 + PAGE, 7, 0], device=DEVICE)
    want_q, want_k = (turned(x, angle[at].double()[:, None]) for x in (want_q, want_k))
    assert close(q[[0, 2]], want_q[[0, 2]])
    written = torch.zeros_like(pool, dtype=torch.bool)
    for slot, page in ((0, 3), (2, 4)):
        assert close(pool[page, 1, 0, :, 0], want_k[slot])
        assert close(pool[page, 1, 1, :, 0], want_v[slot])
        written[page, 1, :, :, 0] = True
    assert bool((pool.isnan() == ~written).all()), "nothing else is touched"


def turned(x: Tensor, angle: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), -1)


def test_a_prompt_is_stored_from_where_it_goes_on_up_to_its_length() -> None:
    K, d, tokens = 2, 24, 20
    k, v = noise(3, tokens, K, d).transpose(1, 2), noise(3, K, tokens, d, seed=1)
    pool = torch.full((9, 2, 2, K, PAGE, d), torch.nan, device=DEVICE)
    table = ints(0, 5, 2, 8, 1, 3, 4, 6, 7, 7, 7, 7).view(3, 4)
    start, length = [3, 0, -1], [19, 20, 20]
    decode_layers.store(k, v, pool, 0, table, ints(*start), ints(*length))
    written = torch.zeros_like(pool, dtype=torch.bool)
    for b in range(2):
        for t in range(min(tokens, length[b] - start[b])):
            page, place = int(table[b, (start[b] + t) // PAGE]), (start[b] + t) % PAGE
            assert torch.equal(pool[page, 0, 0, :, place], k[b, :, t])
            assert torch.equal(pool[page, 0, 1, :, place], v[b, :, t])
            written[page, 0, :, :, place] = True
    assert bool((pool.isnan() == ~written).all())
