"""Finds the answer in a completion. What is thought is not said: text between think tags is left out first."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Literal

Take = Literal["tag", "boxed", "hashes", "number", "any"]

_NUMBER = re.compile(r"(?<![0-9.])[-+−]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")

_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9+_-]*)[^\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def without_thinking(text: str) -> str:
    """The text without its thinking. Thinking that is not closed lasts to the end; where the prompt had opened it already,
    the first `</think>` ends it."""
    opened, closed = text.find("<think>"), text.find("</think>")
    if closed >= 0 and (opened < 0 or closed < opened):
        text = text[closed + len("</think>") :]
    parts = text.split("<think>")
    return parts[0] + "".join(part.partition("</think>")[2] for part in parts[1:])


def extract_tagged(text: str) -> str | None:
    """What the last closed `<answer>…</answer>` holds."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if end >= 0 and start >= 0 else None


def extract_boxed(text: str) -> str | None:
    r"""What the last `\boxed{…}` holds, its own braces balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def extract_fenced(text: str, languages: tuple[str, ...] | None = None) -> str | None:
    """What the last block between lines of three backticks holds, of one of the languages where they are named; the end of
    the text closes one too."""
    blocks = [body for language, body in _FENCE.findall(text) if languages is None or language.lower() in languages]
    return blocks[-1] if blocks else None


def extract_hashed(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K writes answers."""
    _, mark, after = text.rpartition("####")
    return after.strip().partition("\n")[0] if mark else None


def last_number(text: str) -> str | None:
    """The last number written in ASCII digits. Of `5-3` it is 3: a sign after a digit is an operation."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return last[0].group() if last else None


SOURCES: dict[str, Callable[[str], str | None]] = {
    "tag": extract_tagged,
    "boxed": extract_boxed,
    "hashes": extract_hashed,
    "number": last_number,
}


def answer_in(text: str, take: Take) -> str | None:
    """The answer of a completion, from where the recipe says; `any` tries tag, box, hashes and last number in this order."""
    spoken = without_thinking(text)
    sources = SOURCES.values() if take == "any" else (SOURCES[take],)
    found = (source(spoken) for source in sources)
    return next((answer.strip() for answer in found if answer is not None), None)
