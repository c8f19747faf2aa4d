"""The endpoint: /v1/models, /v1/chat/completions and /v1/completions, as OpenAI's clients call them; and serving it.

The engine in its own thread: requests come in from the event loop, tokens go back to it.

Only this thread touches the session, so nothing needs a lock. Between decode steps it handles the commands that have arrived:
new requests get slots while others decode, and a request whose client has left frees its slots. All tokens of a step are sent
to the event loop at once.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from oncurve.engines.base import SampleRequest
from oncurve.engines.native.session import SampledToken, Session, open_session, served_request
from oncurve.errors import ModelError, RecipeError
from oncurve.local_http import JsonBodies, address_of, is_loopback, listen, rejection_reason, server_config
from oncurve.models.policy import Policy
from oncurve.records import Ints, Prompt
from oncurve.serve.detokenizer import StreamedText, TextDelta
from oncurve.serve.openai_format import (
    ApiError,
    ChatBody,
    ChatFormatter,
    CompletionChoice,
    ResponseFormatter,
    TextBody,
    TextFormatter,
    error_response,
    error_text,
    install_error_handlers,
    usage,
)

Item = tuple[int, list[SampledToken] | Exception]
"""The index of a request in its call, and its new tokens or an error."""


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True, slots=True)
class _Subscriber:
    """The queue that the tokens of a call go to, and its event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item]


@dataclass(frozen=True, slots=True)
class _Submit:
    call: int
    requests: Sequence[SampleRequest]
    subscriber: _Subscriber


@dataclass(frozen=True, slots=True)
class _Cancel:
    call: int


class EngineThread:
    """Runs a session until it is closed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._commands: queue.SimpleQueue[_Submit | _Cancel | None] = queue.SimpleQueue()
        self._calls = count()
        self._requests_of: dict[int, list[int]] = {}  # call -> the session's numbers of its requests
        self._subscribers: dict[int, tuple[_Subscriber, int]] = {}  # the session's number -> (subscriber, index in the call)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends after the current decode step."""
        self._commands.put(None)
        self._thread.join()
        self.session.close()

    async def tokens(
        self, requests: Sequence[SampleRequest], gone: asyncio.Future[Any]
    ) -> AsyncGenerator[tuple[int, list[SampledToken]], None]:
        """(index of the request, its new tokens) as they come.

        Closing the generator early cancels the requests. If ``gone`` is done, it raises ClientGone.
        """
        items = asyncio.Queue[Item]()
        call, unfinished = next(self._calls), sum(request.samples for request in requests)
        gone.add_done_callback(lambda _: items.put_nowait((0, ClientGone())))
        self._commands.put(_Submit(call, requests, _Subscriber(asyncio.get_running_loop(), items)))
        try:
            while unfinished:
                index, item = await items.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= sum(token.stop is not None for token in item)
                yield index, item
        finally:
            if unfinished:
                self._commands.put(_Cancel(call))

    def _run(self) -> None:
        while self._handle_commands():
            try:
                sampled = self.session.step()
            except Exception as error:  # an error of one batch, such as out of memory, must not end the server
                self._fail(error)
                continue
            by_request: dict[int, list[SampledToken]] = {}
            for token in sampled:
                by_request.setdefault(token.request, []).append(token)
            self._publish(by_request)
            self._forget_ended()

    def _handle_commands(self) -> bool:
        """Handles all commands that have arrived, and waits for one if nothing decodes. False once the thread must end."""
        wait = not self.session.requests
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Submit):
                numbers = [self.session.submit(request) for request in command.requests]
                self._requests_of[command.call] = numbers
                self._subscribers |= {number: (command.subscriber, index) for index, number in enumerate(numbers)}
            else:
                for number in self._requests_of.get(command.call, ()):
                    self.session.cancel(number)
                self._forget_ended()
            wait = not self.session.requests

    def _forget_ended(self) -> None:
        """Forgets requests that have ended in the session."""
        for number in [number for number in self._subscribers if number not in self.session.requests]:
            del self._subscribers[number]
        for call in [c for c, numbers in self._requests_of.items() if not any(n in self._subscribers for n in numbers)]:
            del self._requests_of[call]

    def _fail(self, error: Exception) -> None:
        self._publish(dict.fromkeys(self._subscribers, error))
        for number in self._subscribers:
            self.session.cancel(number)
        self._forget_ended()

    def _publish(self, items: Mapping[int, list[SampledToken] | Exception]) -> None:
        """Sends each request's item to its subscriber, with one wake-up per event loop."""
        for loop in {self._subscribers[number][0].loop for number in items}:
            of_loop = [(*self._subscribers[n], item) for n, item in items.items() if self._subscribers[n][0].loop is loop]
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, of_loop)


def _deliver(items: list[tuple[_Subscriber, int, list[SampledToken] | Exception]]) -> None:
    for subscriber, index, item in items:
        subscriber.queue.put_nowait((index, item))


MAX_WAITING = 4096
"""Completions that may wait for a slot before the server answers 429."""
CLIENT_CLOSED_REQUEST = 499
"""The status of a response that nobody reads any more."""


@dataclass(frozen=True)
class ServedModel:
    """The served model: its name, its policy, and the thread that decodes."""

    name: str
    policy: Policy
    engine: EngineThread
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.policy.tokenizer.chat_template)

    def sample_request(self, prompt_ids: Ints, body: ChatBody | TextBody, seed: int) -> SampleRequest:
        """The engine's request. Raises ApiError if prompt and completion don't fit."""
        limit, context = self.engine.session.max_new_tokens, self.engine.session.context
        room = context - len(prompt_ids)
        if room < 1 or room < (body.limit or 1):
            if context == self.policy.max_positions:
                reason = f"the model addresses {context} positions"
            else:
                reason = f"the memory that is free for the KV cache holds {context} tokens"
            raise ApiError(
                400,
                f"a prompt of {len(prompt_ids)} tokens and a completion of {body.limit or 1} don't fit: {reason}",
                "messages" if isinstance(body, ChatBody) else "prompt",
                "context_length_exceeded",
            )
        if (body.limit or 1) > limit:
            message = f"{body.limit} tokens: this server generates at most {limit} (oncurve serve --max-tokens)"
            raise ApiError(400, message, "max_tokens")
        return served_request(prompt_ids, body.samples, body.sampling(body.limit or min(limit, room)), seed, body.top)

    def encode_chat(self, body: ChatBody) -> Ints:
        prompt = Prompt("messages", messages=tuple(message.for_template() for message in body.messages))
        if not self.has_chat_template:
            raise ApiError(400, f"{self.name} has no chat template: use /v1/completions", "messages")
        try:
            return self.policy.encode(prompt)
        except ModelError as error:
            raise ApiError(400, error_text(error), "messages") from None

    def encode_text(self, prompt: str | list[int]) -> Ints:
        if isinstance(prompt, str):
            return self.policy.encode(Prompt("prompt", text=prompt))
        vocabulary = int(self.policy.model.config.get_text_config().vocab_size)
        if max(prompt) >= vocabulary:
            raise ApiError(400, f"token {max(prompt)}: the model has {vocabulary} tokens", "prompt")
        return np.asarray(prompt, np.int64)

    def decode(self, ids: list[int]) -> str:
        return str(self.policy.tokenizer.decode(ids, skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        return _token_text(self.policy, token_id)


@lru_cache(maxsize=200_000)
def _token_text(policy: Policy, token_id: int) -> str:
    return str(policy.tokenizer.decode([token_id], skip_special_tokens=False))


def make_app(served: ServedModel, key: str | None) -> ASGIApp:
    """The endpoint over a model. With ``key``, every request must send it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, title="Oncurve")
    install_error_handlers(app)
    session = served.engine.session
    card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "oncurve"}
    card |= {"context": session.context, "max_tokens": session.max_new_tokens, "chat": served.has_chat_template}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        _check_model(served, name)
        return card

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": len(session.waiting)}

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        _check_model(served, body.model)
        prompt = await asyncio.to_thread(served.encode_chat, body)  # a long prompt takes seconds
        return await _respond(served, request, body, [prompt], ChatFormatter)

    @app.post("/v1/completions")
    async def text(request: Request, body: TextBody) -> Response:
        _check_model(served, body.model)
        prompts = await asyncio.to_thread(lambda: [served.encode_text(prompt) for prompt in body.prompts])
        return await _respond(served, request, body, prompts, TextFormatter)

    return KeyMiddleware(JsonBodies(app, error_response), key)


def _check_model(served: ServedModel, name: str) -> None:
    if name != served.name:
        raise ApiError(404, f"there is no model {name!r} here: this server has {served.name!r}", "model", "model_not_found")


async def _respond(
    served: ServedModel,
    http_request: Request,
    body: ChatBody | TextBody,
    prompts: Sequence[Ints],
    formatter: type[ResponseFormatter],
) -> Response:
    if len(served.engine.session.waiting) + len(prompts) * body.samples > MAX_WAITING:
        raise ApiError(429, f"more than {MAX_WAITING} completions would wait: try again later", code="overloaded")
    seed = secrets.randbits(63) if body.seed is None else body.seed
    requests = [served.sample_request(ids, body, seed) for ids in prompts]
    format_response = formatter(served.name, served.token_text, body.wants_logprobs)
    call = CompletionCall(served, requests, body.with_usage, format_response)
    # The body has been read, so the next message that can arrive is that the client has disconnected.
    gone = asyncio.ensure_future(http_request.receive())
    if body.stream:
        return StreamingResponse(call.stream(gone), media_type="text/event-stream", headers={"cache-control": "no-store"})
    try:
        return JSONResponse(await call.complete(gone))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        gone.cancel()


class CompletionCall:
    """One HTTP request in progress: a sample request per prompt, and the text of each choice so far."""

    def __init__(
        self, served: ServedModel, requests: Sequence[SampleRequest], with_usage: bool, formatter: ResponseFormatter
    ) -> None:
        self.served, self.requests, self.with_usage, self.formatter = served, requests, with_usage, formatter
        self.texts = [
            StreamedText(served.decode, request.sampling.stop) for request in requests for _ in range(request.samples)
        ]

    @property
    def usage(self) -> dict[str, int]:
        return usage(sum(len(request.prompt_ids) for request in self.requests), sum(text.count for text in self.texts))

    async def complete(self, gone: asyncio.Future[Any]) -> dict[str, Any]:
        """The response once all choices have finished."""
        choices, tokens = [CompletionChoice() for _ in self.texts], [list[SampledToken]() for _ in self.texts]
        async with aclosing(self.served.engine.tokens(self.requests, gone)) as rounds:
            async for prompt, new_tokens in rounds:
                for choice, of_choice in self._by_choice(prompt, new_tokens):
                    tokens[choice] += of_choice
        for choice, of_choice in enumerate(tokens):
            for delta in self._deltas(choice, of_choice):
                choices[choice].add(delta)
        return self.formatter.complete(choices, self.usage)

    def _by_choice(self, prompt: int, tokens: Sequence[SampledToken]) -> Iterator[tuple[int, list[SampledToken]]]:
        for sample in dict.fromkeys(token.sample for token in tokens):
            yield prompt * self.requests[0].samples + sample, [token for token in tokens if token.sample == sample]

    def _deltas(self, choice: int, tokens: Sequence[SampledToken]) -> Iterator[TextDelta]:
        """The new text of a choice. With log-probs the tokens are pushed one by one, so that each has its text offset."""
        text = self.texts[choice]
        if self.formatter.with_logprobs:
            yield from map(text.push, tokens)
        else:
            yield text.push(*tokens)

    async def stream(self, gone: asyncio.Future[Any]) -> AsyncIterator[str]:
        """Server-sent events. An error after the first event is sent as an event."""
        started: set[int] = set()
        try:
            async with aclosing(self.served.engine.tokens(self.requests, gone)) as rounds:
                async for prompt, tokens in rounds:
                    for choice, of_choice in self._by_choice(prompt, tokens):
                        for delta in self._deltas(choice, of_choice):
                            if delta.text or delta.finish:
                                yield _event(self.formatter.chunk(choice, delta, choice not in started))
                                started.add(choice)
            if self.with_usage:
                yield _event(self.formatter.usage_chunk(self.usage))
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


class KeyMiddleware:
    """Lets a request through if it has the key, or, on a server without one, if it comes from this machine."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejection = self._rejection(scope) if scope["type"] == "http" else None
        await (rejection or self.app)(scope, receive, send)

    def _rejection(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        reason = rejection_reason(scope["method"], headers, local_only=self.key is None)
        if reason is not None:
            return error_response(*reason)
        key = headers.get("authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
        if self.key is not None and not hmac.compare_digest(key, self.key.encode()):
            message = "the key is missing or wrong: send it as `Authorization: Bearer KEY`"
            return error_response(401, message, code="invalid_api_key")
        return None


SLOTS_CPU, SLOTS_GPU = 8, 64
"""Completions decoded at once if --slots is not given."""


class CompletionServer(uvicorn.Server):
    """A model behind a socket. When stopped, it waits a moment for running responses, then ends."""

    def __init__(self, served: ServedModel, key: str | None = None) -> None:
        super().__init__(server_config(make_app(served, key)))


def api_key_for(host: str, name: str) -> tuple[str | None, bool]:
    """(the key, whether it is a new one): from environment variable ``name``, else a new key unless the address is local."""
    key = os.environ.get(name)
    if key is not None and len(key) < 8:
        raise RecipeError(
            name, "too short for a key", because="it could be guessed", fix="use 8 characters or more, or unset it"
        )
    if key is not None or is_loopback(host):
        return key, False
    return secrets.token_urlsafe(24), True


def serve(
    policy: Policy,
    name: str,
    host: str,
    port: int,
    *,
    key: str | None,
    slots: int | None,
    max_tokens: int,
    on_ready: Callable[[str], None],
    until_closed: bool = False,
) -> None:
    """Serves until Ctrl-C; with ``until_closed`` also until standard input closes, for programs that start it.

    ``on_ready`` is called with the address once the server answers.
    """
    with listen(host, port) as listening:
        slots = slots or (SLOTS_GPU if policy.device.type == "cuda" else SLOTS_CPU)
        engine = EngineThread(open_session(policy, slots, min(max_tokens, policy.max_positions)))
        server = CompletionServer(ServedModel(name, policy, engine), key)
        if until_closed:
            threading.Thread(target=stop_when_stdin_closes, args=(server,), daemon=True).start()
        threading.Thread(target=_report_when_ready, args=(server, on_ready, address_of(listening, host)), daemon=True).start()
        try:
            asyncio.run(server.serve(sockets=[listening]))
        finally:
            engine.close()


def stop_when_stdin_closes(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    server.should_exit = True


def _report_when_ready(server: uvicorn.Server, on_ready: Callable[[str], None], address: str) -> None:
    while not server.started:
        if server.should_exit:
            return
        threading.Event().wait(0.02)
    on_ready(address)
