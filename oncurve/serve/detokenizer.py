"""From drawn tokens to the text that a client may be told.

Bytes arrive before characters do: text waits while its last character may be half of one. And where stop strings were asked
for, text waits while it may be the beginning of one, as the stop string itself is never told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oncurve.engines.native.session import SampledToken

Decode = Callable[[list[int]], str]
HALF = "�"
CONTEXT = 8
"""Tokens decoded again before a new one: decoders look at what stands before a token, never further back than this."""


class IncrementalDetokenizer:
    """Text from token ids as they come; what it has told never changes."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._told = 0  # ids whose text has been told

    def push(self, *token_ids: int, last: bool = False) -> str:
        """The text that has become certain with these tokens."""
        known = len(self._ids)
        self._ids += token_ids
        first = max(0, self._told - CONTEXT)
        before = self._decode(self._ids[first : self._told])
        now = self._decode(self._ids[first:])
        if now.endswith(HALF) and not last:
            if len(token_ids) == 1:
                return ""
            del self._ids[known:]
            return "".join(self.push(token_id) for token_id in token_ids)
        self._told = len(self._ids)
        return now[len(before) :]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new of a completion: text, the tokens that it ends with, and why it finished, if it did."""

    text: str
    tokens: tuple[tuple[SampledToken, int], ...]  # each with the place in the text where it begins
    finish: str | None


class StreamedText:
    """One completion of a request as its client is told it."""

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._unfolding, self._stop = IncrementalDetokenizer(decode), tuple(stop)
        self._text, self._told = "", 0
        self._pending: list[tuple[SampledToken, int]] = []
        self.count = 0

    def push(self, *tokens: SampledToken) -> TextDelta:
        """What may be told once these tokens are there. The end token has no text, and is not among the tokens told.

        Several at once are quicker, but all get the place of the first: where places matter, they are pushed one by one.
        """
        self.count += len(tokens)
        stop, words = tokens[-1].stop, [token for token in tokens if token.stop != "end"]
        if words:
            self._pending += [(token, len(self._text)) for token in words]
            self._text += self._unfolding.push(*(token.token_id for token in words), last=stop is not None and stop != "end")
        if stop is None:
            return self._say(len(self._text) - self._held_back())
        found = [place for place in map(self._text.find, self._stop) if place >= 0] if stop == "stop_string" else []
        cut = min(found, default=len(self._text))
        self._pending = [(one, place) for one, place in self._pending if place < cut or cut == len(self._text)]
        return self._say(cut, "length" if stop == "length" else "stop")

    def _say(self, until: int, finish: str | None = None) -> TextDelta:
        if until <= self._told and finish is None:
            return TextDelta("", (), None)
        text, tokens = self._text[self._told : until], tuple(self._pending)
        self._told, self._pending = max(until, self._told), []
        return TextDelta(text, tokens, finish)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0
