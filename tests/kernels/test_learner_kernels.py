"""Each kernel of the learner against plain torch in float64: values and every derivative.

Without a GPU they run in Triton's interpreter, which can't compute with bfloat16: float32 here, bfloat16 in tests/gpu.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from oncurve.kernels import learner_layers, lm_head, pack_attention
from oncurve.kernels.launch import INTERPRETER
from oncurve.models.attention_interface import ScoreRule
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.models.heads import lm_head_cuda
from oncurve.models.heads.lm_head import Head, token_logps
from oncurve.models.pack_attention import PackAttention
from oncurve.models.pack_attention_cuda import CudaPackAttention
from oncurve.models.packing import PrefixGroup, build_pack
from tests.kernels.gpus import GPUS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WITHIN = 2e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    """In float64, but with the values of float32: what a kernel gets and what it is compared with are the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def low(x: Tensor) -> Tensor:
    return x.float().to(DEVICE)


def apart(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double().cpu() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("added", [True, False])
def test_residual_sum_and_norm(width: int, added: bool) -> None:
    x, y, w, g, past = (random(*s, seed=i) for i, s in enumerate([(7, width), (7, width), (width,), (7, width), (7, width)]))
    s, weight = (x + y if added else x).requires_grad_(), w.clone().requires_grad_()
    normal = weight * s * (s.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    ds, dw = torch.autograd.grad((normal * g).sum() + (s * past).sum(), (s, weight))
    total, ours = learner_layers.add_norm(low(x), low(y) if added else None, low(w), 1e-3)
    d_in, again, d_weight = learner_layers.norm_backward(total, low(w), 1e-3, low(g), low(past))
    for one, other in ((total, s), (ours, normal), (again, normal), (d_in, ds), (d_weight, dw)):
        assert apart(one, other) < WITHIN
    alone, _, _ = learner_layers.norm_backward(total, low(w), 1e-3, low(g), None, recompute=False)
    assert apart(alone, ds - past) < WITHIN


def test_gated_unit() -> None:
    both, g = random(5, 2 * 11).requires_grad_(), random(5, 11, seed=1)
    value = functional.silu(both[:, :11]) * both[:, 11:]
    (expected,) = torch.autograd.grad((value * g).sum(), both)
    d_both, again = learner_layers.swiglu_backward(low(both.detach()), low(g))
    for one, other in ((learner_layers.swiglu(low(both.detach())), value), (again, value), (d_both, expected)):
        assert apart(one, other) < WITHIN


@pytest.mark.parametrize("normed", [True, False])
def test_norm_and_rotation_of_queries_and_keys(normed: bool) -> None:
    N, H, K, d = 9, 3, 2, 8
    qkv, g = random(N, (H + 2 * K) * d).requires_grad_(), random(N, H + K, d, seed=1)
    weights = [random(d, seed=i).requires_grad_() for i in (2, 3)]
    angles = random(20, d // 2, seed=4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin() * torch.tensor([-1.0] * (d // 2) + [1.0] * (d // 2))
    position = torch.tensor([0, 1, 2, 3, 19, 4, 5, 3, 4])
    heads = qkv[:, : (H + K) * d].view(N, H + K, d)
    if normed:
        scale = torch.cat((weights[0].expand(H, d), weights[1].expand(K, d)))
        heads = heads * (heads.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * scale
    turned = torch.cat((heads[..., d // 2 :], heads[..., : d // 2]), -1)
    out = heads * cos[position][:, None] + turned * sin[position][:, None]
    expected = torch.autograd.grad((out * g).sum(), (qkv, *weights) if normed else (qkv,))
    own = (low(weights[0].detach()), low(weights[1].detach())) if normed else None
    tables = (low(angles[:, : d // 2].cos()), low(angles[:, : d // 2].sin()))
    turning = learner_layers.NormedRope(H, K, d, own, 1e-3, tables, position.to(DEVICE))
    d_qkv = torch.zeros_like(low(qkv.detach()))
    assert apart(turning.forward(low(qkv.detach())), out) < WITHIN
    of_norms = turning.backward(low(qkv.detach()), low(g), d_qkv)
    for one, other in zip((d_qkv, *(of_norms or ())), expected, strict=True):
        assert apart(one, other) < WITHIN


@pytest.mark.parametrize(("scale", "softcap", "temperature", "bias"), [(1.0, None, 1.0, False), (0.3, 2.0, 0.7, True)])
@pytest.mark.parametrize("entropy", [True, False])
def test_statistics_of_logits(scale: float, softcap: float | None, temperature: float, bias: bool, entropy: bool) -> None:
    """Against the chunked head of a CPU, with the identity as its weight: the logits are then its input."""
    C, V = 4, 37
    logits, b = (3 * random(C, V)).requires_grad_(), random(V, seed=1) if bias else None
    target, g, h = torch.tensor([0, 36, 5, 5]), random(C, seed=2), random(C, seed=3)
    logp, of = token_logps(Head(torch.eye(V, dtype=torch.float64), b, scale, softcap), logits, target, temperature)
    (expected,) = torch.autograd.grad((logp * g).sum() + (of * h).sum() * entropy, logits)
    shape = lm_head.HeadShape(scale, softcap, temperature, None if b is None else low(b))
    raw, out = low(logits.detach()), torch.full((C, V), torch.nan, device=DEVICE)
    ours, ours_of, lse = lm_head.statistics(raw, target.to(DEVICE), shape)
    lm_head.gradient(raw, target.to(DEVICE), shape, (ours_of, lse), low(g), low(h) if entropy else None, out)
    for one, other in ((ours, logp), (ours_of, of), (out, expected)):
        assert apart(one, other) < WITHIN


@pytest.mark.parametrize("rows", [3, 64], ids=["chunks", "one chunk, kept"])
@pytest.mark.parametrize("trained", [True, False])
def test_the_head_in_chunks(rows: int, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the CPU's head in float64. A frozen weight gets no gradient, from autograd or in the sums."""
    monkeypatch.setattr(lm_head_cuda, "gpu_chunk_tokens", lambda _: rows)
    M, D, V = 7, 5, 37
    hidden, weight, bias = random(M, D), random(V, D, seed=1), random(V, seed=2)
    target, g, h = torch.arange(M) * 5, random(M, seed=3), random(M, seed=4)
    exact = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    values = token_logps(Head(exact[1], exact[2], 0.5), exact[0], target, 0.7)
    expected = torch.autograd.grad((values[0] * g).sum() + (values[1] * h).sum(), exact)
    ours = [low(hidden).requires_grad_(), low(weight).requires_grad_(trained), low(bias).requires_grad_(trained)]
    for sums in (None, GradAccumulator([])):
        found = lm_head_cuda.CudaHead.apply(*ours[:3], target.to(DEVICE), lm_head.HeadShape(0.5, None, 0.7, ours[2]), sums)  # type: ignore[no-untyped-call]
        loss = (found[0] * low(g)).sum() + (found[1] * low(h)).sum()
        of = torch.autograd.grad(loss, ours if trained and sums is None else ours[:1])
        if sums is not None:
            assert sums.is_allocated == trained
            of += tuple(sums.buffer_for(x) for x in ours[1:]) if trained else ()
        for one, other in zip((*found, *of), (*values, *expected), strict=False):
            assert apart(one, other) < WITHIN
        assert len(of) == (3 if trained else 1)


def pack_of(shape: list[tuple[int, list[int]]]) -> list[PrefixGroup]:
    dice = np.random.default_rng(3)
    return [
        PrefixGroup(dice.integers(0, 9, p), tuple(dice.integers(0, 9, n) for n in c), tuple(range(len(c)))) for p, c in shape
    ]


TMA = ("H100, H200", "B200", "RTX 5090")
RAGGED = [(40, [30, 1, 7]), (3, [12]), (17, [1, 26])]


@pytest.mark.parametrize("adds", [False, True], ids=["two launches", "one launch, with atomics"])
@pytest.mark.parametrize(
    ("shape", "heads", "size", "window", "softcap", "uses_tma"),
    [
        (RAGGED, (4, 2), 16, None, None, False),
        (RAGGED, (4, 2), 16, None, None, True),
        (RAGGED, (2, 2), 24, 9, None, False),
        (RAGGED, (3, 1), 16, 24, 3.0, False),
        (RAGGED, (3, 1), 16, 24, 3.0, True),
        ([(33, [1, 1]), (4, [1])], (2, 1), 16, None, None, False),
        ([(5, [70])], (2, 1), 16, None, None, True),
    ],
)
def test_attention_in_a_pack(
    shape: list[tuple[int, list[int]]],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    softcap: float | None,
    uses_tma: bool,
    adds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the padded computation with full scores: shared prompts, windows in positions, soft caps, odd head sizes.

    With TMA, rows past a segment's end are real rows of the next segment.
    """
    tiles = pack_attention.PackTiles(32, 16, 4, 1)
    backward = pack_attention.PackTiles(16, 32, 4, 1)
    tiling = pack_attention.Tiling(tiles, None if adds else tiles, backward, uses_tma=uses_tma)
    monkeypatch.setattr(pack_attention, "tiling", lambda *args, **options: tiling)
    pack = build_pack(pack_of(shape), torch.device("cpu"))
    plain = pack.attention
    assert isinstance(plain, PackAttention)
    H, K = heads
    q, k, v = (random(1, n, pack.tokens, size, seed=i).requires_grad_() for i, n in enumerate((H, K, K)))
    weigh = random(1, pack.tokens, H, size, seed=5)
    expected = plain.attend_by_scores(q, k, v, ScoreRule(0.3, window, softcap))
    gradients = torch.autograd.grad((expected * weigh).sum(), (q, k, v))
    layout = on_gpu(pack_of(shape))
    # As models have them: the heads of a token side by side.
    ours = tuple(low(x.detach().transpose(1, 2).contiguous()).transpose(1, 2).requires_grad_() for x in (q, k, v))
    out = layout.attend(0, ours[0], ours[1], ours[2], ScoreRule(0.3, window, softcap))
    found = torch.autograd.grad((out * low(weigh)).sum(), ours)
    for one, other in zip((out, *found), (expected, *gradients), strict=True):
        assert apart(one, other) < WITHIN


@pytest.mark.parametrize("window", [None, 9])
def test_sinks_are_keys_whose_value_is_0(window: int | None) -> None:
    """On a GPU and by the CPU's flash kernel, against the plain formula with one more column of scores."""
    pack, sinks_H = build_pack(pack_of(RAGGED), torch.device("cpu")), random(4, seed=7).requires_grad_()
    q, k, v = (random(1, n, pack.tokens, 16, seed=i).requires_grad_() for i, n in enumerate((4, 2, 2)))
    weigh, plain = random(1, pack.tokens, 4, 16, seed=5), pack.attention
    assert isinstance(plain, PackAttention)
    expected = plain.attend_by_scores(q, k, v, ScoreRule(0.3, window, None, sinks_H))
    assert apart(plain.attend_by_scores(q, k, v, ScoreRule(0.3, window)), expected) > 0.1
    padded = [torch.cat((x, torch.zeros_like(x[:, :, :1])), 2) for x in (k, v)]
    scores = torch.cat(((q[0, 3, 45] @ padded[0][0, 1].t())[: pack.tokens] * 0.3, sinks_H[3:]))
    visible = [i for i in (*range(40), *range(40, 46)) if window is None or 45 - i < window]
    assert apart(expected[0, 45, 3], scores[[*visible, -1]].softmax(0)[:-1] @ v[0, 1, visible]) < WITHIN
    gradients = torch.autograd.grad((expected * weigh).sum(), (q, k, v, sinks_H))
    for layout in (on_gpu(pack_of(RAGGED)), plain):
        inputs = [x.detach().clone() if layout is plain else low(x.detach()) for x in (q, k, v, sinks_H)]
        ours = [x.requires_grad_() for x in inputs]
        out = layout.attend(0, ours[0], ours[1], ours[2], ScoreRule(0.3, window, None, ours[3]))
        found = torch.autograd.grad((out * weigh.to(out)).sum(), ours)
        for one, other in zip((out, *found), (expected, *gradients), strict=True):
            assert apart(one, other) < WITHIN


def on_gpu(bundles: list[PrefixGroup]) -> CudaPackAttention:
    """The GPU's layout of a pack, wherever the tests run."""
    prompts, completions, at = [], [], 0
    positions: list[int] = []
    for p, b in enumerate(bundles):
        prompts.append((at, len(b.prompt_ids)))
        positions += range(len(b.prompt_ids))
        at += len(b.prompt_ids)
        for c in b.completion_ids:
            completions.append((at, len(c) - 1, p))
            positions += range(len(b.prompt_ids), len(b.prompt_ids) + len(c) - 1)
            at += len(c) - 1
    return CudaPackAttention(prompts, completions, torch.tensor(positions, device=DEVICE), max(positions) + 1)


def test_blocks_cover_each_token_once_and_the_longest_work_comes_first() -> None:
    layout = on_gpu(pack_of(RAGGED))
    queries = layout.query_blocks(16).tolist()
    covered = sorted(t for first, end, *_ in queries for t in range(first, min(first + 16, end)))
    assert covered == list(range(sum(p + sum(n - 1 for n in c) for p, c in RAGGED)))
    assert queries[0] == [56, 69, 40, 0, 40]  # the first completion's second block: 29 own keys and 40 of its prompt
    keys = layout.key_blocks(16).tolist()
    assert keys[0] == [0, 40, 75]  # the first prompt's first block is visible to its complete group


def test_tiles_of_the_backward_pass_fit_each_other() -> None:
    """A key block starts its queries at its own first key, so the diagonal must consist of full query blocks."""
    for size in (16, 64, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            for keys in (100, 1000, 10_000):
                for gpu in (INTERPRETER, *GPUS.values()):
                    for has_tma in (False, True):
                        tiles = pack_attention.tiling(size, dtype, keys, gpu, has_tma=has_tma).keys_backward
                        assert tiles.keys % tiles.queries == 0


def test_tiles_by_tma_need_shared_memory() -> None:
    has_tma = [pack_attention.tiling(128, torch.bfloat16, 10_000, GPUS[name], has_tma=True).uses_tma for name in TMA]
    assert dict(zip(TMA, has_tma, strict=True)) == {"H100, H200": True, "B200": True, "RTX 5090": False}
