"""What the self-check costs when a model is opened: a Qwen2.5 of 0.5B shape with random weights.

    python bench/self_check.py             on a GPU in bfloat16; writes bench/results/self_check.json
    python bench/self_check.py --tiny      toy sizes that run anywhere, to check that the script works

Each row is a process of its own. Fresh: neither Triton's cache nor a remembered result. Compiled: Triton's kernels are cached
from the run before. Remembered: the result too. The model has run one plain forward before, so that the start of CUDA
and of its libraries, which every program pays for, is not counted. With --profile the slowest functions are printed.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "self_check.json"
STATES = ("fresh", "compiled", "remembered")
SHAPE = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}


def measure(*, tiny: bool, profile: bool) -> dict[str, Any]:
    """Open the model in this process; seconds of both parts of the check, and what it found."""
    import torch
    import transformers
    from random_models import make_tokenizer

    from oncurve.engines.native.engine import NativeEngine
    from oncurve.engines.native.sampler_check import check_sampler
    from oncurve.models.policy import Policy
    from oncurve.recipe.schema.sections import Engine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    sizes: dict[str, Any] = SHAPE | (TINY if tiny else {})
    config = transformers.Qwen2Config(**sizes, eos_token_id=1, pad_token_id=2, bos_token_id=0)
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            model(torch.arange(3, 40)[None]).logits.sum().item()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    start = time.perf_counter()
    policy = Policy(model, make_tokenizer(sizes["vocab_size"]))
    learner = time.perf_counter()
    check_sampler(NativeEngine(policy, Engine()))
    sampler = time.perf_counter()
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(45)
    is_fused = policy.fast_backbone is not None or policy.fused_weights is not None
    return {
        "check_s": round(policy.check.seconds, 2), "learner_s": round(learner - start, 2),
        "sampler_s": round(sampler - learner, 2),
        "log": policy.check.log_line(is_fused=is_fused, module_reason=policy.module_reason),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip


def main() -> None:
    from reporting import commit

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(tiny=options.tiny, profile=options.profile)))
        return
    folder = Path(tempfile.mkdtemp())
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton"), "ONCURVE_CACHE": str(folder / "cache")}
    command = [
        sys.executable,
        __file__,
        "--child",
        *(["--tiny"] if options.tiny else []),
        *(["--profile"] if options.profile else []),
    ]
    rows: dict[str, Any] = {}
    for state in STATES:
        if state == "compiled":
            shutil.rmtree(folder / "cache" / "self_checks", ignore_errors=True)
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows[state] = json.loads(done.stdout.splitlines()[-1])
        row = rows[state]
        print(f"{state:11} self-check {row['check_s']:5.2f} s; the policy opens in {row['learner_s']:5.2f} s", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    if not options.tiny:
        options.out.write_text(json.dumps({"commit": commit(), "model": "Qwen2.5 0.5B shape", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
