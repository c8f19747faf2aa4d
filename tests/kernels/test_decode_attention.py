"""Decode attention against float64: pages, shared prompts, windows, soft caps, any grouping of heads, idle slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from oncurve.kernels import decode_attention
from oncurve.kernels.decode_attention import LaunchShape, PageTables, PartialSoftmax, Tiles, attend

PAGE, LAYERS = 32, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(16, 4, 1)


@dataclass
class Case:
    """Slots with prompts and suffixes of given lengths; a suffix of −1 is idle. Slots with one prompt number share it."""

    q: Tensor
    pool: Tensor
    tables: PageTables
    prompt_of: list[int]
    prompts: list[int]
    suffixes: list[int]


def make(
    H: int, K: int, d: int, prompts: list[int], prompt_of: list[int], suffixes: list[int], dtype: torch.dtype = torch.float32
) -> Case:
    """Pages are handed out in a shuffled order, and what nobody wrote is NaN."""
    generator = torch.Generator().manual_seed(H * d + len(suffixes))
    S, R, wide = len(suffixes), 4, 4
    pool = torch.full((64, LAYERS, 2, K, PAGE, d), torch.nan)
    free = torch.randperm(64, generator=generator).tolist()
    members, prompt_page = torch.full((S, R), -1), torch.zeros(S, wide)
    suffix_page, listed = torch.zeros(S, wide), torch.full((S * wide,), -1)

    def fill(length: int) -> list[int]:
        pages = [free.pop() for _ in range(-(-length // PAGE))]
        for i, page in enumerate(pages):
            stored = min(PAGE, length - i * PAGE)
            pool[page, :, :, :, :stored] = torch.randn(LAYERS, 2, K, stored, d, generator=generator)
        return pages

    table = 0
    for number, length in enumerate(prompts):
        pages = fill(length)
        slots = [s for s, n in enumerate(prompt_of) if n == number and suffixes[s] >= 0]
        for first in range(0, len(slots), R):
            chosen = slots[first : first + R]
            members[table, : len(chosen)] = torch.tensor(chosen)
            prompt_page[table, : len(pages)] = torch.tensor(pages)
            table += 1
    places = []
    for s, length in enumerate(suffixes):
        pages = fill(length + 1)
        suffix_page[s, : len(pages)] = torch.tensor(pages)
        places += [s * wide + i for i in range(len(pages))]
    listed[: len(places)] = torch.tensor(places)
    lengths = torch.tensor([prompts[n] for n in prompt_of]), torch.tensor(suffixes)
    tensors = (members, prompt_page, suffix_page, listed, *lengths)
    q = torch.randn(S, H, d, generator=generator)
    on: Any = [x.to(DEVICE, torch.int32) for x in tensors]
    return Case(q.to(DEVICE, dtype), pool.to(DEVICE, dtype), PageTables(*on), prompt_of, prompts, suffixes)


def run(
    case: Case,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    more: int = 0,
    listed: bool = False,
    sinks_H: Tensor | None = None,
) -> Tensor:
    S, H, d = case.q.shape
    prompt_pages, suffix_pages = (
        max(-(-p // PAGE) for p in case.prompts) + more,
        max(s // PAGE + 1 for s in case.suffixes) + more,
    )
    there = int((case.tables.suffix_list >= 0).sum()) + more
    launch = LaunchShape(S, prompt_pages, suffix_pages, there if listed else None)
    empty = [torch.full(shape, torch.nan, device=DEVICE) for shape in ((launch.parts, S, H, d), *2 * [(launch.parts, S, H)])]
    return attend(case.q, case.pool, 1, case.tables, launch, PartialSoftmax(*empty), scale, window, softcap, SMALL, sinks_H)


def expected(case: Case, slot: int, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """By the formula, in float64: softmax over the slot's prompt and suffix."""
    _, H, d = case.q.shape
    own, length = case.suffixes[slot] + 1, case.prompts[case.prompt_of[slot]]
    table = int((case.tables.members == slot).any(1).int().argmax())
    pages = [case.pool[int(case.tables.prompt_page[table, i]), 1] for i in range(-(-length // PAGE))]
    kv = torch.cat([p.double() for p in pages], 2)[:, :, :length] if pages else case.pool.new_zeros(2, case.pool.shape[3], 0, d)
    suffix = torch.cat([case.pool[int(case.tables.suffix_page[slot, i]), 1].double() for i in range(-(-own // PAGE))], 2)
    k, v = torch.cat((kv.double(), suffix[:, :, :own]), 2).repeat_interleave(H // case.pool.shape[3], 1)
    scores = torch.einsum("hd,hnd->hn", case.q[slot].double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[:, : max(0, length + own - window)] = -torch.inf
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), v)


def assert_close(case: Case, found: Tensor, scale: float, window: int | None, softcap: float | None, within: float) -> None:
    for slot, length in enumerate(case.suffixes):
        if length >= 0:
            want = expected(case, slot, scale, window, softcap)
            assert float((found[slot].double() - want).norm() / want.norm()) < within, slot


@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
def test_head_sizes(d: int) -> None:
    case = make(4, 2, d, [40, 1], [0, 0, 1], [3, 33, 0])
    assert_close(case, run(case, d**-0.5), d**-0.5, None, None, 1e-5)


@pytest.mark.parametrize(("H", "K"), [(1, 1), (6, 2), (7, 1), (3, 3)])
def test_any_grouping_of_heads(H: int, K: int) -> None:
    case = make(H, K, 16, [32, 33, 0], [0, 0, 1, 0, 0, 0, 2], [0, 31, 32, 5, 64, 7, 1])
    assert_close(case, run(case, 0.3), 0.3, None, None, 1e-5)


@pytest.mark.parametrize("window", [1, 5, 32, 50, 200])
def test_windows_are_measured_in_positions(window: int) -> None:
    case = make(4, 2, 16, [70, 3], [0, 0, 1, 0], [0, 40, 66, 3])
    assert_close(case, run(case, 0.3, window), 0.3, window, None, 1e-5)


def test_soft_caps() -> None:
    case = make(4, 2, 16, [40], [0, 0], [5, 33])
    assert_close(case, run(case, 2.0, softcap=1.5), 2.0, None, 1.5, 1e-5)


def test_sinks_take_part_in_the_softmax() -> None:
    """A sink's share is lost: the rest is the plain output, scaled by what is left. An idle slot stays 0."""
    case = make(4, 2, 16, [40], [0, 0, 0], [5, 33, -1])
    sinks_H = torch.tensor([-3.0, 0.0, 2.0, 9.0], device=DEVICE)
    found = run(case, 0.3, sinks_H=sinks_H)
    assert bool((found[2] == 0).all())
    length, heads = 40 + 6, case.pool[[int(i) for i in case.tables.prompt_page[0, :2]], 1].double()
    keys = torch.cat(
        (torch.cat(list(heads[:, 0]), 1)[:, :40], case.pool[int(case.tables.suffix_page[0, 0]), 1, 0, :, :6].double()), 1
    )
    scores = torch.einsum("hd,hnd->hn", case.q[0].double(), keys.repeat_interleave(2, 0)) * 0.3
    assert scores.shape[1] == length
    left = torch.sigmoid(scores.logsumexp(1) - sinks_H.double())
    want = expected(case, 0, 0.3, None, None) * left[:, None]
    assert float((found[0].double() - want).norm() / want.norm()) < 1e-5


def test_sixteen_bits_round_once() -> None:
    sixteen = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
    case = make(4, 2, 64, [70], [0, 0], [5, 33], sixteen)
    found = run(case, 0.125)
    assert found.dtype == sixteen
    assert_close(case, found, 0.125, None, None, 1e-2)


def test_idle_slots_are_left_out_and_a_longer_launch_changes_no_bit() -> None:
    """A slot's output depends only on its own prompt and suffix."""
    case = make(4, 2, 16, [40, 9], [0, 1, 0, 1], [5, -1, 33, 12])
    found = run(case, 0.3)
    assert bool((found[1] == 0).all())
    assert_close(case, found, 0.3, None, None, 1e-5)
    assert torch.equal(found, run(case, 0.3, more=2))
    for more in (0, 3):
        assert torch.equal(found, run(case, 0.3, more=more, listed=True)), "by a list of pages: the same"
    alone = make(4, 2, 16, [40, 9], [0, 1, 0, 1], [5, -1, 33, 12])
    alone.tables.suffix_length[2:] = -1
    alone.tables.members[:, 1:] = -1
    assert torch.equal(run(alone, 0.3)[0], found[0])


POSITIVE = torch.tensor([(c % 8 / 8 + (c > 7)) * 2.0 ** (max(c // 8, 1) - 7) for c in range(127)], dtype=torch.float64)
"""The numbers of e4m3 from 0 to 448, by their codes."""


def in_fp8(pool: Tensor) -> tuple[Tensor, Tensor]:
    """A pool of bytes, and the same numbers in float64; what nobody wrote stays NaN. Ties go to the even code."""
    numbers = pool.double().cpu()
    scale = (numbers.abs().amax(-1).float() * (1 / 448)).double()
    size = (numbers / scale[..., None]).abs().nan_to_num(0.0)
    code = torch.searchsorted((POSITIVE[:-1] + POSITIVE[1:]) / 2, size)
    is_tie = (code < 126) & (size == ((POSITIVE[:-1] + POSITIVE[1:]) / 2)[code.clamp(max=125)])
    code = code + (is_tie & (code % 2 == 1))
    codes = (code + 128 * (numbers < 0)).to(torch.uint8)
    codes[numbers.isnan()] = 0x7F
    stored = torch.cat((codes.flatten(4), scale.float().view(torch.uint8).flatten(4)), 4)
    again = torch.where(numbers.isnan(), torch.nan, POSITIVE[code] * numbers.sign() * scale[..., None])
    return stored.view(*pool.shape[:5], -1).to(DEVICE), again.to(DEVICE)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str)
def test_fp8_numbers_are_multiplied_by_their_scales(
    dtype: torch.dtype, within: float, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the GPU's conversion and with ours. In float16, weights times the scales of small values alone would be lost."""
    monkeypatch.setattr(decode_attention, "_converts_fp8", lambda device: native)
    case = make(6, 2, 24, [40, 1, 70], [0, 0, 1, 2], [3, 33, 0, 64], dtype)
    case.pool[:, :, 1] *= 1e-3
    case.pool[:, :, :, :, ::5, 7] = 600.0
    case.pool, exact = in_fp8(case.pool)
    found = run(case, 0.2, listed=True)
    case.pool = exact
    assert_close(case, found, 0.2, None, None, within)


@pytest.mark.parametrize("outlier", [1.0, 600.0])
def test_fp8_moves_attention_by_no_more_than_its_format_allows(outlier: float) -> None:
    """A number is off by 1/16 of itself, or by half of the step 2⁻⁹ of the smallest numbers. So a score is off by
    δ ≤ scale · Σ |q| · error of k, a weight by a factor of e^±2δ, and the output by (e^2δ − 1) · max |v| + max error of v."""
    case = make(4, 2, 16, [40], [0, 0], [5, 33])
    channel = case.pool[:, :, 0, :, :, 3]
    channel.copy_(torch.where(channel.isnan(), torch.nan, outlier * channel.sign()))
    plain = run(case, 0.05)
    exact = case.pool.double()
    case.pool, rounded = in_fp8(case.pool)
    found = run(case, 0.05)
    error = torch.maximum(exact.abs() / 16, exact.abs().amax(-1, keepdim=True) / 448 * 2**-10)
    assert bool(((rounded - exact).abs() <= error * (1 + 1e-6))[exact.isfinite()].all())
    k_error, v_error = (rounded - exact).abs().nan_to_num(0.0)[:, 1].unbind(1)
    delta = 0.05 * float(torch.einsum("shd,pknd->shkpn", case.q.double().abs(), k_error).max())
    values = exact[:, 1, 1].nan_to_num(0.0).abs().max()
    bound = (float(torch.tensor(2 * delta).exp()) - 1) * float(values) + float(v_error.max())
    moved = float((found - plain).abs().max())
    assert 1e-4 < moved <= bound < 4.0, (moved, bound)
