"""Extracts the answer from a completion. Text between think tags is removed first."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Literal

Take = Literal["tag", "boxed", "hashes", "number", "any"]

_NUMBER = re.compile(r"(?<![0-9.])[-+−]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9+_-]*)[^\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def without_thinking(text: str) -> str:
    """The text without its think blocks. A block that is not closed lasts to the end. If the prompt already opened one, the
    first `</think>` closes it."""
    opened, closed = text.find("<think>"), text.find("</think>")
    if closed >= 0 and (opened < 0 or closed < opened):
        text = text[closed + len("</think>") :]
    parts = text.split("<think>")
    return parts[0] + "".join(part.partition("</think>")[2] for part in parts[1:])


def extract_tagged(text: str) -> str | None:
    """The content of the last closed `<answer>…</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if end >= 0 and start >= 0 else None


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`, with balanced braces; `\{` and `\}` are not braces, but characters."""
    last = deque(_BOX.finditer(text), maxlen=1)
    if not last:
        return None
    depth, begin = 1, last[0].end()
    for brace in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[begin : brace.start()]
    return None


def extract_fenced(text: str, languages: tuple[str, ...] | None = None) -> str | None:
    """The content of the last fenced code block, of one of ``languages`` if set. The end of the text closes a block too."""
    blocks = [body for language, body in _FENCE.findall(text) if languages is None or language.lower() in languages]
    return blocks[-1] if blocks else None


def extract_hashed(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K writes answers."""
    _, mark, after = text.rpartition("####")
    return after.strip().partition("\n")[0] if mark else None


def last_number(text: str) -> str | None:
    """The last number in ASCII digits. In `5-3` it is 3: a sign after a digit is an operator."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return last[0].group() if last else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "tag": extract_tagged,
    "boxed": extract_boxed,
    "hashes": extract_hashed,
    "number": last_number,
}


def answer_in(text: str, take: Take) -> str | None:
    """The answer of a completion, or None; `any` tries tag, box, hashes and last number in this order."""
    visible = without_thinking(text)
    extractors = EXTRACTORS.values() if take == "any" else (EXTRACTORS[take],)
    answers = (extract(visible) for extract in extractors)
    return next((answer.strip() for answer in answers if answer is not None), None)
