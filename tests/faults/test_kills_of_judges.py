"""SIGKILL over the stage training_free: resumed, its library, its database and all else are those of a run never killed.

The endpoint is a real HTTP server whose replies are a function of the request. What it teaches differs by lesson, and the
library has room for few: every step adds, changes or drops something.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.training.start import begin
from tests.faults.cases import recipe
from tests.faults.sameness import everything
from tests.faults.test_kills import killed
from tests.rewards.models.test_judge import Judge

QUICK = [("asking", 7), ("writing the library", 2), ("in a commit", 1)]
EVERY = [
    ("asking", 7), ("keeping a reply", 5), ("scoring", 2), ("writing the library", 2), ("putting the library in place", 2),
    ("before a commit", 2), ("in a commit", 2), ("after a commit", 2), ("amid a checkpoint's file", 1),
    ("between writing and renaming", 1), ("between renaming and pruning", 1),
]  # fmt: skip
RANDOM = 10
"""Kills at moments that the clock chooses."""


def reply(body: dict[str, Any]) -> str:
    """Right or wrong as the request decides; as the teacher, one of six pieces of advice, new or in place of an old one."""
    coin = int(hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest(), 16)
    if body["messages"][0]["role"] == "system":
        number, advice = coin % 4, f"Advice {coin // 4 % 6}."
        return json.dumps([{"do": "change", "number": number, "text": advice} if number else {"do": "add", "text": advice}])
    return f"<answer>{coin % 3}</answer>"


@pytest.fixture
def judged_recipe(tmp_path: Path) -> Iterator[Callable[[int], Recipe]]:
    """Builds a recipe with a given number of steps, for an endpoint that replies."""
    endpoint = Judge()
    endpoint.reply = reply
    rows = [{"prompt": f"{i}-{i}=", "answer": "0"} for i in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {
        "type": "training_free", "model": "any", "base_url": endpoint.url, "prompts_per_step": 2, "group_size": 3, "most": 3,
        "retries": 0, "save_every": 2, "eval_every": 5,
    }  # fmt: skip
    task = {"type": "file", "path": str(data), "heldout": 3, "heldout_share": 0.25}
    yield lambda steps: recipe({**stage, "steps": steps}, rewards=[{"type": "answer"}], task=task)
    endpoint.server.shutdown()
    endpoint.server.server_close()


def replies(run: RunFolder) -> list[Any]:
    """Requests and replies, as the run stores them."""
    with closing(sqlite3.connect(run.path / "experience" / "training_free.sqlite")) as kept:
        return kept.execute("SELECT request, reply FROM replies ORDER BY request").fetchall()


def same(run: RunFolder, whole: RunFolder) -> None:
    assert everything(run) == everything(whole)
    assert replies(run) == replies(whole), "nothing else was asked"


def test_three_kills_in_one_run_change_no_bit(judged_recipe: Callable[[int], Recipe], tmp_path: Path) -> None:
    run = killed(tmp_path / "killed", judged_recipe(10), QUICK)
    full = begin(judged_recipe(10), out=tmp_path / "whole")
    same(run, full)
    assert "Advice" in (full.path / "experience" / "training_free.md").read_text()


@pytest.mark.slow
def test_kills_at_every_moment_change_no_bit(judged_recipe: Callable[[int], Recipe], tmp_path: Path) -> None:
    run = killed(tmp_path / "killed", judged_recipe(24), EVERY)
    same(run, begin(judged_recipe(24), out=tmp_path / "whole"))


@pytest.mark.slow
def test_kills_at_random_moments_change_no_bit(judged_recipe: Callable[[int], Recipe], tmp_path: Path) -> None:
    run = killed(tmp_path / "killed", judged_recipe(200), [("at any moment", 1 + i % 3) for i in range(RANDOM)])
    same(run, begin(judged_recipe(200), out=tmp_path / "whole"))


def test_the_page_says_how_many() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"| training free | {len(EVERY)} and {RANDOM} |" in page
