"""The endpoint that agents call while the run samples: /ROLLOUT/v1 with chat and text completions, and /ROLLOUT/v1/reward.

Each rollout has a base URL and a key of its own. Requests are read and answered as by `oncurve serve`. The policy is sampled as
the stage says: temperature, top-p and the like of a request are ignored, since the learner could not train on another
distribution. `max_tokens` and `stop` end a turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from oncurve.agent_programs.conversation import RolloutSequence, find_continued, find_continued_text
from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.native.session import SampledToken
from oncurve.errors import ModelError
from oncurve.local_http import JsonBodies, address_of, listen, read_key, rejection_reason, server_config
from oncurve.models.chat_template import encode_following, find_rewriting
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Ints, Message, Prompt
from oncurve.serve.chat_message import MessageReader
from oncurve.serve.detokenizer import StreamedText
from oncurve.serve.openai_format import (
    ApiError,
    ChatBody,
    ChatFormatter,
    CompletionBody,
    ResponseFormatter,
    StrictModel,
    TextBody,
    TextFormatter,
    ToMessage,
    error_response,
    error_text,
    install_error_handlers,
    token_id_text,
)
from oncurve.serve.openai_format import Message as ChatMessage
from oncurve.serve.server import CompletionCall, EngineLoop, ServedModel, find_model, send_response

Rounds = AsyncGenerator[tuple[int, list[SampledToken]], None]


@dataclass(eq=False)
class AgentRollout:
    """A rollout in progress: whose it is, how it is sampled, and its sequences so far.

    Calls change it in the endpoint's thread, until `end` is called in the engine's.
    """

    prompt: Prompt
    sample: int
    sampling: Sampling
    key: SampleKey
    served: ServedModel
    name: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    api_key: str = field(default_factory=lambda: f"oncurve-{secrets.token_urlsafe(24)}")
    sequences: list[RolloutSequence] = field(default_factory=list)
    turns: int = 0
    reward: float | None = None
    refusal: str | None = None
    """Why the last call that failed was refused."""
    ignored: set[str] = field(default_factory=set)
    """Sampling parameters that the agent asked for, and that the stage's own replace."""
    rewriting: str | None = None
    """How the chat template rewrites what was sampled, if it does."""
    _seen: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_over: bool = False

    def end(self) -> list[RolloutSequence]:
        """Ends a rollout and returns its sequences. Calls that are still running are dropped."""
        with self._lock:
            self._is_over = True
            return list(self.sequences)

    def request_for(
        self, context_ids: Ints, parts: tuple[int, ...], limit: int, stop: Sequence[str], top: int
    ) -> SampleRequest:
        """The engine's request for a turn. Its random numbers depend on the rollout and the tokens before it, and, if a call is
        repeated, on how often it was made. ``parts`` are the lengths of the contexts that it continues."""
        digest = hashlib.blake2b(context_ids.tobytes(), digest_size=16).hexdigest()
        self._seen[digest] += 1
        name = f"{self.prompt.id}/{self.sample}/{digest}/{self._seen[digest]}"
        sampling = self.sampling.model_copy(
            update={
                "max_new_tokens": limit,
                "min_new_tokens": min(self.sampling.min_new_tokens, limit),
                "stop": (*self.sampling.stop, *stop),
            }
        )
        return SampleRequest(Prompt(name, text=""), context_ids, 1, sampling, self.key, top, parts=parts)

    def commit(self, turn: PlannedTurn, tokens: Sequence[SampledToken]) -> None:
        """Adds a turn that has ended, before its response is sent."""
        delta = StreamedText(self.served.decode, turn.request.sampling.stop).push(*tokens)
        text = delta.text
        message = turn.to_message(text, [token.token_id for token, _ in delta.tokens])
        with self._lock:
            if self._is_over:
                return
            sequence = turn.sequence
            if sequence is None:
                sequence = RolloutSequence(turn.context_ids, None, turn.tools, "")
                self.sequences.append(sequence)
            sequence.prompt_lengths = [*(turn.request.parts or ()), len(turn.context_ids)]
            sequence.add_turn(turn.reply_ids, tokens, turn.room)
            if turn.messages is not None:
                sequence.messages = (*turn.messages, ChatMessage.model_validate(message).for_template())
            if sequence.messages is None and not turn.text.startswith(sequence.text):  # tokens that decode to another text
                sequence.lengths = [0] * len(sequence.lengths)
            sequence.text = turn.text + text
            sequence.lengths.append(len(sequence.text if sequence.messages is None else sequence.messages))
            sequence.replies.append(message)
            sequence.said.append(turn.new_messages)
            sequence.ended, self.turns = self.turns, self.turns + 1


def _plain_message(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class PlannedTurn:
    """What a call asks for: the sequence that it continues with ``reply_ids``, or a new one after ``context_ids``. ``room`` is
    how many tokens it could have by the stage's limit and the context."""

    sequence: RolloutSequence | None
    context_ids: Ints
    reply_ids: list[int]
    room: int
    request: SampleRequest
    messages: tuple[Message, ...] | None
    new_messages: tuple[Message, ...]
    tools: str
    text: str
    to_message: ToMessage = _plain_message


class RecordedCalls:
    """Stands for the engine in one call: passes its tokens on, and records the turn before the last of them."""

    def __init__(self, engine: EngineLoop, rollout: AgentRollout, turn: PlannedTurn) -> None:
        self.engine, self.rollout, self.turn, self.session = engine, rollout, turn, engine.session

    async def tokens(self, requests: Sequence[SampleRequest], gone: asyncio.Future[Any]) -> Rounds:
        tokens: list[SampledToken] = []
        rounds = self.engine.tokens(requests, gone)
        try:
            async for index, new in rounds:
                tokens += new
                if tokens[-1].stop is not None:
                    self.rollout.commit(self.turn, tokens)
                yield index, new
        finally:
            await rounds.aclose()
            if self.turn.sequence is not None:
                self.turn.sequence.is_busy = False


class RewardBody(StrictModel):
    """POST /v1/reward."""

    reward: float


class AgentEndpoint:
    """The server, for all rollouts of a run. It starts with the first of them, in a thread of its own."""

    def __init__(self, port: int) -> None:
        self.rollouts: dict[str, AgentRollout] = {}
        self._listening = listen("127.0.0.1", port)
        self.address = address_of(self._listening, "127.0.0.1")
        self._server = uvicorn.Server(server_config(make_app(self.rollouts)))
        self._thread = threading.Thread(target=self._serve, name="agents' endpoint", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listening]))

    def add(self, rollout: AgentRollout) -> dict[str, str]:
        """The environment variables by which an agent finds its endpoint."""
        self.rollouts[rollout.name] = rollout
        direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        direct = direct if direct.strip() == "*" else ",".join(filter(None, (direct, "127.0.0.1")))
        return {
            "no_proxy": direct,  # a proxy does not reach this machine
            "NO_PROXY": direct,
            "OPENAI_BASE_URL": f"{self.address}/{rollout.name}/v1",
            "OPENAI_API_KEY": rollout.api_key,
            "OPENAI_MODEL": rollout.served.name,
        }

    def remove(self, rollout: AgentRollout) -> None:
        self.rollouts.pop(rollout.name, None)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()


def make_app(rollouts: dict[str, AgentRollout]) -> ASGIApp:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, title="Oncurve")
    install_error_handlers(app)

    @app.get("/{name}/v1/models")
    def models(name: str) -> dict[str, Any]:
        served = rollouts[name].served
        card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "oncurve"}
        return {"object": "list", "data": [card]}

    @app.post("/{name}/v1/chat/completions")
    async def chat(name: str, request: Request, body: ChatBody) -> Response:
        rollout = rollouts[name]
        _check(rollout, body)
        if body.response_format is not None and body.response_format.json_schema is not None:
            message = "json_schema: the model has to be trained on unconstrained samples; ask for JSON in the prompt instead"
            raise ApiError(400, message, "response_format")
        if body.response_format is not None and body.response_format.type == "json_object":
            rollout.ignored.add("response_format json_object")
        if body.required_functions:
            message = (
                "tool_choice: the model has to be trained on unconstrained samples; ask for the call in the prompt instead"
            )
            raise ApiError(400, message, "tool_choice")
        turn = await plan_chat(rollout, body)
        formatter = partial(ChatFormatter, to_message=turn.to_message if body.template_tools else None)
        return await _respond(rollout, turn, request, body, formatter)

    @app.post("/{name}/v1/completions")
    async def text(name: str, request: Request, body: TextBody) -> Response:
        rollout = rollouts[name]
        _check(rollout, body)
        return await _respond(rollout, await plan_text(rollout, body), request, body, TextFormatter)

    @app.post("/{name}/v1/reward")
    async def reward(name: str, body: RewardBody) -> dict[str, float]:
        rollouts[name].reward = body.reward
        return {"reward": body.reward}

    return RolloutGate(JsonBodies(app, error_response), rollouts)


def _check(rollout: AgentRollout, body: CompletionBody) -> None:
    served = rollout.served
    try:
        find_model([served], body.model)
    except ApiError as error:
        fix = f'ask for the name in $OPENAI_MODEL, or set task.model_name = "{body.model}"'
        raise ApiError(error.status, f"{error.message}; {fix}", error.param, error.code) from None
    served.check_columns(body)
    if body.samples > 1:
        raise ApiError(400, f"n = {body.samples}: an agent gets one completion for each call; call again for more", "n")
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = getattr(body, name)
        if value is not None and value != getattr(rollout.sampling, name):
            rollout.ignored.add(f"{name} {value:g}")
    if body.seed is not None:
        rollout.ignored.add("seed")


async def plan_chat(rollout: AgentRollout, body: ChatBody) -> PlannedTurn:
    """The turn of a chat call. The sequence that it continues is busy from now on."""
    policy, messages, tools = rollout.served.policy, tuple(body.template_messages), body.template_tools
    tools_json = json.dumps(tools, sort_keys=True)
    if not rollout.served.has_chat_template:
        raise ApiError(400, f"{rollout.served.name} has no chat template: use /v1/completions", "messages")
    found = find_continued(rollout.sequences, messages, tools_json)
    if found is None:
        context_ids = await asyncio.to_thread(rollout.served.encode_chat, body)
        return _plan(rollout, body, None, context_ids, [], (), messages, messages, tools_json, "", tools)
    sequence, turn, new = found.sequence, found.turn, found.new
    continued, known_ids, parts = None if found.branches else sequence, sequence.ids_after(turn), found.parts
    if continued is not None:
        continued.is_busy = True
    try:
        before = (sequence.messages or ())[: sequence.lengths[turn]]
        encode = partial(encode_following, policy, before, new, rollout.prompt.id, tools)
        reply_ids = await asyncio.to_thread(encode, ended=sequence.stops[turn] == "end")
        sampled_ids = np.concatenate((known_ids, np.asarray(reply_ids, np.int64)))
        written_ids = await asyncio.to_thread(_rewritten, rollout, body, turn, sampled_ids)
        if written_ids is not None:
            if continued is not None:
                continued.is_busy = False
            return _plan(rollout, body, None, written_ids, [], (), messages, messages, tools_json, "", tools)
        return _plan(rollout, body, continued, known_ids, reply_ids, parts, messages, new, tools_json, "", tools)
    except BaseException as error:
        if continued is not None:
            continued.is_busy = False
        if isinstance(error, ModelError):
            raise ApiError(400, error_text(error), "messages") from None
        raise


def _rewritten(rollout: AgentRollout, body: ChatBody, turn: int, sampled_ids: Ints) -> Ints | None:
    """With ``history = "template"``: the conversation as the chat template renders it, if its text differs from the sampled
    one.

    Otherwise None, so that the sampled tokens stay. When a sequence is first continued, the rollout records what the template
    would have rewritten.
    """
    by_template = rollout.prompt.history == "template"
    if not by_template and (rollout.rewriting is not None or turn > 0):
        return None
    try:
        written_ids = rollout.served.encode_chat(body)
    except ApiError:  # a template may refuse what the recorded tokens can continue
        if by_template:
            raise
        return None
    rewriting = find_rewriting(rollout.served.policy, sampled_ids, written_ids)
    if rewriting is not None and by_template:
        return written_ids
    rollout.rewriting = rollout.rewriting or rewriting
    return None


async def plan_text(rollout: AgentRollout, body: TextBody) -> PlannedTurn:
    """The turn of a text completion."""
    served = rollout.served
    if len(body.prompts) > 1:
        raise ApiError(400, "several prompts: an agent gets one completion for each call; call again for more", "prompt")
    if body.echo:
        raise ApiError(400, "echo: an agent's endpoint samples completions only; it scores no prompts", "echo")
    prompt = body.prompts[0]
    found = find_continued_text(rollout.sequences, prompt)
    shown = prompt if isinstance(prompt, str) else served.decode(prompt)
    said = ({"role": "user", "content": shown},)
    if found is None:
        context_ids = await asyncio.to_thread(served.encode_text, prompt)
        return _plan(rollout, body, None, context_ids, [], (), None, said, "", shown)
    new, known_ids, parts = found.new, found.sequence.ids_after(found.turn), found.parts
    sequence = None if found.branches else found.sequence
    ids = served.policy.tokenizer(new, add_special_tokens=False)["input_ids"] if isinstance(new, str) else list(new)
    said = ({"role": "user", "content": new if isinstance(new, str) else served.decode(ids)},)
    if sequence is not None:
        sequence.is_busy = True
    try:
        return _plan(rollout, body, sequence, known_ids, ids, parts, None, said, "", shown)
    except BaseException:
        if sequence is not None:
            sequence.is_busy = False
        raise


def _plan(
    rollout: AgentRollout,
    body: ChatBody | TextBody,
    sequence: RolloutSequence | None,
    known_ids: Ints,
    reply_ids: list[int],
    parts: tuple[int, ...],
    messages: tuple[Message, ...] | None,
    new_messages: tuple[Message, ...],
    tools: str,
    text: str,
    tool_schemas: Sequence[Mapping[str, Any]] = (),
) -> PlannedTurn:
    """A turn after ``known_ids`` and ``reply_ids``. If it continues no sequence, they are the context of a new one. A sequence
    that has reached its length limit is not continued. ``parts`` are the lengths of earlier contexts that it continues."""
    context_ids = np.concatenate((known_ids, np.asarray(reply_ids, np.int64)))
    limit, policy, context = rollout.sampling.max_new_tokens, rollout.served.policy, rollout.served.engine.session.context
    room = 0 if sequence is None else limit - len(sequence.token_ids) - len(reply_ids)
    if sequence is not None and room < 1:
        sequence.is_busy = False
        sequence = None
    room = min(limit if sequence is None else room, context - len(context_ids))
    if room < 1:
        raise ApiError(
            400,
            f"a conversation of {len(context_ids)} tokens: the sampler's context has {context} positions",
            "messages" if messages is not None else "prompt",
            "context_length_exceeded",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    to_message: ToMessage = _plain_message
    if tool_schemas and isinstance(body, ChatBody):
        to_message = MessageReader(policy, context_ids, tool_schemas, len(messages or ()), body.allows_several_calls)
    request = rollout.request_for(context_ids, parts, min(room, body.limit or room), stop, body.top)
    added_ids = [] if sequence is None else reply_ids
    return PlannedTurn(sequence, context_ids, added_ids, room, request, messages, new_messages, tools, text, to_message)


async def _respond(
    rollout: AgentRollout,
    turn: PlannedTurn,
    request: Request,
    body: ChatBody | TextBody,
    formatter: Callable[[str, Callable[[int], str], bool], ResponseFormatter],
) -> Response:
    served = replace(rollout.served, engine=cast(EngineLoop, RecordedCalls(rollout.served.engine, rollout, turn)))
    as_ids = isinstance(body, TextBody) and body.return_tokens_as_token_ids
    response = formatter(served.name, token_id_text if as_ids else served.token_text, body.wants_logprobs)
    return await send_response(CompletionCall(served, [turn.request], body.with_usage, response), request, body.stream)


class RolloutGate:
    """Lets a request through if it has its rollout's key, and remembers why one was refused."""

    def __init__(self, app: ASGIApp, rollouts: dict[str, AgentRollout]) -> None:
        self.app, self.rollouts = app, rollouts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        rollout = self.rollouts.get(scope["path"].split("/")[1])
        rejection, is_error = self._rejection(scope, rollout), False

        async def send_and_note(message: AsgiMessage) -> None:
            nonlocal is_error
            if message["type"] == "http.response.start":
                is_error = message["status"] >= 400
            elif rollout is not None and is_error and message.get("body"):
                rollout.refusal = _message_of(message["body"])
            await send(message)

        await (rejection or self.app)(scope, receive, send_and_note)

    def _rejection(self, scope: Scope, rollout: AgentRollout | None) -> Response | None:
        headers = Headers(scope=scope)
        reason = rejection_reason(scope["method"], headers, local_only=True)
        if reason is not None:
            return error_response(*reason)
        if rollout is None:
            return error_response(404, "there is no such rollout, or it has ended: use $OPENAI_BASE_URL")
        if not hmac.compare_digest(read_key(headers.get("authorization", "")), rollout.api_key.encode()):
            return error_response(401, "the key is missing or wrong: use $OPENAI_API_KEY", code="invalid_api_key")
        return None


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:200]
