"""From sampled tokens to the text that can be sent to a client.

A token may end in the middle of a character: text waits until its last character is complete. With stop strings, text also
waits while it may be the beginning of one, since a stop string is never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oncurve.engines.native.session import SampledToken

Decode = Callable[[list[int]], str]
INCOMPLETE = "�"
CONTEXT = 8
"""Tokens before a new one that are decoded again with it: decoders look at preceding tokens, but at no more than these."""


class IncrementalDetokenizer:
    """Text from token ids as they come; text that was returned never changes."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._returned = 0  # ids whose text has been returned

    def push(self, *token_ids: int, last: bool = False) -> str:
        """The text that is final with these tokens."""
        known = len(self._ids)
        self._ids += token_ids
        start = max(0, self._returned - CONTEXT)
        before = self._decode(self._ids[start : self._returned])
        after = self._decode(self._ids[start:])
        if after.endswith(INCOMPLETE) and not last:
            if len(token_ids) == 1:
                return self._settled(start, before, after)
            del self._ids[known:]
            return "".join(self.push(token_id) for token_id in token_ids)
        self._returned = len(self._ids)
        return after[len(before) :]

    def _settled(self, start: int, before: str, after: str) -> str:
        """The text of a long run of invalid bytes, up to a token after which it can't change any more.

        A character has at most four bytes and a token at least one. So text that four more tokens have not changed is final.
        """
        if len(self._ids) - self._returned < CONTEXT:
            return ""
        for end in range(len(self._ids) - 4, self._returned, -1):
            text = self._decode(self._ids[start:end])
            if after.startswith(text):
                self._returned = end
                return text[len(before) :]
        return ""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new of a completion: text, the tokens that end in it, and the finish reason if it has finished."""

    text: str
    tokens: tuple[tuple[SampledToken, int], ...]
    """Each token with the offset in the text at which it begins."""
    finish: str | None


class StreamedText:
    """The text of one completion as it is sent to the client."""

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._detokenizer, self._stop = IncrementalDetokenizer(decode), tuple(stop)
        self._text, self._sent = "", 0
        self._unsent_tokens: list[tuple[SampledToken, int]] = []
        self.count = 0
        """All tokens so far, the end token included."""

    def push(self, *tokens: SampledToken) -> TextDelta:
        """The text that can be sent with these tokens. The end token has no text and is left out of the delta's tokens.

        Several tokens at once are faster, but all get the offset of the first: push them one by one if offsets matter.
        """
        self.count += len(tokens)
        stop, text_tokens = tokens[-1].stop, [token for token in tokens if token.stop != "end"]
        if text_tokens:
            self._unsent_tokens += [(token, len(self._text)) for token in text_tokens]
            ids = (token.token_id for token in text_tokens)
            self._text += self._detokenizer.push(*ids, last=stop is not None and stop != "end")
        if stop is None:
            return self._send(len(self._text) - self._held_back())
        matches = [offset for offset in map(self._text.find, self._stop) if offset >= 0] if stop == "stop_string" else []
        end = min(matches, default=len(self._text))
        self._unsent_tokens = [(t, offset) for t, offset in self._unsent_tokens if offset < end or end == len(self._text)]
        return self._send(end, "length" if stop == "length" else "stop")

    def _send(self, end: int, finish: str | None = None) -> TextDelta:
        if end <= self._sent and finish is None:
            return TextDelta("", (), None)
        ready = [token for token in self._unsent_tokens if finish is not None or token[1] < end]
        text, self._unsent_tokens = self._text[self._sent : end], self._unsent_tokens[len(ready) :]
        self._sent = max(end, self._sent)
        return TextDelta(text, tuple(ready), finish)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0
