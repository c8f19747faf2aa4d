"""Training data of reward models: comparisons, ratings and labelled steps from a file, split by prompt.

Rows that can't be learned from are left out and counted (`preference_pairs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from oncurve.errors import DataError
from oncurve.recipe.schema.stages import RewardModel
from oncurve.records import Prompt
from oncurve.rng import philox_generator
from oncurve.tasks.data.preference_pairs import Row, column, completion_text, read_pair, read_training_rows
from oncurve.tasks.data.row_reader import RowReader


@dataclass(frozen=True, slots=True)
class RewardModelExample:
    """A prompt, one or two completions, and their labels.

    ``values`` has one entry per head: for pairs 1, −1 or 0 (which one is better in this aspect), for ratings the number, or
    None if it is missing. For steps, ``texts`` are the steps of one completion and ``values`` has 1 or 0 for each.

    Example: a pair whose first completion is better, ``RewardModelExample(prompt, ("4", "5"), (1.0,))``
    """

    prompt: Prompt
    texts: tuple[str, ...]
    values: tuple[float | None, ...]
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class RewardModelData:
    """The training and held-out rows of a file, and how many were left out for which reason."""

    train: Sequence[RewardModelExample]
    heldout: Sequence[RewardModelExample]
    left_out: Mapping[str, int] = field(default_factory=dict)


def read_reward_model_data(stage: RewardModel) -> RewardModelData:
    """The rows of the stage's file. A fraction `heldout_share` of the prompts is held out with all of their rows."""
    read = {"pairs": _pair, "ratings": _rating, "steps": _steps}[stage.kind]
    reader = RowReader(prompt=stage.prompt, completion=stage.completion, chat=stage.chat)
    data = read_training_rows(stage.data, f"{stage.label}.data", partial(read, stage, reader))
    train, heldout = split_by_prompt(data.rows, stage.heldout_share)
    if not train:
        raise DataError(
            f"{stage.label}.heldout_share",
            stage.heldout_share,
            because=f"all {len(heldout)} rows of {stage.data} would be held out: a prompt is held out with all its rows",
            fix="hold out fewer, or give rows of more prompts",
        )
    return RewardModelData(train, heldout, data.left_out)


def split_by_prompt(
    examples: Sequence[RewardModelExample], share: float
) -> tuple[list[RewardModelExample], list[RewardModelExample]]:
    """(training, held-out) rows, split by the prompts' texts, so that no prompt is in both."""
    prompts = sorted({example.prompt.shown for example in examples})
    order = philox_generator(0, "reward_model/heldout").permutation(len(prompts))[: round(share * len(prompts))]
    heldout = {prompts[int(i)] for i in order}
    return [e for e in examples if e.prompt.shown not in heldout], [e for e in examples if e.prompt.shown in heldout]


def _pair(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> RewardModelExample | str:
    pair = read_pair(reader, row, stage.chosen, stage.rejected, where, id)
    if isinstance(pair, str):
        return pair
    values = tuple(_sign(row.get(aspect), aspect, where) for aspect in stage.aspects) or (1.0,)
    if not any(values):
        return f"without a label for {', '.join(stage.aspects)}"
    margin = 0.0 if stage.margin is None else _number(column(row, stage.margin, where), stage.margin, where)
    if margin < 0:
        raise DataError(where, f"a margin of {margin:g}", because="the chosen one is better", fix="swap the two, or use 0")
    return RewardModelExample(pair.prompt, (pair.chosen, pair.rejected), values, margin)


def _rating(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> RewardModelExample | str:
    prompt = reader.read(row, where, id)
    text = completion_text(column(row, stage.completion, where), stage.completion, where)
    if not text.strip():
        return "with an empty answer"
    values = [row.get(aspect) for aspect in stage.heads]
    if all(value is None for value in values):
        raise DataError(
            where,
            f"no rating in {', '.join(stage.heads)}",
            because=f"the columns found there are: {', '.join(map(str, row))}",
            fix=f"name the rating columns in {stage.label}.aspects",
        )
    heads = zip(stage.heads, values, strict=True)
    ratings = tuple(None if value is None else _number(value, name, where) for name, value in heads)
    return RewardModelExample(prompt, (text,), ratings)


def _steps(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> RewardModelExample | str:
    prompt = reader.read(row, where, id)
    steps, labels = column(row, stage.completions, where), column(row, stage.labels, where)
    match = isinstance(steps, list | tuple) and isinstance(labels, list | tuple) and len(steps) == len(labels) > 0
    if not match or not all(isinstance(s, str) and s for s in steps) or not all(label in (0, 1, -1) for label in labels):
        raise DataError(
            where,
            "steps and labels that do not match",
            because=f"'{stage.completions}' is a list of texts and '{stage.labels}' a list of as many true, false, 1, 0 or −1",
            fix="correct the row",
        )
    return RewardModelExample(prompt, tuple(steps), tuple(float(label > 0) for label in labels))


def _sign(value: Any, name: str, where: str) -> float:
    number = 0.0 if value is None else _number(value, name, where)
    return float((number > 0) - (number < 0))


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        raise DataError(where, f"column '{name}' holds {value!r}", because="it must be a finite number", fix="correct the row")
    return float(value)
