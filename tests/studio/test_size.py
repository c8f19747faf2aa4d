"""A run four times as long: no request scans all of it. How fast requests are is measured by bench/studio.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from oncurve.runs.database import connection, reader
from oncurve.studio import queries
from tests.studio.samples import LARGE_GROUP, LARGE_PROMPTS, make_large_run
from tests.studio.serving import Served, served

LONG, SHORT = 201, 51
ADDED = (LONG - SHORT) * LARGE_PROMPTS * LARGE_GROUP
OPENED = range(40, 41)
"""The steps whose groups have tokens."""
COUNTED = 100
"""Instructions of SQLite's machine between two counts."""


@dataclass
class Counted:
    studio: Served
    instructions: int = 0

    def ask(self, path: str) -> int:
        """The instructions that SQLite needs for a request."""
        self.studio.ask(path)  # what it keeps from request to request is there
        before = self.instructions
        answer = self.studio.ask(path)
        assert answer.status == 200, answer.body
        return self.instructions - before


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    folder = tmp_path_factory.mktemp("large")
    make_large_run(folder, "long", LONG, OPENED)
    make_large_run(folder, "short", SHORT, OPENED)
    with pytest.MonkeyPatch.context() as patched, served(folder) as studio:
        counter = Counted(studio)

        def count() -> None:
            counter.instructions += COUNTED

        def opened(path: Path, read_only: bool) -> object:
            database = connection.open_database(path, read_only)
            database.set_progress_handler(count, COUNTED)
            return database

        patched.setattr(reader, "open_database", opened)
        # A clock that always says that the time is up: a search ends after its first range.
        patched.setattr(queries, "time", SimpleNamespace(monotonic=itertools.count().__next__))
        yield counter


@pytest.mark.parametrize(
    "path",
    [
        "step?stage=grpo&step=40",
        "group?stage=grpo&step=40&position=3",
        "search",
        "search?before=15000",
        "search?failed=true",
        "search?no_signal=true",
        "search?aspect=answer:ge:1&aspect=format:lt:1",
        "search?text=thought+12345",
        "search?text=nowhere+to+be+found",
        "search?stage=grpo&step=40",
        "prompt?id=sums/77",
        "rewards",
    ],
)
def test_no_view_scans_a_longer_run(counted: Counted, path: str) -> None:
    """A scan would take several instructions for each completion that the longer run has more."""
    short, long = (counted.ask(f"/api/runs/{name}/{path}") for name in ("short", "long"))
    assert 0 < long < short + ADDED / 2


def test_the_group_of_a_large_run_has_tokens(counted: Counted) -> None:
    group = counted.studio.ask("/api/runs/long/group?stage=grpo&step=40&position=3").json
    assert len(group["completions"]) == LARGE_GROUP
    assert {"".join(one["tokens"]["pieces"]) == one["text"] for one in group["completions"]} == {True}


def test_a_search_can_be_continued_to_the_end(counted: Counted) -> None:
    """One that exceeds its time limit is continued by the next request, until everything is scanned."""
    pages, before, ids = 0, None, []
    while True:
        page = counted.studio.ask("/api/runs/long/search?failed=true" + (f"&before={before}" if before else "")).json
        ids += [completion["id"] for completion in page["completions"]]
        pages, before = pages + 1, page["before"]
        if before is None:
            break
    completions = (LONG - 1) * LARGE_PROMPTS * LARGE_GROUP
    assert ids[:-1] == [1007 + 50_000 * i for i in reversed(range(-(-completions // 50_000)))]  # the last is of make_run
    assert pages == -(-(999 + completions) // queries.RANGE)
