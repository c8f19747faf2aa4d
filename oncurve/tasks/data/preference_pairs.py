"""Preference pairs from a file: a prompt, the better completion, the worse one. Every stage that learns from pairs reads them
here.

A row that can teach nothing (equal texts, an empty answer, dialogues that part before the last answer) is left out and counted;
one that lacks a column, or holds something else than it should, is a mistake in the data and is told with its line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from oncurve.errors import DataError
from oncurve.recipe.schema.stages import Dpo
from oncurve.records import Prompt
from oncurve.tasks.data.file_task import read_rows
from oncurve.tasks.data.row_reader import RowReader, is_message

T = TypeVar("T")
Row = Mapping[str, Any]
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Pair:
    """Which of two completions of a prompt is the better."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class TrainingRows(Generic[T]):
    """What a file teaches, and how many of its rows were left out for which reason."""

    rows: Sequence[T]
    left_out: Mapping[str, int] = field(default_factory=dict)


def read_training_rows(path: str, key: str, read: Callable[[Row, str, str], T | str]) -> TrainingRows[T]:
    """``read`` makes of a row, its place (file and line) and its id something to learn from, or says why there is nothing."""
    found: list[T] = []
    left_out: Counter[str] = Counter()
    for line, row in read_rows(Path(path), key):
        made = read(row, f"{path}:{line}", f"{Path(path).name}/{line}")
        if isinstance(made, str):
            left_out[made] += 1
        else:
            found.append(made)
    if not found:
        why = f"{left_out_text(left_out)} left out" if left_out else "the file has no rows"
        raise DataError(path, "nothing to learn from", because=why, fix="give rows whose completions differ")
    return TrainingRows(found, dict(left_out))


def left_out_text(left_out: Mapping[str, int]) -> str:
    """`1 row of equal texts, 3 rows with an empty answer`."""
    return ", ".join(f"{count} {'row' if count == 1 else 'rows'} {reason}" for reason, count in left_out.items())


def read_pairs(stage: Dpo) -> TrainingRows[Pair]:
    """The pairs of the stage's file."""
    reader = RowReader(prompt=stage.prompt, chat=stage.chat)
    return read_training_rows(
        stage.pairs,
        f"{stage.label}.pairs",
        lambda row, where, id: read_pair(reader, row, stage.chosen, stage.rejected, where, id),
    )


def read_pair(reader: RowReader, row: Row, chosen: str, rejected: str, where: str, id: str) -> Pair | str:
    """The pair of a row, by the names of its columns; the reason where it can teach nothing."""
    better, worse = column(row, chosen, where), column(row, rejected, where)
    if reader.prompt in row:
        pair = Pair(reader.read(row, where, id), answer(better, chosen, where), answer(worse, rejected, where))
    else:
        one, other = _dialogue(better, chosen, where), _dialogue(worse, rejected, where)
        if one[:-1] != other[:-1]:
            return "of dialogues that part before the last answer"
        pair = Pair(Prompt(id=id, messages=tuple(one[:-1])), one[-1]["content"], other[-1]["content"])
    if not pair.chosen.strip() or not pair.rejected.strip():
        return "with an empty answer"
    return "of equal texts" if pair.chosen.strip() == pair.rejected.strip() else pair


def column(row: Row, name: str, where: str) -> Any:
    """What a row holds under a name that it must have."""
    if row.get(name) is None:
        because = f"the columns found there are: {', '.join(map(str, row)) or 'none'}"
        raise DataError(
            where, f"no column '{name}'", because=because, fix="name the right column in the stage, or mend the row"
        )
    return row[name]


def answer(value: Any, name: str, where: str) -> str:
    """A completion: a text, or the one message of an assistant."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content")
    if not isinstance(value, str):
        raise DataError(where, f"column '{name}' holds no text", because="a completion is a text", fix="mend the row")
    return value


def _dialogue(value: Any, name: str, where: str) -> list[dict[str, str]]:
    """A whole dialogue that ends with an answer: messages, or a text with `Human:` and `Assistant:`."""
    messages: list[dict[str, str]] = []
    if isinstance(value, str):
        messages = dialogue_messages(value)
    elif isinstance(value, list | tuple) and all(is_message(message) for message in value):
        messages = [dict(message) for message in value]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DataError(
            where,
            f"column '{name}' holds no dialogue that ends with an answer",
            because="without a column of prompts, each side is a whole dialogue",
            fix="name the column of prompts, or write dialogues as messages or as 'Human: …', 'Assistant: …'",
        )
    return messages


def dialogue_messages(text: str) -> list[dict[str, str]]:
    """`Human: …` and `Assistant: …`, each after an empty line, as messages."""
    parts = _TURN.split(text)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in pairs]
