"""An agent in the form of TRL's example `grpo_agent.py`, with the changes that docs/agents.md lists: a tool that queries a
database within a time limit of its own (`signal.alarm`) and returns rows, and three rewards that read the conversation.
"""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

import oncurve
from tests.agent_programs.taught import teach

LIMIT_S = 5
ROWS = [("JUN", "FOS"), ("JUN", "ATF2"), ("MYC", "MAX")]


class QueryTimeoutError(Exception):
    """A query has taken too long."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Python allows signal handlers in the main thread only."""

    def stop(number: int, frame: Any) -> None:
        raise QueryTimeoutError(f"Stopped after {seconds} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def query_genes(sql_command: str) -> list[tuple]:  # type: ignore[type-arg]
    """
    Query the database of genes.

    Args:
        sql_command: The SQL command.

    Returns:
        The rows that were found.
    """
    with time_limit(LIMIT_S):
        connection = sqlite3.connect("file:genes.db?mode=ro", uri=True)
        try:
            return connection.execute(sql_command).fetchall()
        finally:
            connection.close()


def correct(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """The last message has the answer between stars."""
    found = [re.search(r"\*(yes|no)\*", completion[-1]["content"]) for completion in completions]
    return [float(match is not None and match[1] == right) for match, right in zip(found, answer, strict=True)]


def structured(completions: list[Any], **kwargs: Any) -> list[float]:
    """A call, its result, and an answer."""
    kinds = [[(turn["role"], bool(turn.get("tool_calls"))) for turn in completion] for completion in completions]
    return [float(kind == [("assistant", True), ("tool", False), ("assistant", False)]) for kind in kinds]


def supported(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """The queries say where, and the number of rows that they found agrees with the answer."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        calls = [call["function"] for turn in completion for call in turn.get("tool_calls") or ()]
        results = [turn["content"] for turn in completion if turn["role"] == "tool"]
        rows = [row for result in results if isinstance(result, list) for row in result]
        has_where = all(" where " in call["arguments"].get("sql_command", "").lower() for call in calls)
        rewards.append(float(bool(results) and has_where and bool(rows) == (right == "yes")) - len(calls) / 10)
    return rewards


def chats() -> list[tuple[tuple[Any, ...], str, str]]:
    """(the chat, what the model says next, the question's answer)."""
    taught: list[tuple[tuple[Any, ...], str, str]] = []
    for gene, answer in (("JUN", "yes"), ("P53", "no")):
        asked = {"role": "user", "content": f"{gene}?"}
        function = {"name": "query_genes", "arguments": {"sql_command": f"SELECT b FROM pairs WHERE a = '{gene}'"}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        rows = [(b,) for a, b in ROWS if a == gene]
        result = {"role": "tool", "name": "query_genes", "content": str(rows)}
        taught += [
            ((asked,), f"<tool_call>{json.dumps(function)}</tool_call>", answer),
            ((asked, called, result), f"*{answer}*", answer),
        ]
    return taught


@pytest.mark.slow
def test_its_tool_and_its_rewards_run_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("genes.db") as database:
        database.execute("CREATE TABLE pairs (a TEXT, b TEXT)")
        database.executemany("INSERT INTO pairs VALUES (?, ?)", ROWS)
    policy = teach([(chat, text) for chat, text, _ in chats()], get_json_schema(query_genes))
    dataset = [{"prompt": list(chat), "answer": answer} for chat, _, answer in chats() if len(chat) == 1]
    before = signal.getsignal(signal.SIGALRM)
    try:
        run = oncurve.train(
            model=(policy.model, policy.tokenizer),
            prompts=dataset,
            tools=[query_genes],
            rewards=[correct, structured, supported],
            steps=1,
            prompts_per_step=2,
            group_size=4,
            sampling={"max_new_tokens": 200},
            threads=1,
            quiet=True,
        )
    finally:
        signal.signal(signal.SIGALRM, before)
    seen: dict[Any, dict[str, float | None]] = {}
    for group in run.groups(step=1):
        for scored in group.scored.scored:
            assert scored.failure is None
            episode = scored.completion.episode
            assert episode is not None
            contents = tuple(str(message["content"]) for message in episode.messages)
            seen[group.group.prompt.shown, contents] = {aspect.name: aspect.value for aspect in scored.aspects}
    best = {"correct": 1.0, "structured": 1.0, "supported": 0.9}
    assert seen["user: JUN?", ("", "[['FOS'], ['ATF2']]", "*yes*")] == best, "rows are lists, as JSON stores them"
    assert seen["user: P53?", ("", "[]", "*no*")] == best
