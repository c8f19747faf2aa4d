"""The endpoint: /v1/models, /v1/chat/completions, /v1/completions, as OpenAI's clients ask for them."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from oncurve.engines.native.session import SampledToken, SampleRequest
from oncurve.errors import ModelError
from oncurve.local_http import refusal
from oncurve.models.policy import Policy
from oncurve.records import Ints, Prompt
from oncurve.serve.detokenizer import StreamedText, TextDelta
from oncurve.serve.engine_thread import ClientGone, EngineThread
from oncurve.serve.openai_errors import ApiError, answer_errors, in_words, problem
from oncurve.serve.requests import ChatBody, TextBody
from oncurve.serve.responses import ChatFormatter, Choice, ResponseFormatter, TextFormatter, usage

MOST_WAITING = 4096
"""Completions that may wait for a slot before further requests are told to come back later."""
NOBODY = 499
"""The status of an answer that nobody is there to read."""


@dataclass(frozen=True)
class ServedModel:
    """A model that is served: its name, its policy, and the thread that decodes."""

    name: str
    policy: Policy
    worker: EngineThread
    since: int = field(default_factory=lambda: int(time.time()))

    @property
    def chats(self) -> bool:
        return bool(self.policy.tokenizer.chat_template)

    def ask(self, prompt_ids: Ints, body: ChatBody | TextBody, seed: int) -> SampleRequest:
        """The request as the engine takes it; refused where prompt and answer don't fit."""
        limit, context = self.worker.session.limit, self.worker.session.context
        room = context - len(prompt_ids)
        if room < 1 or room < (body.limit or 1):
            raise ApiError(
                400,
                f"the prompt's {len(prompt_ids)} tokens and {body.limit or 1} of an answer don't fit: "
                + (
                    f"the model addresses {context} positions"
                    if context == self.policy.max_positions
                    else f"the memory that is free for keys and values holds {context} tokens"
                ),
                "messages" if isinstance(body, ChatBody) else "prompt",
                "context_length_exceeded",
            )
        if (body.limit or 1) > limit:
            raise ApiError(
                400, f"{body.limit} tokens: this server writes at most {limit} (oncurve serve --max-tokens)", "max_tokens"
            )
        return SampleRequest(prompt_ids, body.samples, body.sampling(body.limit or min(limit, room)), seed, body.top)

    def chat_ids(self, body: ChatBody) -> Ints:
        prompt = Prompt("messages", messages=tuple(message.plain() for message in body.messages))
        if not self.chats:
            raise ApiError(400, f"{self.name} has no chat template: use /v1/completions", "messages")
        try:
            return self.policy.encode(prompt)
        except ModelError as error:
            raise ApiError(400, in_words(error), "messages") from None

    def text_ids(self, prompt: str | list[int]) -> Ints:
        if isinstance(prompt, str):
            return self.policy.encode(Prompt("prompt", text=prompt))
        most = int(self.policy.model.config.get_text_config().vocab_size)
        if max(prompt) >= most:
            raise ApiError(400, f"token {max(prompt)}: the model has {most} tokens", "prompt")
        return np.asarray(prompt, np.int64)

    def decode(self, ids: list[int]) -> str:
        return str(self.policy.tokenizer.decode(ids, skip_special_tokens=True))

    def spell(self, token_id: int) -> str:
        return _spelt(self.policy, token_id)


@lru_cache(maxsize=200_000)
def _spelt(policy: Policy, token_id: int) -> str:
    return str(policy.tokenizer.decode([token_id], skip_special_tokens=False))


def make_app(served: ServedModel, key: str | None) -> ASGIApp:
    """The endpoint over a model. With ``key``, nothing is answered without it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, title="Oncurve")
    answer_errors(app)
    card = {"id": served.name, "object": "model", "created": served.since, "owned_by": "oncurve"}
    card |= {"context": served.worker.session.context, "max_tokens": served.worker.session.limit, "chat": served.chats}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        _check_model(served, name)
        return card

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": len(served.worker.session.waiting)}

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        _check_model(served, body.model)
        return await _answer(served, request, body, [served.chat_ids(body)], ChatFormatter)

    @app.post("/v1/completions")
    async def text(request: Request, body: TextBody) -> Response:
        _check_model(served, body.model)
        return await _answer(served, request, body, [served.text_ids(prompt) for prompt in body.prompts], TextFormatter)

    return ServeGuard(app, key)


def _check_model(served: ServedModel, name: str) -> None:
    if name != served.name:
        raise ApiError(404, f"there is no model {name!r} here: this server has {served.name!r}", "model", "model_not_found")


async def _answer(
    served: ServedModel, request: Request, body: ChatBody | TextBody, prompts: Sequence[Ints], shape: type[ResponseFormatter]
) -> Response:
    if len(served.worker.session.waiting) + len(prompts) * body.samples > MOST_WAITING:
        raise ApiError(429, f"more than {MOST_WAITING} completions would wait: come back later", code="overloaded")
    seed = secrets.randbits(63) if body.seed is None else body.seed
    asks = [served.ask(ids, body, seed) for ids in prompts]
    shaped = shape(served.name, served.spell, body.wants_logprobs)
    exchange = CompletionCall(served, asks, body.with_usage, shaped)
    # The body has been read, so the next thing that can be received is that the client has left.
    gone = asyncio.ensure_future(request.receive())
    if body.stream:
        return StreamingResponse(exchange.stream(gone), media_type="text/event-stream", headers={"cache-control": "no-store"})
    try:
        return JSONResponse(await exchange.whole(gone))
    except ClientGone:
        return Response(status_code=NOBODY)
    finally:
        gone.cancel()


class CompletionCall:
    """One request under way: its asks, and what each of its choices has been told."""

    def __init__(self, served: ServedModel, asks: Sequence[SampleRequest], with_usage: bool, shape: ResponseFormatter) -> None:
        self.served, self.asks, self.with_usage, self.shape = served, asks, with_usage, shape
        self.writings = [StreamedText(served.decode, ask.how.stop) for ask in asks for _ in range(ask.samples)]

    @property
    def spent(self) -> dict[str, int]:
        return usage(sum(len(ask.prompt_ids) for ask in self.asks), sum(writing.count for writing in self.writings))

    async def whole(self, gone: asyncio.Future[Any]) -> dict[str, Any]:
        choices, found = [Choice() for _ in self.writings], [list[SampledToken]() for _ in self.writings]
        async with aclosing(self.served.worker.tokens(self.asks, gone)) as rounds:
            async for place, tokens in rounds:
                for index, own in self._by_choice(place, tokens):
                    found[index] += own
        for index, tokens in enumerate(found):
            for said in self._pushed(index, tokens):
                choices[index].add(said)
        return self.shape.whole(choices, self.spent)

    def _by_choice(self, place: int, tokens: Sequence[SampledToken]) -> Iterator[tuple[int, list[SampledToken]]]:
        for sample in dict.fromkeys(token.sample for token in tokens):
            yield place * self.asks[0].samples + sample, [token for token in tokens if token.sample == sample]

    def _pushed(self, index: int, tokens: Sequence[SampledToken]) -> Iterator[TextDelta]:
        """What may be told of a choice with these tokens: one by one where their places are told too."""
        writing = self.writings[index]
        if self.shape.logprobs:
            yield from map(writing.push, tokens)
        else:
            yield writing.push(*tokens)

    async def stream(self, gone: asyncio.Future[Any]) -> AsyncIterator[str]:
        """Server-sent events; what goes wrong after the first of them is told as one of them."""
        begun: set[int] = set()
        try:
            async with aclosing(self.served.worker.tokens(self.asks, gone)) as rounds:
                async for place, tokens in rounds:
                    for index, own in self._by_choice(place, tokens):
                        for said in self._pushed(index, own):
                            if said.text or said.finish:
                                yield _event(self.shape.chunk(index, said, index not in begun))
                                begun.add(index)
            if self.with_usage:
                yield _event(self.shape.last(self.spent))
            yield "data: [DONE]\n\n"
        except ClientGone:
            return
        except RuntimeError as error:
            message = {"message": f"{type(error).__name__}: {error}", "type": "server_error", "param": None, "code": None}
            yield _event({"error": message})
        finally:
            gone.cancel()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


class ServeGuard:
    """Stands before the endpoint: the key where there is one, this machine's own name where there is none."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else None
        await (answer or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        refused = refusal(scope["method"], headers, local_only=self.key is None)
        if refused is not None:
            return problem(*refused)
        given = headers.get("authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
        if self.key is not None and not hmac.compare_digest(given, self.key.encode()):
            return problem(401, "the key is missing or wrong: send it as `Authorization: Bearer KEY`", code="invalid_api_key")
        return None
