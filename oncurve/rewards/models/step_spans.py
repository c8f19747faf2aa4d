"""Splits a completion into reasoning steps, by characters, and finds each step's last token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from oncurve.records import Ints

Span = tuple[int, int]
"""A step's first character, and the one after its last; without surrounding white space."""
Split = Literal["lines", "numbered", "sentences", "tags"]
Decode = Callable[[Ints], str]

_NUMBERED = re.compile(r"(?im)^[ \t*#]*step\s+[0-9]+\b")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+|(?<=[。！？])")
_TAGGED = re.compile(r"<step>(.*?)</step>", re.DOTALL)


def lines(text: str) -> list[Span]:
    return _between(text, [match.span() for match in re.finditer(r"\n+", text)])


def numbered(text: str) -> list[Span]:
    """From each `Step n` at the beginning of a line to the next; text before the first is no step."""
    starts = [match.start() for match in _NUMBERED.finditer(text)]
    return _strip(text, list(zip(starts, [*starts[1:], len(text)], strict=True)))


def sentences(text: str) -> list[Span]:
    """Up to a full stop, question or exclamation mark before white space, or a newline: `3.5` is not split."""
    return _between(text, [match.span() for match in _SENTENCE_END.finditer(text)])


def tags(text: str) -> list[Span]:
    """The text between `<step>` and `</step>`."""
    return _strip(text, [match.span(1) for match in _TAGGED.finditer(text)])


SPLITTERS: dict[Split, Callable[[str], list[Span]]] = {
    "lines": lines,
    "numbered": numbered,
    "sentences": sentences,
    "tags": tags,
}


def _between(text: str, separators: Sequence[Span]) -> list[Span]:
    begins, ends = [0, *(end for _, end in separators)], [*(start for start, _ in separators), len(text)]
    return _strip(text, list(zip(begins, ends, strict=True)))


def _strip(text: str, spans: Sequence[Span]) -> list[Span]:
    """Spans without surrounding white space; empty ones are dropped."""
    stripped = []
    for begin, end in spans:
        part = text[begin:end]
        begin += len(part) - len(part.lstrip())
        stripped.append((begin, begin + len(part.strip())))
    return [(begin, end) for begin, end in stripped if end > begin]


def validate_spans(spans: Any, text: str) -> list[Span]:
    """The spans that a user's splitter returned; raises TypeError or ValueError if they are not valid."""
    pairs = [(int(begin), int(end)) for begin, end in spans]
    for (begin, end), after in zip(pairs, [*[begin for begin, _ in pairs[1:]], len(text)], strict=True):
        if not 0 <= begin < end <= max(after, end) or end > len(text) or after < end:
            raise ValueError(
                f"the step {begin} to {end} is empty, out of the text's {len(text)} characters, or overlaps the next"
            )
    return pairs


def last_tokens(token_ids: Ints, text: str, spans: Sequence[Span], decode: Decode) -> list[int]:
    """For each span, the index of the token that completes its last character.

    The first k tokens contain a step if their text begins with everything up to its end. If that is true for k it is true for
    k + 1, so binary search finds the smallest k: a few dozen decodings per step, without the tokenizer's offsets. A character
    that consists of several tokens belongs to the last of them.
    """
    last: list[int] = []
    for _, end in spans:
        low, high = last[-1] if last else 0, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if decode(token_ids[: middle + 1]).startswith(text[:end]):
                high = middle
            else:
                low = middle + 1
        if low == len(token_ids):
            raise ValueError("the text of the completion is not the text of its tokens")
        last.append(low)
    return last
