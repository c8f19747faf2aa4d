"""OpenAI's wire format: errors, request bodies and responses.

Errors make its clients raise their own exceptions: BadRequestError, AuthenticationError … Unsupported keys of a body are
refused by name, never ignored. Responses are complete or in chunks, of chat or text completions, with log-probs in either form.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from oncurve.engines.native.session import TOP, SampledToken
from oncurve.errors import OncurveError
from oncurve.recipe.schema.sections import Sampling
from oncurve.serve.detokenizer import INCOMPLETE, TextDelta
from oncurve.strict_json import parse_json

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Raised for a request that can't be answered: the HTTP status, a message with the fix, and the request's key at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    error_type = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": error_type, "param": param, "code": code}}, status)


def error_text(error: OncurveError) -> str:
    return f"{error.what}, because {error.because}; {error.fix}"


OTHER_APIS = {
    "responses": "Responses API here: use /v1/chat/completions (in openai-agents: set_default_openai_api('chat_completions'))",
    "messages": "Messages API here: use /v1/chat/completions, with a client of OpenAI's API",
}
"""Addresses that some clients call by default: what is not here, and what to do."""


def install_error_handlers(app: FastAPI) -> None:
    """Answers every failure of a request in OpenAI's format."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error_response(error.status, error.message, error.param, error.code)

    async def on_invalid_body(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(400, *_message_and_key(error.errors()))

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        apis = [api for part, api in OTHER_APIS.items() if part in request.url.path.split("/")]
        return error_response(error.status_code, f"there is no {apis[0]}" if apis else str(error.detail))

    async def on_oncurve_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OncurveError)
        return error_response(400, error_text(error))

    async def on_server_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(500, f"{type(error).__name__}: {error}")

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(OncurveError, on_oncurve_error)
    for kind in (RuntimeError, Exception):  # one of another type is also printed in the server's log, with its traceback
        app.add_exception_handler(kind, on_server_error)


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


class JsonSchema(StrictModel):
    """A schema that texts must be valid against. Sampling is constrained whether or not `strict` is set."""

    name: Text
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Plain text, any JSON object, or JSON that is valid against a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: the type json_schema needs it, and no other type allows it")
        return self

    @property
    def schema_to_follow(self) -> dict[str, Any] | None:
        """The schema that texts must be valid against; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


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
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    user: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    columns: dict[str, Any] | None = None
    """An addition of ours: the columns that the environment begins with, if the server runs one."""

    @model_validator(mode="after")
    def _reject_unsupported(self) -> CompletionBody:
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: leave it out")
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionBody:
        if self.max_tokens == 0 and not getattr(self, "echo", False):
            raise ValueError("max_tokens of 0 generates nothing: use 1 or more, or echo with logprobs to score a prompt")
        return self

    default_tokens: ClassVar[int] = 2**31
    """The length limit of a request that sets none: as many tokens as fit, but no more than this."""

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


class CalledFunction(StrictModel):
    name: str
    arguments: str


class MessageToolCall(StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(StrictModel):
    """A message. Clients that send a response's message back also send keys that are empty in ours."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; `developer` is OpenAI's newer name of the role `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None and self.role == "tool":
            message["name"] = self.name
        return message


def _arguments(call: MessageToolCall) -> Any:
    """Templates write the arguments as JSON themselves; a text that is not JSON stays as it is."""
    try:
        return parse_json(call.function.arguments)
    except ValueError:
        return call.function.arguments


class FunctionSchema(StrictModel):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema of a call's arguments; a function without `parameters` takes none."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(StrictModel):
    """A function that the model may call. Sampling is constrained if `tool_choice` requires a call, whatever `strict` is."""

    type: Literal["function"]
    function: FunctionSchema

    def for_template(self) -> dict[str, Any]:
        function = self.function
        schema = {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": schema}


class NamedFunction(StrictModel):
    name: Text


class NamedToolChoice(StrictModel):
    """The one function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(CompletionBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _check_required_tools(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools or ()]
        repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if repeated:
            raise ValueError(f"tools: several functions are called {repeated[0]!r}: a call could mean any of them")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: 'required' needs tools")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no function {self.tool_choice.function.name!r} in tools")
        for function in self.required_functions:
            if function.schema_of_arguments.get("type") != "object":
                raise ValueError(f"tools: the parameters of {function.name!r} must be a schema of type object")
        return self

    @property
    def required_functions(self) -> list[FunctionSchema]:
        """The functions of which the model must call one; none: it may answer without a call."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedToolChoice):
            return [function for function in functions if function.name == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    @property
    def allows_several_calls(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is shown."""
        return [] if self.tool_choice == "none" else [tool.for_template() for tool in self.tools or ()]

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
    """POST /v1/completions."""

    default_tokens = 16  # OpenAI's
    prompt: str | Annotated[list[str], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=TOP)] | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """vLLM's extension: tokens as `token_id:17` instead of their text, since several tokens may have one text."""

    @model_validator(mode="after")
    def _check_echo(self) -> TextBody:
        if not self.echo:
            return self
        if self.logprobs is None or self.max_tokens != 0:
            raise ValueError("echo needs logprobs, and max_tokens of 0: it returns the log-probs of the prompt's own tokens")
        if self.stream or self.samples > 1:
            raise ValueError("echo generates nothing: leave out stream and n")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens

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
ToMessage = Callable[[str, Sequence[int]], dict[str, Any]]
"""A completion's text and tokens as the assistant's message, with its tool calls."""


def token_id_text(token_id: int) -> str:
    """A token as `return_tokens_as_token_ids` shows it."""
    return f"token_id:{token_id}"


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt with the log-prob of each of its tokens but the first, and the likeliest tokens there with theirs. ``offsets``:
    where in the text each token begins."""

    text: str
    token_ids: list[int]
    offsets: list[int]
    logps: list[float]
    top: list[list[tuple[int, float]]]


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

    holds_back = False
    """Whether a streamed choice is sent only when it has finished, because its parts are not known before."""

    id_prefix, object_type, chunk_type = "", "", ""

    def __init__(self, model: str, token_text: TokenText, with_logprobs: bool) -> None:
        self.token_text: Callable[[int], str] = token_text
        self.with_logprobs = with_logprobs
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def complete(self, choices: Sequence[CompletionChoice], used: dict[str, int]) -> dict[str, Any]:
        """A response that is not streamed."""
        formatted = [{"index": i, **self.choice(choice), "finish_reason": choice.finish} for i, choice in enumerate(choices)]
        return {**self._head, "object": self.object_type, "choices": formatted, "usage": used}

    def chunk(self, index: int, delta: TextDelta, is_first: bool) -> dict[str, Any]:
        formatted = {"index": index, **self.delta(delta, is_first), "finish_reason": delta.finish}
        return {**self._head, "object": self.chunk_type, "choices": [formatted]}

    def finished_chunks(self, index: int, choice: CompletionChoice) -> list[dict[str, Any]]:
        """The chunks of a choice that is sent only when it is complete."""
        raise NotImplementedError

    def usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        """The last chunk, with the usage that the client asked for."""
        return {**self._head, "object": self.chunk_type, "choices": [], "usage": used}

    def choice(self, choice: CompletionChoice) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, delta: TextDelta, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError


def _finish_reason(message: Mapping[str, Any], finish: str | None) -> str | None:
    return "tool_calls" if message.get("tool_calls") and finish == "stop" else finish


class ChatFormatter(ResponseFormatter):
    id_prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, token_text: TokenText, with_logprobs: bool, to_message: ToMessage | None = None) -> None:
        """``to_message`` separates a text from its tool calls, if the request has tools."""
        super().__init__(model, token_text, with_logprobs)
        self.to_message, self.holds_back = to_message, to_message is not None

    def complete(self, choices: Sequence[CompletionChoice], used: dict[str, int]) -> dict[str, Any]:
        response = super().complete(choices, used)
        for choice in response["choices"]:
            choice["finish_reason"] = _finish_reason(choice["message"], choice["finish_reason"])
        return response

    def choice(self, choice: CompletionChoice) -> dict[str, Any]:
        return {"message": self._message(choice), "logprobs": self._logprobs(choice.tokens)}

    def _message(self, choice: CompletionChoice) -> dict[str, Any]:
        if self.to_message is None:
            return {"role": "assistant", "content": choice.text}
        return self.to_message(choice.text, [token.token_id for token, _ in choice.tokens])

    def finished_chunks(self, index: int, choice: CompletionChoice) -> list[dict[str, Any]]:
        message = self._message(choice)
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        first = {"index": index, "delta": delta, "logprobs": self._logprobs(choice.tokens), "finish_reason": None}
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish_reason(message, choice.finish)}
        return [{**self._head, "object": self.chunk_type, "choices": [formatted]} for formatted in (first, last)]

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

    def scored(self, prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
        """The response to `echo`: each prompt with the log-probs of its own tokens. The first token has none."""
        choices = [
            {"index": i, "text": prompt.text, "logprobs": self._prompt_logprobs(prompt), "finish_reason": "length"}
            for i, prompt in enumerate(prompts)
        ]
        used = usage(sum(len(prompt.token_ids) for prompt in prompts), 0)
        return {**self._head, "object": self.object_type, "choices": choices, "usage": used}

    def _prompt_logprobs(self, prompt: ScoredPrompt) -> dict[str, Any]:
        return {
            "tokens": [self.token_text(token_id) for token_id in prompt.token_ids],
            "token_ids": prompt.token_ids,
            "token_logprobs": [None, *prompt.logps],
            "top_logprobs": [None, *({self.token_text(token_id): logp for token_id, logp in likely} for likely in prompt.top)],
            "text_offset": prompt.offsets,
        }

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
