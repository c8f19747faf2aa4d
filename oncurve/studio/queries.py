"""Queries that only the studio needs: pages of completions by condition, one prompt through training.

A page must load quickly whatever the size of the run. A search scans completions from the newest on, a range of ids at a time,
and stops when the page is full or the time is up; the result says where to continue.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oncurve.runs.database.reader import Kind, RunReader, StageRow

PAGE = 50
RANGE = 10_000
"""Completions scanned between two checks of the time limit."""
BUDGET_S = 0.12
"""Time limit of one search: the 200 ms budget of a page, less the network and rendering."""

ANY_FAILURE = "any"
CALLS = """(SELECT completion_id, CASE WHEN json_valid(episode) THEN episode ELSE '{}' END AS read FROM episodes) AS stored,
           json_each(stored.read, '$.turns') AS turn, json_each(turn.value, '$[2].calls') AS call"""
"""Every tool call of the episodes."""

Comparison = Literal["lt", "ge"]
SIGNS: dict[Comparison, str] = {"lt": "<", "ge": ">="}
LISTED = """completions.id, groups.id AS group_id, stage, step, kind, groups.position AS "group", completions.position AS place,
            prompt_id, prompt, messages, text, total, advantage, length, stop, failure, has_signal"""


@dataclass(frozen=True, slots=True)
class CompletionFilter:
    """Conditions on completions, all of which must hold. ``aspects`` compare an aspect's value: ("format", "lt", 1.0).
    ``tool`` and ``tool_failure`` are those of one of its tool calls; the failure `any` is any failure."""

    text: str = ""
    stage: str | None = None
    step: int | None = None
    kind: Kind | None = None
    aspects: Sequence[tuple[str, Comparison, float]] = ()
    failed: bool = False
    cut: bool = False
    no_signal: bool = False
    tool: str | None = None
    tool_failure: str | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """The condition as SQL, with its values in order."""
        parts: list[tuple[str, list[Any]]] = []
        if self.text:
            pattern = "%" + self.text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
            parts.append(("(text LIKE ? ESCAPE '\\' OR prompt LIKE ? ESCAPE '\\')", [pattern, pattern]))
        for column, equal in (("stage", self.stage), ("step", self.step), ("kind", self.kind)):
            if equal is not None:
                parts.append((f"{column} = ?", [equal]))
        for name, comparison, value in self.aspects:
            its_value = "SELECT value FROM aspects WHERE completion_id = completions.id AND name = ?"
            parts.append((f"({its_value}) {SIGNS[comparison]} ?", [name, value]))
        if self.failed:
            parts.append(("failure IS NOT NULL", []))
        if self.cut:
            parts.append(("stop = 'length'", []))
        if self.no_signal:
            # Whether a group has signal is the same for all its completions: list the first one only.
            parts.append(("has_signal = 0 AND completions.position = 0", []))
        if self.asks_for_calls:
            parts.append(self._call_condition())
        return " AND ".join(part for part, _ in parts) or "1", [value for _, values in parts for value in values]

    @property
    def asks_for_calls(self) -> bool:
        return self.tool is not None or self.tool_failure is not None

    def _call_condition(self) -> tuple[str, list[Any]]:
        """A call is stored as [name, arguments, result, failure, …]."""
        matches: list[tuple[str, list[Any]]] = []
        if self.tool is not None:
            matches.append(("json_extract(call.value, '$[0]') = ?", [self.tool]))
        if self.tool_failure == ANY_FAILURE:
            matches.append(("json_extract(call.value, '$[3]') IS NOT NULL", []))
        elif self.tool_failure is not None:
            matches.append(("json_extract(call.value, '$[3]') = ?", [self.tool_failure]))
        condition = " AND ".join(match for match, _ in matches)
        rows = f"SELECT 1 FROM {CALLS} WHERE completion_id = completions.id AND {condition}"
        return f"EXISTS ({rows})", [value for _, values in matches for value in values]


@dataclass(frozen=True, slots=True)
class CompletionPage:
    """A page of completions. ``before`` is where to continue (None: the search is complete); ``searched`` were scanned."""

    rows: list[sqlite3.Row] = field(default_factory=list)
    before: int | None = None
    searched: int = 0


class StudioQueries(RunReader):
    """A run's database with the studio's queries."""

    def find(
        self, conditions: CompletionFilter, before: int | None = None, limit: int = PAGE, budget_s: float = BUDGET_S
    ) -> CompletionPage:
        """Completions that match, newest first, with ids below ``before``."""
        if conditions.asks_for_calls and not self.has_episodes():
            return CompletionPage(searched=self.last_completion())
        condition, values = conditions.condition()
        top = self._last_id("completions") + 1 if before is None else before
        low_end, high = self._ids_of_step(conditions, top)
        rows: list[sqlite3.Row] = []
        start, deadline = high, time.monotonic() + budget_s
        while high > low_end and len(rows) <= limit and (high == start or time.monotonic() < deadline):
            low = max(low_end, high - RANGE)
            rows += self._query(
                f"""SELECT {LISTED} FROM completions JOIN groups ON groups.id = group_id
                    WHERE completions.id >= ? AND completions.id < ? AND {condition}
                    ORDER BY completions.id DESC LIMIT ?""",
                low, high, *values, limit + 1 - len(rows),
            )  # fmt: skip
            high = low
        full = len(rows) > limit
        reached = rows[limit - 1]["id"] if full else high
        return CompletionPage(rows[:limit], reached if full or high > low_end else None, start - reached)

    def has_episodes(self) -> bool:
        """False for a run that is older than the table."""
        return bool(self._query("SELECT 1 FROM sqlite_master WHERE name = 'episodes'"))

    def calls(self, since: int) -> tuple[list[str], list[str]]:
        """(the tools that were called, how calls failed) in completions from id ``since`` on."""
        if not self.has_episodes():
            return [], []
        kinds = "SELECT DISTINCT json_extract(call.value, '$[{}]') AS kind FROM {} WHERE completion_id >= ? ORDER BY kind"
        tools, failures = ([row["kind"] for row in self._query(kinds.format(at, CALLS), since)] for at in (0, 3))
        return [tool for tool in tools if tool is not None], [failure for failure in failures if failure is not None]

    def _ids_of_step(self, conditions: CompletionFilter, top: int) -> tuple[int, int]:
        """The range of ids to scan. A step's completions have consecutive ids, so a search within one step scans only those."""
        if conditions.stage is None or conditions.step is None:
            return 1, top
        groups = "SELECT min(id), max(id) FROM groups WHERE stage = ? AND step = ?"
        first, last = self._query(groups, conditions.stage, conditions.step)[0]
        if first is None:
            return 1, 1
        ids = "SELECT min(id), max(id) FROM completions WHERE group_id IN (?, ?)"
        lowest, highest = self._query(ids, first, last)[0]
        return (lowest, min(top, highest + 1)) if lowest is not None else (1, 1)

    def groups_of_prompt(self, prompt_id: str, accuracy: Sequence[str] = ()) -> list[sqlite3.Row]:
        """Every group of one prompt, in the order of sampling. ``solved`` counts completions for which one of the ``accuracy``
        aspects is 1 or more; NULL if no completion has such an aspect."""
        marks = ", ".join("?" * len(accuracy))
        return self._query(
            f"""SELECT stage, step, kind, groups.position AS "group", has_signal, count(completions.id) AS completions,
                avg(total) AS mean, min(total) AS lowest, max(total) AS highest, avg(length) AS length,
                sum((SELECT max(value >= 1) FROM aspects WHERE completion_id = completions.id AND name IN ({marks}))) AS solved
                FROM groups LEFT JOIN completions ON group_id = groups.id WHERE prompt_id = ?
                GROUP BY groups.id ORDER BY groups.id""",
            *accuracy, prompt_id,
        )  # fmt: skip

    def totals(self, stage: str, step: int, kind: Kind) -> list[list[float | None]]:
        """The total rewards of each group of a step, from which a batch's std is computed."""
        rows = self._query(
            """SELECT group_id, total FROM groups JOIN completions ON group_id = groups.id
               WHERE stage = ? AND step = ? AND kind = ? ORDER BY completions.id""",
            stage, step, kind,
        )  # fmt: skip
        by_group: dict[int, list[float | None]] = {}
        for row in rows:
            by_group.setdefault(row["group_id"], []).append(row["total"])
        return list(by_group.values())

    def group_heads(self, stage: str, step: int, kind: Kind) -> list[sqlite3.Row]:
        """A step's groups with their prompts and the range of their rewards."""
        return self._query(
            """SELECT groups.position, prompt_id, prompt, messages, has_signal, count(completions.id) AS completions,
               count(failure) AS failures, avg(total) AS mean, min(total) AS lowest, max(total) AS highest
               FROM groups LEFT JOIN completions ON group_id = groups.id
               WHERE stage = ? AND step = ? AND kind = ? GROUP BY groups.id ORDER BY groups.position""",
            stage, step, kind,
        )  # fmt: skip

    def steps_by_metric(self, name: str, count: int, stage: str | None = None) -> list[tuple[str, int]]:
        """The steps, of one stage or of all, at which a metric was highest."""
        rows = self._query(
            """SELECT stage, step FROM metrics WHERE name = :name AND (:stage IS NULL OR stage = :stage)
               ORDER BY value DESC LIMIT :count""",
            name=name, stage=stage, count=count,
        )  # fmt: skip
        return [(row["stage"], row["step"]) for row in rows]

    def token_kl(self, stage: str, step: int, conditions: CompletionFilter | None = None) -> list[sqlite3.Row]:
        """The completions of a step that have per-token KL, with that KL; ``matches`` says whether the conditions hold."""
        condition, values = (conditions or CompletionFilter()).condition()
        return self._query(
            f"""SELECT {LISTED}, kl, loss_mask, ({condition}) AS matches FROM groups JOIN completions ON group_id = groups.id
                JOIN tokens ON completion_id = completions.id
                WHERE stage = ? AND step = ? AND kind = 'train' AND kl IS NOT NULL""",
            *values, stage, step,
        )  # fmt: skip

    def last_sampled(self) -> StageRow | None:
        """The last stage with sampled groups."""
        return next((s for s in reversed(self.stages()) if s.done and self.groups(s.name, s.done)), None)

    def recent_seconds(self, stage: str, count: int = 20) -> list[float]:
        rows = self._query("SELECT seconds FROM steps WHERE stage = ? ORDER BY step DESC LIMIT ?", stage, count)
        return [row["seconds"] for row in rows]

    def total_seconds(self) -> float:
        """The time of all recorded steps."""
        return float(self._query("SELECT total(seconds) AS seconds FROM steps")[0]["seconds"])

    def progress(self, stage: str, after: int = 0) -> list[sqlite3.Row]:
        """(step, seconds, tokens, samples) of each step after step ``after``.

        A step's completions have consecutive ids, so they are counted without reading them.
        """
        return self._query(
            """SELECT steps.step, seconds, value AS tokens, (SELECT max(id) FROM completions WHERE group_id = last)
               - (SELECT min(id) FROM completions WHERE group_id = first) + 1 AS samples
               FROM steps LEFT JOIN metrics ON metrics.stage = steps.stage AND metrics.step = steps.step AND name = 'tokens'
               LEFT JOIN (SELECT step, min(id) AS first, max(id) AS last FROM groups WHERE stage = :stage AND step > :after
               AND kind = 'train' GROUP BY step) AS sampled ON sampled.step = steps.step
               WHERE steps.stage = :stage AND steps.step > :after ORDER BY steps.step""",
            stage=stage, after=after,
        )  # fmt: skip

    def aspect_statistics(self, since: int) -> list[sqlite3.Row]:
        """Statistics of each aspect over completions from id ``since`` on: count, mean, range, failures."""
        return self._query(
            """SELECT name, weight, count(*) AS asked, avg(value) AS mean, min(value) AS lowest, max(value) AS highest,
               count(failure) AS failures FROM aspects WHERE completion_id >= ? GROUP BY name, weight ORDER BY min(position)""",
            since,
        )

    def reasons(self, since: int, name: str, weight: float, limit: int = 2000) -> list[sqlite3.Row]:
        """An aspect's failures, then its other reasons, from id ``since`` on: most frequent first, each with its mean value and
        one example."""
        return self._query(
            """SELECT coalesce(failure, reason) AS said, failure IS NOT NULL AS failed, count(*) AS times, avg(value) AS value,
               max(completion_id) AS example FROM aspects WHERE completion_id >= ? AND name = ? AND weight = ?
               AND said IS NOT NULL GROUP BY said, failed ORDER BY failed DESC, times DESC LIMIT ?""",
            since, name, weight, limit,
        )  # fmt: skip

    def histogram(self, since: int, name: str, weight: float, lowest: float, highest: float, count: int) -> list[int]:
        """How many of an aspect's values, from id ``since`` on, lie in each of ``count`` equal parts of lowest … highest."""
        rows = self._query(
            """SELECT min(:count - 1, CAST(:count * (value - :lowest) / (:highest - :lowest) AS INTEGER)) AS bin,
               count(*) AS times FROM aspects
               WHERE completion_id >= :since AND name = :name AND weight = :weight AND value IS NOT NULL GROUP BY bin""",
            count=count, lowest=lowest, highest=highest, since=since, name=name, weight=weight,
        )  # fmt: skip
        found = {row["bin"]: row["times"] for row in rows}
        return [found.get(index, 0) for index in range(count)]

    def completion(self, completion_id: int) -> sqlite3.Row | None:
        """One completion as lists show it, with its stage, step and group."""
        rows = self._query(
            f"SELECT {LISTED} FROM completions JOIN groups ON groups.id = group_id WHERE completions.id = ?", completion_id
        )
        return rows[0] if rows else None

    def longest_prompt(self) -> int | None:
        """Tokens of the longest of the last 5,000 prompts. A token id takes 4 bytes."""
        longest = self._query(
            "SELECT max(length(prompt_ids)) AS bytes FROM groups WHERE id > ? - 5000", self._last_id("groups")
        )[0]["bytes"]
        return None if longest is None else max(1, longest // 4)

    def recent_prompts(self, count: int) -> list[sqlite3.Row]:
        """The last prompts of a run, each once. Held-out prompts come first: the run never trained on them."""
        prompts: dict[str, sqlite3.Row] = {}
        for kind in ("eval", "train"):
            newest = self._query(
                """SELECT prompt_id, prompt, messages, columns FROM groups WHERE kind = ? AND id > ? - 5000
                   ORDER BY id DESC LIMIT ?""",
                kind, self._last_id("groups"), 4 * count,
            )  # fmt: skip
            for row in newest:
                prompts.setdefault(row["prompt_id"], row)
        return list(prompts.values())[:count]

    def last_completion(self) -> int:
        return self._last_id("completions")
