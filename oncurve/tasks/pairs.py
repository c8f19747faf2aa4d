"""Preference pairs from a file: a prompt, the better completion, the worse one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oncurve.errors import DataError
from oncurve.recipe.dpo import Dpo
from oncurve.records import Prompt
from oncurve.tasks.files import read_rows
from oncurve.tasks.rows import RowReader


@dataclass(frozen=True, slots=True)
class Pair:
    """Which of two completions of a prompt is the better."""

    prompt: Prompt
    chosen: str
    rejected: str


def read_pairs(stage: Dpo) -> list[Pair]:
    """Every pair of the stage's file. A row that lacks a column, or prefers a text to itself, is a mistake in the data."""
    file = Path(stage.pairs)
    better = RowReader(prompt=stage.prompt, completion=stage.chosen, chat=stage.chat)
    worse = RowReader(prompt=stage.prompt, completion=stage.rejected, chat=stage.chat)
    pairs = []
    for line, row in read_rows(file, f"{stage.label}.pairs"):
        where = f"{stage.pairs}:{line}"
        prompt = better.read(row, where, f"{file.name}/{line}")
        chosen, rejected = better.example(row, prompt, where), worse.example(row, prompt, where)
        if chosen is None or rejected is None:
            missing = stage.chosen if chosen is None else stage.rejected
            because = f"the columns found there are: {', '.join(map(str, row)) or 'none'}"
            fix = f"name the right columns in {stage.label}.chosen and {stage.label}.rejected, or mend the data"
            raise DataError(where, f"no column '{missing}'", because=because, fix=fix)
        if chosen.completion == rejected.completion:
            because = "nothing can be learned from preferring a text to itself"
            raise DataError(where, "chosen and rejected are the same text", because=because, fix="drop the row")
        pairs.append(Pair(prompt, chosen.completion, rejected.completion))
    if not pairs:
        raise DataError(stage.pairs, "no rows", because="the file is empty", fix="give a file with one pair per row")
    return pairs
