"""The rules of recipes/agent_wordle.py and recipes/agent_sort.py, against other ways to compute them."""

from __future__ import annotations

import bisect
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from oncurve.plugins import load_function
from oncurve.records import Prompt

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DICE = np.random.default_rng(0)


def module_of(file: str, name: str) -> ModuleType:
    return sys.modules[load_function(f"{RECIPES / file}:{name}", "test").__module__]


WORDLE, SORT = module_of("agent_wordle.py", "Wordle"), module_of("agent_sort.py", "Sort")


def prompt(**columns: Any) -> Prompt:
    return Prompt("game/1", "1:", None, columns)


def reference_marks(secret: str, guess: str) -> str:
    """By counting: a letter at another place gets a ? if the secret has more of it, apart from those at their place, than the
    guess has before it."""
    green = [a == b for a, b in zip(secret, guess, strict=True)]
    marks = []
    for i, letter in enumerate(guess):
        wanted = sum(a == letter and not g for a, g in zip(secret, green, strict=True))
        before = sum(b == letter and not g for b, g in zip(guess[:i], green[:i], strict=True))
        marks.append(letter if green[i] else "?" if before < wanted else "-")
    return "".join(marks)


@pytest.mark.parametrize(
    ("secret", "guess", "marks"),
    [
        ("tad", "tad", "tad"),
        ("tad", "dot", "?-?"),
        ("tad", "tat", "ta-"),
        ("dad", "tad", "-ad"),
        ("apple", "paper", "??p?-"),
        ("table", "label", "?ab?-"),
        ("level", "eagle", "?--??"),
        ("hello", "level", "?e--?"),
        ("sweet", "eerie", "??---"),
        ("teeth", "eerie", "?e---"),
    ],
)
def test_the_marks_of_a_guess(secret: str, guess: str, marks: str) -> None:
    assert WORDLE.mark(secret, guess) == marks
    assert reference_marks(secret, guess) == marks


def test_the_marks_of_all_short_words_and_of_many_with_repeated_letters() -> None:
    dice = random.Random(0)
    repeated = [("".join(dice.choices("abc", k=5)), "".join(dice.choices("abc", k=5))) for _ in range(3000)]
    pairs = (
        [(a, b) for a in WORDLE.THREE for b in WORDLE.THREE]
        + repeated
        + [(a, b) for a in WORDLE.FIVE for b in WORDLE.FIVE[:20]]
    )
    assert [pair for pair in pairs if WORDLE.mark(*pair) != reference_marks(*pair)] == []


def test_a_game_of_wordle() -> None:
    game, secret = WORDLE.Wordle(), prompt(secret="apple")
    assert game.reply(secret, ["I try [paper]"], DICE) == "??p?-"
    assert game.reply(secret, ["[paper]", "??p?-", "[zzzzz]"], DICE) == "!"
    assert game.reply(secret, ["[tad]"], DICE) == "!", "a word of another length"
    assert game.reply(secret, ["no guess"], DICE) is None
    assert game.reply(secret, ["[paper]", "??p?-", "[apple]"], DICE) is None
    played = ["[paper]", "??p?-"] * 5
    assert game.reply(secret, [*played[:8], "[paper]"], DICE) == "??p?-"
    assert game.reply(secret, [*played, "[paper]"], DICE) is None, "six guesses"
    assert WORDLE.found("[paper]??p?-[apple]", "apple") == 1
    assert WORDLE.found("apple [paper]??p?-", "apple") == 0
    assert WORDLE.found("[paper]??p?-" * 6 + "[apple]", "apple") == 0, "the seventh guess does not count"
    assert all(len(word) == 5 and word.isalpha() and word.islower() for word in WORDLE.FIVE)
    assert len(set(WORDLE.FIVE)) == len(WORDLE.FIVE)


def reference_answers(first: list[str], added: list[list[str]]) -> list[str]:
    """By insertion, one name at a time."""
    known: list[str] = []
    right = []
    for new in [first, *added]:
        for name in new:
            bisect.insort(known, name)
        right.append("".join(f"{name}*" if name in new and new is not first else name for name in known))
    return right


def test_alphabetical_order_in_several_turns() -> None:
    assert SORT.answers(["d", "c"], [["a", "e"], ["b"]]) == ["cd", "a*cde*", "ab*cde"]
    dice = random.Random(0)
    for _ in range(300):
        first, added = SORT.deal(SORT.LETTERS, (3, 2, 1), dice)
        right = SORT.answers(first, added)
        assert right == reference_answers(first, added)
        text = f"[{right[0]}]+{''.join(added[0])}[{right[1]}]+{added[1][0]}[{right[2]}]"
        assert SORT.sorted_turns(text, first, added) == 1
        assert SORT.sorted_turns(text.replace("*", ""), first, added) == pytest.approx(1 / 3)


def test_a_conversation_of_sort() -> None:
    game, names = SORT.Sort(), prompt(added=[["Eva", "Ada"], ["Ben"]], comma=",")
    assert game.reply(names, ["[Cleo,Dan]"], DICE) == "+Eva,Ada"
    assert game.reply(names, ["[Cleo,Dan]", "+Eva,Ada", "[Ada*,Cleo,Dan,Eva*]"], DICE) == "+Ben"
    assert game.reply(names, ["[Cleo,Dan]", "+Eva,Ada", "[x]", "+Ben", "[x]"], DICE) is None
    assert game.reply(names, ["no list"], DICE) is None
    text = "[Cleo,Dan]+Eva,Ada[Ada*,Cleo,Dan,Eva*]+Ben[Ada,Cleo,Dan,Eva,Ben*]"
    assert SORT.sorted_turns(text, ["Dan", "Cleo"], [["Eva", "Ada"], ["Ben"]], ",") == pytest.approx(2 / 3)


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("game", ["wordle", "sort"])
def test_the_programs_write_the_recipes_data(tmp_path: Path, game: str) -> None:
    program = shutil.copy(RECIPES / f"agent_{game}.py", tmp_path)
    subprocess.run([sys.executable, program], check=True)
    written = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert written == [f"agent-{game}-demos.jsonl", f"agent-{game}.jsonl"]
    for name in written:
        assert (tmp_path / name).read_text() == (RECIPES / name).read_text(), name
    subprocess.run([sys.executable, program, tmp_path / "words.jsonl"], check=True)
    assert len(rows_of(tmp_path / "words.jsonl")) >= 250
    prompts = {row["prompt"] for row in rows_of(RECIPES / f"agent-{game}.jsonl")}
    assert prompts.isdisjoint(row["prompt"] for row in rows_of(RECIPES / f"agent-{game}-demos.jsonl"))


def test_demonstrations_of_wordle_are_games_by_its_rules() -> None:
    for row in rows_of(RECIPES / "agent-wordle-demos.jsonl"):
        *guesses, last = [part for part in row["completion"].split("[") if part]
        for guess in guesses:
            word, _, marks = guess.partition("]")
            assert word in WORDLE.THREE
            assert any(WORDLE.mark(secret, word) == marks for secret in WORDLE.THREE)
        assert last.endswith("]"), "the policy has the last turn"
