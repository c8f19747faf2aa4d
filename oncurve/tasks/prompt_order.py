"""Which prompts a step asks, and which worked examples an update sees.

Both are pure functions of (seed, step): step 900's prompts are known without playing steps 1 to 899, so a resumed or forked run
asks what the first one would have asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from oncurve.errors import DataError
from oncurve.records import Example, Ints, Prompt
from oncurve.rng import derive_seed, philox_generator
from oncurve.tasks.base import Task

_STEP_ROOM = 1 << 32
"""Indices that each step of an endless task has to itself."""


def prompts_for_step(task: Task, seed: int, step: int, count: int, *, round: int = 0) -> list[Prompt]:
    """The `count` prompts of a step, all with different ids (random numbers hang on the id, so a twin would be a copy).

    A task with an end is asked in epochs, each shuffled by (seed, epoch). A step lies in one epoch: the rest that would not
    fill a step waits for the next shuffle. With fewer training prompts than `count`, prompts are asked again in the same step
    under the ids `…#2`, `…#3`. An endless task gives fresh prompts.

    `round` 1, 2 … gives prompts that this step has not asked yet (dynamic sampling replaces groups without signal by them);
    fewer than `count` where the task has no more.
    """
    if task.train_size is None:
        return _fresh_prompts(task, seed, step, count * (round + 1))[count * round :]
    if round == 0:
        return _epoch_prompts(task, seed, step, count, task.train_size)
    asked = {prompt.id for prompt in _epoch_prompts(task, seed, step, count, task.train_size)}
    others = (task.train_prompt(int(i)) for i in _shuffled(seed, "prompts/more", step, task.train_size))
    unasked = [prompt for prompt in others if prompt.id not in asked]
    return unasked[count * (round - 1) : count * round]


def examples_for_step(examples: Sequence[Example], seed: int, step: int, batch_size: int) -> list[Example]:
    """The examples of update `step`: its B places in all epochs laid end to end, each shuffled by (seed, epoch)."""
    size = len(examples)
    if not size:
        raise DataError(
            "task",
            "it has no worked examples",
            because="an sft stage imitates them",
            fix="set task.examples, give the file a column of completions, or leave the sft stage out",
        )
    return [examples[i] for i in batch_indices(size, seed, step, batch_size)]


def batch_indices(size: int, seed: int, step: int, batch_size: int) -> list[int]:
    """Which of ``size`` rows update `step` sees, in epochs, each shuffled by (seed, epoch)."""
    places = (divmod(place, size) for place in range(step * batch_size, (step + 1) * batch_size))
    return [int(_shuffled(seed, "examples", epoch, size)[offset]) for epoch, offset in places]


@lru_cache(maxsize=8)
def _shuffled(seed: int, purpose: str, epoch: int, size: int) -> Ints:
    return philox_generator(seed, purpose, epoch).permutation(size).astype(np.int64)


def _epoch_prompts(task: Task, seed: int, step: int, count: int, size: int) -> list[Prompt]:
    if count > size:
        return _repeated_prompts(task, seed, step, count, size)
    epoch, place = divmod(step, size // count)
    order = _shuffled(seed, "prompts", epoch, size)[place * count : (place + 1) * count]
    return [task.train_prompt(int(i)) for i in order]


def _repeated_prompts(task: Task, seed: int, step: int, count: int, size: int) -> list[Prompt]:
    """Every prompt once, then every prompt again under another id, until the step is full."""
    epochs = -(-count // size)
    orders = (_shuffled(seed, "prompts", step * epochs + turn, size) for turn in range(epochs))
    asked = [(turn, task.train_prompt(int(i))) for turn, order in enumerate(orders) for i in order]
    return [_again(prompt, turn) for turn, prompt in asked[:count]]


def _again(prompt: Prompt, turn: int) -> Prompt:
    return prompt if turn == 0 else replace(prompt, id=f"{prompt.id}#{turn + 1}")


def _fresh_prompts(task: Task, seed: int, step: int, count: int) -> list[Prompt]:
    """`count` prompts of an endless task: those drawn twice are passed over, unless its problems are too few to go on so."""
    found: dict[str, Prompt] = {}
    for tries, prompt in enumerate(_stream(task, seed, step)):
        turn = 0
        while tries > 16 * count and _again(prompt, turn).id in found:
            turn += 1
        prompt = _again(prompt, turn)
        found.setdefault(prompt.id, prompt)
        if len(found) == count:
            break
    return list(found.values())


def _stream(task: Task, seed: int, step: int) -> Iterator[Prompt]:
    start = (derive_seed(seed, "prompts") << 64) + step * _STEP_ROOM
    for index in range(start, start + _STEP_ROOM):
        yield task.train_prompt(index)
