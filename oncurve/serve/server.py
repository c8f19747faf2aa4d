"""The endpoint: /v1/models, /v1/chat/completions and /v1/completions, as OpenAI's clients call them; and serving it.

Each model's engine runs in one thread: requests come in from the event loop, and tokens go back to it.

Only that thread touches the session, so nothing needs a lock. Between decode steps it handles the commands that have arrived:
new requests get slots while others decode, and a request whose client has left frees its slots. All tokens of a step are sent
to the event loop at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, count
from typing import Any, TypeVar

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from oncurve.engines.base import Grammar, SampleRequest
from oncurve.engines.native.session import SampledToken, Session, open_session, served_request
from oncurve.errors import ModelError, OncurveError, RecipeError
from oncurve.local_http import (
    JsonBodies,
    KeyMiddleware,
    PrometheusMetric,
    address_of,
    is_loopback,
    listen,
    prometheus_response,
    server_config,
)
from oncurve.models.heads.divergence_head import most_likely
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft
from oncurve.records import Environment, Ints, Prompt, StatefulEnvironment
from oncurve.serve.chat_message import MessageReader
from oncurve.serve.detokenizer import IncrementalDetokenizer, StreamedText, TextDelta
from oncurve.serve.episode_call import EpisodeCall
from oncurve.serve.json_grammar import JsonGrammars, SchemaError
from oncurve.serve.openai_format import (
    ApiError,
    ChatBody,
    ChatFormatter,
    CompletionBody,
    CompletionChoice,
    ResponseFormatter,
    ScoredPrompt,
    TextBody,
    TextFormatter,
    error_response,
    error_text,
    install_error_handlers,
    token_id_text,
    usage,
)

T = TypeVar("T")
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


Task = Callable[[], None]
"""Work for the engine's thread, between two decode steps."""


class EngineLoop:
    """Runs a session in the thread that calls `run`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._commands: queue.SimpleQueue[_Submit | _Cancel | Task | None] = queue.SimpleQueue()
        self._calls = count()
        self._requests_of: dict[int, list[int]] = {}  # call -> the session's numbers of its requests
        self._subscribers: dict[int, tuple[_Subscriber, int]] = {}  # the session's number -> (subscriber, index in the call)
        self.completions = self.prompt_tokens = self.tokens_sampled = 0
        """Totals since the start, for /metrics."""

    def stop(self) -> None:
        """`run` returns after the current decode step."""
        self._commands.put(None)

    def call(self, task: Task) -> None:
        """Runs ``task`` in the engine's thread. What it raises, `run` raises."""
        self._commands.put(task)

    async def compute(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the engine's thread and returns its result. ``work`` needs the model, but no session."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def task() -> None:
            if not done.set_running_or_notify_cancel():  # nobody waits for it any more
                return
            try:
                done.set_result(work())
            except Exception as error:  # an error of one request must not end the server
                done.set_exception(error)

        self.call(task)
        return await asyncio.wrap_future(done)

    async def tokens(
        self, requests: Sequence[SampleRequest], gone: asyncio.Future[Any]
    ) -> AsyncGenerator[tuple[int, list[SampledToken]], None]:
        """Yields (index of the request, its new tokens) as tokens are sampled.

        Closing the generator early cancels the requests. Raises ClientGone once ``gone`` is done.
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

    def run(self) -> None:
        """Decodes, and waits for requests, until `stop` is called."""
        while self._handle_commands():
            try:
                sampled = self.session.step()
            except Exception as error:  # an error of one batch, such as out of memory, must not end the server
                self._fail(error)
                continue
            self.tokens_sampled += len(sampled)
            by_request: dict[int, list[SampledToken]] = {}
            for token in sampled:
                by_request.setdefault(token.request, []).append(token)
            failed = {number: RuntimeError(reason) for number, reason in self.session.failures.items()}
            self._publish({**by_request, **failed})
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
                self.completions += sum(request.samples for request in command.requests)
                self.prompt_tokens += sum(len(request.prompt_ids) for request in command.requests)
                self._subscribers |= {number: (command.subscriber, index) for index, number in enumerate(numbers)}
            elif callable(command):
                command()
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


class EngineThread(EngineLoop):
    """Runs a session in a thread of its own until it is closed."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends after the current decode step."""
        self.stop()
        self._thread.join()
        self.session.close()


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
    engine: EngineLoop
    created: int = field(default_factory=lambda: int(time.time()))
    environment: Environment | StatefulEnvironment | None = None
    """Runs the model's tool calls, if the server does that itself."""

    @property
    def has_chat_template(self) -> bool:
        return bool(self.policy.tokenizer.chat_template)

    def sample_request(self, prompt_ids: Ints, body: ChatBody | TextBody, seed: int) -> SampleRequest:
        """The engine's request. Raises ApiError if prompt and completion don't fit."""
        limit, context = self.engine.session.max_new_tokens, self.engine.session.context
        room = context - len(prompt_ids)
        asked = body.limit or 1
        if room < asked:
            if context == self.policy.max_positions:
                reason = f"the model has {context} positions"
            else:
                reason = f"the memory that is free for the KV cache holds {context} tokens"
            raise ApiError(
                400,
                f"a prompt of {len(prompt_ids)} tokens and a completion of {asked} don't fit: {reason}",
                "messages" if isinstance(body, ChatBody) else "prompt",
                "context_length_exceeded",
            )
        if asked > limit:
            message = f"{asked} tokens: this server generates at most {limit} (oncurve serve --max-tokens)"
            raise ApiError(400, message, "max_tokens")
        sampling = body.sampling(body.limit or min(body.default_tokens, limit, room))
        return served_request(prompt_ids, body.samples, sampling, seed, body.top)

    def encode_chat(self, body: ChatBody) -> Ints:
        prompt = Prompt("messages", messages=tuple(body.template_messages))
        self.check_chat()
        try:
            return self.policy.encode(prompt, body.template_tools)
        except ModelError as error:
            raise ApiError(400, error_text(error), "messages") from None

    @cached_property
    def _grammars(self) -> JsonGrammars:
        return JsonGrammars(self.policy)

    def grammar_of(self, body: ChatBody) -> Grammar | None:
        """The texts that `response_format` or `tool_choice` allows; None: any text. Raises ApiError."""
        response_format, functions = body.response_format, body.required_functions
        schema = None if response_format is None else response_format.schema_to_follow
        if schema is not None and body.template_tools:
            message = "response_format with tools: with JSON output the model could not call a tool; leave either out"
            raise ApiError(400, message, "response_format")
        key = "tool_choice" if functions else "response_format"
        if functions and getattr(self.policy.tokenizer, "response_template", None) is not None:
            raise ApiError(400, "tool_choice: this model writes calls in a form of its own, so none can be required", key)
        if (schema is not None or functions) and not self.engine.session.can_constrain:
            if response_format is not None and response_format.type == "json_object":
                return None
            what = "a required tool_choice" if functions else "json_schema"
            message = f"{what}: this server samples with CUDA graphs, which can't be constrained; serve the model on a CPU"
            raise ApiError(400, message, key)
        try:
            if functions:
                return self._grammars.compile_calls({function.name: function.schema_of_arguments for function in functions})
            return None if schema is None else self._grammars.compile(schema)
        except SchemaError as error:
            raise ApiError(400, f"{key}: {error}", key) from None

    def check_chat(self) -> None:
        if not self.has_chat_template:
            raise ApiError(400, f"{self.name} has no chat template: use /v1/completions", "messages")

    def check_columns(self, body: CompletionBody) -> None:
        if body.columns is not None and self.environment is None:
            raise ApiError(400, "columns: no environment runs here (oncurve serve --tools): leave them out", "columns")

    def encode_text(self, prompt: str | list[int]) -> Ints:
        if isinstance(prompt, str):
            return self.policy.encode(Prompt("prompt", text=prompt))
        vocabulary = int(self.policy.model.config.get_text_config().vocab_size)
        if max(prompt) >= vocabulary:
            raise ApiError(400, f"token {max(prompt)}: the model has {vocabulary} tokens", "prompt")
        return np.asarray(prompt, np.int64)

    @torch.inference_mode()
    def score(self, prompt_ids: Ints, top: int) -> ScoredPrompt:
        """The log-probs of a prompt's own tokens, at temperature 1. The first token follows nothing and has none."""
        limit = self.policy.max_positions
        if len(prompt_ids) > limit:
            message = f"a prompt of {len(prompt_ids)} tokens: the model has {limit} positions"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
        ids, logps, likely = prompt_ids.tolist(), list[float](), list[list[tuple[int, float]]]()
        if len(ids) > 1:
            pack = build_pack([PrefixGroup(prompt_ids[:1], (prompt_ids[1:],), (0,))], self.policy.device)
            hidden_MD = self.policy.pack_hidden(pack)
            logps_M, top_MK, ids_MK = most_likely(self.policy.head, hidden_MD, pack.target_M, top)
            logps = logps_M.tolist()
            likely = [list(zip(*row, strict=True)) for row in zip(ids_MK.tolist(), top_MK.tolist(), strict=True)]
        return ScoredPrompt(*self._text_and_offsets(ids), logps, likely)

    def _text_and_offsets(self, ids: list[int]) -> tuple[str, list[int], list[int]]:
        """The text of tokens, the tokens, and where in the text each of them begins."""
        text, texts = self._decode_all(ids), [self.token_text(token_id) for token_id in ids]
        if "".join(texts) != text:  # a character of several tokens, or a tokenizer whose tokens depend on those before
            detokenizer = IncrementalDetokenizer(self._decode_all)
            texts = [detokenizer.push(token_id) for token_id in ids]
        return text, ids, list(accumulate(map(len, texts), initial=0))[:-1]

    def _decode_all(self, ids: list[int]) -> str:
        return str(self.policy.tokenizer.decode(ids, skip_special_tokens=False))

    @property
    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        session = self.engine.session
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "oncurve"}
        card |= {"context": session.context, "max_tokens": session.max_new_tokens, "chat": self.has_chat_template}
        if self.environment is not None:
            card |= {"tools": [tool["function"]["name"] for tool in getattr(self.environment, "tools", ())]}
        return card

    @property
    def waiting(self) -> int:
        """Completions that wait for a slot."""
        return len(self.engine.session.waiting)

    @property
    def running(self) -> int:
        """Completions in a slot."""
        return max(0, sum(self.engine.session.unfinished.values()) - self.waiting)

    def decode(self, ids: list[int]) -> str:
        return str(self.policy.tokenizer.decode(ids, skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        return _token_text(self.policy, token_id)


@lru_cache(maxsize=200_000)
def _token_text(policy: Policy, token_id: int) -> str:
    return str(policy.tokenizer.decode([token_id], skip_special_tokens=False))


def read_metrics(models: Sequence[ServedModel]) -> Iterator[PrometheusMetric]:
    def values(value: Callable[[ServedModel], int]) -> list[tuple[dict[str, str], int]]:
        return [({"model": served.name}, value(served)) for served in models]

    yield PrometheusMetric(
        "oncurve_completions_total", "counter", "Completions begun.", values(lambda served: served.engine.completions)
    )
    yield PrometheusMetric(
        "oncurve_prompt_tokens_total", "counter", "Tokens of prompts.", values(lambda served: served.engine.prompt_tokens)
    )
    yield PrometheusMetric(
        "oncurve_prompt_tokens_kept_total",
        "counter",
        "Tokens of prompts that were in the KV cache.",
        values(lambda served: served.engine.session.runner.counts.kept),
    )
    yield PrometheusMetric(
        "oncurve_tokens_total", "counter", "Tokens sampled.", values(lambda served: served.engine.tokens_sampled)
    )
    yield PrometheusMetric("oncurve_running", "gauge", "Completions in a slot.", values(lambda served: served.running))
    yield PrometheusMetric(
        "oncurve_waiting", "gauge", "Completions that wait for a slot.", values(lambda served: served.waiting)
    )


def make_app(models: Sequence[ServedModel], key: str | None) -> ASGIApp:
    """The endpoint over some models. With ``key``, every request must send it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, title="Oncurve")
    install_error_handlers(app)

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [served.card for served in models]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        return find_model(models, name).card

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": sum(served.waiting for served in models)}

    @app.get("/metrics")
    def metrics() -> Response:
        return prometheus_response(read_metrics(models))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        served = find_model(models, body.model)
        served.check_columns(body)
        if served.environment is not None:
            return await _play(served, request, body)
        prompt = await asyncio.to_thread(served.encode_chat, body)  # a long prompt takes seconds
        tools = body.template_tools
        several = body.allows_several_calls
        to_message = MessageReader(served.policy, prompt, tools, len(body.messages), several) if tools else None
        grammar = await asyncio.to_thread(served.grammar_of, body)
        return await _respond(served, request, body, [prompt], partial(ChatFormatter, to_message=to_message), grammar)

    @app.post("/v1/completions")
    async def text(request: Request, body: TextBody) -> Response:
        served = find_model(models, body.model)
        served.check_columns(body)
        if served.environment is not None and not body.echo:
            return await _play(served, request, body)
        prompts = await asyncio.to_thread(lambda: [served.encode_text(prompt) for prompt in body.prompts])
        if body.echo:
            return await _score(served, request, body, prompts)
        return await _respond(served, request, body, prompts, TextFormatter)

    message = "the key is missing or wrong: send it as `Authorization: Bearer KEY`"
    wrong_key = error_response(401, message, code="invalid_api_key")
    return KeyMiddleware(JsonBodies(app, error_response), key, "authorization", wrong_key, error_response)


def find_model(models: Sequence[ServedModel], name: str) -> ServedModel:
    """The model that a request names. Raises ApiError."""
    by_name = {served.name: served for served in models}
    if name not in by_name:
        names = ", ".join(map(repr, by_name))
        raise ApiError(404, f"there is no model {name!r} here: this server has {names}", "model", "model_not_found")
    return by_name[name]


async def _score(served: ServedModel, http_request: Request, body: TextBody, prompts: Sequence[Ints]) -> Response:
    """The response to `echo`: one prompt at a time, so that completions continue to decode in between."""
    scored = []
    for ids in prompts:
        if await http_request.is_disconnected():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        scored.append(await served.engine.compute(partial(served.score, ids, body.top)))
    token_text = token_id_text if body.return_tokens_as_token_ids else served.token_text
    return JSONResponse(TextFormatter(served.name, token_text, True).scored(scored))


async def _respond(
    served: ServedModel,
    http_request: Request,
    body: ChatBody | TextBody,
    prompts: Sequence[Ints],
    formatter: Callable[[str, Callable[[int], str], bool], ResponseFormatter],
    grammar: Grammar | None = None,
) -> Response:
    _check_queue(served, len(prompts) * body.samples)
    seeds = [secrets.randbits(63) if body.seed is None else body.seed for _ in prompts]
    requests = [
        replace(served.sample_request(ids, body, seed), grammar=grammar) for ids, seed in zip(prompts, seeds, strict=True)
    ]
    as_ids = isinstance(body, TextBody) and body.return_tokens_as_token_ids
    format_response = formatter(served.name, token_id_text if as_ids else served.token_text, body.wants_logprobs)
    return await send_response(CompletionCall(served, requests, body.with_usage, format_response), http_request, body.stream)


async def _play(served: ServedModel, http_request: Request, body: ChatBody | TextBody) -> Response:
    """The response of a server that runs the model's tools itself."""
    _check_queue(served, body.samples)
    call = EpisodeCall(served, body, secrets.randbits(63) if body.seed is None else body.seed)
    return await send_response(call, http_request, body.stream)


def _check_queue(served: ServedModel, completions: int) -> None:
    if served.waiting + completions > MAX_WAITING:
        raise ApiError(429, f"more than {MAX_WAITING} completions would wait: try again later", code="overloaded")


async def send_response(call: CompletionCall | EpisodeCall, http_request: Request, stream: bool | None) -> Response:
    """The response to a call, complete or as a stream; the call is cancelled if the client leaves."""
    # The body has been read, so the next message that can arrive is that the client has disconnected.
    gone = asyncio.ensure_future(http_request.receive())
    if stream:
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
        held_back = [CompletionChoice() for _ in self.texts]
        try:
            async with aclosing(self.served.engine.tokens(self.requests, gone)) as rounds:
                async for prompt, tokens in rounds:
                    for choice, of_choice in self._by_choice(prompt, tokens):
                        for delta in self._deltas(choice, of_choice):
                            if self.formatter.holds_back:
                                held_back[choice].add(delta)
                                for chunk in self.formatter.finished_chunks(choice, held_back[choice]) if delta.finish else ():
                                    yield _event(chunk)
                            elif delta.text or delta.finish:
                                yield _event(self.formatter.chunk(choice, delta, choice not in started))
                                started.add(choice)
            if self.with_usage:
                yield _event(self.formatter.usage_chunk(self.usage))
            yield "data: [DONE]\n\n"
        except ClientGone:
            return
        except Exception as error:  # whatever the engine has raised
            text = error_text(error) if isinstance(error, OncurveError) else f"{type(error).__name__}: {error}"
            yield _event({"error": {"message": text, "type": "server_error", "param": None, "code": None}})
        finally:
            gone.cancel()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


SLOTS_CPU, SLOTS_GPU = 8, 64
"""Completions decoded at once if --slots is not given."""


class CompletionServer(uvicorn.Server):
    """Models behind a socket. When stopped, it waits a moment for running responses, then ends."""

    def __init__(self, *models: ServedModel, key: str | None = None) -> None:
        super().__init__(server_config(make_app(models, key)))


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """A model, its name for clients, and what runs its tool calls, if the server does."""

    name: str
    policy: Policy
    environment: Environment | StatefulEnvironment | None = None


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
    models: Sequence[ModelToServe],
    host: str,
    port: int,
    *,
    key: str | None,
    slots: int | None,
    max_tokens: int,
    draft: Draft = "off",
    on_ready: Callable[[str], None],
    until_closed: bool = False,
) -> None:
    """Serves until Ctrl-C. With ``until_closed`` it also stops when standard input closes, so that a program that starts the
    server can stop it.

    Each model has its own slots and thread. ``on_ready`` is called with the address once the server answers.
    """
    if len(models) > 1 and any(model.policy.device.type == "cuda" for model in models):
        raise ModelError(
            ", ".join(model.name for model in models),
            "several models on a GPU",
            because="the first would take all free memory for its KV cache",
            fix="start a server for each model, on different ports",
        )
    engines: list[EngineThread] = []
    with listen(host, port) as listening, ExitStack() as stack:
        for model in models:
            slots_of_model = slots or (SLOTS_GPU if model.policy.device.type == "cuda" else SLOTS_CPU)
            limit = min(max_tokens, model.policy.max_positions)
            engines.append(EngineThread(open_session(model.policy, slots_of_model, limit, draft)))
            stack.callback(engines[-1].close)
        pairs = zip(models, engines, strict=True)
        server = CompletionServer(*(ServedModel(m.name, m.policy, e, environment=m.environment) for m, e in pairs), key=key)
        if until_closed:
            threading.Thread(target=stop_when_stdin_closes, args=(server,), daemon=True).start()
        threading.Thread(target=report_when_ready, args=(server, on_ready, address_of(listening, host)), daemon=True).start()
        asyncio.run(server.serve(sockets=[listening]))


def stop_when_stdin_closes(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    server.should_exit = True


def report_when_ready(server: uvicorn.Server, on_ready: Callable[[str], None], address: str) -> None:
    while not server.started:
        if server.should_exit:
            return
        threading.Event().wait(0.02)
    on_ready(address)
