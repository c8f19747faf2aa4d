"""The cheapest change that makes a job fit, found by search.

Every change is one step away from the job as asked; combinations of up to three different ones are tried. Among those that fit,
and that need all of their parts, the cheapest is the one whose dearest part is of the lowest tier, then the one that takes the
fewest GPU-seconds a step.

| tier | what it costs |
|---|---|
| 0 | time only: the result is the same up to rounding |
| 1 | moments in 8 bits: an update a little less exact |
| 2 | the optimiser on the CPU: every update waits for the link |
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

from oncurve.plan.job import Job
from oncurve.plan.memory import memory_limit, memory_of
from oncurve.plan.step_time import seconds_of

PACKS = (8192, 4096, 2048, 1024)
SLOTS = (128, 64, 32, 16)
GPU_COUNTS = (2, 4, 8, 16, 32, 64)
SHARDED = {"optimiser": "a sharded optimiser", "full": "everything sharded"}
NOT_WITH_FULL = {"moments", "optimiser", "lora"}
"""Families that a recipe refuses beside `scale.shard = "full"`."""
MOST_PARTS = 3
SHORTEST = 64


@dataclass(frozen=True, slots=True)
class Change:
    """One change: its family (two of a family exclude each other), its tier, and what it sets."""

    family: str
    tier: int
    words: str
    sets: dict[str, Any]
    key: str | None = None
    """How a recipe says it, `STAGE` standing for the stage's name; None where a recipe can't yet."""

    def apply(self, job: Job) -> Job:
        return replace(job, **self.sets)


@dataclass(frozen=True, slots=True)
class Fix:
    """Changes that together make a job fit, with what the job then takes."""

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
    """The cheapest changes that make a job fit, cheapest first; none where it fits, or where nothing tried helps."""
    if fits(job):
        return []
    found: list[tuple[Change, ...]] = []
    for chosen in _combinations(list(changes(job, lora_rank))):
        needed = not any(set(map(id, part)) < set(map(id, chosen)) for part in found)
        if needed and fits(_applied(job, chosen)):
            found.append(chosen)
    fixes = sorted((_fix(job, chosen) for chosen in found), key=lambda fix: fix.cost)
    return _distinct(fixes, count)


def changes(job: Job, lora_rank: int) -> Iterator[Change]:
    """Every single change that makes sense for the job."""
    one = partial(Change, tier=0)
    for tokens in (n for n in PACKS if n < job.pack_tokens):
        yield one(
            "packs",
            words=f"tokens_per_pack = {tokens}",
            sets={"tokens_per_pack": tokens},
            key=f"STAGE.tokens_per_pack={tokens}",
        )
    if job.checkpointing == "off":
        yield one(
            "checkpointing", words="gradient checkpointing", sets={"checkpointing": "auto"}, key="STAGE.checkpointing=auto"
        )
    for slots in (n for n in SLOTS if job.does.samples and n < min(job.slots, job.rows)):
        yield one("slots", words=f"{slots} slots", sets={"slots": slots}, key=f"engine.slots={slots}")
    if job.holds_reference and not job.reference_on_cpu:
        yield one("reference", words="the reference on the CPU", sets={"reference_on_cpu": True}, key="STAGE.kl.on_cpu=true")
    if job.moments == "float32" and not job.does.curvature:
        yield Change("moments", 1, "8-bit moments", {"moments": "int8"}, "STAGE.optimiser.moments=int8")
    if not job.optimiser_on_cpu and not job.does.curvature:
        key = "STAGE.optimiser.on_cpu=true"
        yield Change("optimiser", 2, "the optimiser on the CPU", {"optimiser_on_cpu": True}, key)
    if job.lora_rank is None:
        yield Change("lora", 3, f"LoRA of rank {lora_rank}", {"lora_rank": lora_rank}, f"model.lora.rank={lora_rank}")
    whole = job.does.critic or job.does.curvature or job.lora_rank is not None  # these need all weights on each rank
    shards = {shard: words for shard, words in SHARDED.items() if shard == "optimiser" or not whole}
    if job.gpus > 1 and job.sharding == "none" and not job.gpu.is_cpu:
        for shard, words in shards.items():
            yield one("gpus", words=f"{words} (scale.shard)", sets={"sharding": shard}, key=f"scale.shard={shard}")
    for gpus in (n for n in GPU_COUNTS if n > job.gpus and not job.gpu.is_cpu):
        for shard, words in shards.items():
            yield Change("gpus", 4, f"{gpus} GPUs with {words}", {"gpus": gpus, "sharding": shard})
    tokens = job.new_tokens // 2
    while tokens >= SHORTEST:
        mean = min(job.mean_tokens, tokens)
        sets = {"new_tokens": tokens, "mean_tokens": mean}
        key = f"STAGE.sampling.max_new_tokens={tokens}"
        yield Change("length", 5, f"completions of at most {tokens} tokens", sets, key)
        tokens //= 2


def _combinations(single: list[Change]) -> Iterator[tuple[Change, ...]]:
    for size in range(1, MOST_PARTS + 1):
        for chosen in combinations(single, size):
            families = {change.family for change in chosen}
            full = any(change.sets.get("sharding") == "full" for change in chosen)
            if len(families) == size and not (full and families & NOT_WITH_FULL):
                yield chosen


def _applied(job: Job, chosen: tuple[Change, ...]) -> Job:
    for change in chosen:
        job = change.apply(job)
    return job


def _fix(job: Job, chosen: tuple[Change, ...]) -> Fix:
    changed = _applied(job, chosen)
    memory = memory_of(changed)
    return Fix(chosen, changed, memory.peak.total, memory.host, seconds_of(changed).step)


def _distinct(fixes: list[Fix], count: int) -> list[Fix]:
    """The cheapest of each set of families: 8192 and 4096 tokens a pack are one idea."""
    best: dict[frozenset[str], Fix] = {}
    for fix in fixes:
        best.setdefault(frozenset(change.family for change in fix.changes), fix)
    return list(best.values())[:count]
