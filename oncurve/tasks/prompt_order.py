"""Which prompts a step samples, and which demonstrations an update trains on.

Both are pure functions of (seed, step): step 900's prompts can be computed without steps 1 to 899, so a resumed or forked run
uses the same prompts as one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from oncurve.records import Ints, Prompt
from oncurve.rng import derive_seed, philox_generator
from oncurve.tasks.base import Task

_INDICES_PER_STEP = 1 << 32
"""Prompt indices of an endless task that are reserved for each step."""


def prompts_for_step(task: Task, seed: int, step: int, count: int, *, round: int = 0) -> list[Prompt]:
    """The ``count`` prompts of a step, all with different ids (random numbers depend on the id, so equal ids would be copies).

    A finite task is shuffled anew for each epoch by (seed, epoch). A step lies within one epoch: prompts that would not fill a
    step are left to the next shuffle. If there are fewer training prompts than ``count``, a step repeats them under the ids
    `…#2`, `…#3`. An endless task gives new prompts.

    ``round`` 1, 2 … returns prompts that this step has not used yet, with which dynamic sampling replaces groups without
    signal; fewer than ``count`` if the task has no more.
    """
    if task.train_size is None:
        return _fresh_prompts(task, seed, step, count * (round + 1))[count * round :]
    if round == 0:
        return _epoch_prompts(task, seed, step, count, task.train_size)
    used = {prompt.id for prompt in _epoch_prompts(task, seed, step, count, task.train_size)}
    others = (task.train_prompt(int(i)) for i in _permutation(seed, "prompts/more", step, task.train_size))
    unused = [prompt for prompt in others if prompt.id not in used]
    return unused[count * (round - 1) : count * round]


def batch_indices(size: int, seed: int, step: int, batch_size: int) -> list[int]:
    """Which of ``size`` rows update ``step`` uses, in epochs, each shuffled by (seed, epoch)."""
    positions = (divmod(position, size) for position in range(step * batch_size, (step + 1) * batch_size))
    return [int(_permutation(seed, "examples", epoch, size)[offset]) for epoch, offset in positions]


@lru_cache(maxsize=8)
def _permutation(seed: int, purpose: str, epoch: int, size: int) -> Ints:
    return philox_generator(seed, purpose, epoch).permutation(size).astype(np.int64)


def _epoch_prompts(task: Task, seed: int, step: int, count: int, size: int) -> list[Prompt]:
    if count > size:
        return _repeated_prompts(task, seed, step, count, size)
    epoch, step_in_epoch = divmod(step, size // count)
    indices = _permutation(seed, "prompts", epoch, size)[step_in_epoch * count : (step_in_epoch + 1) * count]
    return [task.train_prompt(int(i)) for i in indices]


def _repeated_prompts(task: Task, seed: int, step: int, count: int, size: int) -> list[Prompt]:
    """Every prompt once, then every prompt again under another id, until the step is full."""
    epochs = -(-count // size)
    orders = (_permutation(seed, "prompts", step * epochs + repeat, size) for repeat in range(epochs))
    prompts = [(repeat, task.train_prompt(int(i))) for repeat, order in enumerate(orders) for i in order]
    return [_repeated(prompt, repeat) for repeat, prompt in prompts[:count]]


def _repeated(prompt: Prompt, repeat: int) -> Prompt:
    return prompt if repeat == 0 else replace(prompt, id=f"{prompt.id}#{repeat + 1}")


def _fresh_prompts(task: Task, seed: int, step: int, count: int) -> list[Prompt]:
    """``count`` prompts of an endless task. Duplicates are skipped; if it has too few problems, they get another id."""
    prompts: dict[str, Prompt] = {}
    for tries, prompt in enumerate(_stream(task, seed, step)):
        repeat = 0
        while tries > 16 * count and _repeated(prompt, repeat).id in prompts:
            repeat += 1
        prompt = _repeated(prompt, repeat)
        prompts.setdefault(prompt.id, prompt)
        if len(prompts) == count:
            break
    return list(prompts.values())


def _stream(task: Task, seed: int, step: int) -> Iterator[Prompt]:
    start = (derive_seed(seed, "prompts") << 64) + step * _INDICES_PER_STEP
    for index in range(start, start + _INDICES_PER_STEP):
        yield task.train_prompt(index)
