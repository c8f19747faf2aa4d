"""When a GPU runs out of memory: what was tried is tried again with half as much at once, and never a lost run for one batch.

Splitting changes neither the gradient (reductions divide by the step's totals) nor the random numbers: only rounding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from oncurve.errors import ModelError
from oncurve.runs.notes import note

T = TypeVar("T")


class OutOfMemory(ModelError):
    """Not even the smallest piece fits."""


def with_less(attempt: Callable[[int], T], budget: int, *, least: int, what: str) -> tuple[T, int]:
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


def release() -> None:
    """Gives back what only the failed attempt held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
