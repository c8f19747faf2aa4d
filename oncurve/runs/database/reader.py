"""Queries on a run's database. ``RunWriter`` adds recording; the studio, the terminal and the API only read.

Numpy and the recipe schema are imported by the queries that need them, so that a list of runs is fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from oncurve.errors import RunError, did_you_mean
from oncurve.records import EvalReport, GradedGroup, Ints, ScoredGroup, StepReport, TokenStats
from oncurve.runs.database.connection import DATABASE, database_errors, open_database
from oncurve.runs.metrics import is_repeatable

SECONDS = "seconds/"
"""Prefix of the metrics that hold a step's time by phase."""
STARTED = "running"
"""Message of the event of kind `run` that is recorded each time a run starts or resumes."""

T = TypeVar("T")
Kind = Literal["train", "eval"]
ScoredRows = tuple[ScoredGroup, list[sqlite3.Row]]


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage that has begun: ``steps`` planned, ``done`` the last one recorded, ``finished`` None until the stage ends."""

    name: str
    type: str
    position: int
    steps: int
    done: int
    started: float
    finished: float | None


@dataclass(frozen=True, slots=True)
class StepRow:
    """One recorded step: how long it took, and when it was recorded."""

    stage: str
    step: int
    seconds: float
    created: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in a list, without its texts. ``has_signal`` is None for a group of an evaluation."""

    id: int
    position: int
    prompt_id: str
    has_signal: bool | None
    completions: int
    failures: int
    mean_total: float | None


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A training group, with the learner's statistics of each completion (None: the learner did not forward it)."""

    graded: GradedGroup
    stats: tuple[TokenStats | None, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the run: a stage began, a checkpoint was written, a damaged one was skipped."""

    time: float
    kind: str
    message: str
    stage: str | None
    step: int | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """A run at a glance. ``groups`` and ``completions`` include those of evaluations; ``evals`` come without their groups."""

    format: int
    oncurve: str
    created: float
    stages: tuple[StageRow, ...]
    groups: int
    completions: int
    failures: int
    last_metrics: Mapping[str, float]
    evals: tuple[EvalReport, ...]


CONTENT = (
    "SELECT name, type, position, steps FROM stages ORDER BY position",
    "SELECT stage, step FROM steps ORDER BY stage, step",
    "SELECT stage, step, accuracy, asked, by_difficulty FROM evals ORDER BY stage, step",
    "SELECT * FROM groups ORDER BY id",
    "SELECT * FROM completions ORDER BY id",
    "SELECT * FROM aspects ORDER BY completion_id, position",
    "SELECT * FROM tokens ORDER BY completion_id",
)
"""Queries whose rows two identical runs share. Metrics are compared one by one: some measure the machine."""


class RunReader:
    """Reads a run's database, even while another process writes to it.

    Example:
        with RunReader.open(Path("runs/arithmetic-1")) as store:
            store.metric("reward", "grpo")
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens the database of the run in ``folder``. The connection is read-only."""
        path = folder / DATABASE
        return cls(path, open_database(path, read_only=True))

    def close(self) -> None:
        with database_errors(self.path):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _query(self, query: str, *values: Any, **named: Any) -> list[sqlite3.Row]:
        """The rows of a query with placeholders `?` for ``values``, or `:name` for ``named`` ones."""
        try:
            with database_errors(self.path):
                return self._connection.execute(query, named or values).fetchall()
        except OverflowError as error:
            raise RunError(
                str(self.path),
                "no such row",
                because="its number is larger than any integer that SQLite can store",
                fix="use a smaller step or position",
            ) from error

    def _number(self, query: str, *values: Any) -> int:
        with self._damage():
            return int(self._query(query, *values)[0][0])

    def _decoded(self, rows: Sequence[sqlite3.Row], decode: Callable[[sqlite3.Row], T]) -> list[T]:
        with self._damage():
            return [decode(row) for row in rows]

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Reports errors in decoding rows as damage of the database, since SQLite stores any value in any column."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RunError(
                str(self.path),
                "unreadable",
                because=f"it has a value that Oncurve did not write ({type(error).__name__}: {error})"[:300],
                fix="restore it from a copy; the run's checkpoints do not depend on it",
            ) from error

    def stages(self) -> list[StageRow]:
        done = "coalesce((SELECT max(step) FROM steps WHERE steps.stage = stages.name), 0)"
        query = f"SELECT name, type, position, steps, {done}, started, finished FROM stages ORDER BY position"
        return self._decoded(self._query(query), lambda row: _record(StageRow, row))

    def stage_of_step(self, step: int, stage: str | None = None) -> str:
        """The stage to look up a step in: ``stage`` if given. Otherwise, of the stages that have reached the step, the last one
        that samples, or the last one if none samples."""
        stages = {row.name: row for row in self.stages()}
        if stage is not None and stage not in stages:
            raise RunError(
                self.path.parent.name,
                f"no stage '{stage}'{did_you_mean(stage, stages)}",
                because=f"its stages are: {', '.join(stages) or 'none yet'}",
                fix="name one of them",
            )
        if stage is not None:
            return stage
        reached = [row for row in stages.values() if row.done >= step] or list(stages.values())
        if not reached:
            raise RunError(
                self.path.parent.name, f"no step {step}", because="no step is recorded yet", fix="wait for the first step"
            )
        from oncurve.recipe.schema.stages import SAMPLED_TYPES

        return next((row.name for row in reversed(reached) if row.type in SAMPLED_TYPES), reached[-1].name)

    def steps(self, stage: str | None = None) -> list[StepRow]:
        """The recorded steps in order, of one stage or of all."""
        query = """SELECT stage, step, seconds, created FROM steps JOIN stages ON stages.name = steps.stage
                   WHERE :stage IS NULL OR stage = :stage ORDER BY position, step"""
        return self._decoded(self._query(query, stage=stage), lambda row: _record(StepRow, row))

    def metric(self, name: str, stage: str) -> list[tuple[int, float]]:
        """One metric's curve as (step, value). NULL is read as NaN."""
        rows = self._query("SELECT step, value FROM metrics WHERE stage = ? AND name = ? ORDER BY step", stage, name)
        return self._decoded(rows, lambda row: (int(row["step"]), _number_or_nan(row["value"])))

    def metric_names(self, stage: str) -> list[str]:
        """The names of all metrics that a stage has logged. Each name is one search in the primary key, which begins with
        stage and name, so the time does not depend on the number of steps."""
        rows = self._query(
            """WITH RECURSIVE names(name) AS (
                   SELECT min(name) FROM metrics WHERE stage = :stage UNION ALL
                   SELECT (SELECT min(name) FROM metrics WHERE stage = :stage AND name > names.name) FROM names
                   WHERE name IS NOT NULL)
               SELECT name FROM names WHERE name IS NOT NULL""",
            stage=stage,
        )
        return [row["name"] for row in rows]

    def metrics_of(self, stage: str, step: int) -> dict[str, float]:
        """Every metric of a step by name, its time by phase included as ``seconds/<phase>``."""
        rows = self._query("SELECT name, value FROM metrics WHERE stage = ? AND step = ? ORDER BY name", stage, step)
        return dict(self._decoded(rows, lambda row: (str(row["name"]), _number_or_nan(row["value"]))))

    def groups(self, stage: str, step: int) -> list[GroupRow]:
        """The groups of a training step."""
        query = """SELECT groups.id, groups.position, prompt_id, has_signal,
                   count(completions.id), count(failure), avg(total)
                   FROM groups LEFT JOIN completions ON group_id = groups.id
                   WHERE stage = ? AND step = ? AND kind = 'train' GROUP BY groups.id ORDER BY groups.position"""
        return self._decoded(self._query(query, stage, step), _group_row)

    def group(self, stage: str, step: int, position: int) -> RecordedGroup:
        """One training group as recorded. A column with a value that JSON lacks (a tuple, a date) comes back as JSON has it."""
        recorded = self._recorded(stage, step, position)
        if not recorded:
            count = self._number("SELECT count(*) FROM groups WHERE stage = ? AND step = ? AND kind = 'train'", stage, step)
            raise RunError(
                str(self.path),
                f"no group {position} at step {step} of stage '{stage}'",
                because=f"{count} groups were recorded there, counted from 0",
                fix=f"use 0 to {count - 1}" if count > 1 else "use 0" if count else self._recorded_steps(),
            )
        return recorded[0]

    def scored_group(self, stage: str, step: int, kind: Kind, position: int) -> ScoredRows | None:
        """One group of a training step or an evaluation, with its completions' rows; None if there is no such group."""
        rows = self._scored(stage, step, kind, position)
        return rows[0] if rows else None

    def step(self, stage: str, step: int) -> StepReport:
        """A complete step as it was reported."""
        if not self._query("SELECT 1 FROM steps WHERE stage = ? AND step = ?", stage, step):
            raise RunError(
                str(self.path), f"no step {step} of stage '{stage}'", because="it was not recorded", fix=self._recorded_steps()
            )
        numbers = self.metrics_of(stage, step)
        seconds = {name.removeprefix(SECONDS): value for name, value in numbers.items() if name.startswith(SECONDS)}
        metrics = {name: value for name, value in numbers.items() if not name.startswith(SECONDS)}
        groups = self._recorded(stage, step)
        return StepReport(stage, step, metrics, seconds, tuple(g.graded for g in groups), tuple(g.stats for g in groups))

    def evals(self, stage: str | None = None) -> list[EvalReport]:
        """The evaluations in order, without their groups (``eval_groups`` reads those)."""
        query = """SELECT evals.* FROM evals JOIN stages ON stages.name = evals.stage
                   WHERE :stage IS NULL OR stage = :stage ORDER BY position, step"""
        return self._decoded(self._query(query, stage=stage), _eval_report)

    def eval_groups(self, stage: str, step: int) -> tuple[ScoredGroup, ...]:
        """The groups that an evaluation sampled."""
        return tuple(scored for scored, _ in self._scored(stage, step, "eval"))

    def events(self, kind: str | None = None) -> list[Event]:
        query = "SELECT time, kind, message, stage, step, data FROM events WHERE :kind IS NULL OR kind = :kind ORDER BY id"
        return self._decoded(self._query(query, kind=kind), lambda row: _record(Event, (*row[:5], json.loads(row["data"]))))

    def count_failures(self, stage: str) -> tuple[int, int]:
        """(completions that could not be rewarded, all completions) of a stage's training steps."""
        query = """SELECT count(failure), count(*) FROM groups JOIN completions ON group_id = groups.id
                   WHERE stage = ? AND kind = 'train'"""
        return next(iter(self._decoded(self._query(query, stage), lambda row: (int(row[0]), int(row[1])))))

    def last_failure(self) -> str | None:
        """The message of the error that ended the run; None if it was not recorded. Errors from before the run's last start
        don't count: they are of an earlier attempt, or of the run that was forked."""
        rows = self._query(
            """SELECT message FROM events WHERE kind = 'failed' AND id >
               (SELECT coalesce(max(id), 0) FROM events WHERE kind = 'run' AND message = ?) ORDER BY id DESC LIMIT 1""",
            STARTED,
        )
        return next(iter(self._decoded(rows, lambda row: str(row["message"]))), None)

    def replies(self, stage: str, step: int, kind: Kind = "train") -> dict[str, str]:
        """Recorded results of non-deterministic rewards for a step or an evaluation, by the key of the reply cache."""
        if not self._query("SELECT 1 FROM sqlite_master WHERE name = 'replies'"):
            return {}  # the run is older than the table, and a reader can't add it
        query = "SELECT key, reply FROM replies WHERE stage = ? AND step = ? AND kind = ?"
        return dict(self._decoded(self._query(query, stage, step, kind), lambda row: (str(row["key"]), str(row["reply"]))))

    def last_answers(self, most: int, max_tokens: int, stage: str, step: int) -> dict[str, tuple[Ints, ...]]:
        """The last answers to each prompt up to a step: at most ``most`` completions of its last group. Prompts are in the
        order of recording. If all answers together have more than ``max_tokens`` tokens, the prompts recorded first are left
        out."""
        from oncurve.runs.database import row_codec

        last = """SELECT max(groups.id) AS last FROM groups
            JOIN stages ON stages.name = groups.stage JOIN stages AS until ON until.name = ?
            WHERE stages.position < until.position OR (stages.name = until.name AND groups.step <= ?) GROUP BY prompt_id"""
        lengths = self._query(
            f"""SELECT last, total(length) FROM ({last}) JOIN completions ON group_id = last AND position < ?
                GROUP BY last ORDER BY last DESC""",
            stage,
            step,
            most,
        )
        totals = zip(lengths, accumulate(row[1] for row in lengths), strict=True)
        before = next((row["last"] for row, tokens in totals if tokens > max_tokens), 0)
        rows = self._query(
            f"""SELECT prompt_id, token_ids FROM ({last}) JOIN groups ON groups.id = last
                JOIN completions ON group_id = last JOIN tokens ON completion_id = completions.id
                WHERE last > ? AND completions.position < ? ORDER BY last, completions.position""",
            stage,
            step,
            before,
            most,
        )
        answers: dict[str, tuple[Ints, ...]] = {}
        for prompt, ids in self._decoded(rows, lambda row: (row_codec.text_of(row["prompt_id"]) or "", row_codec.ints(row[1]))):
            answers[prompt] = (*answers.get(prompt, ()), ids)
        return answers

    def versions(self, stage: str, step: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """By (group, completion): which weights sampled it, as (first token, number of updates). Only with asynchronous
        sampling or `carry_over`."""
        if not self._query("SELECT 1 FROM sqlite_master WHERE name = 'versions'"):
            return {}
        query = """SELECT groups.position, completions.position, versions FROM groups
                   JOIN completions ON group_id = groups.id JOIN versions ON completion_id = completions.id
                   WHERE stage = ? AND step = ? AND kind = 'train'"""
        rows = self._query(query, stage, step)
        return dict(self._decoded(rows, lambda row: ((row[0], row[1]), [(int(at), int(v)) for at, v in json.loads(row[2])])))

    def summary(self) -> Summary:
        stages, meta = tuple(self.stages()), self._query("SELECT format, oncurve, created FROM meta")[0]
        begun = [stage for stage in stages if stage.done]
        return Summary(
            format=meta["format"],
            oncurve=meta["oncurve"],
            created=meta["created"],
            stages=stages,
            groups=self._last_id("groups"),
            completions=self._last_id("completions"),
            failures=self._number("SELECT count(*) FROM completions WHERE failure IS NOT NULL"),
            last_metrics=self.metrics_of(begun[-1].name, begun[-1].done) if begun else {},
            evals=tuple(self.evals()),
        )

    def fingerprint(self) -> str:
        """SHA-256 of everything except times, events and metrics that measure the machine: equal for two identical runs."""
        digest = hashlib.sha256()
        for query in CONTENT:
            for row in self._query(query):
                digest.update(repr(tuple(row)).encode())
        for table in ("contexts", "episodes", "routing", "prompt_routing"):
            known = self._query("SELECT 1 FROM sqlite_master WHERE name = ?", table)
            for row in self._query(f"SELECT * FROM {table} ORDER BY 1, 2") if known else ():
                content = (row["completion_id"], _without_times(row["episode"])) if table == "episodes" else tuple(row)
                digest.update(repr(content).encode())
        for row in self._query("SELECT stage, step, name, value FROM metrics ORDER BY stage, name, step"):
            if is_repeatable(row["name"]):
                digest.update(repr(tuple(row)).encode())
        for report in self.evals():
            digest.update(repr(sorted((n, v) for n, v in report.metrics.items() if is_repeatable(n))).encode())
        return digest.hexdigest()

    def _recorded(self, stage: str, step: int, position: int | None = None) -> list[RecordedGroup]:
        groups = self._scored(stage, step, "train", position)
        with self._damage():
            return [_recorded_group(scored, rows) for scored, rows in groups]

    def _scored(self, stage: str, step: int, kind: Kind, position: int | None = None) -> list[ScoredRows]:
        """The groups of a step, each with its completions' rows: one query per table, however many groups there are."""
        from oncurve.runs.database import row_codec

        where = "stage = ? AND step = ? AND kind = ? AND groups.position BETWEEN ? AND ?"
        low, high = (0, 2**62) if position is None else (position, position)
        values = (stage, step, kind, low, high)
        groups = self._query(f"SELECT * FROM groups WHERE {where} ORDER BY position", *values)
        of_groups = (
            f"FROM groups JOIN completions ON group_id = groups.id JOIN {{}} ON completion_id = completions.id WHERE {where}"
        )
        completions = self._query(
            f"SELECT completions.*, tokens.* {of_groups.format('tokens')} ORDER BY completions.id", *values
        )
        aspect_rows = self._query(
            f"SELECT aspects.* {of_groups.format('aspects')} ORDER BY completion_id, aspects.position", *values
        )
        context_rows = self._added_rows("contexts", of_groups, values)
        episode_rows = self._added_rows("episodes", of_groups, values)
        routing_rows = self._added_rows("routing", of_groups, values)
        of_prompts = f"FROM groups JOIN {{}} ON group_id = groups.id WHERE {where}"
        prompt_routing_rows = self._added_rows("prompt_routing", of_prompts, values)
        others = row_codec.CompletionRows()
        by_group: dict[int, list[sqlite3.Row]] = {group["id"]: [] for group in groups}
        with self._damage():
            for row in aspect_rows:
                others.aspects.setdefault(row["completion_id"], []).append(row_codec.aspect_of(row))
            for row in context_rows:
                context = (int(row["first"]), row_codec.ints(row["token_ids"]))
                others.contexts.setdefault(row["completion_id"], []).append(context)
            for row in episode_rows:
                others.episodes[row["completion_id"]] = row_codec.episode_of(row["episode"])
            others.routing |= {row["completion_id"]: row["routing"] for row in routing_rows}
            others.prompt_routing |= {row["group_id"]: row["routing"] for row in prompt_routing_rows}
            for row in completions:
                by_group[row["group_id"]].append(row)
            return [
                (row_codec.scored_group_of(group, by_group[group["id"]], others), by_group[group["id"]]) for group in groups
            ]

    def _added_rows(self, table: str, of_groups: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        """The rows of a newer table for some groups; none if the run is older than the table."""
        if not self._query("SELECT 1 FROM sqlite_master WHERE name = ?", table):
            return []
        return self._query(f"SELECT {table}.* {of_groups.format(table)} ORDER BY 1, 2", *values)

    def _last_id(self, table: Literal["groups", "completions", "events"]) -> int:
        return self._number(f"SELECT coalesce(max(id), 0) FROM {table}")

    def _recorded_steps(self) -> str:
        known = ", ".join(f"{stage.name} 1 to {stage.done}" for stage in self.stages() if stage.done)
        return f"recorded steps: {known}" if known else "no step is recorded yet"


def _without_times(episode: str) -> str:
    """An episode's cell without how long its tool calls took."""
    data = json.loads(episode)
    for _, _, observation in data["turns"]:
        observation["calls"] = [call[:4] for call in observation.get("calls", ())]
    return json.dumps(data)


def _record(kind: Callable[..., T], values: Sequence[Any]) -> T:
    """Builds a record from a row's values. Raises TypeError if one does not have its field's type."""
    for (name, types), value in zip(_field_types(kind), values, strict=True):
        if not isinstance(value, types):
            raise TypeError(f"{name} is {value!r:.40}")
    return kind(*values)


@lru_cache(maxsize=16)
def _field_types(kind: Callable[..., Any]) -> tuple[tuple[str, tuple[type, ...]], ...]:
    def types_of(hint: Any) -> tuple[type, ...]:
        parts = [get_origin(part) or part for part in (get_args(hint) if type(None) in get_args(hint) else (hint,))]
        return (*parts, int) if float in parts else tuple(parts)

    return tuple((name, types_of(hint)) for name, hint in get_type_hints(kind).items())


def _number_or_nan(value: float | None) -> float:
    """SQLite stores NaN as NULL."""
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"a metric is {value!r:.40}")
    return math.nan if value is None else value


def _group_row(row: sqlite3.Row) -> GroupRow:
    from oncurve.runs.database import row_codec

    signal = None if row["has_signal"] is None else bool(row["has_signal"])
    return _record(GroupRow, (row["id"], row["position"], row_codec.text_of(row["prompt_id"]) or "", signal, *row[4:]))


def _recorded_group(scored: ScoredGroup, rows: Sequence[sqlite3.Row]) -> RecordedGroup:
    from oncurve.runs.database import row_codec

    advantages = tuple(row_codec.advantages_of(row) for row in rows)
    graded = GradedGroup(scored, advantages, tuple(bool(row["graded"]) for row in rows))
    return RecordedGroup(graded, tuple(row_codec.stats_of(row) for row in rows))


def _eval_report(row: sqlite3.Row) -> EvalReport:
    by_difficulty = {level: (int(solved), int(asked)) for level, (solved, asked) in json.loads(row["by_difficulty"]).items()}
    metrics = {name: _number_or_nan(value) for name, value in json.loads(row["metrics"]).items()}
    accuracy = None if row["accuracy"] is None else _number_or_nan(row["accuracy"])
    return EvalReport(str(row["stage"]), int(row["step"]), accuracy, int(row["asked"]), by_difficulty, metrics)
