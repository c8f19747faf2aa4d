"""The planner's accuracy: planned and measured peak memory and step time of eight settings on this machine's GPU.

Models have the shapes of known models and random weights. Every completion has exactly the requested length, so that plan and
run do the same work. Each setting runs one warm-up step (which compiles kernels and captures graphs); then two steps are
measured, or one if a step is long.
Memory is the peak of torch's allocator plus the KV cache, which is allocated outside of torch. The planned figure leaves out
the driver's own context, which no program can measure from within.

    python bench/plan_check.py                      measure, print, write bench/results/plan_check.json
    python bench/plan_check.py --only 0.6B          only settings whose name contains this
    python bench/plan_check.py --seconds 200        start no setting after this time; the output lists what was left out
    python bench/plan_check.py --again              plan again and compare with the measurements in the file;
                                                    write docs/plan.md
    python bench/plan_check.py --device cpu --tiny  small shapes that run anywhere, for tests; no memory is measured
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from reporting import commit, put

from oncurve.plan.hardware import GIB, Gpu, find_gpu, gpu_of_driver
from oncurve.plan.job import Job
from oncurve.plan.memory import memory_of
from oncurve.plan.model_shape import ModelShape
from oncurve.plan.model_table import find_shape
from oncurve.plan.request import default_lora_rank, job_for
from oncurve.plan.step_time import seconds_of

RESULTS = Path(__file__).resolve().parent / "results" / "plan_check.json"
PLAN_PAGE = Path(__file__).resolve().parents[1] / "docs" / "plan.md"
MEMORY_WITHIN, TIME_WITHIN = 0.10, 0.30
STEPS = 2
LONG = 4.0
"""Planned seconds of a step from which on one is measured."""
SMALL = ModelShape("small", 2, 64, 4, 2, 16, 96, 128, 4096, tied=True, family="qwen3")


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    model: str
    algorithm: str
    lora: bool
    prompts: int
    prompt_tokens: int
    new_tokens: int
    tokens_per_pack: int = 17408
    """Whole groups, 8 short ones or 2 long ones: plans take packs to be full."""
    group_size: int = 8

    def job(self, gpu: Gpu, tiny: bool) -> Job:
        settings = {
            "algorithm": self.algorithm, "prompts": self.prompts, "group_size": self.group_size,
            "prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens, "tokens_per_pack": self.tokens_per_pack,
            "lora_rank": default_lora_rank() if self.lora else None,
        }  # fmt: skip
        if not tiny:
            return job_for(find_shape(self.model), gpu, **settings)
        lengths = {"prompt_tokens": self.prompt_tokens // 32, "new_tokens": self.new_tokens // 32}
        return job_for(SMALL, gpu, **{**settings, "prompts": 2, "group_size": 4, **lengths})


SETTINGS = (
    Setting("0.1B grpo full", "HuggingFaceTB/SmolLM2-135M", "grpo", False, 32, 128, 256),
    Setting("0.6B grpo full", "Qwen/Qwen3-0.6B", "grpo", False, 32, 128, 256),
    Setting("0.6B grpo full, long", "Qwen/Qwen3-0.6B", "grpo", False, 8, 512, 1024),
    Setting("0.6B grpo LoRA", "Qwen/Qwen3-0.6B", "grpo", True, 32, 128, 256),
    Setting("0.6B ppo full", "Qwen/Qwen3-0.6B", "ppo", False, 32, 128, 256),
    Setting("1.7B ppo LoRA, long", "Qwen/Qwen3-1.7B", "ppo", True, 4, 512, 1024, 8704),
    Setting("1.7B grpo full, long", "Qwen/Qwen3-1.7B", "grpo", False, 8, 512, 1024),
    Setting("4B grpo full", "Qwen/Qwen3-4B", "grpo", False, 32, 128, 256, 8704),
)


@dataclass(frozen=True)
class Checked:
    """A setting, planned and measured, in bytes and seconds. ``said`` holds the reason if it could not be measured."""

    setting: str
    planned_memory: int
    planned_by_phase: dict[str, int]
    planned_seconds: float
    planned_seconds_by_phase: dict[str, float]
    measured_memory: int | None = None
    measured_by_phase: dict[str, int] | None = None
    reserved: int | None = None
    measured_seconds: float | None = None
    measured_seconds_by_phase: dict[str, float] | None = None
    said: str | None = None

    @property
    def memory_off(self) -> float | None:
        return None if not self.measured_memory else self.planned_memory / self.measured_memory - 1

    @property
    def time_off(self) -> float | None:
        return None if not self.measured_seconds else self.planned_seconds / self.measured_seconds - 1

    @property
    def holds(self) -> bool | None:
        """Whether both are within their bounds; None if nothing was measured."""
        if self.said is not None or self.time_off is None:
            return None
        near = self.memory_off is None or abs(self.memory_off) <= MEMORY_WITHIN
        return near and abs(self.time_off) <= TIME_WITHIN


def planned_memory(job: Job) -> dict[str, int]:
    """Planned bytes by phase, without the driver's context."""
    return {p.name: p.total - p.parts.get("cuda context", 0) for p in memory_of(job).phases}


def planned(setting: Setting, job: Job) -> Checked:
    """The planner's figures for a setting."""
    by_phase = planned_memory(job)
    took = seconds_of(job)
    return Checked(setting.name, max(by_phase.values()), by_phase, took.step, took.phases)


def check(setting: Setting, gpu: Gpu, tiny: bool, steps: int = STEPS) -> Checked:
    """Plan and measure a setting. A missing stage or a failed run is recorded; it never passes silently."""
    from oncurve.recipe.schema.stages import STAGE_CLASSES

    job = setting.job(gpu, tiny)
    plan = planned(setting, job)
    if setting.algorithm not in STAGE_CLASSES:
        return replace(plan, said=f"there is no stage '{setting.algorithm}' yet")
    try:
        return measured(plan, job, 1 if plan.planned_seconds > LONG else steps)
    except Exception as error:  # record any failure and measure the other settings
        traceback.print_exc()
        return replace(plan, said=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
    finally:
        clear()


def measured(plan: Checked, job: Job, steps: int) -> Checked:
    meter = Meter(on_gpu=not job.gpu.is_cpu)
    loop = build(job, steps, meter)
    loop.step(1)
    meter.reset()
    reports = [_step(loop, n, meter) for n in range(2, steps + 2)]
    phases = {name: statistics.median(r.get(name, 0.0) for r in reports) for name in reports[0]}
    total = phases.pop("step")
    return replace(
        plan,
        measured_memory=max(meter.peaks.values(), default=None),
        measured_by_phase=dict(meter.peaks) or None,
        reserved=meter.reserved,
        measured_seconds=total,
        measured_seconds_by_phase=phases,
    )


def _step(loop: Any, n: int, meter: Meter) -> dict[str, float]:
    start = time.perf_counter()
    report = loop.step(n)
    meter.wait()
    return {**report.seconds, "step": time.perf_counter() - start}


class Meter:
    """Peak allocation in each phase: torch's own count plus what the KV cache maps outside of torch."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.peaks: dict[str, int] = {}
        self.reserved: int | None = None
        self.mapped = 0

    def reset(self) -> None:
        self.peaks, self.reserved = {}, None

    def wait(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.on_gpu:
            yield
            return
        import torch

        torch.cuda.reset_peak_memory_stats()
        self.mapped = 0
        yield
        self.wait()
        peak = torch.cuda.max_memory_allocated() + self.mapped
        self.peaks[name] = max(self.peaks.get(name, 0), peak)
        self.reserved = max(self.reserved or 0, torch.cuda.max_memory_reserved() + self.mapped)

    def around(self, owner: Any, method: str, name: str) -> None:
        """Wrap a method so that every call of it is a phase."""
        plain: Callable[..., Any] = getattr(owner, method)

        def call(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return plain(*arguments, **named)

        setattr(owner, method, call)

    def watch(self, pool: Any) -> None:
        """Record how much a KV cache maps when it opens. One inside torch's memory is already counted."""
        plain = pool.open

        def open_pool(*arguments: Any) -> Any:
            out = plain(*arguments)
            self.mapped = max(self.mapped, 0 if pool.range is None else pool.range.mapped)
            return out

        pool.open = open_pool


def build(job: Job, steps: int, meter: Meter) -> Any:
    """The stage's loop over a random-weight model of the job's shape, built as a run builds it."""
    from oncurve.recipe.load import parse_recipe

    return metered_loop(parse_recipe(recipe_data(job, steps + 1)).stages[0], job, steps + 1, reward, meter)


def metered_loop(stage: Any, job: Job, steps: int, rewarding: Callable[..., list[float]], meter: Meter) -> Any:
    """The loop of a grpo, ppo or trpo stage with prompts for the given number of steps, metered in each phase."""
    from oncurve.engines.native.engine import NativeEngine
    from oncurve.recipe.schema.sections import Engine
    from oncurve.rewards.mix import RewardMix
    from oncurve.rewards.python_function import as_reward
    from oncurve.tasks.data.prompt_list import PromptList
    from oncurve.training.stages.grpo import GrpoLoop
    from oncurve.training.stages.ppo import PpoLoop
    from oncurve.training.stages.trpo import TrpoLoop

    engine = NativeEngine(policy_of(job), Engine(slots=min(job.slots, job.rows)))
    task = PromptList.of(prompt_texts(job, job.prompts * steps))
    kind = {"grpo": GrpoLoop, "ppo": PpoLoop, "trpo": TrpoLoop}[stage.type]
    loop: Any = kind(stage, 0, task, engine, RewardMix([as_reward(rewarding)]))
    if meter.on_gpu and engine.graph_decoder is not None:
        meter.watch(engine.graph_decoder.cache)
    meter.around(loop, "sample", "sample")
    meter.around(loop.learner, "update", "update")
    meter.around(loop, "grade", "grade")
    return loop


def recipe_data(job: Job, steps: int) -> dict[str, Any]:
    stage = {
        "type": job.algorithm,
        "steps": steps,
        "prompts_per_step": job.prompts,
        "group_size": job.group_size,
        "tokens_per_pack": job.tokens_per_pack,
        "sampling": {"max_new_tokens": job.new_tokens, "min_new_tokens": job.new_tokens},
    }
    if job.algorithm == "grpo":
        stage["no_signal"] = "keep"
    model = {
        "tiny": {"context": job.prompt_tokens + job.new_tokens + 1}
    }  # validated but unused: the policy is built separately
    return {"model": model, "task": {"type": "arithmetic"}, "rewards": [{"type": "answer"}], "stages": [stage]}


def reward(completions: Sequence[str], **_: object) -> list[float]:
    """A cheap reward that is practically never equal for all completions of a group."""
    return [float(completion.count("7") + completion.count("3")) for completion in completions]


def policy_of(job: Job) -> Any:
    """A policy with random weights created on its device, and a tokenizer with one word per number so that lengths are
    exact."""
    import torch
    from random_models import make_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    from oncurve.models import lora
    from oncurve.models.policy import Policy
    from oncurve.recipe.schema.model import Lora

    shape = job.shape
    config = AutoConfig.for_model(
        shape.family, vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size, max_position_embeddings=min(shape.context, 4096), tie_word_embeddings=shape.tied,
        eos_token_id=1, pad_token_id=2, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cpu" if job.gpu.is_cpu else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job.dtype))
    if job.lora_rank is not None:
        lora.attach(model, Lora(rank=job.lora_rank), 0, "random")
    return Policy(model, make_tokenizer(shape.vocabulary))


def prompt_texts(job: Job, count: int) -> list[str]:
    """Distinct prompts of exactly the requested length."""
    low, span = 10, min(job.shape.vocabulary, 1000) - 10
    return [
        " ".join(f"w{low + (i * 7919 + t * 104729 + i * t) % span}" for t in range(job.prompt_tokens)) for i in range(count)
    ]


def clear() -> None:
    gc.collect()
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(rows: Sequence[Checked]) -> str:
    """Planned and measured figures as a Markdown table."""
    lines = ["| setting | planned GiB | measured | off | planned s | measured | off | |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        memory = "–" if row.measured_memory is None else f"{row.measured_memory / GIB:.1f}"
        seconds = "–" if row.measured_seconds is None else f"{row.measured_seconds:.2f}"
        verdict = row.said or {True: "holds", False: "DOES NOT HOLD", None: "not measured"}[row.holds]
        lines.append(
            f"| {row.setting} | {row.planned_memory / GIB:.1f} | {memory} | {_off(row.memory_off)} "
            f"| {row.planned_seconds:.2f} | {seconds} | {_off(row.time_off)} | {verdict} |"
        )
    return "\n".join(lines)


def _off(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.0f} %".replace("-", "−")


def details(row: Checked) -> str:
    """Figures by phase, for debugging the planner."""
    lines = [f"  {row.setting}"]
    memory = {name: f"{amount / GIB:.2f}" for name, amount in row.planned_by_phase.items()}
    lines.append(f"    planned GiB  {memory}")
    if row.measured_by_phase:
        shown = {name: f"{amount / GIB:.2f}" for name, amount in row.measured_by_phase.items()}
        lines.append(f"    measured GiB {shown}, reserved {(row.reserved or 0) / GIB:.2f}")
    lines.append(f"    planned s    { {name: round(s, 3) for name, s in row.planned_seconds_by_phase.items()} }")
    if row.measured_seconds_by_phase:
        lines.append(f"    measured s   { {name: round(s, 3) for name, s in row.measured_seconds_by_phase.items()} }")
    return "\n".join(lines)


def gpu_of_this_machine(device: str) -> Gpu:
    if device == "cpu":
        return find_gpu("cpu")
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no GPU found; --device cpu --tiny checks that the script works")
    properties = torch.cuda.get_device_properties(0)
    known = gpu_of_driver(properties.name, properties.total_memory)
    if known is None:
        raise SystemExit(f"{properties.name} is not in the planner's table (oncurve/plan/hardware.py), so its speed is unknown")
    return replace(known, memory=properties.total_memory)


def machine(gpu: Gpu) -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"gpu": gpu.name, "memory": gpu.memory, "python": platform.python_version(), "commit": commit(), **versions}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes instead of the named models")
    parser.add_argument("--only", default="", help="only settings whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no setting after this time")
    parser.add_argument("--again", action="store_true", help="plan again and compare with the stored measurements")
    args = parser.parse_args(arguments)
    if args.again:
        return replan(args.out)
    gpu = gpu_of_this_machine(args.device)
    rows: list[Checked] = []
    about, begun = {"machine": machine(gpu), "tiny": args.tiny}, time.perf_counter()
    for setting in (s for s in SETTINGS if args.only in s.name):
        start = time.perf_counter()
        if start - begun > args.seconds:
            rows.append(replace(planned(setting, setting.job(gpu, args.tiny)), said="left out: the time was up"))
        else:
            rows.append(check(setting, gpu, args.tiny))
        print(f"{details(rows[-1])}\n    took {time.perf_counter() - start:.0f} s", flush=True)
        write(args.out, about, rows)
    print(table(rows))
    return 0 if all(row.holds is not False and row.said is None for row in rows) else 1


def write(out: Path, about: dict[str, Any], rows: Sequence[Checked]) -> None:
    """Write the results after each setting, so that a failure loses nothing."""
    offs = [{**asdict(row), "memory_off": row.memory_off, "time_off": row.time_off, "holds": row.holds} for row in rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**about, "settings": offs}, indent=2) + "\n")


def replan(out: Path) -> int:
    """Compare the current planner with the measurements in the file."""
    stored = json.loads(out.read_text())
    gpu = replace(find_gpu(stored["machine"]["gpu"]), memory=stored["machine"]["memory"])
    by_name = {setting.name: setting for setting in SETTINGS}
    rows = []
    for measurement in stored["settings"]:
        now = planned(by_name[measurement["setting"]], by_name[measurement["setting"]].job(gpu, stored["tiny"]))
        measurements = {
            name: measurement[name] for name in measurement if name.startswith("measured") or name in ("reserved", "said")
        }
        rows.append(replace(now, **measurements))
        print(details(rows[-1]))
    write(out, {name: stored[name] for name in ("machine", "tiny")}, rows)
    print(table(rows))
    if not stored["tiny"]:
        versions = f"{gpu.name}, torch {stored['machine']['torch']}, transformers {stored['machine']['transformers']}."
        put(PLAN_PAGE, "plan-check", f"{table(rows)}\n\nMeasured on an {versions}")
    return 0 if all(row.holds is not False and row.said is None for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
