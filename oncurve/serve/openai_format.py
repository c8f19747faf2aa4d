"""OpenAI's wire format: errors, request bodies and responses.

Errors make its clients raise their own exceptions: BadRequestError, AuthenticationError … Unsupported keys of a body are
refused by name, never ignored. Responses are complete or in chunks, of chat or text completions, with log-probs in either form.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from oncurve.engines.native.session import TOP, SampledToken
from oncurve.errors import OncurveError
from oncurve.recipe.schema.sections import Sampling
from oncurve.serve.detokenizer import INCOMPLETE, TextDelta

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that can't be answered: the status, a message with its fix, and the key that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    error_type = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": error_type, "param": param, "code": code}}, status)


def error_text(error: OncurveError) -> str:
    return f"{error.what}, because {error.because}; {error.fix}"


def install_error_handlers(app: FastAPI) -> None:
    """Answers every failure of a request in OpenAI's format."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error_response(error.status, error.message, error.param, error.code)

    async def on_invalid_body(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(400, *_message_and_key(error.errors()))

    async def on_http_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, str(error.detail))

    async def on_oncurve_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OncurveError)
        return error_response(400, error_text(error))

    async def on_server_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(500, f"{type(error).__name__}: {error}")

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(OncurveError, on_oncurve_error)
    app.add_exception_handler(RuntimeError, on_server_error)


def _message_and_key(errors: Any) -> tuple[str, str | None]:
    """The first validation error. Of a union's branches, the one that matched furthest has the most useful message: a list that
    is too long is not a text, but that is not what is wrong with it."""
    deepest = max(errors, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    error = errors[0] if errors[0]["type"] != deepest["type"] and len(errors[0]["loc"]) == 2 else deepest
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}", None
    # Without the names of a union's branches, such as list[TextPart] and constrained-str.
    path = [str(part) for part in error["loc"] if part not in ("body", "constrained-str") and "[" not in str(part)]
    key = ".".join(path[:1]) or None
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown key: leave it out"
    return f"{'.'.join(path)}: {message}" if path else message, key


Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class StrictModel(BaseModel):
    """No type coercion; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class ResponseFormat(StrictModel):
    """`json_object` does not constrain sampling: the prompt has to ask for JSON."""

    type: Literal["text", "json_object"]


class CompletionBody(StrictModel):
    """The keys that both kinds of completion have."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    user: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def _reject_unsupported(self) -> CompletionBody:
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: leave it out")
        return self

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int) -> Sampling:
        """The engine's sampling settings; keys that are not set mean plain sampling."""
        values = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        settings: dict[str, Any] = {name: float(v) if name != "top_k" else v for name, v in values.items() if v is not None}
        return Sampling(max_new_tokens=max_new_tokens, stop=stop, **settings)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it; `developer` is OpenAI's newer name of the role `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(CompletionBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int:
        return self.top_logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


class TextBody(CompletionBody):
    """POST /v1/completions. The default of 16 tokens is OpenAI's."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=TOP)] | None = None
    echo: Literal[False] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens or 16

    @property
    def top(self) -> int:
        return self.logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [[int(item) for item in self.prompt]]  # type: ignore[arg-type]
        return list(self.prompt)  # type: ignore[arg-type]


TokenText = Callable[[int], str]
"""The text of a single token, special tokens included."""


@dataclass
class CompletionChoice:
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

    def complete(self, choices: Sequence[CompletionChoice], used: dict[str, int]) -> dict[str, Any]:
        """A response that is not streamed."""
        formatted = [{"index": i, **self.choice(choice), "finish_reason": choice.finish} for i, choice in enumerate(choices)]
        return {**self._head, "object": self.object_type, "choices": formatted, "usage": used}

    def chunk(self, index: int, delta: TextDelta, is_first: bool) -> dict[str, Any]:
        formatted = {"index": index, **self.delta(delta, is_first), "finish_reason": delta.finish}
        return {**self._head, "object": self.chunk_type, "choices": [formatted]}

    def usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        """The last chunk, with the usage that the client asked for."""
        return {**self._head, "object": self.chunk_type, "choices": [], "usage": used}

    def choice(self, choice: CompletionChoice) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, delta: TextDelta, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormatter(ResponseFormatter):
    id_prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: CompletionChoice) -> dict[str, Any]:
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

    def choice(self, choice: CompletionChoice) -> dict[str, Any]:
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
