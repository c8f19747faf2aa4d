"""A task that is a list of prompts in memory, from Python or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oncurve.errors import DataError
from oncurve.recipe.schema import sections
from oncurve.records import Example, Prompt
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
    def of(cls, prompts: Iterable[Row], heldout: Iterable[Row] = (), name: str = "prompts") -> PromptList:
        """From Python values. Rows with a "completion" become demonstrations too."""
        rows, reader = [_as_row(row) for row in prompts], RowReader()
        train = [reader.read(row, f"{name}[{i}]", f"{name}/train/{i}") for i, row in enumerate(rows)]
        heldout_prompts = [reader.read(_as_row(row), f"heldout[{i}]", f"{name}/heldout/{i}") for i, row in enumerate(heldout)]
        examples = (reader.example(row, p, f"{name}[{i}]") for i, (row, p) in enumerate(zip(rows, train, strict=True)))
        return cls.split(train, heldout_prompts, [example for example in examples if example is not None], where=name)

    @classmethod
    def split(cls, train: Iterable[Prompt], heldout: Sequence[Prompt], examples: Iterable[Example], where: str) -> PromptList:
        """Removes every training prompt and demonstration whose text is in the held-out split, whatever its columns or id."""
        heldout_texts = {prompt.shown for prompt in heldout}
        remaining = tuple(prompt for prompt in train if prompt.shown not in heldout_texts)
        if not remaining:
            raise DataError(
                where,
                "no training prompts",
                because="there are none, or all of them are in the held-out split",
                fix="give more prompts, or hold out fewer",
            )
        return cls(remaining, tuple(heldout), tuple(e for e in examples if e.prompt.shown not in heldout_texts))

    @property
    def train_size(self) -> int:
        return len(self.train)

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        have_answers = any(prompt.columns.get("answer") is not None for prompt in (*self.train, *self.heldout))
        return (sections.Reward.model_validate({"type": "answer", "take": "any"}),) if have_answers else ()

    def train_prompt(self, index: int) -> Prompt:
        return self.train[index]


def _as_row(row: Row) -> Mapping[str, Any]:
    return row if isinstance(row, Mapping) else {"prompt": row}
