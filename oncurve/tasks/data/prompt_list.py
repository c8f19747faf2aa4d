"""A task that is a list of prompts in memory, from Python or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oncurve.errors import DataError
from oncurve.recipe.schema import sections
from oncurve.records import Environment, Example, Prompt, StatefulEnvironment
from oncurve.tasks.data.row_reader import RowReader

Row = str | Sequence[Mapping[str, str]] | Mapping[str, Any]
"""A prompt in Python code: a text, a list of messages, or a dict with "prompt" and the columns that its rewards need."""


@dataclass(frozen=True)
class PromptList:
    """A task that is a list of prompts.

    Example: ``PromptList.of(["12+34=", {"prompt": "5+6=", "answer": "11"}])``
    """

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...] = ()
    examples: tuple[Example, ...] = ()
    alphabet: str | None = None
    rows: int | None = None
    """Rows of the file that the held-out prompts were chosen from; None if they are not from a file."""
    log_lines: tuple[str, ...] = ()
    """Lines for the run's log."""

    @classmethod
    def of(
        cls,
        prompts: Iterable[Row],
        heldout: Iterable[Row] = (),
        name: str = "prompts",
        environment: Environment | StatefulEnvironment | Mapping[str, StatefulEnvironment] | None = None,
    ) -> PromptList:
        """From Python values. Rows with a "completion" become demonstrations too. If there are several environments, the column
        "environment" names a row's own."""
        rows, reader = [_as_row(row) for row in prompts], RowReader()

        def read(row: Mapping[str, Any], where: str, id: str) -> Prompt:
            own, row = _environment_of(row, environment, where) if isinstance(environment, Mapping) else (environment, row)
            fix = 'rename the column: {"prompt": row["question"], **row}'
            return RowReader(environment=own, missing_column_fix=fix).read(row, where, id)

        train = [read(row, f"{name}[{i}]", f"{name}/train/{i}") for i, row in enumerate(rows)]
        heldout_prompts = [read(_as_row(row), f"heldout[{i}]", f"{name}/heldout/{i}") for i, row in enumerate(heldout)]
        examples = (reader.example(row, p, f"{name}[{i}]") for i, (row, p) in enumerate(zip(rows, train, strict=True)))
        task = cls.split(train, heldout_prompts, [example for example in examples if example is not None], where=name)
        if not task.train:
            because, fix = "all of them are in the held-out split", "give more prompts, or hold out fewer"
            raise DataError(name, "no training prompts", because=because, fix=fix)
        given = ((prompt.messages, row["prompt"]) for prompt, row in zip(train, rows, strict=True))
        shortened = sum(messages is not None and len(messages) < len(chat) for messages, chat in given)
        line = f"{shortened} of {len(rows)} prompts end with the assistant's message, which is left out"
        return replace(task, log_lines=(*task.log_lines, line)) if shortened else task

    @classmethod
    def split(cls, train: Iterable[Prompt], heldout: Sequence[Prompt], examples: Iterable[Example], where: str) -> PromptList:
        """Removes every training prompt whose text is in the held-out split, whatever its columns or id, and its
        demonstrations: those of all turns, whose ids are `ID/TURN`. The log says how many rows were dropped although they are
        not held out themselves."""
        train, texts, ids = tuple(train), {prompt.shown for prompt in heldout}, {prompt.id for prompt in heldout}
        remaining = tuple(prompt for prompt in train if prompt.shown not in texts)
        if not remaining and not heldout:
            raise DataError(where, "no training prompts", because="the list is empty", fix="give at least one prompt")
        removed = {prompt.id for prompt in train} - {prompt.id for prompt in remaining}
        dropped = len(removed - ids)
        rows = "1 row dropped: its" if dropped == 1 else f"{dropped} rows dropped: their"
        lines = (f"{rows} prompt is held out",) if dropped else ()
        kept = (e for e in examples if removed.isdisjoint((e.prompt.id, e.prompt.id.rpartition("/")[0])))
        return cls(remaining, tuple(heldout), tuple(e for e in kept if e.prompt.shown not in texts), log_lines=lines)

    @property
    def train_size(self) -> int:
        return len(self.train)

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        prompts = (*self.train, *self.heldout)
        if prompts and getattr(prompts[0].environment, "reward_name", None) is not None:
            return (sections.Reward.model_validate({"type": "environment"}),)
        have_answers = any(prompt.columns.get("answer") is not None for prompt in prompts)
        return (sections.Reward.model_validate({"type": "answer", "take": "any"}),) if have_answers else ()

    def train_prompt(self, index: int) -> Prompt:
        return self.train[index]


def _environment_of(
    row: Mapping[str, Any], environments: Mapping[str, StatefulEnvironment], where: str
) -> tuple[StatefulEnvironment, Mapping[str, Any]]:
    """A row's environment, and the row without its name."""
    name = row.get("environment")
    if not isinstance(name, str) or name not in environments:
        raise DataError(
            where,
            f"environment {name!r}",
            because=f"environment_factory has: {', '.join(environments)}",
            fix='name one of them in the column "environment" of each row',
        )
    return environments[name], {key: value for key, value in row.items() if key != "environment"}


def _as_row(row: Row) -> Mapping[str, Any]:
    return row if isinstance(row, Mapping) else {"prompt": row}
