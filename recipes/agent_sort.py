"""Alphabetical order in several turns: the environment of agent-sort.toml. Run as a program, it writes the recipe's prompts and
demonstrations:

    python recipes/agent_sort.py                 letters, for the built-in model
    python recipes/agent_sort.py names.jsonl     names, with the rules in words, for a pretrained model
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LIST = """
Ada Alan Alma Amir Anna Anton Bella Boris Carla Carlos Chen Clara Dana David Diego Dora Elena Elias Emma Erik Esra Eva
Felix Fiona Frida Gina Greta Hana Hugo Ida Igor Ines Ivan Jana Jonas Julia Kai Karim Katja Lara Leila Leo Lina Luca Maja
Marco Maria Mila Nadia Nina Noah Olga Omar Oskar Paula Pedro Petra Quinn Rafael Rita Rosa Samir Sara Simon Sofia Tara Theo
Tim Tomas Ulla Uma Vera Victor Wanda Wim Xenia Yara Yusuf Zara Zoe
"""
NAMES = tuple(_LIST.split())
RULES = (
    "Sort names alphabetically. Write all names so far in brackets, with commas, and a star after each name that is new in "
    "this turn, as in [Ada,Ben*,Cleo]. In the first turn no name has a star. I then add names. The first ones are: {names}"
)
_ANSWER = re.compile(r"\[([^\[\]]*)\]")


class Sort:
    """The pure form: the prompt has the first names, and each reply adds the next ones, from the prompt's column `added`."""

    calls = ("]",)

    def reply(self, prompt: Any, turns: Sequence[str], dice: object) -> str | None:
        """`+` and the names; None after the last ones, or if the turn has no brackets."""
        added, answered = prompt.columns["added"], len(turns[::2])
        if not turns[-1].endswith("]") or answered > len(added):
            return None
        return f"+{prompt.columns.get('comma', '').join(added[answered - 1])}"


def answers(first: list[str], added: list[list[str]], comma: str = "") -> list[str]:
    """The right answer of each turn."""
    known, right = list(first), [comma.join(sorted(first))]
    for new in added:
        known += new
        right.append(comma.join(name + "*" if name in new else name for name in sorted(known)))
    return right


def sorted_turns(completion: str, first: list[str], added: list[list[str]], comma: str = "") -> float:
    """The reward: the fraction of turns with the right answer. All brackets are the policy's, because replies have none."""
    right = answers(first, added, comma)
    written = _ANSWER.findall(completion)
    return [a == b for a, b in zip(right, written, strict=False)].count(True) / len(right)


def demonstration(first: list[str], added: list[list[str]], dice: random.Random) -> str:
    """The turns of a conversation. Half of the lists with new names are sorted, and half have the new ones at the end."""
    text, known = f"[{''.join(sorted(first))}]", sorted(first)
    for new in added:
        order = sorted([*known, *new]) if dice.random() < 0.5 else [*known, *sorted(new)]
        text += f"+{''.join(new)}[{''.join(name + '*' if name in new else name for name in order)}]"
        known = sorted([*known, *new])
    return text


def deal(names: tuple[str, ...], counts: tuple[int, ...], dice: random.Random) -> tuple[list[str], list[list[str]]]:
    """Different names for each turn: the first ones, and those that are added."""
    chosen = dice.sample(names, sum(counts))
    parts = [[chosen.pop() for _ in range(count)] for count in counts]
    return parts[0], parts[1:]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")

if __name__ == "__main__":
    dice, here = random.Random(0), Path(__file__).parent
    rows: list[dict[str, Any]] = []
    if len(sys.argv) > 1:
        for _ in range(400):
            first, added = deal(NAMES, (4, 2, 2), dice)
            prompt = RULES.format(names=", ".join(first))
            rows.append({"prompt": prompt, "first": first, "added": added, "comma": ","})
        write_rows(Path(sys.argv[1]), rows)
    else:
        for _ in range(2000):
            first, added = deal(LETTERS, (3, 2, 1), dice)
            rows.append({"prompt": f"{''.join(first)}:", "first": first, "added": added})
        write_rows(here / "agent-sort.jsonl", rows[:400])
        used = {row["prompt"] for row in rows[:400]}
        others = [row for row in rows[400:] if row["prompt"] not in used]
        shown = [{"prompt": row["prompt"], "completion": demonstration(row["first"], row["added"], dice)} for row in others]
        write_rows(here / "agent-sort-demos.jsonl", shown)
