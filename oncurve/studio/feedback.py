"""What people say of completions: rankings and disputed rewards, in ``feedback.jsonl`` beside the run.

The run's database is only read. A line is added and never changed; the last one about a thing is what holds. Rankings become
preference pairs, the food of a reward model or of DPO, and are held against the reward: how often does it agree with people?
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from oncurve.errors import RunError
from oncurve.runs.atomic_files import disk_errors
from oncurve.runs.database.reader import Kind
from oncurve.runs.folder import RunFolder
from oncurve.studio.open_run import open_reader
from oncurve.studio.queries import StudioQueries

FILE = "feedback.jsonl"
Count = Annotated[int, Field(ge=0)]


class Label(BaseModel):
    """What every label has: which group it is about."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    stage: str
    step: Count
    kind: Kind = "train"
    group: Count

    @property
    def subject(self) -> tuple[Any, ...]:
        """What the label is about: a later label of the same subject takes its place."""
        return (type(self).__name__, self.stage, self.step, self.kind, self.group)


class Ranking(Label):
    """A group's completions in tiers, the best first; those in one tier are as good as each other. Empty: taken back."""

    type: Literal["ranking"] = "ranking"
    tiers: list[list[Count]]

    @model_validator(mode="after")
    def _each_once(self) -> Ranking:
        places = [place for tier in self.tiers for place in tier]
        if len(set(places)) != len(places):
            raise ValueError("a completion stands in two tiers")
        return self


class Dispute(Label):
    """A completion whose reward a person disagrees with, and the reward it should have had. None: taken back."""

    type: Literal["dispute"] = "dispute"
    completion: Count
    reward: float | None
    note: Annotated[str, Field(max_length=2000)] = ""

    @property
    def subject(self) -> tuple[Any, ...]:
        return (*super().subject, self.completion)


AnyLabel = Annotated[Ranking | Dispute, Field(discriminator="type")]
LABEL: TypeAdapter[Ranking | Dispute] = TypeAdapter(AnyLabel)


@dataclass(frozen=True, slots=True)
class Pair:
    """One completion preferred to another, with the rewards that the run gave them."""

    prompt: str
    chosen: str
    rejected: str
    chosen_reward: float | None
    rejected_reward: float | None

    @property
    def agrees(self) -> bool | None:
        """Whether the reward prefers the same one; None where it gave none, or no difference."""
        if self.chosen_reward is None or self.rejected_reward is None or self.chosen_reward == self.rejected_reward:
            return None
        return self.chosen_reward > self.rejected_reward


def add_label(run: RunFolder, label: Ranking | Dispute) -> None:
    """Adds one line. The group and its completions must be there."""
    with open_reader(run) as store:
        found = store.scored_group(label.stage, label.step, label.kind, label.group)
        size = len(found[0].scored) if found else 0
    named = [place for tier in label.tiers for place in tier] if isinstance(label, Ranking) else [label.completion]
    if found is None or any(place >= size for place in named):
        raise RunError(
            run.name,
            f"no such completion in group {label.group} of {label.stage} {label.step}",
            because=f"{size} completions were recorded there, counted from 0",
            fix="reload the page",
        )
    line = json.dumps({"time": time.time(), **label.model_dump()}, ensure_ascii=True) + "\n"
    path = run.path / FILE
    with disk_errors(path), path.open("ab") as file:
        file.write(line.encode())


def labels(run: RunFolder) -> list[Ranking | Dispute]:
    """The labels that hold: the last of each subject, those taken back left out. Lines of other hands are passed over."""
    last: dict[tuple[Any, ...], Ranking | Dispute] = {}
    for label in _lines(run.path / FILE):
        last.pop(label.subject, None)
        last[label.subject] = label
    return [label for label in last.values() if not _taken_back(label)]


def _taken_back(label: Ranking | Dispute) -> bool:
    return not label.tiers if isinstance(label, Ranking) else label.reward is None


def _lines(path: Path) -> Iterator[Ranking | Dispute]:
    if not path.is_file():
        return
    with disk_errors(path), path.open("rb") as file:
        for line in file:
            try:
                told = json.loads(line)
                told.pop("time", None)
                yield LABEL.validate_python(told)
            except (ValueError, TypeError, AttributeError, ValidationError):
                continue


def pairs(run: RunFolder) -> list[Pair]:
    """Every pair that people's labels decide: better tier over worse, and disputed rewards over the others of their group."""
    found: list[Pair] = []
    with open_reader(run) as store:
        for label in labels(run):
            found += _pairs_of(store, label)
    return found


def _pairs_of(store: StudioQueries, label: Ranking | Dispute) -> Iterator[Pair]:
    kept = store.scored_group(label.stage, label.step, label.kind, label.group)
    if kept is None:
        return
    scored = kept[0]
    for better, worse in _decided(label, scored.totals):
        if max(better, worse) >= len(scored.scored):
            continue
        one, other = scored.scored[better], scored.scored[worse]
        if one.completion.text != other.completion.text:
            yield Pair(scored.group.prompt.shown, one.completion.text, other.completion.text, one.total, other.total)


def _decided(label: Ranking | Dispute, totals: Sequence[float | None]) -> Iterator[tuple[int, int]]:
    if isinstance(label, Ranking):
        for upper, lower in combinations(label.tiers, 2):
            yield from ((better, worse) for better in upper for worse in lower)
        return
    assert label.reward is not None, "a label taken back decides nothing"
    for place, total in enumerate(totals):
        if place == label.completion or total is None or total == label.reward:
            continue
        yield (label.completion, place) if label.reward > total else (place, label.completion)


def feedback_data(run: RunFolder) -> dict[str, Any]:
    """The labels, and how often the reward agrees with people."""
    decided = pairs(run)
    verdicts = [pair.agrees for pair in decided]
    return {
        "labels": [label.model_dump() for label in labels(run)],
        "pairs": len(decided),
        "agree": verdicts.count(True),
        "disagree": verdicts.count(False),
        "undecided": verdicts.count(None),
    }


def pairs_lines(run: RunFolder) -> str:
    """The pairs as JSON lines with prompt, chosen and rejected: what preference trainers read."""
    keep = ({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs(run))
    return "".join(json.dumps(one, ensure_ascii=True) + "\n" for one in keep)
