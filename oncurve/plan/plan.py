"""A plan: memory and time of a job by phase, whether it fits, what would make it fit, and how it scales. Also as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from typing import Any

from oncurve.plan.fixes import Fix, find_fixes, fits
from oncurve.plan.hardware import GIB, GPUS
from oncurve.plan.job import Job
from oncurve.plan.memory import PARTS, Memory, memory_limit, memory_of, min_kv_pool
from oncurve.plan.model_table import MODELS
from oncurve.plan.step_time import Seconds, seconds_of

SCALING_MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B")
MAX_NEW_TOKENS = 16384
MAX_LAYERS = 4096
MAX_COMPLETION = 1 << 20
MARGIN = 0.10
"""Accuracy of a plan: a run is refused only if the plan exceeds the device's memory by more than this."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A job's memory, time and possible fixes."""

    job: Job
    memory: Memory
    seconds: Seconds
    fixes: tuple[Fix, ...]

    @property
    def limit(self) -> int:
        return memory_limit(self.job)

    @property
    def fits(self) -> bool:
        return self.memory.peak.total <= self.limit

    @property
    def is_impossible(self) -> bool:
        """Whether the job is too large even if the plan is too high by `MARGIN`."""
        return self.memory.peak.total / (1 + MARGIN) > self.job.gpu.memory

    @property
    def resident_parameters(self) -> int:
        """Parameters in memory: policy, adapter, reference, teacher, critic, reward model."""
        job, critic = self.job, self.job.critic_shape
        count = job.shape.parameters * (2 if job.holds_reference else 1) + job.adapters
        count += sum(other.parameters for other in (job.reward_model, job.teacher) if other)
        return count + (critic.parameters + self._critic_adapters if critic else 0)

    @property
    def trained(self) -> int:
        critic = self.job.critic_shape
        if critic is None:
            return self.job.trained
        return self.job.trained + (critic.parameters if self.job.lora_rank is None else self._critic_adapters)

    @property
    def _critic_adapters(self) -> int:
        critic, rank = self.job.critic_shape, self.job.lora_rank
        return critic.adapter_parameters(rank) if critic and rank is not None else 0

    @property
    def least(self) -> int:
        """What the job needs: its peak with the smallest KV cache and, if checkpointing is `auto`, with every layer
        checkpointed. If more memory is free, the KV cache and activations use it."""
        job = _with_least_activations(self.job)
        kv_minimum = ceil(min_kv_pool(job))
        phases = memory_of(job).phases
        return max(phase.total - max(0, phase.parts.get("kv pool", 0) - kv_minimum) for phase in phases)

    @property
    def memory_note(self) -> str:
        """Why the peak is higher than what the job needs; empty if it isn't, or if the job does not fit."""
        peak = self.memory.peak
        if not self.fits or peak.total - self.least <= GIB // 20:
            return ""
        needs = f"needs {self.least / GIB:.1f} GiB"
        if "kv pool" in peak.parts:
            kv_cache = f"of what is left the KV cache takes {peak.parts['kv pool'] / GIB:.1f} GiB, less on a smaller GPU"
            return f"{needs} for weights, optimiser and activations; {kv_cache}"
        activations = f"activations take {peak.parts['activations'] / GIB:.1f} GiB because there is room"
        return f"{needs}; {activations}, and are recomputed on a smaller GPU"

    @property
    def largest(self) -> int | None:
        """Parameters of the largest model of this width that would fit; only for algorithms with a natural gradient."""
        return largest_model(self.job) if self.job.does.curvature else None

    @property
    def longest_completion(self) -> int:
        """The most new tokens with which the job would fit."""
        return longest_completion(self.job)

    @property
    def title(self) -> str:
        return f"{self.job.algorithm}, {'full' if self.job.lora_rank is None else 'LoRA'}"

    @property
    def verdict(self) -> str:
        """One line: whether it fits, the peak and its phase, and, if it fits, the time of a step."""
        time = f", about {seconds_text(self.seconds.step)} per step" if self.fits else ""
        return f"{self.memory_verdict}{time}"

    @property
    def memory_verdict(self) -> str:
        """Whether it fits, and the peak and its phase."""
        job, peak = self.job, self.memory.peak
        article = "an" if job.gpu.name[0] in "AHLRM" else "a"
        device = "this machine" if job.gpu.is_cpu else f"{article} {job.gpu.name}"
        device += f", {job.gpus} of them" if job.gpus > 1 else ""
        fits = "fits" if self.fits else "does not fit"
        sizes = f"{peak.total / GIB:.1f} of {job.gpu.memory / GIB:.1f} GiB at the peak ({peak.name})"
        return f"{fits} {device}: {sizes}"


def seconds_text(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 60 else (f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h")


def make_plan(job: Job, lora_rank: int) -> Plan:
    """The plan of one job; ``lora_rank`` is the rank of a proposed LoRA adapter."""
    return Plan(job, memory_of(job), seconds_of(job), tuple(find_fixes(job, lora_rank)))


def side_by_side(job: Job, lora_rank: int) -> list[Plan]:
    """Plans of GRPO, PPO and the job's own algorithm, full and with LoRA, with all other settings equal."""
    algorithms = dict.fromkeys(("grpo", "ppo", job.algorithm))
    ranks = (None, job.lora_rank or lora_rank)
    return [make_plan(replace(job, algorithm=a, lora_rank=rank), lora_rank) for rank in ranks for a in algorithms]


def smallest_gpus(job: Job) -> list[str]:
    """The GPUs of the table on which the job fits, with the same number of them, smallest memory first.

    Each is planned separately: a smaller one has a smaller KV cache and checkpoints more layers.
    """
    fitting = [gpu for gpu in GPUS.values() if fits(replace(job, gpu=gpu))]
    return [gpu.name for gpu in sorted(fitting, key=lambda gpu: gpu.memory)]


def largest_model(job: Job) -> int:
    """Parameters of the deepest model of the job's width that would fit; 0 if not even one layer does."""

    def with_layers(layers: int) -> Job:
        return replace(job, shape=replace(job.shape, layers=layers))

    layers = _largest_fitting(with_layers, MAX_LAYERS)
    return with_layers(layers).shape.parameters if layers else 0


def longest_completion(job: Job) -> int:
    """The most new tokens, in multiples of 512, with which the job fits; 0 if not even 512 do.

    This is about memory only: the model's context may be shorter. One completion is then a pack by itself, and with
    ``checkpointing="auto"`` every layer is recomputed.
    """
    job = _with_least_activations(job)

    def with_pages(pages: int) -> Job:
        return replace(job, new_tokens=512 * pages, mean_tokens=512.0 * pages)

    return 512 * _largest_fitting(with_pages, MAX_COMPLETION // 512)


def _with_least_activations(job: Job) -> Job:
    """The job as `checkpointing = "auto"` runs it if memory is short: every layer is checkpointed."""
    return replace(job, checkpointing="on" if job.checkpointing == "auto" else job.checkpointing)


def _largest_fitting(with_value: Callable[[int], Job], limit: int) -> int:
    """The largest value up to a limit with which a job fits; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(with_value(middle)) else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The job with one setting changed. ``asked``: whether this is the job's own value. If ``fits`` is False, the times mean
    nothing. Fields are JSON keys."""

    what: str
    value: str
    asked: bool
    fits: bool
    peak: int
    step_seconds: float
    samples_per_day: float


def scaling_points(job: Job) -> list[ScalingPoint]:
    """How memory and time scale with group size, length and model, one at a time."""
    return [_scaling_point(what, value, changed, changed == job) for what, value, changed in _variants(job)]


def _variants(job: Job) -> Iterator[tuple[str, str, Job]]:
    if job.does.samples:
        for size in sorted({4, 8, 16, 32, 64, job.group_size}):
            yield "group size", str(size), replace(job, group_size=size)
    mean_fraction = job.mean_tokens / job.new_tokens
    room = (job.shape.context or MAX_NEW_TOKENS) - job.prompt_tokens
    for tokens in sorted({256, 1024, 4096, MAX_NEW_TOKENS, job.new_tokens}):
        if tokens > room:
            continue
        longer = replace(
            job, new_tokens=tokens, mean_tokens=job.mean_tokens if tokens == job.new_tokens else mean_fraction * tokens
        )
        yield "new tokens", str(tokens), longer
    if job.gpu.is_cpu:
        return
    shapes = {name: MODELS[name] for name in SCALING_MODELS} | {job.shape.name: job.shape}
    for name, shape in sorted(shapes.items(), key=lambda item: item[1].parameters):
        yield "model", name.rpartition("/")[2], replace(job, shape=shape)


def _scaling_point(what: str, value: str, job: Job, asked: bool) -> ScalingPoint:
    seconds, peak = seconds_of(job), memory_of(job).peak.total
    return ScalingPoint(what, value, asked, peak <= memory_limit(job), peak, seconds.step, seconds.samples_per_day)


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan as JSON: bytes and seconds, parts in the order of the bars."""
    peak, seconds = plan.memory.peak, plan.seconds
    return {
        "algorithm": plan.job.algorithm,
        "lora_rank": plan.job.lora_rank,
        "title": plan.title,
        "parameters": {"held": plan.resident_parameters, "trained": plan.trained},
        "memory": {
            "phases": [{"name": phase.name, "total": phase.total, "parts": phase.parts} for phase in plan.memory.phases],
            "peak": {"phase": peak.name, "total": peak.total, "parts": peak.parts},
            "host": plan.memory.host,
            "least": plan.least,
            "limit": plan.limit,
            "note": plan.memory_note,
            "fits": plan.fits,
        },
        "time": {"phases": seconds.phases, "step": seconds.step, "samples_per_day": seconds.samples_per_day},
        "verdict": plan.verdict,
        "fixes": [_fix_data(fix) for fix in plan.fixes],
        "fits_on": smallest_gpus(plan.job),
        "largest": plan.largest,
        "longest_completion": plan.longest_completion,
    }


def _fix_data(fix: Fix) -> dict[str, Any]:
    sets = {key: value for change in fix.changes for key, value in change.sets.items()}
    return {"words": fix.words, "sets": sets, "tier": fix.cost[0], "peak": fix.peak, "host": fix.host, "step": fix.step_seconds}


OTHER_MODELS = ("shape", "gpu", "reward_model", "teacher", "critic")
"""Fields of a job that JSON shows by name, or not at all."""


def job_data(job: Job) -> dict[str, Any]:
    """The job as JSON."""
    shape, gpu = job.shape, job.gpu
    settings = {f.name: getattr(job, f.name) for f in fields(job) if f.name not in OTHER_MODELS}
    return {
        "model": {"name": shape.name, "parameters": shape.parameters, "layers": shape.layers, "width": shape.width},
        "gpu": {"name": gpu.name, "memory": gpu.memory, "flops": gpu.flops, "bandwidth": gpu.bandwidth},
        **settings,
        "reward_model": job.reward_model.name if job.reward_model else None,
        "teacher": job.teacher.name if job.teacher else None,
    }


def report_data(job: Job, plans: list[Plan]) -> dict[str, Any]:
    """What `oncurve plan --json` prints."""
    plan_of_job = next(p for p in plans if p.job.algorithm == job.algorithm and p.job.lora_rank == job.lora_rank)
    return {
        "asked": job_data(job),
        "parts": list(PARTS),
        "plan": plan_data(plan_of_job),
        "side_by_side": [plan_data(plan) for plan in plans],
        "growth": [asdict(row) for row in scaling_points(job)],
    }
