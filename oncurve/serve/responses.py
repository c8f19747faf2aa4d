"""Responses in OpenAI's format: complete or in chunks, chat or text completions, with log-probs in either format."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oncurve.engines.native.session import SampledToken
from oncurve.serve.detokenizer import INCOMPLETE, TextDelta

TokenText = Callable[[int], str]
"""The text of a single token, special tokens included."""


@dataclass
class Choice:
    """One completion of a response."""

    text: str = ""
    tokens: list[tuple[SampledToken, int]] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish = delta.finish or self.finish


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


class ResponseFormatter:
    """The common part of chat and text completions."""

    id_prefix, object_type, chunk_type = "", "", ""

    def __init__(self, model: str, token_text: TokenText, with_logprobs: bool) -> None:
        self.token_text, self.with_logprobs = token_text, with_logprobs
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def complete(self, choices: Sequence[Choice], used: dict[str, int]) -> dict[str, Any]:
        """A response that is not streamed."""
        formatted = [{"index": i, **self.choice(choice), "finish_reason": choice.finish} for i, choice in enumerate(choices)]
        return {**self._head, "object": self.object_type, "choices": formatted, "usage": used}

    def chunk(self, index: int, delta: TextDelta, is_first: bool) -> dict[str, Any]:
        formatted = {"index": index, **self.delta(delta, is_first), "finish_reason": delta.finish}
        return {**self._head, "object": self.chunk_type, "choices": [formatted]}

    def usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        """The last chunk, with the usage that the client asked for."""
        return {**self._head, "object": self.chunk_type, "choices": [], "usage": used}

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, delta: TextDelta, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormatter(ResponseFormatter):
    id_prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text}, "logprobs": self._logprobs(choice.tokens)}

    def delta(self, delta: TextDelta, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": delta.text}, "logprobs": self._logprobs(delta.tokens)}

    def _logprobs(self, tokens: Sequence[tuple[SampledToken, int]]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = [
            {**self._entry(token.token_id, token.logp), "top_logprobs": [self._entry(*likely) for likely in token.top]}
            for token, _ in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logp: float) -> dict[str, Any]:
        """A token that is only part of a character has no text, and so no ``bytes``.

        ``token_id`` is an addition of ours: several tokens may have the same text.
        """
        text = self.token_text(token_id)
        bytes_ = None if INCOMPLETE in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "token_id": token_id, "logprob": logp, "bytes": bytes_}


class TextFormatter(ResponseFormatter):
    id_prefix, object_type, chunk_type = "cmpl", "text_completion", "text_completion"

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text, "logprobs": self._logprobs(choice.tokens)}

    def delta(self, delta: TextDelta, is_first: bool) -> dict[str, Any]:
        return {"text": delta.text, "logprobs": self._logprobs(delta.tokens)}

    def _logprobs(self, tokens: Sequence[tuple[SampledToken, int]]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return {
            "tokens": [self.token_text(token.token_id) for token, _ in tokens],
            "token_ids": [token.token_id for token, _ in tokens],
            "token_logprobs": [token.logp for token, _ in tokens],
            "top_logprobs": [{self.token_text(token_id): logp for token_id, logp in token.top} for token, _ in tokens],
            "text_offset": [offset for _, offset in tokens],
        }
