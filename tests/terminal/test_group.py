from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from oncurve.records import Completion, EpisodeRecord, Outcome
from oncurve.terminal.group import GroupTable, render_group, turns_text
from tests.terminal.builders import graded_group

GROUP = graded_group(
    ["wrong", "right " + "and long " * 30, "broken", "cut short"],
    [0.0, 1.0, None, 0.5],
    [-0.5, 1.25, 0.0, 0.0],
    ["end", "end", "end", "length"],
)


def render(what: object, width: int) -> list[str]:
    console = Console(width=width, record=True, force_terminal=True, color_system=None, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text().splitlines()


def test_best_first_and_what_takes_no_part_last() -> None:
    assert GROUP.best_first == [1, 3, 0, 2]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_has_one_line_per_completion_at_any_width(width: int) -> None:
    lines = render(GroupTable(GROUP), width)
    assert len(lines) == 2 + 4
    assert all(len(line.rstrip()) <= width for line in lines)
    assert lines[2].split()[:4] == ["+1.25", "1.00", "1.00", "3"]
    assert lines[3].rstrip().endswith("cut short ⋯ truncated")
    assert "! answer: ValueError: odd" in lines[5]
    assert lines[5].split()[:4] == ["–", "–", "failed", "3"]


def test_a_completion_without_text_is_shown_as_empty() -> None:
    group = graded_group(["", "7"], [1.0, 0.0], [1.0, -1.0])
    assert render(GroupTable(group), 80)[2].rstrip().endswith("3  (empty)")
    assert [line.strip() for line in render(render_group(group), 80)].count("(empty)") == 1


def test_in_full_no_text_is_shortened() -> None:
    text = " ".join(" ".join(render(render_group(GROUP), 100)).split())
    assert text.count("and long") == 30
    assert "answer failed: ValueError: odd" in text
    assert "not graded" in text
    assert "12+34=" in text


def test_in_full_the_second_line_of_a_headline_is_indented() -> None:
    lines = [line.rstrip() for line in render(render_group(GROUP), 40)]
    head = next(number for number, line in enumerate(lines) if line.startswith("1. advantage +1.25"))
    assert lines[head + 1].startswith("   ")


def test_in_full_an_episode_that_failed_says_why() -> None:
    scored = GROUP.scored.scored[0]
    episode = EpisodeRecord((), Outcome(failure="search took more than 10 s"))
    failed = replace(scored, completion=replace(scored.completion, episode=episode))
    group = replace(GROUP, scored=replace(GROUP.scored, scored=(failed, *GROUP.scored.scored[1:])))
    lines = [line.strip() for line in render(render_group(group), 100)]
    assert lines.count("search took more than 10 s") == 1


def spelled(text: str, policy: str) -> Completion:
    """A completion of one token per letter; ``policy`` has a 1 below each letter that the policy sampled."""
    logps = np.zeros(len(text), np.float32)
    mask = np.array([mark == "1" for mark in policy])
    return Completion(np.array([ord(c) for c in text]), text, "end", logps, logps, logps, mask)


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_what_the_environment_replied_is_told_apart() -> None:
    turns = spelled("[1+2]3]so 3", "11111001111")
    assert turns_text(turns, letters).plain == "[1+2]\n  environment: 3]\nso 3"
    assert turns_text(turns, None).plain == turns.text
    assert turns_text(spelled("so 3", "1111"), letters).plain == "so 3"
    assert turns_text(turns, lambda ids: "?").plain == turns.text, "never a text that was not sampled"
