"""The HTTP interface that the Tinker SDK calls, version 0.36, and serving it.

Requests that need the model return a future at once, and the SDK polls for its result (`retrieve_future`). A malformed request
gets an HTTP error. A request that fails later gets a failed future, with the category `user` if the sender can fix the reason.
Unknown keys of a body are refused by name.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from oncurve.errors import OncurveError, RecipeError
from oncurve.local_http import JSON, JsonBodies, KeyMiddleware, address_of, listen, server_config
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.serve.openai_format import error_text
from oncurve.serve.server import api_key_for, report_when_ready, stop_when_stdin_closes
from oncurve.tinker.adapters import (
    AdamSettings,
    AdapterHost,
    AdapterShape,
    AdapterWeights,
    RefusedRequest,
    SamplePrompt,
    SampleSettings,
    TrainedAdapter,
)
from oncurve.tinker.protobuf import (
    ProtobufError,
    SampleOutput,
    TrainingRequest,
    read_training_request,
    write_sample_output,
    write_training_output,
)
from oncurve.tinker.saved_adapters import Description, SavedAdapters, SavedPath
from oncurve.tinker.work_queue import WorkQueue

PROTOBUF = "application/x-protobuf"
POLL_S = 20.0
"""How long a request for a result waits; the SDK then asks again."""
MAX_RETRIEVED = 1000
"""Results that are kept after they were sent, in case the SDK did not get them."""
SESSION_SILENCE_S = 1800.0
"""A session without a heartbeat or another request for so long is forgotten when the next one starts."""
MAX_SNAPSHOTS = 8
"""How many unnamed snapshots for sampling are kept for each model, and how many saved adapters stay in memory."""
MAX_WAITING = 4096
MAX_TOP = 20
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False, "use_pyqwest_transport": False,
    "create_model_via_load_weights": False, "sample_use_retrieve_futures": False, "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}  # fmt: skip
"""The answer when the SDK asks for the server's configuration. With it, requests for one model arrive in order."""


class Body(BaseModel):
    """A request's body. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    type: str | None = None


class SessionBody(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(Body):
    session_id: str


class LoraBody(Body):
    rank: Annotated[int, Field(ge=1, le=1024)]
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def shape(self) -> AdapterShape:
        return AdapterShape(self.rank, self.train_attn, self.train_mlp, self.train_unembed)


class OptimiserBody(Body):
    type: Literal["adamw"] = "adamw"


class ModelBody(Body):
    session_id: str
    model_seq_id: Annotated[int, Field(ge=0, lt=1_000_000_000)]
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody
    optimizer_config: OptimiserBody = OptimiserBody()


class ModelIdBody(Body):
    model_id: str


class TrainingBody(Body):
    model_id: str
    seq_id: int


class AdamBody(Body):
    """The SDK's `AdamParams`, with its defaults."""

    learning_rate: NonNegativeFloat = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: NonNegativeFloat = 1e-12
    weight_decay: NonNegativeFloat = 0.0
    grad_clip_norm: NonNegativeFloat = 0.0

    @property
    def settings(self) -> AdamSettings:
        return AdamSettings(**self.model_dump(exclude={"type"}))


class OptimStepBody(TrainingBody):
    adam_params: AdamBody


class SaveBody(TrainingBody):
    path: str | None = None
    ttl_seconds: PositiveInt | None = None
    user_metadata: dict[str, str] | None = None


class SaveStateBody(SaveBody):
    path: str
    overwrite: bool = False


class SaveForSamplerBody(SaveBody):
    sampling_session_seq_id: int | None = None


class LoadBody(TrainingBody):
    path: str
    optimizer: bool


class SamplingSessionBody(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]]


class ModelInputBody(Body):
    chunks: list[ChunkBody]


class SamplingParamsBody(Body):
    max_tokens: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: NonNegativeFloat = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(Body):
    sampling_session_id: str
    seq_id: int
    prompt: ModelInputBody
    sampling_params: SamplingParamsBody
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    prompt_logprobs_last_n: PositiveInt | None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


class RetrieveBody(Body):
    request_id: str
    allow_metadata_only: bool = False


class PathBody(Body):
    tinker_path: str


@dataclass
class Sampler:
    """A sampling session: an adapter that never changes, or the base model. Saved weights are read when they are needed."""

    model_id: str | None = None
    weights: AdapterWeights | None = None
    path: SavedPath | None = None


@dataclass
class Futures:
    """Results by the id of their request, until they have been sent."""

    results: dict[str, Future[Any]] = field(default_factory=dict)
    retrieved: deque[str] = field(default_factory=deque)

    def add(self, request_id: str, start: Callable[[], Future[Any]]) -> str:
        """Adds a request. If the SDK sends it again, because it got no answer, it still runs once."""
        if request_id not in self.results:
            self.results[request_id] = start()
        return request_id

    @property
    def waiting(self) -> int:
        """Requests that have not run yet."""
        return sum(not future.done() for future in list(self.results.values()))

    def forget(self, session_id: str) -> None:
        """Forgets the results of a session that has ended: nobody asks for them."""
        for name in [name for name in list(self.results) if name.startswith(f"{session_id}:")]:
            self.results.pop(name, None)

    def mark_retrieved(self, request_id: str) -> None:
        self.retrieved.append(request_id)
        if len(self.retrieved) > MAX_RETRIEVED:
            self.results.pop(self.retrieved.popleft(), None)


class TinkerService:
    """What the endpoints do: sessions, models, samplers and futures. Only the work queue's thread runs models."""

    def __init__(self, policy: Policy, names: Sequence[str], folder: Path, max_tokens: int) -> None:
        self.names, self.max_tokens = tuple(names), min(max_tokens, policy.max_positions - 1)
        self.host, self.queue = AdapterHost(policy, names[-1]), WorkQueue()
        self.saved, self.futures = SavedAdapters(folder, names[-1]), Futures()
        self.sessions: dict[str, float] = {}
        """When each one was last heard of, in seconds of a monotonic clock."""
        self.models: dict[str, TrainedAdapter | None] = {}
        """None while a model is being created."""
        self.samplers: dict[str, Sampler] = {}
        self._read: OrderedDict[tuple[SavedPath, float], AdapterWeights] = OrderedDict()
        """Saved weights by their path and when they were saved: they may be overwritten or deleted."""
        self.tokenizer_folder = folder / "tokenizer"
        policy.tokenizer.save_pretrained(self.tokenizer_folder)

    @property
    def name(self) -> str:
        return self.names[0]

    def start_session(self) -> str:
        """A new session. Silent sessions are forgotten: their client has crashed, as the SDK sends heartbeats."""
        for session_id, heard in list(self.sessions.items()):
            if time.monotonic() - heard > SESSION_SILENCE_S:
                self.finish(session_id)
        session_id = uuid.uuid4().hex
        self.sessions[session_id] = time.monotonic()
        return session_id

    def check_session(self, session_id: str) -> None:
        if session_id not in self.sessions:
            raise HTTPException(
                404, f"there is no session {session_id!r}: it sent no heartbeat for long, or the server has been restarted"
            )
        self._hear(session_id)

    def _hear(self, name: str) -> None:
        """The client of a session, or of one of its models or samplers, is alive."""
        session_id = name.partition(":")[0]
        if session_id in self.sessions:
            self.sessions[session_id] = time.monotonic()

    def check_base(self, base_model: str) -> None:
        if base_model not in self.names:
            raise RefusedRequest(f"there is no base model {base_model!r} here: this server has {self.name!r}")

    def model(self, model_id: str) -> TrainedAdapter:
        model = self.models.get(model_id)
        self._hear(model_id)
        if model is None:
            raise RefusedRequest(f"there is no model {model_id!r}: it was not created, or the server has been restarted")
        return model

    def finish(self, session_id: str) -> None:
        """Forgets the models, samplers and results of a session. Adapters that the session saved stay on disk."""
        self.sessions.pop(session_id, None)
        self.futures.forget(session_id)
        for known in (self.models, self.samplers):
            for name in [name for name in list(known) if name.startswith(f"{session_id}:")]:
                known.pop(name, None)

    def training_run(self, model_id: str) -> dict[str, Any]:
        """The SDK's `TrainingRun`, of a model in memory or of one that was saved."""
        saved, model = self.saved.list_of(model_id), self.models.get(model_id)
        if model is None and not saved:
            raise HTTPException(404, f"there is no training run {model_id!r}")
        shape = self.saved.describe(SavedPath.parse(saved[0]["tinker_path"])).shape if model is None else model.weights.shape
        now = datetime.now(UTC).isoformat()
        return {
            "training_run_id": model_id, "base_model": self.name, "model_owner": "local", "is_lora": True,
            "lora_rank": shape.rank, "last_request_time": saved[0]["time"] if model is None else now,
            "last_checkpoint": next((each for each in saved if each["checkpoint_type"] == "training"), None),
            "last_sampler_checkpoint": next((each for each in saved if each["checkpoint_type"] == "sampler"), None),
        }  # fmt: skip

    def start(self, request_id: str, work: Callable[[], Any]) -> str:
        return self.futures.add(request_id, lambda: self.queue.submit(work))

    def create_model(self, body: ModelBody) -> tuple[str, str]:
        """(the request's id, the model's id)."""
        self.check_session(body.session_id)
        self.check_base(body.base_model)
        shape = body.lora_config.shape
        if not (shape.attention or shape.mlp or shape.head):
            raise RefusedRequest("train_attn, train_mlp and train_unembed are all false: nothing would be trained")
        model_id = f"{body.session_id}:train:{body.model_seq_id}"

        def work() -> dict[str, Any]:
            if body.session_id not in self.sessions:
                raise RefusedRequest("the session has ended")
            self.models[model_id] = self.host.create(shape, body.lora_config.seed or 0)
            return {"model_id": model_id, "type": "create_model"}

        return self.start(f"{model_id}:0", work), model_id

    def forward_backward(self, request: TrainingRequest) -> str:
        def work() -> bytes:
            out = self.host.forward_backward(
                self.model(request.model_id), request.data, request.loss, request.config, request.forward_only
            )
            return write_training_output(out.logps, {"loss:sum": out.loss})

        return self.start(_request_id(request.model_id, request.seq_id), work)

    def optim_step(self, body: OptimStepBody) -> str:
        def work() -> dict[str, Any]:
            return {"metrics": self.model(body.model_id).update(body.adam_params.settings)}

        return self.start(_request_id(body.model_id, body.seq_id), work)

    def save_state(self, body: SaveStateBody) -> str:
        def work() -> dict[str, Any]:
            model = self.model(body.model_id)
            path = SavedPath.of(body.model_id, "weights", body.path)
            self.saved.save(path, model.weights, model.moments(), self._description(model, body), body.overwrite)
            return {"path": str(path), "type": "save_weights"}

        return self.start(_request_id(body.model_id, body.seq_id), work)

    def save_for_sampler(self, body: SaveForSamplerBody) -> str:
        def work() -> dict[str, Any]:
            model = self.model(body.model_id)
            if body.path is None:
                return {"sampling_session_id": self._snapshot(body, model), "type": "save_weights_for_sampler"}
            path = SavedPath.of(body.model_id, "sampler_weights", body.path)
            self.saved.save(path, model.weights, None, self._description(model, body), overwrite=False)
            return {"path": str(path), "type": "save_weights_for_sampler"}

        return self.start(_request_id(body.model_id, body.seq_id), work)

    def _snapshot(self, body: SaveForSamplerBody, model: TrainedAdapter) -> str:
        if body.sampling_session_seq_id is None:
            raise RefusedRequest("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        of_model = [sampler for sampler in self.samplers.values() if sampler.model_id == body.model_id and sampler.weights]
        for sampler in of_model[: len(of_model) - MAX_SNAPSHOTS + 1]:
            sampler.weights = None
        session_id = body.model_id.partition(":")[0]
        return self._add_sampler(session_id, body.sampling_session_seq_id, Sampler(body.model_id, model.weights.copy()))

    def _description(self, model: TrainedAdapter, body: SaveBody) -> Description:
        now = time.time()
        expires = None if body.ttl_seconds is None else now + body.ttl_seconds
        return Description(self.name, model.weights.shape, now, expires, body.user_metadata)

    def load_state(self, body: LoadBody) -> str:
        def work() -> dict[str, Any]:
            model, path = self.model(body.model_id), SavedPath.parse(body.path)
            self.check_base(self.saved.describe(path).base_model)
            moments = self.saved.load_moments(path) if body.optimizer else None
            model.load(self.saved.load(path, self.host.base.device), moments)
            return {"path": str(path), "model_id": body.model_id, "type": "load_weights"}

        return self.start(_request_id(body.model_id, body.seq_id), work)

    def create_sampler(self, body: SamplingSessionBody) -> str:
        self.check_session(body.session_id)
        if body.model_path is None:
            self.check_base(body.base_model or "")
            sampler = Sampler()
        else:
            path = SavedPath.parse(body.model_path)
            self.check_base(self.saved.describe(path).base_model)
            sampler = Sampler(path=path)
        return self._add_sampler(body.session_id, body.sampling_session_seq_id, sampler)

    def _add_sampler(self, session_id: str, seq_id: int, sampler: Sampler) -> str:
        sampler_id = f"{session_id}:sample:{seq_id}"
        self.samplers[sampler_id] = sampler
        return sampler_id

    def sampler(self, sampler_id: str) -> Sampler:
        self._hear(sampler_id)
        if sampler_id not in self.samplers:
            raise RefusedRequest(f"there is no sampling session {sampler_id!r}: the server may have been restarted")
        return self.samplers[sampler_id]

    def sample(self, body: SampleBody) -> tuple[str, list[str]]:
        """(the request's id, the ids of its sequences)."""
        sampler = replace(self.sampler(body.sampling_session_id))  # it keeps its weights until the request has run
        if sampler.model_id is not None and sampler.weights is None:
            raise RefusedRequest(
                f"this sampling session is too old: only the last {MAX_SNAPSHOTS} snapshots of a model are kept; save weights "
                "that you need longer with save_weights_for_sampler(name)"
            )
        settings, prompt = self._sample_settings(body), _sample_prompt(body)
        self.host.check_prompt(prompt, settings.sampling.max_new_tokens)
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        key = (body.sampling_session_id, settings)

        def work(prompts: Sequence[SamplePrompt]) -> list[bytes]:
            outputs: list[SampleOutput] = self.host.sample(self._weights_of(sampler), prompts, settings)
            return [write_sample_output(output) for output in outputs]

        self.futures.add(request_id, lambda: self.queue.submit_batched(key, prompt, work))
        return request_id, [f"{request_id}:{index}" for index in range(body.num_samples)]

    def _sample_settings(self, body: SampleBody) -> SampleSettings:
        params, length = body.sampling_params, sum(len(chunk.tokens) for chunk in body.prompt.chunks)
        if params.max_tokens is not None and params.max_tokens > self.max_tokens:
            raise RefusedRequest(
                f"max_tokens = {params.max_tokens}: this server samples at most {self.max_tokens} (--max-tokens)"
            )
        limit = params.max_tokens or max(1, min(self.max_tokens, self.host.base.max_positions - length))
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        strings = tuple(s for s in stop or () if isinstance(s, str))
        if "" in strings:
            raise RefusedRequest("an empty stop string would end every completion at once")
        ends = None if stop is None or strings else tuple(token for token in stop if isinstance(token, int))
        if ends is not None and not all(0 <= token < self.host.vocabulary for token in ends):
            raise RefusedRequest(f"stop has a token that the model's vocabulary of {self.host.vocabulary} tokens lacks")
        sampling = Sampling(
            temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0), max_new_tokens=limit, stop=strings
        )
        return SampleSettings(sampling, body.num_samples, ends)

    def _weights_of(self, sampler: Sampler) -> AdapterWeights | None:
        if sampler.path is None:
            return sampler.weights
        key = sampler.path, self.saved.describe(sampler.path).created
        if key not in self._read:
            self._read[key] = self.saved.load(sampler.path, self.host.base.device)
            if len(self._read) > MAX_SNAPSHOTS:
                self._read.popitem(last=False)
        self._read.move_to_end(key)
        return self._read[key]

    async def result(self, request_id: str) -> Response:
        """The result of a request, or a reply that it is not ready yet."""
        self._hear(request_id)
        future = self.futures.results.get(request_id)
        if future is None:
            raise HTTPException(404, f"there is no request {request_id!r}: the server may have been restarted")
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([waiting], timeout=POLL_S)
        if not done:
            again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(again, 408)
        self.futures.mark_retrieved(request_id)
        error = waiting.exception()
        if error is not None:
            is_users = isinstance(error, RefusedRequest | OncurveError)
            return JSONResponse({"error": _message_of(error), "category": "user" if is_users else "server"})
        result = waiting.result()
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)


def _request_id(model_id: str, seq_id: int) -> str:
    if seq_id < 1:
        raise RefusedRequest(f"seq_id = {seq_id}: the first request of a model has 1")
    return f"{model_id}:{seq_id}"


def _sample_prompt(body: SampleBody) -> SamplePrompt:
    ids = np.asarray([token for chunk in body.prompt.chunks for token in chunk.tokens], np.int64)
    scored = None
    if body.prompt_logprobs:
        scored = body.prompt_logprobs_last_n or max(len(ids) - 1, 0)
    if body.prompt_logprobs_last_n is not None and (not body.prompt_logprobs or body.prompt_logprobs_last_n > len(ids) - 1):
        raise RefusedRequest("prompt_logprobs_last_n needs prompt_logprobs, and must be less than the prompt's length")
    return SamplePrompt(ids, body.sampling_params.seed, scored, body.topk_prompt_logprobs, body.topk_sample_logprobs)


def _message_of(error: BaseException) -> str:
    if isinstance(error, RefusedRequest | ProtobufError):
        return str(error)
    return error_text(error) if isinstance(error, OncurveError) else f"{type(error).__name__}: {error}"


def error_response(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message}, status)


def make_app(service: TinkerService, key: str | None) -> ASGIApp:
    """The endpoints. With ``key``, every request must send it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, title="Oncurve")
    _install_error_handlers(app)

    def promise(request_id: str, **more: Any) -> dict[str, Any]:
        return {"request_id": request_id, **more}

    @app.get("/api/v1/healthz")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/v1/get_server_capabilities")
    def capabilities() -> dict[str, Any]:
        context = service.host.base.max_positions
        model = {"model_name": service.name, "max_context_length": context, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    @app.post("/api/v1/client/config")
    def client_config(body: dict[str, Any]) -> dict[str, Any]:
        return CLIENT_CONFIG

    @app.post("/api/v1/client/dynamic_config")
    def client_dynamic_config(body: dict[str, Any]) -> dict[str, Any]:
        return {"sample_cancel_enabled": False}

    @app.post("/api/v1/telemetry")
    def telemetry(body: dict[str, Any]) -> dict[str, str]:
        return {"status": "accepted"}  # and dropped

    @app.post("/api/v1/create_session")
    def create_session(body: SessionBody) -> dict[str, Any]:
        return {"type": "create_session", "session_id": service.start_session()}

    @app.post("/api/v1/session_heartbeat")
    def heartbeat(body: HeartbeatBody) -> dict[str, str]:
        service.check_session(body.session_id)
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session_id}/finish")
    async def finish(session_id: str, body: dict[str, Any]) -> Response:
        service.finish(session_id)
        return Response(status_code=204)

    @app.post("/api/v1/create_model")
    async def create_model(body: ModelBody) -> dict[str, Any]:
        request_id, model_id = service.create_model(body)
        return promise(request_id, model_id=model_id)

    @app.post("/api/v1/get_info")
    async def get_info(body: ModelIdBody) -> dict[str, Any]:
        rank = service.model(body.model_id).weights.shape.rank
        architecture = type(service.host.base.model).__name__
        data = {"arch": architecture, "model_name": service.name, "tokenizer_id": str(service.tokenizer_folder.resolve())}
        return {
            "type": "get_info", "model_data": data, "model_id": body.model_id, "is_lora": True, "lora_rank": rank,
            "model_name": service.name,
        }  # fmt: skip

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        if request.headers.get("content-encoding"):
            raise HTTPException(415, "the body is compressed: this server's configuration tells clients not to compress")
        training = await asyncio.to_thread(read_training_request, await request.body())
        return promise(service.forward_backward(training), model_id=training.model_id)

    @app.post("/api/v1/optim_step")
    async def optim_step(body: OptimStepBody) -> dict[str, Any]:
        return promise(service.optim_step(body), model_id=body.model_id)

    @app.post("/api/v1/save_weights")
    async def save_weights(body: SaveStateBody) -> dict[str, Any]:
        return promise(service.save_state(body), model_id=body.model_id)

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_weights_for_sampler(body: SaveForSamplerBody) -> dict[str, Any]:
        return promise(service.save_for_sampler(body), model_id=body.model_id)

    @app.post("/api/v1/load_weights")
    async def load_weights(body: LoadBody) -> dict[str, Any]:
        return promise(service.load_state(body), model_id=body.model_id)

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(body: SamplingSessionBody) -> dict[str, Any]:
        return {"type": "create_sampling_session", "sampling_session_id": service.create_sampler(body)}

    @app.post("/api/v1/asample")
    async def asample(body: SampleBody) -> dict[str, Any]:
        if service.futures.waiting >= MAX_WAITING:
            raise HTTPException(429, f"more than {MAX_WAITING} requests wait: try again later")
        request_id, sequence_ids = service.sample(body)
        return promise(request_id, sample_sequence_ids=sequence_ids)

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(body: RetrieveBody) -> Response:
        return await service.result(body.request_id)

    @app.post("/api/v1/weights_info")
    def weights_info(body: PathBody) -> dict[str, Any]:
        description = service.saved.describe(SavedPath.parse(body.tinker_path))
        shape = description.shape
        return {
            "base_model": description.base_model, "is_lora": True, "lora_rank": shape.rank, "train_unembed": shape.head,
            "train_mlp": shape.mlp, "train_attn": shape.attention,
        }  # fmt: skip

    @app.get("/api/v1/samplers/{sampler_id}")
    async def sampler(sampler_id: str) -> dict[str, Any]:
        path = service.sampler(sampler_id).path
        return {"sampler_id": sampler_id, "base_model": service.name, "model_path": None if path is None else str(path)}

    @app.get("/api/v1/training_runs/{model_id}")
    def training_run(model_id: str) -> dict[str, Any]:
        return service.training_run(model_id)

    @app.get("/api/v1/training_runs/{model_id}/checkpoints")
    def checkpoints(model_id: str) -> dict[str, Any]:
        return {"checkpoints": service.saved.list_of(model_id)}

    @app.delete("/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}")
    def delete_checkpoint(model_id: str, kind: str, name: str) -> Response:
        service.saved.delete(SavedPath.of(model_id, kind, name))
        return Response(status_code=204)

    wrong_key = error_response(401, "the key is missing or wrong: set TINKER_API_KEY to the server's key")
    bodies = JsonBodies(app, error_response, others=(PROTOBUF,))
    return KeyMiddleware(bodies, key, "x-api-key", wrong_key, error_response, types=(JSON, PROTOBUF))


def _install_error_handlers(app: FastAPI) -> None:
    async def on_refusal(_: Request, error: Exception) -> JSONResponse:
        return error_response(400, _message_of(error))

    async def on_invalid_body(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][1:])
        message = "not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
        return error_response(422, f"{key}: {message}")

    async def on_http_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, str(error.detail))

    for kind in (RefusedRequest, OncurveError, ProtobufError):
        app.add_exception_handler(kind, on_refusal)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)


def key_for(host: str, name: str) -> tuple[str | None, bool]:
    """(the key, whether it is a new one), as `oncurve serve` chooses it. The SDK takes keys that begin with `tml-` only."""
    key, is_new = api_key_for(host, name)
    if is_new:
        return f"tml-{key}", True
    if key is not None and not key.startswith("tml-"):
        raise RecipeError(name, "not a key of Tinker", because="the SDK takes keys that begin with tml-", fix="add the prefix")
    return key, False


def serve(
    service: TinkerService,
    host: str,
    port: int,
    *,
    key: str | None,
    on_ready: Callable[[str], None],
    until_closed: bool = False,
) -> None:
    """Serves until Ctrl-C; with ``until_closed`` also until standard input closes. ``on_ready`` gets the address."""
    with listen(host, port) as listening:
        server = uvicorn.Server(server_config(make_app(service, key)))
        if until_closed:
            threading.Thread(target=stop_when_stdin_closes, args=(server,), daemon=True).start()
        threading.Thread(target=report_when_ready, args=(server, on_ready, address_of(listening, host)), daemon=True).start()
        try:
            asyncio.run(server.serve(sockets=[listening]))
        finally:
            service.queue.close()
