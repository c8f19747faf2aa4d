"""Out of memory: retry with half as much at once, so that one large batch does not end a run.

The split changes neither the gradient (reductions divide by the step's totals) nor the random numbers, only rounding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from oncurve.distributed.world import World
from oncurve.engines.base import Engine, SampleKey, slots_for
from oncurve.engines.native.kv_cache import slots_per_block
from oncurve.errors import ModelError, troubleshooting
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Prompt
from oncurve.runs.step_notes import note

T = TypeVar("T")


class OutOfMemory(ModelError):
    """Even the smallest batch does not fit."""


def retry_on_oom(attempt: Callable[[int], T], budget: int, *, min_budget: int, name: str) -> tuple[T, int]:
    """(the result of ``attempt(budget)``, the budget that fit). Each out-of-memory error halves the budget.

    ``name`` is the recipe key of the budget, for messages.
    """
    while True:
        try:
            return attempt(budget), budget
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            message = str(error).partition("\n")[0][:160]
        # Outside of the handler: the exception refers to the attempt's frames, which keep its tensors alive.
        if budget <= min_budget:
            raise OutOfMemory(
                name,
                f"out of memory at {budget}",
                because=message,
                fix="use a smaller model or shorter completions (sampling.max_new_tokens), or free memory; "
                + troubleshooting("Out of memory"),
            )
        budget = max(budget // 2, min_budget)
        release_memory()
        note("memory", f"out of memory ({message}); retrying with {name} = {budget}")


def _is_out_of_memory(error: RuntimeError) -> bool:
    """torch's allocator for CPUs raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


class PackedStage:
    """Mixin: runs packs of ``tokens_per_pack`` tokens and lowers it after an out-of-memory error."""

    tokens_per_pack: int
    world: World

    def with_oom_retry(self, attempt: Callable[[int], T], budget: int, min_budget: int) -> T:
        """The result of ``attempt`` with packs of ``budget`` tokens, or of fewer, but never fewer than ``min_budget``.

        If every forward is a collective (FSDP), there is no retry: the other ranks are in the middle of theirs.
        """
        min_budget = budget if self.world.forward_is_collective else min_budget
        result, fitting = retry_on_oom(attempt, budget, min_budget=min_budget, name="tokens_per_pack")
        if fitting < budget:
            self.tokens_per_pack = fitting
        return result

    def on_local_rows(self, costs: Sequence[int], budget: int, work: Callable[[list[int], int], T]) -> T:
        """The result of ``work(indices, budget)`` on this rank's share of the rows. ``costs`` has the number of tokens of each
        row."""
        local = self.world.local_indices(costs)
        return self.with_oom_retry(lambda fitting: work(local, fitting), budget, max(costs))


def release_memory() -> None:
    """Returns what only the failed attempt used to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sample_with_retry(
    engine: Engine,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    key: SampleKey,
    on_group: Callable[[int, Group], None] | None = None,
) -> list[Group]:
    """``engine.sample``, with half the slots after an out-of-memory error. The engine keeps the lower number."""
    slots = slots_for(engine, len(prompts) * group_size)

    def attempt(budget: int) -> list[Group]:
        if budget != slots:
            engine.settings = engine.settings.model_copy(update={"slots": budget})
        return engine.sample(prompts, group_size, sampling, key, on_group)

    with engine.policy.for_sampling():
        return retry_on_oom(attempt, slots, min_budget=slots_per_block(group_size), name="engine.slots")[0]
