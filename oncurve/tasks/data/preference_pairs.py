"""Preferences from a file: pairs of a prompt, the chosen completion and the rejected one, or single completions with a label.

A row that can't be learned from (equal texts, an empty answer, dialogues that differ before the last answer) is left out and
counted. A row that lacks a column, or has the wrong type in it, raises an error with its line.
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
    """Two completions of a prompt, of which the first is preferred.

    Example: ``Pair(Prompt("pairs.jsonl/3", "2+2="), chosen="4", rejected="5")``
    """

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class LabelledCompletion:
    """A completion of a prompt that is desirable or not.

    Example: ``LabelledCompletion(Prompt("rated.jsonl/3", "2+2="), "5", is_desirable=False)``
    """

    prompt: Prompt
    completion: str
    is_desirable: bool


@dataclass(frozen=True, slots=True)
class TrainingRows(Generic[T]):
    """The rows of a file that can be learned from, and how many were left out for which reason."""

    rows: Sequence[T]
    left_out: Mapping[str, int] = field(default_factory=dict)


def read_training_rows(path: str, key: str, read: Callable[[Row, str, str], T | str]) -> TrainingRows[T]:
    """Reads every row by ``read``, which takes (row, file and line, id) and returns a training row, or why there is none."""
    rows: list[T] = []
    left_out: Counter[str] = Counter()
    for line, row in read_rows(Path(path), key):
        result = read(row, f"{path}:{line}", f"{Path(path).name}/{line}")
        if isinstance(result, str):
            left_out[result] += 1
        else:
            rows.append(result)
    if not rows:
        because = f"{left_out_text(left_out)} left out" if left_out else "the file has no rows"
        raise DataError(path, "nothing to learn from", because=because, fix="give rows whose completions differ")
    return TrainingRows(rows, dict(left_out))


def left_out_text(left_out: Mapping[str, int]) -> str:
    """For people: `1 row of equal texts, 3 rows with an empty answer`."""
    return ", ".join(f"{count} {'row' if count == 1 else 'rows'} {reason}" for reason, count in left_out.items())


def read_preferences(stage: Dpo) -> TrainingRows[Pair | LabelledCompletion]:
    """The pairs of the stage's file; with a label column, its single completions."""
    reader, label = RowReader(prompt=stage.prompt, chat=stage.chat), stage.label_column

    def read(row: Row, where: str, id: str) -> Pair | LabelledCompletion | str:
        if label is None:
            return read_pair(reader, row, stage.chosen, stage.rejected, where, id)
        return read_labelled(reader, row, stage.completion, label, where, id)

    return read_training_rows(stage.pairs, f"{stage.label}.pairs", read)


def read_labelled(reader: RowReader, row: Row, completion: str, label: str, where: str, id: str) -> LabelledCompletion | str:
    """The completion of a row by the names of its columns, or the reason why it is left out."""
    value, is_desirable = column(row, completion, where), column(row, label, where)
    if is_desirable not in (True, False):
        because = f"it is {is_desirable!r}, and must be true (desirable) or false"
        raise DataError(
            where, f"column '{label}' holds no label", because=because, fix="correct the row, or name another column"
        )
    if reader.prompt in row:
        prompt, text = reader.read(row, where, id), completion_text(value, completion, where)
    else:
        dialogue = _dialogue(value, completion, where)
        prompt, text = Prompt(id=id, messages=tuple(dialogue[:-1])), dialogue[-1]["content"]
    return LabelledCompletion(prompt, text, bool(is_desirable)) if text.strip() else "with an empty answer"


def read_pair(reader: RowReader, row: Row, chosen: str, rejected: str, where: str, id: str) -> Pair | str:
    """The pair of a row by the names of its columns, or the reason why it is left out."""
    better, worse = column(row, chosen, where), column(row, rejected, where)
    if reader.prompt in row:
        pair = Pair(
            reader.read(row, where, id), completion_text(better, chosen, where), completion_text(worse, rejected, where)
        )
    else:
        better_dialogue, worse_dialogue = _dialogue(better, chosen, where), _dialogue(worse, rejected, where)
        context = better_dialogue[:-1]
        if context != worse_dialogue[:-1]:
            return "of dialogues that differ before the last answer"
        prompt = Prompt(id=id, messages=tuple(context))
        pair = Pair(prompt, better_dialogue[-1]["content"], worse_dialogue[-1]["content"])
    if not pair.chosen.strip() or not pair.rejected.strip():
        return "with an empty answer"
    return "of equal texts" if pair.chosen.strip() == pair.rejected.strip() else pair


def column(row: Row, name: str, where: str) -> Any:
    """A column that a row must have."""
    if row.get(name) is None:
        because = f"the columns found there are: {', '.join(map(str, row)) or 'none'}"
        raise DataError(where, f"no column '{name}'", because=because, fix="name the right column in the stage, or fix the row")
    return row[name]


def completion_text(value: Any, name: str, where: str) -> str:
    """The text of a completion: a text, or a list with one assistant message."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content")
    if not isinstance(value, str):
        raise DataError(where, f"column '{name}' holds no text", because="a completion is a text", fix="correct the row")
    return value


def _dialogue(value: Any, name: str, where: str) -> list[dict[str, str]]:
    """A complete dialogue that ends with an answer: messages, or a text with `Human:` and `Assistant:`."""
    messages: list[dict[str, str]] = []
    if isinstance(value, str):
        messages = dialogue_messages(value)
    elif isinstance(value, list | tuple) and all(is_message(message) for message in value):
        messages = [dict(message) for message in value]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DataError(
            where,
            f"column '{name}' holds no dialogue that ends with an answer",
            because="without a prompt column, each side must be a complete dialogue",
            fix="name the prompt column, or write dialogues as messages or as 'Human: …', 'Assistant: …'",
        )
    return messages


def dialogue_messages(text: str) -> list[dict[str, str]]:
    """The messages of a text with `Human: …` and `Assistant: …`, each after an empty line."""
    parts = _TURN.split(text)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": _ROLES[speaker], "content": content.strip()} for speaker, content in pairs]
