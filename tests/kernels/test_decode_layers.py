"""Norms, rotary positions, the pool's writes and the gated unit against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from oncurve.kernels import decode_layers
from oncurve.kernels.decode_layers import HeadNorms, NormRule, RopeTables
from oncurve.models.llama.block_description import ACTIVATIONS, Activation

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
    found = decode_layers.embed_norm(token, table, NormRule(weight, 1e-6), residual)
    assert torch.equal(residual, table[token].float())
    assert close(found, normed(residual, weight, 1e-6), within)
    found = decode_layers.add_norm(more, NormRule(weight, 1e-6), residual, dtype)
    assert torch.equal(residual, table[token].float() + more.float())
    assert close(found, normed(residual, weight, 1e-6), within)
    before, parts = residual.clone(), noise(2, 3, width, seed=3)
    found = decode_layers.add_norm(parts, NormRule(weight, 1e-6), residual, dtype)
    assert found.dtype == dtype
    assert torch.equal(residual, before + parts[0] + parts[1])
    assert close(found, normed(residual, weight, 1e-6), within)


@pytest.mark.parametrize("width", [40, 256])
@pytest.mark.parametrize("form", range(8))
def test_every_form_of_norm_before_and_after(form: int, width: int) -> None:
    """With or without mean, 1 + weight and bias; the norm of what is added has another form than that of the sum."""
    table, token, more = noise(9, width) + 1, torch.tensor([8, 0, 3], device=DEVICE), noise(2, 3, width, seed=2) + 1
    norm, after = rule_of(form, width, 3), rule_of(7 - form, width, 6)
    residual = torch.full((3, width), torch.nan, device=DEVICE)
    found = decode_layers.embed_norm(token, table, norm, residual, 2.5)
    want = 2.5 * table[token].double()
    assert close(residual, want)
    assert close(found, by_rule(want, norm))
    found = decode_layers.add_norm(more, norm, residual, torch.float32, after=after, scale=0.3)
    want = want + 0.3 * by_rule(more.double().sum(0), after)
    assert close(residual, want)
    assert close(found, by_rule(want, norm))
    decode_layers.add(more[0], residual, after=after)
    want = want + by_rule(more[0].double(), after)
    assert close(residual, want)
    assert close(decode_layers.add_norm(more, None, residual, torch.float32, scale=2.0), want + 2 * more.double().sum(0))


def rule_of(form: int, width: int, seed: int) -> NormRule:
    bias = noise(width, seed=seed + 1) if form & 4 else None
    return NormRule(noise(width, seed=seed), 1e-3, bias, bool(form & 1), bool(form & 2))


def by_rule(x: Tensor, rule: NormRule) -> Tensor:
    weight = rule.weight.double() + rule.adds_one
    bias = None if rule.bias is None else rule.bias.double()
    if rule.is_centred:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, rule.eps)
    return functional.rms_norm(x, (x.shape[-1],), weight, rule.eps) + (0 if bias is None else bias)


@pytest.mark.parametrize("width", [5, 48, 1500])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_with_and_without_a_gate(name: Activation, width: int) -> None:
    both = 3 * noise(3, 2 * width)
    both[0, :2] = torch.tensor([-200.0, 200.0])
    gate, up = both.double().chunk(2, -1)
    assert close(decode_layers.activate_unit(both, name), ACTIVATIONS[name](gate) * up)
    assert close(decode_layers.activate_unit(both, name, gated=False), ACTIVATIONS[name](both.double()))


@dataclass(frozen=True)
class Heads:
    """What becomes of q and k: a norm of each head or of all, and a rotary embedding of the first ``size`` numbers."""

    norm: Literal["none", "head", "all"]
    size: int | None
    interleaved: bool = False
    adds_one: bool = False


LLAMA, QWEN3 = Heads("none", None), Heads("head", None)
OTHERS = [
    Heads("head", None, adds_one=True), Heads("all", None), Heads("all", None, adds_one=True), Heads("none", 0),
    Heads("head", 0), Heads("none", 8), Heads("none", 12, interleaved=True), Heads("all", 8, interleaved=True),
    Heads("none", None, interleaved=True),
]  # fmt: skip


@pytest.mark.parametrize("kind", [LLAMA, QWEN3, *OTHERS], ids=str)
@pytest.mark.parametrize(("H", "K", "d"), [(4, 2, 16), (3, 1, 80), (5, 5, 24)])
def test_rotary_positions_and_the_pool(H: int, K: int, d: int, kind: Heads) -> None:
    """Slot 0 writes into the first place of its second page, slot 1 is idle, slot 2 opens its suffix."""
    qkv, pool = noise(3, (H + 2 * K) * d), torch.full((5, 2, 2, K, PAGE, d), torch.nan, device=DEVICE)
    pages, prompt, suffix = ints(0, 3, 1, 1, 4, 2).view(3, 2), ints(11, 7, 0), ints(PAGE, -1, 0)
    size = d if kind.size is None else kind.size
    angle = noise(40, size // 2, seed=3)
    rope = RopeTables(angle.cos(), angle.sin(), kind.interleaved) if size else None
    wide = (H * d, K * d) if kind.norm == "all" else (d, d)
    weights = noise(wide[0], seed=1), noise(wide[1], seed=2)
    norms = None if kind.norm == "none" else HeadNorms(*weights, 1e-6, kind.adds_one)
    q = decode_layers.rotate_store(qkv, pool, 1, pages, prompt, suffix, rope, norms, torch.float32)
    parts = torch.stack((qkv - 1, torch.ones_like(qkv)))
    summed = decode_layers.rotate_store(parts, pool.clone(), 1, pages, prompt, suffix, rope, norms, torch.float32)
    assert close(summed[[0, 2]], q[[0, 2]], 1e-5)
    heads = qkv.double().view(3, -1, d)
    want_q, want_k, want_v = heads[:, :H], heads[:, H : H + K], heads[:, H + K :]
    if norms is not None:
        want_q, want_k = (
            normed(x.reshape(3, -1, width), weight.double() + kind.adds_one, 1e-6).view(x.shape)
            for x, width, weight in zip((want_q, want_k), wide, weights, strict=True)
        )
    at = torch.tensor([11 + PAGE, 7, 0], device=DEVICE)
    want_q, want_k = (turned(x, angle[at].double()[:, None], size, kind.interleaved) for x in (want_q, want_k))
    assert close(q[[0, 2]], want_q[[0, 2]])
    written = torch.zeros_like(pool, dtype=torch.bool)
    for slot, page in ((0, 3), (2, 4)):
        assert close(pool[page, 1, 0, :, 0], want_k[slot])
        assert close(pool[page, 1, 1, :, 0], want_v[slot])
        written[page, 1, :, :, 0] = True
    assert bool((pool.isnan() == ~written).all()), "nothing else is touched"


def turned(x: Tensor, angle: Tensor, size: int, interleaved: bool) -> Tensor:
    """By complex numbers."""
    if not size:
        return x
    part = x[..., :size]
    pairs = part.reshape(*part.shape[:-1], -1, 2) if interleaved else torch.stack(part.chunk(2, -1), -1)
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    out = out.flatten(-2) if interleaved else torch.cat((out[..., 0], out[..., 1]), -1)
    return torch.cat((out, x[..., size:]), -1)


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


def in_fp8(pool: Tensor) -> Tensor:
    """A pool of bytes with the numbers of another: codes, then scales (`decode_attention`)."""
    scale = pool.abs().amax(-1).clamp(min=2.0**-100) * (1 / 448)
    codes = (pool / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((codes.flatten(4), scale.view(torch.uint8).flatten(4)), 4).view(*pool.shape[:5], -1)


@pytest.mark.parametrize("kind", [QWEN3, Heads("all", 8, interleaved=True)], ids=str)
def test_a_pool_of_bytes_gets_new_tokens_in_fp8(kind: Heads) -> None:
    """The same numbers as another pool, rounded; a channel is 600. Slot 1 is idle, and nothing else is touched."""
    H, K, d = 4, 2, 24
    pool, qkv = torch.zeros((5, 2, 2, K, PAGE, d), device=DEVICE), noise(3, 8 * d)
    stored = in_fp8(pool)
    qkv[:, (H + 1) * d + 20] = qkv[:, (H + K) * d + 3] = 600.0
    angle = noise(40, (kind.size or d) // 2, seed=3)
    rope, wide = RopeTables(angle.cos(), angle.sin(), kind.interleaved), (H * d, K * d) if kind.norm == "all" else (d, d)
    norms = HeadNorms(noise(wide[0], seed=1), noise(wide[1], seed=2), 1e-6)
    where = ints(0, 3, 1, 1, 4, 2).view(3, 2), ints(11, 7, 0), ints(PAGE, -1, 0)
    q, q_fp8 = (decode_layers.rotate_store(qkv, x, 1, *where, rope, norms, torch.float32) for x in (pool, stored))
    assert torch.equal(q[[0, 2]], q_fp8[[0, 2]])
    assert float(pool.abs().max()) == 600.0
    assert torch.equal(stored, in_fp8(pool))


def test_a_pool_of_bytes_gets_prompts_in_fp8() -> None:
    """Numbers of every size, a channel of 600, a zero vector, ties, and the largest float32. None saturates or is NaN."""
    K, d = 2, 24
    k, v = (noise(2, K, 20, d, seed=s) * (4 * noise(2, K, 20, d, seed=s + 2)).exp() for s in (0, 1))
    k[:, :, :, 5], v[0, 0, 0], v[0, 0, 1] = -600.0, 0.0, 3e38 * noise(d, seed=7).clamp(-1, 1)
    k[0, 0, 1] = torch.arange(d, device=DEVICE) + 0.5
    k[0, 0, 1, 0] = 448.0  # so that the scale is 1
    pool = torch.zeros((9, 2, 2, K, PAGE, d), device=DEVICE)
    stored = in_fp8(pool)
    for target in (pool, stored):
        decode_layers.store(k, v, target, 1, ints(0, 5, 2, 8, 1, 3).view(2, 3), ints(3, 0), ints(19, 20))
    assert torch.equal(stored, in_fp8(pool))
    codes = stored.flatten(4)[..., : PAGE * d]
    assert not bool((codes & 0x7F == 0x7F).any())


@pytest.mark.parametrize("x", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_nan_in_fp8(x: float) -> None:
    """A broken model must not get finite log-probs."""
    k, stored = noise(1, 1, 2, 16), torch.zeros((1, 1, 2, 1, PAGE, 20), dtype=torch.uint8, device=DEVICE)
    k[0, 0, 1, 3] = x
    decode_layers.store(k, k, stored, 0, ints(0).view(1, 1), ints(0), ints(2))
    codes = stored[0, 0, 0, 0].flatten()[: PAGE * 16].view(PAGE, 16)
    assert int(codes[1, 3]) & 0x7F == 0x7F
    assert not bool((codes[0] & 0x7F == 0x7F).any())
