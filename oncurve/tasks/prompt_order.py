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
from oncurve.tasks.task_mix import MixPart, TaskMix

_INDICES_PER_STEP = 1 << 32
"""Prompt indices of an endless task that are reserved for each step."""


def prompts_for_step(task: Task, seed: int, step: int, count: int, *, round: int = 0) -> list[Prompt]:
    """The ``count`` prompts of a step, all with different ids (random numbers depend on the id, so equal ids would be copies).

    A finite task is shuffled again for each epoch by (seed, epoch). A step lies within one epoch: prompts that would not fill a
    step are left to the next shuffle. If there are fewer training prompts than ``count``, a step repeats them under the ids
    `…#2`, `…#3`. An endless task gives new prompts. Each task of a mix has its own epochs, and a step may cross their ends.

    ``round`` 1, 2 … returns prompts that this step has not used yet, with which dynamic sampling replaces groups without
    signal; fewer than ``count`` if the task has no more.
    """
    if isinstance(task, TaskMix):
        ranges = zip(task.parts, task.ranges(step, count), strict=True)
        return [prompt for part, positions in ranges for prompt in _mixed_prompts(part, seed, step, positions, round)]
    if task.train_size is None:
        return _fresh_prompts(task, seed, step, count * (round + 1))[count * round :]
    if round == 0:
        return _epoch_prompts(task, seed, step, count, task.train_size)
    used = {prompt.id for prompt in _epoch_prompts(task, seed, step, count, task.train_size)}
    others = (task.train_prompt(int(i)) for i in _permutation(seed, "prompts/more", step, task.train_size))
    unused = [prompt for prompt in others if prompt.id not in used]
    return unused[count * (round - 1) : count * round]


def _mixed_prompts(part: MixPart, seed: int, step: int, positions: tuple[int, int], round: int) -> list[Prompt]:
    """The prompts of one task of a mix: numbers ``positions`` [first, end) of its epochs, each shuffled by (seed, epoch)."""
    (first, end), seed = positions, derive_seed(seed, f"mix/{part.name}")
    count, size = end - first, part.train_size
    if size is None:
        return _fresh_prompts(part, seed, step, count * (round + 1))[count * round :] if count else []
    places = (divmod(position, size) for position in range(first, end))
    indices = [int(_permutation(seed, "prompts", epoch, size)[offset]) for epoch, offset in places]
    if round == 0:
        repeats = (indices[:place].count(index) for place, index in enumerate(indices))
        return [with_repeat_id(part.train_prompt(i), repeat) for i, repeat in zip(indices, repeats, strict=True)]
    others = [int(i) for i in _permutation(seed, "prompts/more", step, size) if i not in indices]
    return [part.train_prompt(i) for i in others[count * (round - 1) : count * round]]


def batch_indices(size: int, seed: int, step: int, batch_size: int) -> list[int]:
    """Which of ``size`` rows update ``step`` uses, in epochs, each shuffled by (seed, epoch)."""
    positions = (divmod(position, size) for position in range(step * batch_size, (step + 1) * batch_size))
    return [int(_permutation(seed, "examples", epoch, size)[offset]) for epoch, offset in positions]


def shuffled_indices(seed: int, size: int) -> Iterator[int]:
    """The training prompts of a finite task in the order of its first epoch."""
    return map(int, _permutation(seed, "prompts", 0, size))


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
    return [with_repeat_id(prompt, repeat) for repeat, prompt in prompts[:count]]


def with_repeat_id(prompt: Prompt, repeat: int) -> Prompt:
    """Repetition ``repeat`` of a prompt in one step, under an id of its own; 0 is the prompt itself."""
    return prompt if repeat == 0 else replace(prompt, id=f"{prompt.id}#{repeat + 1}")


def _fresh_prompts(task: Task, seed: int, step: int, count: int) -> list[Prompt]:
    """``count`` prompts of an endless task. Duplicates are skipped; if it has too few problems, they get another id."""
    prompts: dict[str, Prompt] = {}
    for tries, prompt in enumerate(prompt_stream(task, seed, step)):
        repeat = 0
        while tries > 16 * count and with_repeat_id(prompt, repeat).id in prompts:
            repeat += 1
        prompt = with_repeat_id(prompt, repeat)
        prompts.setdefault(prompt.id, prompt)
        if len(prompts) == count:
            break
    return list(prompts.values())


def prompt_stream(task: Task, seed: int, step: int, first: int = 0) -> Iterator[Prompt]:
    """The prompts that an endless task reserves for a step, from number ``first`` on."""
    start = (derive_seed(seed, "prompts") << 64) + step * _INDICES_PER_STEP
    for index in range(start + first, start + _INDICES_PER_STEP):
        yield task.train_prompt(index)
