"""When a GPU runs out of memory: what was tried is tried again with half as much at once, and never a lost run for one batch.

Splitting changes neither the gradient (reductions divide by the step's totals) nor the random numbers: only rounding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from oncurve.distributed.world import World
from oncurve.engines.base import Engine, SampleKey, slots_for
from oncurve.engines.native.kv_cache import slots_per_block
from oncurve.errors import ModelError
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Prompt
from oncurve.runs.step_notes import note

T = TypeVar("T")


class OutOfMemory(ModelError):
    """Not even the smallest piece fits."""


def retry_on_oom(attempt: Callable[[int], T], budget: int, *, least: int, what: str) -> tuple[T, int]:
    """What ``attempt(budget)`` gives, with ``budget`` halved as often as memory runs out; and the budget that was enough."""
    while True:
        try:
            return attempt(budget), budget
        except torch.OutOfMemoryError as error:
            said = str(error).partition("\n")[0][:160]
        # Outside the handler: the exception holds every frame of the attempt, and with them its tensors.
        if budget <= least:
            raise OutOfMemory(
                what,
                f"out of memory at {budget}",
                because=said,
                fix="use a smaller model or shorter completions (sampling.max_new_tokens), or free the GPU",
            )
        budget = max(budget // 2, least)
        release()
        note("memory", f"out of memory ({said}); tried again with {what} = {budget}")


class PackedStage:
    """What forwards ``tokens_per_pack`` tokens at once, and fewer from where memory ran out on."""

    tokens_per_pack: int
    world: World

    def with_oom_retry(self, attempt: Callable[[int], T], whole: int, least: int) -> T:
        """What ``attempt`` makes of packs of so many tokens: of half as many, as often as memory runs out in it, unless every
        pass is one of all ranks. No pack can be smaller than ``least``."""
        least = whole if self.world.forward_is_collective else least
        done, enough = retry_on_oom(attempt, whole, least=least, what="tokens_per_pack")
        if enough < whole:
            self.tokens_per_pack = enough
        return done


def release() -> None:
    """Gives back what only the failed attempt held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sample_with_retry(
    engine: Engine,
    prompts: Sequence[Prompt],
    group_size: int,
    how: Sampling,
    draws: SampleKey,
    on_group: Callable[[int, Group], None] | None = None,
) -> list[Group]:
    """As ``engine.sample``; where memory runs out, with half the slots, which stay so: the pool was too large for this run."""
    slots = slots_for(engine, len(prompts) * group_size)

    def attempt(budget: int) -> list[Group]:
        if budget != slots:
            engine.settings = engine.settings.model_copy(update={"slots": budget})
        return engine.sample(prompts, group_size, how, draws, on_group)

    with engine.policy.for_sampling():
        return retry_on_oom(attempt, slots, least=slots_per_block(group_size), what="engine.slots")[0]


def available() -> int | None:
    """Bytes of the machine's memory that may yet be taken, as Linux counts them; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
