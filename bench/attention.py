"""The learner's attention on a GPU: forward and backward of a pack of two completions, with and without TMA.

    python bench/attention.py           writes bench/results/attention.json
    python bench/attention.py --sweep   the backward pass with other tiles, in one launch with atomics or in two

Heads of Qwen3-0.6B: 16 of 128, 8 for keys and values, in bfloat16; prompt 512. FLOPs are 4 per query, key and element of a
head, and 2.5 times that for the backward pass, whatever the kernels compute twice. The best of three.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from reporting import commit

from oncurve.kernels import pack_attention
from oncurve.kernels.launch import gpu_of
from oncurve.kernels.pack_attention import AttentionRule, PackTiles, Tiling
from oncurve.models.pack_attention_cuda import CudaPackAttention

RESULTS = Path(__file__).resolve().parent / "results" / "attention.json"
HEADS, KV_HEADS, SIZE, PROMPT, COMPLETIONS = 16, 8, 128, 512, 2


def seconds(do: Callable[[], object]) -> float:
    do()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        do()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(new: int) -> tuple[CudaPackAttention, Tensors, float]:
    """A pack, its q, k, v and dO, and the FLOPs of its forward pass."""
    completions = [(PROMPT + i * new, new, 0) for i in range(COMPLETIONS)]
    positions = [torch.arange(PROMPT), *[torch.arange(PROMPT, PROMPT + new)] * COMPLETIONS]
    pack = CudaPackAttention([(0, PROMPT)], completions, torch.cat(positions).cuda(), PROMPT + new)
    tokens = PROMPT + COMPLETIONS * new
    q, d_out = (torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(tokens, KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pairs = COMPLETIONS * (new * new / 2 + new * PROMPT) + PROMPT * PROMPT / 2
    return pack, (q, k, v, d_out), 4 * SIZE * HEADS * pairs


def use(tiles: Tiling) -> None:
    """Make the kernels use these tiles."""
    pack_attention.tiling = lambda *args, **options: tiles


def measure(new: int, *, has_tma: bool) -> dict[str, object]:
    pack, (q, k, v, d_out), flops = inputs(new)
    rule = AttentionRule(SIZE**-0.5)
    original = pack_attention.tiling
    chosen = original(SIZE, q.dtype, round(pack.mean_keys), gpu_of(q.device), has_tma=has_tma)
    use(chosen)
    try:
        out, lse = pack.forward(q, k, v, rule)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        forward = seconds(lambda: pack.forward(q, k, v, rule))
        backward = seconds(lambda: pack.backward(q, k, v, out, lse, d_out, rule, grads))
    finally:
        pack_attention.tiling = original
    rates = {"forward_tflops": round(flops / forward / 1e12, 1), "backward_tflops": round(2.5 * flops / backward / 1e12, 1)}
    return {"completions": f"{COMPLETIONS} × {new:,}", "tma": chosen.uses_tma, **rates}


FORWARD = PackTiles(128, 128, 8, 3)
QUERIES = [PackTiles(128, 64, 8, 3), PackTiles(128, 128, 8, 2), PackTiles(128, 32, 8, 4), PackTiles(64, 64, 4, 3)]
KEYS = [
    PackTiles(64, 64, 4, 2), PackTiles(64, 128, 8, 2), PackTiles(64, 128, 8, 1), PackTiles(64, 64, 4, 3),
    PackTiles(32, 128, 8, 3), PackTiles(128, 128, 8, 1), PackTiles(32, 64, 4, 3),
]  # fmt: skip
ADDING = [
    PackTiles(64, 128, 8, 1), PackTiles(64, 128, 8, 2), PackTiles(64, 64, 4, 1), PackTiles(64, 64, 4, 2),
    PackTiles(32, 128, 8, 2), PackTiles(32, 64, 4, 2), PackTiles(64, 64, 8, 2), PackTiles(32, 128, 4, 2),
]  # fmt: skip


def variants() -> dict[str, Tiling]:
    """The current tiles with one launch changed, and one launch in place of two."""
    q, k = QUERIES[0], KEYS[0]
    two = [(q, k), *((other, k) for other in QUERIES[1:]), *((q, other) for other in KEYS[1:])]
    found = {f"queries {q}, keys {k}": Tiling(FORWARD, q, k, uses_tma=True) for q, k in two}
    for uses_tma in (True, False):
        found |= {f"one launch {k}, tma={uses_tma}": Tiling(FORWARD, None, k, uses_tma=uses_tma) for k in ADDING}
    return {name.replace("PackTiles", ""): tiles for name, tiles in found.items()}


def sweep(new: int, numbers: list[int]) -> list[dict[str, object]]:
    """Each variant's rate, and how far its gradients are from those of the first, relative to their norm."""
    pack, (q, k, v, d_out), flops = inputs(new)
    rule, original, rows = AttentionRule(SIZE**-0.5), pack_attention.tiling, list[dict[str, object]]()
    expected: tuple[torch.Tensor, ...] | None = None
    try:
        for number, (name, tiles) in enumerate(variants().items()):
            if numbers and number not in numbers:
                continue
            use(tiles)
            out, lse = pack.forward(q, k, v, rule)
            grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            try:
                best = seconds(lambda: pack.backward(q, k, v, out, lse, d_out, rule, grads))  # noqa: B023
            except Exception as error:  # a variant that needs too much shared memory
                rows.append({"variant": name, "failed": f"{type(error).__name__}: {str(error)[:80]}"})
            else:
                expected = expected or tuple(x.float() for x in grads)
                off = [float((x.float() - y).norm() / y.norm()) for x, y in zip(grads, expected, strict=True)]
                rows.append({"number": number, "variant": name, "tflops": round(2.5 * flops / best / 1e12, 1), "off": off})
            print(new, rows[-1], flush=True)
    finally:
        pack_attention.tiling = original
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--new", default="16384", help="tokens of a completion for --sweep")
    parser.add_argument("--variants", default="", help="numbers of variants for --sweep; default: all")
    options = parser.parse_args()
    if options.sweep:
        numbers = [int(n) for n in options.variants.split(",") if n]
        found = {new: sweep(int(new), numbers) for new in options.new.split(",")}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    rows: list[dict[str, object]] = []
    for new in (4096, 16_384, 65_536):
        for has_tma in (False, True):
            rows.append(measure(new, has_tma=has_tma))
            print(rows[-1], flush=True)
    report = {"commit": commit(), "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
