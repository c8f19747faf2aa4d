"""What reward models learn from: comparisons, ratings and judged steps, read from a file, and kept apart by prompt.

Rows that can teach nothing (equal texts, dialogues that part before the last answer) are left out and counted; a row that lacks
a column, or holds something else than it should, is a mistake in the data and is told with its line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncurve.errors import DataError
from oncurve.recipe.reward_model import RewardModel
from oncurve.records import Prompt
from oncurve.tasks.draws import generator
from oncurve.tasks.files import read_rows
from oncurve.tasks.rows import RowReader

Row = Mapping[str, Any]
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Judged:
    """One thing to learn from: a prompt, one or two completions, and what is said of them.

    ``values`` has an entry per head: for pairs 1, −1 or 0 (who is better in it), for ratings the number, or None where
    nothing is said. For steps, ``texts`` are the steps of one completion and ``values`` 1 or 0 for each.
    """

    prompt: Prompt
    texts: tuple[str, ...]
    values: tuple[float | None, ...]
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Judgements:
    """What a file holds, and what was left out of it and why."""

    train: Sequence[Judged]
    heldout: Sequence[Judged]
    left_out: Mapping[str, int] = field(default_factory=dict)


def read_judgements(stage: RewardModel) -> Judgements:
    """The rows of the stage's file; `heldout_share` of the prompts are kept aside with all their rows."""
    read = {"pairs": _pair, "ratings": _rating, "steps": _steps}[stage.kind]
    reader = RowReader(prompt=stage.prompt, completion=stage.completion, chat=stage.chat)
    found: list[Judged] = []
    left_out: Counter[str] = Counter()
    for line, row in read_rows(Path(stage.data), f"{stage.label}.data"):
        judged = read(stage, reader, row, f"{stage.data}:{line}", f"{Path(stage.data).name}/{line}")
        if isinstance(judged, str):
            left_out[judged] += 1
        else:
            found.append(judged)
    train, heldout = split_by_prompt(found, stage.heldout_share)
    if not train:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "it has no rows"
        raise DataError(stage.data, "nothing to learn from", because=why, fix="give rows whose completions differ")
    return Judgements(train, heldout, dict(left_out))


def split_by_prompt(found: Sequence[Judged], share: float) -> tuple[list[Judged], list[Judged]]:
    """(train, held out): by what is asked, so that no prompt is on both sides; drawn by the prompts alone."""
    prompts = sorted({judged.prompt.shown for judged in found})
    order = generator(0, "reward_model/heldout").permutation(len(prompts))[: round(share * len(prompts))]
    aside = {prompts[int(i)] for i in order}
    return [j for j in found if j.prompt.shown not in aside], [j for j in found if j.prompt.shown in aside]


def _pair(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> Judged | str:
    better, worse = _column(row, stage.chosen, where), _column(row, stage.rejected, where)
    if stage.prompt in row:
        prompt = reader.read(row, where, id)
        texts = (_answer(better, stage.chosen, where), _answer(worse, stage.rejected, where))
    else:
        one, other = _dialogue(better, stage.chosen, where), _dialogue(worse, stage.rejected, where)
        if one[:-1] != other[:-1]:
            return "dialogues that part before the last answer"
        prompt = Prompt(id=id, messages=tuple(one[:-1]))
        texts = (one[-1]["content"], other[-1]["content"])
    if not all(text.strip() for text in texts):
        return "pairs with an empty answer"
    if texts[0].strip() == texts[1].strip():
        return "pairs of equal texts"
    values = tuple(_sign(row.get(aspect), aspect, where) for aspect in stage.aspects) or (1.0,)
    margin = 0.0 if stage.margin is None else _number(_column(row, stage.margin, where), stage.margin, where)
    if margin < 0:
        raise DataError(where, f"a margin of {margin:g}", because="the chosen one is the better", fix="swap the two, or use 0")
    return Judged(prompt, texts, values, margin)


def _rating(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> Judged | str:
    prompt = reader.read(row, where, id)
    text = _answer(_column(row, stage.completion, where), stage.completion, where)
    values = [row.get(aspect) for aspect in stage.heads]
    if all(value is None for value in values):
        raise DataError(
            where,
            f"no rating in {', '.join(stage.heads)}",
            because=f"the columns found there are: {', '.join(map(str, row))}",
            fix=f"name the columns of ratings in {stage.label}.aspects",
        )
    told = zip(stage.heads, values, strict=True)
    return Judged(prompt, (text,), tuple(None if value is None else _number(value, name, where) for name, value in told))


def _steps(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> Judged | str:
    prompt = reader.read(row, where, id)
    steps, labels = _column(row, stage.completions, where), _column(row, stage.labels, where)
    good = isinstance(steps, list | tuple) and isinstance(labels, list | tuple) and len(steps) == len(labels) > 0
    if not good or not all(isinstance(s, str) and s for s in steps) or not all(label in (0, 1, -1) for label in labels):
        raise DataError(
            where,
            "steps and labels that do not belong together",
            because=f"'{stage.completions}' is a list of texts and '{stage.labels}' one of as many: true, false, 1, 0 or −1",
            fix="mend the row",
        )
    return Judged(prompt, tuple(steps), tuple(float(label > 0) for label in labels))


def _column(row: Row, name: str, where: str) -> Any:
    if row.get(name) is None:
        because = f"the columns found there are: {', '.join(map(str, row)) or 'none'}"
        raise DataError(
            where, f"no column '{name}'", because=because, fix="name the right column in the stage, or mend the row"
        )
    return row[name]


def _answer(value: Any, name: str, where: str) -> str:
    """A completion: a text, or the one message of an assistant."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content")
    if not isinstance(value, str) or not value:
        raise DataError(where, f"column '{name}' holds no text", because="a completion is a text", fix="mend the row")
    return value


def _dialogue(value: Any, name: str, where: str) -> list[dict[str, str]]:
    """A whole dialogue that ends with an answer: messages, or a text with `Human:` and `Assistant:`."""
    messages = dialogue_messages(value) if isinstance(value, str) else [dict(message) for message in value]
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


def _sign(value: Any, name: str, where: str) -> float:
    number = 0.0 if value is None else _number(value, name, where)
    return float((number > 0) - (number < 0))


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        raise DataError(
            where, f"column '{name}' holds {value!r}", because="a finite number is needed there", fix="mend the row"
        )
    return float(value)
