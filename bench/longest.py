"""The longest completion that trains: what the planner says for a memory limit, and what one update takes on a GPU.

    python bench/longest.py             eight settings on this machine's GPU; writes bench/results/longest.json
    python bench/longest.py --again     plan again and compare with the measurements in the file; writes docs/plan.md

A limit is emulated: a tensor occupies the rest of the GPU. Each setting makes one update at the planned length with all memory,
for its peak, and one at 90 % of the length within the limit, which must succeed. Random weights; one completion, prompt 512.
Peaks are those of torch's allocator; the planned figure leaves out the driver's own context.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_models import graded_groups, make_policy, shape_of
from reporting import commit, put

from oncurve.errors import OncurveError
from oncurve.plan.hardware import GIB, GPUS
from oncurve.plan.job import Job
from oncurve.plan.memory import CUDA_CONTEXT, memory_of
from oncurve.plan.model_table import find_shape
from oncurve.plan.plan import longest_completion
from oncurve.plan.request import job_for
from oncurve.recipe.schema.stages import Grpo
from oncurve.training.learner.learner import Learner
from oncurve.training.stages.grpo import grpo_learner_settings

RESULTS = Path(__file__).resolve().parent / "results" / "longest.json"
DOCS = Path(__file__).resolve().parents[1] / "docs" / "plan.md"
PROMPT = 512
SETTINGS = (
    ("0.6b", None, 16), ("0.6b", None, 24), ("0.6b", 32, 12), ("1.7b", None, 40), ("1.7b", None, 45), ("1.7b", 32, 24),
    ("4b", 32, 24), ("4b", 32, 32),
)  # fmt: skip
"""Model, rank of the adapter (None: full fine-tuning), GiB."""


def job_of(size: str, rank: int | None, gib: float) -> Job:
    gpu = replace(GPUS["H200"], memory=int(gib * GIB))
    job = job_for(find_shape(f"Qwen/Qwen3-{size.upper()}"), gpu, prompts=1, group_size=2, prompt_tokens=PROMPT)
    return replace(job, lora_rank=rank, checkpointing="on")


def planned_gib(row: dict[str, Any]) -> float:
    """The planned peak of a row's update."""
    job = job_of(row["model"].removeprefix("Qwen3-"), row["rank"], row["gib"])
    phases = {phase.name: phase.total for phase in memory_of(replace(job, new_tokens=row["tokens"])).phases}
    return (phases["update"] - CUDA_CONTEXT) / GIB


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| one completion | limit | planned GiB | measured | off | 90 % of it within the limit |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        method, planned = "full" if row["rank"] is None else f"LoRA {row['rank']}", planned_gib(row)
        off = f"{planned / row['peak_gib'] - 1:+.1%}".replace("-", "−").replace("%", " %")
        trains = "trains" if row["trains_at_90_percent"] else "**fails**"
        name = f"{row['model'].replace('b', 'B')} {method}, {row['tokens']:,} tokens"
        lines.append(f"| {name} | {row['gib']} GiB | {planned:.1f} | {row['peak_gib']:.1f} | {off} | {trains} |")
    return "\n".join(lines)


def update(size: str, rank: int | None, tokens: int, gib: float | None) -> dict[str, Any]:
    """One update on a completion of this many tokens, within a limit if there is one."""
    device, ballast = torch.device("cuda"), None
    gc.collect()
    torch.cuda.empty_cache()
    if gib is not None:
        free, total = torch.cuda.mem_get_info()
        ballast = torch.empty(int(free - (gib * GIB - (total - free))), dtype=torch.uint8, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    policy = make_policy(size, device, torch.bfloat16, rank or 0, max_positions=tokens + PROMPT)
    stage = Grpo.model_validate({"optimiser": {"learning_rate": 1e-6}, "checkpointing": "auto" if gib else "on"})
    learner = Learner(policy, grpo_learner_settings(stage))
    learner.update(graded_groups(1, 1, PROMPT, 512, shape_of(size)["vocab_size"]))
    groups = graded_groups(1, 1, PROMPT, tokens, shape_of(size)["vocab_size"])
    start = time.perf_counter()
    try:
        learner.update(groups)
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, OncurveError) as error:
        return {"failed": type(error).__name__}
    finally:
        del learner, policy, ballast
    peak = torch.cuda.max_memory_allocated() - (before if gib is None else torch.cuda.memory_allocated())
    return {"seconds": round(time.perf_counter() - start, 2), "peak_gib": round(peak / GIB, 2)}


def measure(out: Path) -> None:
    rows: list[dict[str, Any]] = []
    for size, rank, gib in SETTINGS:
        tokens = longest_completion(job_of(size, rank, gib))
        free, within = update(size, rank, tokens, None), update(size, rank, int(0.9 * tokens), gib)
        row: dict[str, Any] = {"model": f"Qwen3-{size}", "rank": rank, "gib": gib, "tokens": tokens}
        rows.append({**row, **free, "trains_at_90_percent": "failed" not in within})
        print(rows[-1], flush=True)
        report = {"commit": commit(), "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    if not options.again:
        measure(options.out)
    lines = table(json.loads(options.out.read_text())["rows"])
    print(lines)
    if options.again:
        put(DOCS, "longest-check", lines)


if __name__ == "__main__":
    main()
