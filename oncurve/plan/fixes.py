"""Searches for the cheapest change that makes a job fit.

Each change alters one setting of the job; combinations of up to three are tried. Of those that fit and need all of their parts,
the cheapest is the one whose most expensive part has the lowest tier, then the one with the fewest GPU-seconds per step.

| tier | cost |
|---|---|
| 0 | time only: the result is the same up to rounding |
| 1 | 8-bit moments: slightly less exact updates |
| 2 | the optimiser on the CPU: every update waits for the host link |
| 3 | LoRA: another, smaller set of weights is trained |
| 4 | more GPUs |
| 5 | shorter completions: another task |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

from oncurve.plan.job import RECIPE_KEYS, Job, recipe_setting
from oncurve.plan.memory import memory_limit, memory_of
from oncurve.plan.step_time import seconds_of

PACK_TOKENS = (8192, 4096, 2048, 1024)
SLOTS = (128, 64, 32, 16)
GPU_COUNTS = (2, 4, 8, 16, 32, 64)
SHARDED = {"optimiser": "a sharded optimiser", "full": "everything sharded"}
NOT_WITH_FULL = {"moments", "optimiser", "lora"}
"""Families that a recipe refuses together with `scale.shard = "full"`."""
MAX_CHANGES = 3
MIN_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """One change: its family (two of a family exclude each other), its tier, and the job's settings that it changes."""

    family: str
    tier: int
    words: str
    sets: dict[str, Any]
    needs_more_gpus: bool = False

    @property
    def recipe_settings(self) -> list[str]:
        """The change as `--set` takes it, ``STAGE`` being the stage's name."""
        return [recipe_setting(name, value) for name, value in self.sets.items() if name in RECIPE_KEYS]

    def apply(self, job: Job) -> Job:
        return replace(job, **self.sets)


@dataclass(frozen=True, slots=True)
class Fix:
    """Changes that together make a job fit, with the memory and time of the changed job."""

    changes: tuple[Change, ...]
    job: Job
    peak: int
    host: int
    step_seconds: float

    @property
    def words(self) -> str:
        return " and ".join(change.words for change in self.changes)

    @property
    def cost(self) -> tuple[int, float, int]:
        return max(change.tier for change in self.changes), self.step_seconds * self.job.gpus, len(self.changes)


def fits(job: Job) -> bool:
    return memory_of(job).peak.total <= memory_limit(job)


def find_fixes(job: Job, lora_rank: int, count: int = 4) -> list[Fix]:
    """The cheapest changes that make a job fit, cheapest first. Empty if it fits already, or if no change helps."""
    if fits(job):
        return []
    sufficient: list[tuple[Change, ...]] = []
    for chosen in _combinations(list(changes(job, lora_rank))):
        is_minimal = not any(set(map(id, part)) < set(map(id, chosen)) for part in sufficient)
        if is_minimal and fits(_apply_all(job, chosen)):
            sufficient.append(chosen)
    fixes = sorted((_fix(job, chosen) for chosen in sufficient), key=lambda fix: fix.cost)
    return _distinct(fixes, count)


def changes(job: Job, lora_rank: int) -> Iterator[Change]:
    """Every single change that is possible for the job."""
    free = partial(Change, tier=0)
    for tokens in (n for n in PACK_TOKENS if n < job.pack_tokens):
        yield free("packs", words=f"tokens_per_pack = {tokens}", sets={"tokens_per_pack": tokens})
    if job.checkpointing == "off":
        yield free("checkpointing", words="gradient checkpointing", sets={"checkpointing": "auto"})
    for slots in (n for n in SLOTS if job.does.samples and n < min(job.slots, job.rows)):
        yield free("slots", words=f"{slots} slots", sets={"slots": slots})
    if job.holds_reference and not job.reference_on_cpu:
        yield free("reference", words="the reference on the CPU", sets={"reference_on_cpu": True})
    if job.teacher and not job.teacher_on_cpu:
        yield free("teacher", words="the teacher on the CPU", sets={"teacher_on_cpu": True})
    if job.moments == "float32" and not job.does.curvature:
        yield Change("moments", 1, "8-bit moments", {"moments": "int8"})
    if not job.optimiser_on_cpu and not job.does.curvature:
        yield Change("optimiser", 2, "the optimiser on the CPU", {"optimiser_on_cpu": True})
    if job.lora_rank is None:
        yield Change("lora", 3, f"LoRA of rank {lora_rank}", {"lora_rank": lora_rank})
    needs_all_weights = job.does.critic or job.does.curvature or job.lora_rank is not None
    shards = {shard: words for shard, words in SHARDED.items() if shard == "optimiser" or not needs_all_weights}
    if job.gpus > 1 and job.sharding == "none" and not job.gpu.is_cpu:
        for shard, words in shards.items():
            yield free("gpus", words=f"{words} (scale.shard)", sets={"sharding": shard})
    for gpus in (n for n in GPU_COUNTS if n > job.gpus and not job.gpu.is_cpu):
        for shard, words in shards.items():
            sets = {"gpus": gpus, "sharding": shard}
            yield Change("gpus", 4, f"{gpus} GPUs with {words}", sets, needs_more_gpus=True)
    tokens = job.new_tokens // 2
    while tokens >= MIN_NEW_TOKENS:
        shorter = {"new_tokens": tokens, "mean_tokens": min(job.mean_tokens, tokens)}
        yield Change("length", 5, f"completions of at most {tokens} tokens", shorter)
        tokens //= 2


def _combinations(single: list[Change]) -> Iterator[tuple[Change, ...]]:
    for size in range(1, MAX_CHANGES + 1):
        for chosen in combinations(single, size):
            families = {change.family for change in chosen}
            full = any(change.sets.get("sharding") == "full" for change in chosen)
            if len(families) == size and not (full and families & NOT_WITH_FULL):
                yield chosen


def _apply_all(job: Job, chosen: tuple[Change, ...]) -> Job:
    for change in chosen:
        job = change.apply(job)
    return job


def _fix(job: Job, chosen: tuple[Change, ...]) -> Fix:
    changed = _apply_all(job, chosen)
    memory = memory_of(changed)
    return Fix(chosen, changed, memory.peak.total, memory.host, seconds_of(changed).step)


def _distinct(fixes: list[Fix], count: int) -> list[Fix]:
    """The cheapest fix of each set of families: packs of 8192 and of 4096 tokens count as one idea."""
    best: dict[frozenset[str], Fix] = {}
    for fix in fixes:
        best.setdefault(frozenset(change.family for change in fix.changes), fix)
    return list(best.values())[:count]
