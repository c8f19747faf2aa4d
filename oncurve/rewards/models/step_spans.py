"""Where the steps of a completion are: splitters by characters, and their exact place among the tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from oncurve.records import Ints

Span = tuple[int, int]
"""A step's first character, and the one after its last; white space around it left out."""
Split = Literal["lines", "numbered", "sentences", "tags"]
Decode = Callable[[Ints], str]

_NUMBERED = re.compile(r"(?im)^[ \t*#]*step\s+[0-9]+\b")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+|(?<=[。！？])")
_TAGGED = re.compile(r"<step>(.*?)</step>", re.DOTALL)


def lines(text: str) -> list[Span]:
    return _between(text, [match.span() for match in re.finditer(r"\n+", text)])


def numbered(text: str) -> list[Span]:
    """From each `Step n` at the beginning of a line to the next; what stands before the first is no step."""
    starts = [match.start() for match in _NUMBERED.finditer(text)]
    return _filled(text, list(zip(starts, [*starts[1:], len(text)], strict=True)))


def sentences(text: str) -> list[Span]:
    """Up to a full stop, question or exclamation mark before white space, or a line's end: `3.5` is not cut."""
    return _between(text, [match.span() for match in _SENTENCE_END.finditer(text)])


def tags(text: str) -> list[Span]:
    """What stands between `<step>` and `</step>`."""
    return _filled(text, [match.span(1) for match in _TAGGED.finditer(text)])


SPLITTERS: dict[Split, Callable[[str], list[Span]]] = {
    "lines": lines,
    "numbered": numbered,
    "sentences": sentences,
    "tags": tags,
}


def _between(text: str, cuts: Sequence[Span]) -> list[Span]:
    begins, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return _filled(text, list(zip(begins, ends, strict=True)))


def _filled(text: str, spans: Sequence[Span]) -> list[Span]:
    found = []
    for begin, end in spans:
        part = text[begin:end]
        begin += len(part) - len(part.lstrip())
        found.append((begin, begin + len(part.strip())))
    return [(begin, end) for begin, end in found if end > begin]


def checked_spans(spans: Any, text: str) -> list[Span]:
    """The spans that a function of the user's gave, or a TypeError or ValueError that says what is wrong with them."""
    found = [(int(begin), int(end)) for begin, end in spans]
    for (begin, end), after in zip(found, [*[begin for begin, _ in found[1:]], len(text)], strict=True):
        if not 0 <= begin < end <= max(after, end) or end > len(text) or after < end:
            raise ValueError(
                f"the step {begin} to {end} is empty, out of the text's {len(text)} characters, or overlaps the next"
            )
    return found


def last_tokens(token_ids: Ints, text: str, spans: Sequence[Span], decode: Decode) -> list[int]:
    """For each span, the index of the token that completes its last character.

    The first k tokens hold a step if their text begins with everything up to its end. Once that is true it stays true, so the
    smallest k is found by halving: a few dozen decodings per step, and no tokenizer's offsets are needed. A character that
    several tokens make up (half of an emoji is none) belongs to the last of them.
    """
    found: list[int] = []
    for _, end in spans:
        low, high = found[-1] if found else 0, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if decode(token_ids[: middle + 1]).startswith(text[:end]):
                high = middle
            else:
                low = middle + 1
        if low == len(token_ids):
            raise ValueError("the text of the completion is not the text of its tokens")
        found.append(low)
    return found
