"""Sampling on the general path beside transformers' `generate`, with one group in one batch.

    python bench/general_path.py             on a GPU in bfloat16; writes bench/results/general_path.json
    python bench/general_path.py --tiny      toy sizes that run anywhere, to check that the script works

Random weights, one prompt of 128 tokens, 8 completions of 128 tokens; the better of two runs after a warm-up. Qwen2.5 0.5B
takes our attention: its row shows what opening a model costs, self-check and compilation included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from random_models import make_tokenizer
from reporting import commit

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt

RESULTS = Path(__file__).resolve().parent / "results" / "general_path.json"
GROUP = 8
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba 130M": ("MambaConfig", {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50_280}),
    "Falcon 1B": ("FalconConfig", {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 50_280, "alibi": True,
        "multi_query": False, "parallel_attn": False, "bias": True, "new_decoder_architecture": False,
    }),
    "GPT-J of 0.5B shape": ("GPTJConfig", {
        "n_embd": 1024, "n_layer": 24, "n_head": 16, "rotary_dim": 32, "vocab_size": 50_280,
    }),
    "Qwen2.5 0.5B": ("Qwen2Config", {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    }),
}  # fmt: skip
TINY = {"hidden_size": 64, "n_embd": 64, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4,
        "num_key_value_heads": 2, "rotary_dim": 8, "intermediate_size": 128, "vocab_size": 512}  # fmt: skip


def measure(kind: str, sizes: dict[str, Any], tokens: int) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, eos_token_id=1, pad_token_id=2, bos_token_id=0)
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    began = time.perf_counter()
    policy = Policy(model, make_tokenizer(sizes["vocab_size"]))
    opened = time.perf_counter() - began
    engine, prompt = NativeEngine(policy, Engine(slots=GROUP)), Prompt(id="a", text=" ".join(f"w{i}" for i in range(10, 138)))
    sampling = Sampling(max_new_tokens=tokens, min_new_tokens=tokens)

    def rate(run: Callable[[], object]) -> int:
        run()
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return round(GROUP * tokens / min(seconds))

    row: dict[str, Any] = {"path": policy.general_reason or "our attention", "open_s": round(opened, 2)}
    row["oncurve"] = rate(lambda: engine.sample([prompt], GROUP, sampling, SampleKey(0, 0)))
    if policy.general_reason is not None:
        ids = torch.from_numpy(policy.encode(prompt)).to(device).expand(GROUP, -1)
        options = {"do_sample": True, "max_new_tokens": tokens, "min_new_tokens": tokens}
        row["generate"] = rate(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))
        row["ratio"] = round(row["oncurve"] / row["generate"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = {}
    for name, (kind, sizes) in SHAPES.items():
        shape = {key: TINY.get(key, value) for key, value in sizes.items()} if options.tiny else sizes
        rows[name] = measure(kind, shape, 8 if options.tiny else 128)
        print(f"{name:22} {rows[name]}", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report = {"commit": commit(), "device": device, "versions": versions, "group": GROUP, "tokens": [128, 128], "rows": rows}
    if not options.tiny:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
