"""Human feedback: rankings and disputed rewards, in ``feedback.jsonl`` in the run's folder.

Labels are appended, never changed; the last label about a subject holds. The run's database is only read. The same rules turn
labels into preferences everywhere: where the studio shows how often the reward agrees with people, in `oncurve pairs --people`,
and in `grpo.iterate`.

- A ranking prefers every completion of a better tier to every one of a worse tier.
- A dispute gives the total reward that a completion should have had. The completion is preferred to those of its group with a
  lower total reward than that, and those with a higher one are preferred to it.
- Texts that are blank, or equal up to surrounding whitespace, make no pair.
- A line that is not a valid label, or names a completion that the run does not have, is skipped; unreadable lines are noted in
  the run's log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from oncurve.errors import RunError
from oncurve.runs.atomic_files import disk_errors
from oncurve.runs.database.reader import Kind, RunReader
from oncurve.runs.preference_pairs import is_comparable
from oncurve.runs.step_notes import note

FILE = "feedback.jsonl"
Index = Annotated[int, Field(ge=0)]


class GroupLabel(BaseModel):
    """What every label has: the group that it is about, and who gave it. People who give no name count as one person."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    stage: str
    step: Index
    kind: Kind = "train"
    group: Index
    rater: Annotated[str, Field(max_length=40)] = ""

    @property
    def subject(self) -> tuple[Any, ...]:
        """What the label is about: a later label of the same subject by the same person replaces it."""
        return (type(self).__name__, self.stage, self.step, self.kind, self.group, self.rater)


class Ranking(GroupLabel):
    """A group's completions in tiers, best first; completions of one tier are equally good. No tiers: withdrawn."""

    type: Literal["ranking"] = "ranking"
    tiers: list[list[Index]]

    @model_validator(mode="after")
    def _each_once(self) -> Ranking:
        if len(set(self.completions)) != len(self.completions):
            raise ValueError("a completion is in two tiers")
        return self

    @property
    def completions(self) -> list[int]:
        return [index for tier in self.tiers for index in tier]

    @property
    def is_withdrawn(self) -> bool:
        return not self.tiers


class Dispute(GroupLabel):
    """A completion whose reward a person disagrees with, and the total reward it should have had. None: withdrawn."""

    type: Literal["dispute"] = "dispute"
    completion: Index
    reward: float | None
    note: Annotated[str, Field(max_length=2000)] = ""

    @property
    def subject(self) -> tuple[Any, ...]:
        return (*super().subject, self.completion)

    @property
    def completions(self) -> list[int]:
        return [self.completion]

    @property
    def is_withdrawn(self) -> bool:
        return self.reward is None


Label = Ranking | Dispute
AnyLabel = Annotated[Label, Field(discriminator="type")]
LABEL: TypeAdapter[Label] = TypeAdapter(AnyLabel)


@dataclass(frozen=True, slots=True)
class Preference:
    """One completion preferred to another by a person, with the rewards that the run gave them.

    ``prompt`` is a text or a list of messages, as data files hold it.
    """

    prompt: str | list[dict[str, str]]
    chosen: str
    rejected: str
    chosen_reward: float | None
    rejected_reward: float | None

    @property
    def agrees(self) -> bool | None:
        """Whether the reward prefers the same completion; None if a reward is missing or both are equal."""
        if self.chosen_reward is None or self.rejected_reward is None or self.chosen_reward == self.rejected_reward:
            return None
        return self.chosen_reward > self.rejected_reward

    @property
    def row(self) -> dict[str, Any]:
        """The columns that preference trainers read."""
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


def add_label(run: Path, store: RunReader, label: Label) -> None:
    """Appends a label. Refuses one about a group or completion that the run does not have."""
    group = store.scored_group(label.stage, label.step, label.kind, label.group)
    size = len(group[0].scored) if group else 0
    if group is None or any(index >= size for index in label.completions):
        raise RunError(
            run.name,
            f"no such completion in group {label.group} of {label.stage} {label.step}",
            because=f"{size} completions were recorded there, counted from 0",
            fix="reload the page",
        )
    line = json.dumps({"time": time.time(), **label.model_dump()}, ensure_ascii=True) + "\n"
    path = run / FILE
    with disk_errors(path), path.open("ab") as file:
        file.write(line.encode())


def read_labels(run: Path) -> list[Label]:
    """The valid labels: the last one for each subject, unless it was withdrawn."""
    last: dict[tuple[Any, ...], Label] = {}
    for label in _lines(run / FILE):
        last.pop(label.subject, None)
        last[label.subject] = label
    return [label for label in last.values() if not label.is_withdrawn]


def _lines(path: Path) -> Iterator[Label]:
    if not path.is_file():
        return
    with disk_errors(path), path.open("rb") as file:
        for line in file:
            try:
                fields = json.loads(line)
                fields.pop("time", None)
                yield LABEL.validate_python(fields)
            except (ValueError, TypeError, AttributeError, RecursionError, ValidationError):
                # A line that another process is writing right now is read the next time.
                note("people", f"skipped a line of {path.name} that can't be read: {line[:60].decode('utf-8', 'replace')}")


def read_preferences(run: Path, store: RunReader, labels: Iterable[Label] | None = None) -> list[Preference]:
    """The preferences of these labels; unset: of all labels that hold."""
    chosen = read_labels(run) if labels is None else labels
    return [preference for label in chosen for preference in _preferences_of(store, label)]


def training_preferences(run: Path, store: RunReader, stage: str, until: int) -> list[Preference]:
    """The preferences about one stage's training groups up to a step. Held-out groups never train anything."""
    labels = [b for b in read_labels(run) if b.stage == stage and b.kind == "train" and b.step <= until]
    return read_preferences(run, store, labels)


def _preferences_of(store: RunReader, label: Label) -> Iterator[Preference]:
    group = store.scored_group(label.stage, label.step, label.kind, label.group)
    if group is None:
        return
    scored = group[0].scored
    if any(index >= len(scored) for index in label.completions):
        return
    for better, worse in _decided(label, group[0].totals):
        chosen, rejected = scored[better], scored[worse]
        if is_comparable(chosen.completion.text, rejected.completion.text):
            yield Preference(
                group[0].group.prompt.written, chosen.completion.text, rejected.completion.text, chosen.total, rejected.total
            )


def _decided(label: Label, totals: Sequence[float | None]) -> Iterator[tuple[int, int]]:
    """(better, worse) completions by index."""
    if isinstance(label, Ranking):
        for upper, lower in combinations(label.tiers, 2):
            yield from ((better, worse) for better in upper for worse in lower)
        return
    assert label.reward is not None, "a withdrawn label decides nothing"
    for index, total in enumerate(totals):
        if index == label.completion or total is None or total == label.reward:
            continue
        yield (label.completion, index) if label.reward > total else (index, label.completion)


@dataclass(frozen=True, slots=True)
class RaterAgreement:
    """How far people agree about pairs of completions. A pair counts once for every two people who both ranked it.

    ``kappa`` corrects the agreement for chance: (share agreed − chance) / (1 − chance), where chance is the sum of the squared
    shares of the three verdicts (better, equal, worse), pooled over people and both orders of a pair (Scott's π). None if
    there are no pairs, or if every verdict is ``equal`` (chance is 1).
    """

    raters: int
    pairs: int
    agreed: int
    kappa: float | None


def rater_agreement(labels: Iterable[Label]) -> RaterAgreement:
    by_group: dict[tuple[Any, ...], list[Ranking]] = {}
    for label in labels:
        if isinstance(label, Ranking):
            by_group.setdefault((label.stage, label.step, label.kind, label.group), []).append(label)
    verdicts: list[tuple[int, int]] = []
    for rankings in by_group.values():
        for one, other in combinations(rankings, 2):
            ranks = [{index: tier for tier, indices in enumerate(r.tiers) for index in indices} for r in (one, other)]
            shared = sorted(ranks[0].keys() & ranks[1].keys())
            verdicts += [(_sign(ranks[0], a, b), _sign(ranks[1], a, b)) for a, b in combinations(shared, 2)]
    agreed = sum(one == other for one, other in verdicts)
    raters = len({r.rater for rankings in by_group.values() for r in rankings})
    if not verdicts:
        return RaterAgreement(raters, 0, 0, None)
    ties = sum((one == 0) + (other == 0) for one, other in verdicts) / (2 * len(verdicts))
    chance = ties**2 + 2 * ((1 - ties) / 2) ** 2  # in both orders of a pair, better and worse are equally frequent
    kappa = None if chance == 1 else (agreed / len(verdicts) - chance) / (1 - chance)
    return RaterAgreement(raters, len(verdicts), agreed, kappa)


def _sign(ranks: Mapping[int, int], a: int, b: int) -> int:
    """-1 if completion a is in a better tier than b, 1 if in a worse one, 0 if in the same."""
    return (ranks[a] > ranks[b]) - (ranks[a] < ranks[b])


def preference_lines(preferences: Iterable[Preference]) -> str:
    """Preferences as JSON lines with prompt, chosen and rejected."""
    return "".join(json.dumps(preference.row, ensure_ascii=True) + "\n" for preference in preferences)
