"""The learner's attention on a GPU: forward and backward of a pack of two completions, with and without TMA.

    python bench/attention.py           writes bench/results/attention.json

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
from oncurve.kernels.pack_attention import AttentionRule
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


def measure(new: int, *, has_tma: bool) -> dict[str, object]:
    completions = [(PROMPT + i * new, new, 0) for i in range(COMPLETIONS)]
    positions = [torch.arange(PROMPT), *[torch.arange(PROMPT, PROMPT + new)] * COMPLETIONS]
    pack = CudaPackAttention([(0, PROMPT)], completions, torch.cat(positions).cuda(), PROMPT + new)
    tokens = PROMPT + COMPLETIONS * new
    q, d_out = (torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(tokens, KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pairs = COMPLETIONS * (new * new / 2 + new * PROMPT) + PROMPT * PROMPT / 2
    flops, rule = 4 * SIZE * HEADS * pairs, AttentionRule(SIZE**-0.5)
    chosen, original = pack_attention.tiling(SIZE, q.dtype, round(pack.mean_keys), has_tma=has_tma), pack_attention.tiling
    pack_attention.tiling = lambda *args, **options: chosen
    try:
        out, lse = pack.forward(q, k, v, rule)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        forward = seconds(lambda: pack.forward(q, k, v, rule))
        backward = seconds(lambda: pack.backward(q, k, v, out, lse, d_out, rule, grads))
    finally:
        pack_attention.tiling = original
    rates = {"forward_tflops": round(flops / forward / 1e12, 1), "backward_tflops": round(2.5 * flops / backward / 1e12, 1)}
    return {"completions": f"{COMPLETIONS} × {new:,}", "tma": chosen.uses_tma, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for new in (4096, 16_384, 65_536):
        for has_tma in (False, True):
            rows.append(measure(new, has_tma=has_tma))
            print(rows[-1], flush=True)
    report = {"commit": commit(), "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
