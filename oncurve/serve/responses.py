"""Answers in OpenAI's shapes: whole or in chunks, chat or plain text, with log-probs of either form."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oncurve.engines.native.session import SampledToken
from oncurve.serve.detokenizer import TextDelta

TokenText = Callable[[int], str]
"""The text of one token by itself, special ones included."""


@dataclass
class Choice:
    """One completion as far as it has been told."""

    text: str = ""
    tokens: list[tuple[SampledToken, int]] = field(default_factory=list)
    finish: str | None = None

    def add(self, said: TextDelta) -> None:
        self.text += said.text
        self.tokens += said.tokens
        self.finish = said.finish or self.finish


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


class ResponseFormatter:
    """What chat and plain completions have in common: the envelope."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, model: str, spell: TokenText, logprobs: bool) -> None:
        self.spell, self.logprobs = spell, logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], spent: dict[str, int]) -> dict[str, Any]:
        told = [{"index": index, **self.choice(one), "finish_reason": one.finish} for index, one in enumerate(choices)]
        return {**self._head, "object": self.whole_object, "choices": told, "usage": spent}

    def chunk(self, index: int, said: TextDelta, first: bool) -> dict[str, Any]:
        told = {"index": index, **self.delta(said, first), "finish_reason": said.finish}
        return {**self._head, "object": self.chunk_object, "choices": [told]}

    def last(self, spent: dict[str, int]) -> dict[str, Any]:
        """The chunk after all others, where usage was asked for."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": spent}

    def choice(self, one: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, said: TextDelta, first: bool) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormatter(ResponseFormatter):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, one: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": one.text}, "logprobs": self._logprobs(one.tokens)}

    def delta(self, said: TextDelta, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": said.text}, "logprobs": self._logprobs(said.tokens)}

    def _logprobs(self, tokens: Sequence[tuple[SampledToken, int]]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        told = [
            {**self._entry(token.token_id, token.logp), "top_logprobs": [self._entry(*one) for one in token.top]}
            for token, _ in tokens
        ]
        return {"content": told, "refusal": None}

    def _entry(self, token_id: int, logp: float) -> dict[str, Any]:
        """A token that is part of a character has no text of its own, and so no bytes that could be told from it.

        ``token_id`` is ours: texts of tokens are not unique.
        """
        text = self.spell(token_id)
        bytes_ = None if "�" in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "token_id": token_id, "logprob": logp, "bytes": bytes_}


class TextFormatter(ResponseFormatter):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, one: Choice) -> dict[str, Any]:
        return {"text": one.text, "logprobs": self._logprobs(one.tokens)}

    def delta(self, said: TextDelta, first: bool) -> dict[str, Any]:
        return {"text": said.text, "logprobs": self._logprobs(said.tokens)}

    def _logprobs(self, tokens: Sequence[tuple[SampledToken, int]]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [self.spell(token.token_id) for token, _ in tokens],
            "token_ids": [token.token_id for token, _ in tokens],
            "token_logprobs": [token.logp for token, _ in tokens],
            "top_logprobs": [{self.spell(one): logp for one, logp in token.top} for token, _ in tokens],
            "text_offset": [place for _, place in tokens],
        }
