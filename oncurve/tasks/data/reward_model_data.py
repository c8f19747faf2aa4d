"""What reward models learn from: comparisons, ratings and judged steps, read from a file, and kept apart by prompt.

Rows that can teach nothing are left out and counted, as everywhere (tasks/data/preference_pairs.py).
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
from oncurve.tasks.data.preference_pairs import Row, answer, column, read_pair, read_training_rows
from oncurve.tasks.data.row_reader import RowReader


@dataclass(frozen=True, slots=True)
class RewardModelExample:
    """One thing to learn from: a prompt, one or two completions, and what is said of them.

    ``values`` has an entry per head: for pairs 1, −1 or 0 (who is better in it), for ratings the number, or None where
    nothing is said. For steps, ``texts`` are the steps of one completion and ``values`` 1 or 0 for each.
    """

    prompt: Prompt
    texts: tuple[str, ...]
    values: tuple[float | None, ...]
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class RewardModelData:
    """What a file holds, and what was left out of it and why."""

    train: Sequence[RewardModelExample]
    heldout: Sequence[RewardModelExample]
    left_out: Mapping[str, int] = field(default_factory=dict)


def read_reward_model_data(stage: RewardModel) -> RewardModelData:
    """The rows of the stage's file; `heldout_share` of the prompts are kept aside with all their rows."""
    read = {"pairs": _pair, "ratings": _rating, "steps": _steps}[stage.kind]
    reader = RowReader(prompt=stage.prompt, completion=stage.completion, chat=stage.chat)
    found = read_training_rows(stage.data, f"{stage.label}.data", partial(read, stage, reader))
    train, heldout = split_by_prompt(found.rows, stage.heldout_share)
    if not train:
        raise DataError(
            f"{stage.label}.heldout_share",
            stage.heldout_share,
            because=f"all {len(heldout)} rows of {stage.data} would be kept aside: whole prompts are",
            fix="keep fewer aside, or give rows of more prompts",
        )
    return RewardModelData(train, heldout, found.left_out)


def split_by_prompt(
    found: Sequence[RewardModelExample], share: float
) -> tuple[list[RewardModelExample], list[RewardModelExample]]:
    """(train, held out): by what is asked, so that no prompt is on both sides; drawn by the prompts alone."""
    prompts = sorted({judged.prompt.shown for judged in found})
    order = philox_generator(0, "reward_model/heldout").permutation(len(prompts))[: round(share * len(prompts))]
    aside = {prompts[int(i)] for i in order}
    return [j for j in found if j.prompt.shown not in aside], [j for j in found if j.prompt.shown in aside]


def _pair(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> RewardModelExample | str:
    pair = read_pair(reader, row, stage.chosen, stage.rejected, where, id)
    if isinstance(pair, str):
        return pair
    values = tuple(_sign(row.get(aspect), aspect, where) for aspect in stage.aspects) or (1.0,)
    if not any(values):
        return f"without a word on {', '.join(stage.aspects)}"
    margin = 0.0 if stage.margin is None else _number(column(row, stage.margin, where), stage.margin, where)
    if margin < 0:
        raise DataError(where, f"a margin of {margin:g}", because="the chosen one is the better", fix="swap the two, or use 0")
    return RewardModelExample(pair.prompt, (pair.chosen, pair.rejected), values, margin)


def _rating(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> RewardModelExample | str:
    prompt = reader.read(row, where, id)
    text = answer(column(row, stage.completion, where), stage.completion, where)
    if not text.strip():
        return "with an empty answer"
    values = [row.get(aspect) for aspect in stage.heads]
    if all(value is None for value in values):
        raise DataError(
            where,
            f"no rating in {', '.join(stage.heads)}",
            because=f"the columns found there are: {', '.join(map(str, row))}",
            fix=f"name the columns of ratings in {stage.label}.aspects",
        )
    told = zip(stage.heads, values, strict=True)
    return RewardModelExample(
        prompt, (text,), tuple(None if value is None else _number(value, name, where) for name, value in told)
    )


def _steps(stage: RewardModel, reader: RowReader, row: Row, where: str, id: str) -> RewardModelExample | str:
    prompt = reader.read(row, where, id)
    steps, labels = column(row, stage.completions, where), column(row, stage.labels, where)
    good = isinstance(steps, list | tuple) and isinstance(labels, list | tuple) and len(steps) == len(labels) > 0
    if not good or not all(isinstance(s, str) and s for s in steps) or not all(label in (0, 1, -1) for label in labels):
        raise DataError(
            where,
            "steps and labels that do not belong together",
            because=f"'{stage.completions}' is a list of texts and '{stage.labels}' one of as many: true, false, 1, 0 or −1",
            fix="mend the row",
        )
    return RewardModelExample(prompt, tuple(steps), tuple(float(label > 0) for label in labels))


def _sign(value: Any, name: str, where: str) -> float:
    number = 0.0 if value is None else _number(value, name, where)
    return float((number > 0) - (number < 0))


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        raise DataError(
            where, f"column '{name}' holds {value!r}", because="a finite number is needed there", fix="mend the row"
        )
    return float(value)
