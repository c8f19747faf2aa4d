"""Five algorithms on a model of Qwen3-0.6B's shape on a GPU: memory, time and passes for the same samples, and the reward.

Random weights, and a reward that every algorithm can raise a little in a few dozen steps: the fraction of even tokens in a
completion, which starts at one half. Every completion has the same length, so all algorithms sample the same number of tokens;
trpo runs fewer steps because they are expensive. Steps are those of `oncurve compare`'s runs, without recording. The first step
of each algorithm compiles kernels, so it counts for the reward only.

    python bench/compare_gpu.py                      print a table, write bench/results/compare_gpu.json after each algorithm
    python bench/compare_gpu.py --seconds 110        start nothing after this time
    python bench/compare_gpu.py --page               write the numbers of that file into docs/compare.md
    python bench/compare_gpu.py --device cpu --tiny  a small shape that runs anywhere, to check that the script works
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from plan_check import Meter, clear, gpu_of_this_machine, machine, metered_loop, planned_memory
from reporting import put

from oncurve.plan.hardware import GIB, Gpu
from oncurve.plan.job import Job
from oncurve.plan.model_shape import ModelShape
from oncurve.plan.model_table import find_shape
from oncurve.plan.request import job_for
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.variants import learning_passes, with_algorithm

RESULTS = Path(__file__).resolve().parent / "results" / "compare_gpu.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "compare.md"
STEPS = {"grpo": 40, "ppo": 40, "rloo": 40, "reinforce": 40, "trpo": 4}
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 64, 16
RATE = 1e-3
SMALL = ModelShape("small", 2, 64, 4, 2, 16, 96, 512, 4096, tied=True, family="qwen3")


@dataclass(frozen=True)
class Compared:
    """Results of one algorithm: rewards by step, seconds of a step after the first by phase, bytes."""

    algorithm: str
    rewards: tuple[float, ...]
    seconds: float
    phases: dict[str, float]
    memory: int | None
    memory_by_phase: dict[str, int] | None
    planned_memory: int
    held: int
    trained: int
    forward: float
    backward: float
    said: str | None = None

    @property
    def rise(self) -> tuple[float, float]:
        """Mean reward of the first tenth of the steps, and of the last tenth."""
        tenth = max(1, len(self.rewards) // 10)
        return statistics.fmean(self.rewards[:tenth]), statistics.fmean(self.rewards[-tenth:])


def even_share(completions: Sequence[str], **_: object) -> list[float]:
    """Fraction of even tokens. Texts are words such as w1234, one per token."""
    return [statistics.fmean(word[-1] in "02468" for word in text.split() or ["w1"]) for text in completions]


def stage_of(algorithm: str, steps: int, tokens_per_pack: int) -> Any:
    base = {
        "type": "grpo", "steps": steps, "prompts_per_step": PROMPTS, "group_size": GROUP, "tokens_per_pack": tokens_per_pack,
        "sampling": {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}, "no_signal": "keep",
        "optimiser": {"learning_rate": RATE, "warmup_steps": 2},
    }  # fmt: skip
    data = {"task": {"type": "arithmetic"}, "rewards": [{"type": "answer"}], "stages": [base]}
    return with_algorithm(parse_recipe(data), algorithm, ["trpo.cg_iterations=5"] if algorithm == "trpo" else []).stages[-1]


def job_of(algorithm: str, gpu: Gpu, tiny: bool) -> Job:
    return job_for(
        SMALL if tiny else find_shape("Qwen/Qwen3-0.6B"), gpu,
        algorithm=algorithm, prompts=PROMPTS, group_size=GROUP, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS,
    )  # fmt: skip


def run(algorithm: str, gpu: Gpu, tiny: bool) -> Compared:
    job = job_of(algorithm, gpu, tiny)
    steps = 3 if tiny else STEPS[algorithm]
    meter = Meter(on_gpu=not gpu.is_cpu)
    stage = stage_of(algorithm, steps, job.tokens_per_pack)
    loop = metered_loop(stage, replace(job, dtype=job.precision), steps, even_share, meter)
    rewards, times, phases = [], [], []
    for n in range(1, steps + 1):
        begun = time.perf_counter()
        report = loop.step(n)
        meter.wait()
        rewards.append(report.metrics["reward"])
        if n > 1:
            times.append(time.perf_counter() - begun)
            phases.append(report.seconds)
    learner = loop.learner
    held = sum(p.numel() for p in learner.policy.model.parameters())
    critic = sum(p.numel() for p in learner.critic.module.parameters()) if algorithm == "ppo" else 0
    tries = report.metrics.get("line_search_tries", 1.0)
    passes = learning_passes(stage, tries)
    return Compared(
        algorithm, tuple(rewards), statistics.median(times),
        {name: statistics.median(p.get(name, 0.0) for p in phases) for name in ("sample", "score", "grade", "update")},
        max(meter.peaks.values(), default=None), dict(meter.peaks) or None, max(planned_memory(job).values()),
        held + critic, held + critic, passes.forward, passes.backward,
    )  # fmt: skip


def table(rows: Sequence[Compared]) -> str:
    heads = ("algorithm", "reward", "steps", "seconds a step", "sample", "learn", "peak GiB", "planned", "held", "passes")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        if row.said:
            lines.append(f"| {row.algorithm} | {row.said} |" + " |" * (len(heads) - 2))
            continue
        first, last = row.rise
        memory = "–" if row.memory is None else f"{row.memory / GIB:.1f}"
        learn = row.phases["grade"] + row.phases["update"]
        cells = (
            row.algorithm, f"{first:.3f} → {last:.3f}", len(row.rewards), f"{row.seconds:.3f}", f"{row.phases['sample']:.3f}",
            f"{learn:.3f}", memory, f"{row.planned_memory / GIB:.1f}", f"{row.held / 1e9:.2f}B",
            f"{row.forward:.3g}/{row.backward:.3g}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def attempt(algorithm: str, gpu: Gpu, tiny: bool) -> Compared:
    """Run one algorithm. A failure is recorded and the others still run."""
    try:
        return run(algorithm, gpu, tiny)
    except Exception as error:
        return left_out(algorithm, gpu, tiny, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}")
    finally:
        clear()


def left_out(algorithm: str, gpu: Gpu, tiny: bool, why: str) -> Compared:
    planned = max(planned_memory(job_of(algorithm, gpu, tiny)).values())
    return Compared(algorithm, (), math.nan, {}, None, None, planned, 0, 0, 0.0, 0.0, why)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if args.page:
        results = json.loads(args.out.read_text())
        put(
            PAGE,
            "gpu",
            table([Compared(**row) for row in results["runs"]]) + f"\n\nMeasured on an {results['machine']['gpu']}.",
        )
        return 0
    gpu, begun = gpu_of_this_machine(args.device), time.perf_counter()
    rows: list[Compared] = []
    for algorithm in STEPS:
        late = time.perf_counter() - begun > args.seconds
        rows.append(
            left_out(algorithm, gpu, args.tiny, "left out: the time was up") if late else attempt(algorithm, gpu, args.tiny)
        )
        print(f"{algorithm} done after {time.perf_counter() - begun:.0f} s {rows[-1].said or ''}", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine(gpu), "tiny": args.tiny, "runs": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))
    return 0 if all(row.said is None for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
