"""The task `mix`: several tasks in one run, each with its share of every step's prompts.

Each task keeps its own order of prompts and its own held-out split. A prompt's id begins with the name of its task, its column
`task` is that name, and its difficulty is `NAME` or `NAME: LEVEL`, so that held-out accuracy is reported for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from oncurve.errors import DataError, RecipeError
from oncurve.recipe.error_messages import read_section
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Section
from oncurve.records import Example, Prompt
from oncurve.tasks.base import Task

COLUMN = "task"
"""The column with the name of a prompt's task."""


class MixedTask(sections.Task):
    """One task of a mix: the keys of a task, its name and its share."""

    name: str | None = None
    """Its name in tables and metrics, and in `task` of a reward. Unset: its type."""
    share: PositiveFloat = 1.0
    """Its part of each step's prompts, relative to the shares of the others."""

    @property
    def label(self) -> str:
        return self.name or self.type


class MixOptions(Section):
    """Several tasks in one run, each with its share of every step's prompts."""

    mix: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    """The tasks, as a list of tables `[[task.mix]]`: `type` and the task's own keys, `share` (relative to the others; unset: 1)
    and `name` (unset: the type). `heldout` and `seed` of `[task]` are the defaults of each. A reward with `task = "NAME"`
    scores the prompts of that task only."""


@dataclass(frozen=True)
class MixPart:
    """A task of the mix as the mix shows it: with ids, columns and difficulties that name it."""

    name: str
    share: float
    task: Task

    @property
    def train_size(self) -> int | None:
        return self.task.train_size

    @cached_property
    def heldout(self) -> Sequence[Prompt]:
        return tuple(map(self.mark, self.task.heldout))

    @cached_property
    def examples(self) -> Sequence[Example]:
        return tuple(replace(example, prompt=self.mark(example.prompt)) for example in self.task.examples)

    @property
    def alphabet(self) -> str | None:
        return self.task.alphabet

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        rewards = self.task.default_rewards
        return tuple(r.model_copy(update={"name": f"{self.name}_{r.label}", "task": self.name}) for r in rewards)

    def train_prompt(self, index: int) -> Prompt:
        return self.mark(self.task.train_prompt(index))

    def mark(self, prompt: Prompt) -> Prompt:
        if prompt.columns.get(COLUMN, self.name) != self.name:
            raise DataError(
                prompt.id,
                f"a column '{COLUMN}' with the value {prompt.columns[COLUMN]!r}",
                because=f"a mix writes the name of a prompt's task, '{self.name}', into this column",
                fix="rename the column in the data",
            )
        level = self.name if prompt.difficulty is None else f"{self.name}: {prompt.difficulty}"
        return replace(
            prompt, id=f"{self.name}/{prompt.id}", columns={**prompt.columns, COLUMN: self.name, "difficulty": level}
        )


class TaskMix:
    """A task that is several tasks. Its training prompts are selected by `prompts_for_step`, which knows the shares."""

    def __init__(self, parts: Sequence[MixPart]) -> None:
        self.parts = tuple(parts)
        self._quotas: dict[int, list[list[int]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def train_size(self) -> int | None:
        sizes = [part.train_size for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @cached_property
    def heldout(self) -> Sequence[Prompt]:
        return tuple(prompt for part in self.parts for prompt in part.heldout)

    @cached_property
    def examples(self) -> Sequence[Example]:
        return tuple(example for part in self.parts for example in part.examples)

    @property
    def alphabet(self) -> str | None:
        alphabets = [part.alphabet for part in self.parts]
        known = [letters for letters in alphabets if letters is not None]
        return "".join(dict.fromkeys("".join(known))) if len(known) == len(alphabets) else None

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        return tuple(reward for part in self.parts for reward in part.default_rewards)

    @property
    def log_lines(self) -> tuple[str, ...]:
        return tuple(f"{part.name}: {line}" for part in self.parts for line in getattr(part.task, "log_lines", ()))

    def train_prompt(self, index: int) -> Prompt:
        """Finite tasks one after the other; if one is endless, every task in turn."""
        if self.train_size is None:
            turn, position = divmod(index, len(self.parts))
            part = self.parts[position]
            return part.train_prompt(turn if part.train_size is None else turn % part.train_size)
        for part in self.parts:
            if index < (part.train_size or 0):
                return part.train_prompt(index)
            index -= part.train_size or 0
        raise IndexError(index)

    def ranges(self, step: int, count: int) -> list[tuple[int, int]]:
        """For each part, the range [start, end) of its prompts that a step of ``count`` prompts uses.

        A part's prompts are numbered over all steps, from the first one on.

        Each prompt of a step goes to the part that is furthest behind its share of all prompts up to the end of the step. So
        the total of a part stays within one prompt of its share, or two if there are many parts of very different shares.
        """
        totals = self._quotas.setdefault(count, [[0] * len(self.parts)])
        whole = sum(part.share for part in self.parts)
        while len(totals) < step + 2:
            n, before = len(totals), totals[-1]
            due = [part.share / whole * count * n - given for part, given in zip(self.parts, before, strict=True)]
            quotas = [0] * len(due)
            for _ in range(count):
                furthest = max(range(len(due)), key=lambda i: due[i] - quotas[i])
                quotas[furthest] += 1
            totals.append([given + quota for given, quota in zip(before, quotas, strict=True)])
        return list(zip(totals[step], totals[step + 1], strict=True))


def build_mix(config: sections.Task, options: MixOptions, build: Callable[[sections.Task, str], Task]) -> TaskMix:
    """The mix of a recipe; ``build`` builds a task from its section. Its tasks have the mix's `heldout` and `seed` if they set
    none of their own."""
    parts: list[MixPart] = []
    for index, table in enumerate(options.mix):
        entry = read_section(MixedTask, {"heldout": config.heldout, "seed": config.seed, **table}, f"task.mix.{index}")
        _check_entry(entry, config, parts)
        plain = {"type": entry.type, "heldout": entry.heldout, "seed": entry.seed, **entry.options}
        task = build(sections.Task.model_validate(plain), f"task.mix.{entry.label}")
        parts.append(MixPart(entry.label, entry.share, task))
    return TaskMix(parts)


def _check_entry(entry: MixedTask, config: sections.Task, parts: Sequence[MixPart]) -> None:
    if entry.type == config.type:
        raise RecipeError("task.mix", entry.label, because="it is a mix itself", fix="list its tasks here instead")
    if entry.label in (part.name for part in parts):
        fix = f'give one a name, such as name = "{entry.label}_2"'
        raise RecipeError("task.mix", entry.label, because="two of its tasks have this name", fix=fix)
    if not entry.label or any(mark in entry.label for mark in ".=/\\ \t\n"):
        because = "names are part of dotted keys and of prompt ids"
        raise RecipeError("task.mix", repr(entry.label), because=because, fix="use letters, digits, - and _ only")
