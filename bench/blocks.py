"""Effect of `model.compile_blocks`: the update of models that run their own modules, plain and compiled.

    python bench/blocks.py            on a GPU; writes bench/results/blocks.json
    python bench/blocks.py --tiny     a toy size that runs anywhere, to check that the script works

Random weights in bfloat16 (float32 on a CPU), 8 prompts × 8 completions, 128 + 256 tokens; medians after a warm-up. The time of
the first update includes torch's compilation.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_models import graded_groups, make_tokenizer
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Olmo2Config

from oncurve.models.loading.load import compile_blocks
from oncurve.models.policy import Policy
from oncurve.recipe.schema.stages import Grpo
from oncurve.training.learner.learner import Learner
from oncurve.training.stages.grpo import grpo_learner_settings

RESULTS = Path(__file__).resolve().parent / "results" / "blocks.json"
SIZES = {
    "Gemma 3 1B": (Gemma3TextConfig, {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "head_dim": 256,
                                      "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262_144}),
    "OLMo 2 1B": (Olmo2Config, {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                                "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 100_352}),
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512, "num_attention_heads": 4}


def update_of(name: str, compiled: bool, tiny: bool, tries: int) -> dict[str, Any]:
    config, shape = SIZES[name]
    shape = shape | ({**TINY, "num_key_value_heads": 2, "head_dim": 16} if tiny else {})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config(**shape, eos_token_id=1, pad_token_id=2))
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    policy = Policy(model, make_tokenizer(shape["vocab_size"]))
    if compiled:
        compile_blocks(policy.backbone)
    learner = Learner(
        policy, grpo_learner_settings(Grpo.model_validate({"tokens_per_pack": 16384, "optimiser": {"learning_rate": 1e-6}}))
    )
    groups = graded_groups(8, 8, 128, 256, shape["vocab_size"]) if not tiny else graded_groups(2, 2, 12, 16, 512)
    seconds = []
    for _ in range(tries + 1):
        began = time.perf_counter()
        metrics = learner.update(groups).metrics
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "model": name, "compiled": compiled, "first_s": round(seconds[0], 2), "update_s": round(median(seconds[1:]), 4),
        "tries_s": [round(s, 4) for s in seconds[1:]], "grad_norm": metrics["grad_norm"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--commit", default="", help="the measured commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for name in SIZES:
        for compiled in (False, True):
            rows.append(update_of(name, compiled, args.tiny, args.tries))
            print(rows[-1], flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        print(f"{name}: {rows[-2]['update_s'] / rows[-1]['update_s']:.2f} times as fast when compiled", flush=True)
    versions = {p: metadata.version(p) for p in ("torch", "transformers")}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    args.out.write_text(json.dumps({"device": gpu, "commit": args.commit, **versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
