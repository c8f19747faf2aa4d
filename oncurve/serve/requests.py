"""Request bodies in OpenAI's format. Unsupported keys are refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from oncurve.engines.native.session import TOP
from oncurve.recipe.schema.sections import Sampling

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
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
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
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
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
