"""Serving on a real GPU: captured steps beside plain torch, the same bits whatever comes and goes, and a server over HTTP, with
several adapters, schemas and required calls."""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from oncurve.engines.base import SampleRequest
from oncurve.engines.cuda.paged_kv_cache import PagedKVCache
from oncurve.engines.cuda.per_slot import PerSlotCudaRunner
from oncurve.engines.native.session import SampledToken, Session, open_session, served_request, torch_session
from oncurve.local_http import listen
from oncurve.models import lora
from oncurve.models.loading.load import build_model, build_tokenizer, load_policy
from oncurve.models.policy import Policy
from oncurve.operations import run_model
from oncurve.recipe.schema.model import Lora, Model, TinyModel
from oncurve.recipe.schema.sections import Sampling
from oncurve.serve.server import CompletionServer, EngineThread, ServedModel
from tests.engines.cuda.test_session import bits, by_sample, finish
from tests.engines.native.plain import assert_same_greedy, generate, next_logits
from tests.gpu.test_engine import long_prompt, model_of
from tests.models.architectures import shake, tokenizer

pytestmark = pytest.mark.gpu

SETTINGS = (
    Sampling(max_new_tokens=60),
    Sampling(max_new_tokens=40, temperature=0.0),
    Sampling(max_new_tokens=50, temperature=0.7, top_p=0.8),
    Sampling(max_new_tokens=60, top_k=3, min_p=0.05, min_new_tokens=20),
    Sampling(max_new_tokens=30, temperature=1.3, stop=("a", "77")),
)
LENGTHS = (1, 64, 65, 300, 530)
SLOTS, LIMIT = 8, 600
DEVICE: Literal["cpu", "cuda"] = "cuda"


@cache
def policy(name: str, dtype: torch.dtype, device: str = "cuda") -> Policy:
    return Policy(copy.deepcopy(model_of(name)).to(device, dtype), tokenizer())


def runner_of(session: Session) -> PerSlotCudaRunner:
    assert isinstance(session.runner, PerSlotCudaRunner)
    return session.runner


@contextmanager
def opened_session(name: str, dtype: torch.dtype, slots: int = SLOTS) -> Iterator[Session]:
    session = open_session(policy(name, dtype), slots, LIMIT)
    runner = runner_of(session)
    yield session
    assert runner.decoder.use_cuda_graphs
    assert not any(session.running)
    assert not runner.prompt_pages
    assert runner.cache.left == runner.cache.limit
    session.close()


def ask(place: int, name: str = "qwen3") -> SampleRequest:
    ids = policy(name, torch.float32).encode(long_prompt(LENGTHS[place % 5]))
    return served_request(ids, 1 + place % 3, SETTINGS[(place * 2 + place // 5) % 5], seed=place, top=(0, 5, 20)[place % 3])


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_the_gpu_serves_what_torch_serves(name: str) -> None:
    """Ten requests with settings of their own, by the family's own step and through a model's modules: the same texts but for
    near ties, which are rare, and the same log-probs."""
    with opened_session(name, torch.float32) as session:
        numbers = [session.submit(ask(place, name)) for place in range(10)]
        here = finish(session)
    plain = torch_session(policy(name, torch.float32, "cpu"), SLOTS, LIMIT)
    again = [plain.submit(ask(place, name)) for place in range(10)]
    there = finish(plain)
    parted = 0
    for a, b in zip(numbers, again, strict=True):
        for ours, theirs in zip(by_sample(here[a]), by_sample(there[b]), strict=True):
            if [(t.token_id, t.stop) for t in ours] != [(t.token_id, t.stop) for t in theirs]:
                parted += 1
                continue
            assert [t.logp for t in ours] == pytest.approx([t.logp for t in theirs], abs=1e-4)
            for one, two in zip(ours, theirs, strict=True):
                assert [logp for _, logp in one.top] == pytest.approx([logp for _, logp in two.top], abs=1e-4)
    assert parted <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_request_gets_the_same_bits_whatever_comes_and_goes_beside_it(name: str, dtype: torch.dtype) -> None:
    """One is there from the start; others come, one token later each; and one of them leaves in the middle."""
    with opened_session(name, dtype) as session:
        numbers: dict[int, int] = {}
        found: dict[int, list[SampledToken]] = {}
        for place in range(10):
            numbers[place] = session.submit(ask(place, name))
            for token in session.step():
                found.setdefault(token.request, []).append(token)
        session.cancel(numbers[2])
        finish(session, found)
        for place in (0, 3, 4, 8, 9):
            number = session.submit(ask(place, name))
            assert bits(finish(session)[number]) == bits(found[numbers[place]])


def test_with_a_full_cache_requests_wait_and_no_token_is_streamed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(max_new_tokens=LIMIT, min_new_tokens=LIMIT)
    requests = [
        served_request(policy("qwen3", torch.float32).encode(long_prompt(n)), 2, sampling, seed=n) for n in (1, 300, 530)
    ]
    found: list[list[Any]] = []
    for most in (24, 5):
        room = PagedKVCache.open
        with monkeypatch.context() as patched, opened_with(patched, room, most) as session:
            numbers = [session.submit(one) for one in requests]
            answers = finish(session)
            found.append([bits(answers[number]) for number in numbers])
    assert found[0] == found[1]


@contextmanager
def opened_with(patched: pytest.MonkeyPatch, room: Any, most: int) -> Iterator[Session]:
    patched.setattr(PagedKVCache, "open", lambda self, first, all_, share: room(self, min(first, most), min(all_, most), share))
    with opened_session("qwen3", torch.float32) as session:
        assert runner_of(session).cache.limit == most
        yield session


def test_few_graphs_serve_all_there_is() -> None:
    with opened_session("qwen3", torch.bfloat16, 64) as session:
        for place in range(60):
            session.submit(ask(place))
        finish(session)
        assert len(runner_of(session).decoder.graphs) <= 12


# Over HTTP, by the standard library's own client.


@contextmanager
def served(slots: int = SLOTS) -> Iterator[tuple[int, Session]]:
    with opened_session("qwen3", torch.bfloat16, slots) as session, serving({"small": session}) as port:
        yield port, session


@contextmanager
def serving(sessions: Mapping[str, Session]) -> Iterator[int]:
    """A server of models by name; its port."""
    workers = [EngineThread(session) for session in sessions.values()]
    with listen("127.0.0.1", 0) as listening:
        models = zip(sessions.items(), workers, strict=True)
        server = CompletionServer(*(ServedModel(name, session.policy, worker) for (name, session), worker in models))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.02)
            assert thread.is_alive()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
            for worker in workers:
                worker.close()


def request(port: int, path: str, **body: Any) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    whole = json.dumps({"model": "small", "max_tokens": 40, **body})
    connection.request("POST", path, whole, {"content-type": "application/json"})
    return connection.getresponse()


def post(port: int, **body: Any) -> http.client.HTTPResponse:
    answer = request(port, "/v1/completions", **body)
    assert answer.status == 200, answer.read()
    return answer


def texts(port: int, stream: bool, **body: Any) -> tuple[str, ...]:
    answer = post(port, stream=stream, **body)
    if not stream:
        return tuple(choice["text"] for choice in json.loads(answer.read())["choices"])
    found = [""] * body.get("n", 1)
    for line in answer:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] += choice["text"]
    return tuple(found)


def test_many_clients_at_once_are_answered_as_each_would_be_alone() -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "1+2=", "seed": 1, "n": 3},
        {"prompt": "the quick brown fox", "seed": 2, "temperature": 0.7, "top_p": 0.9, "logprobs": 5},
        {"prompt": "x", "temperature": 0, "n": 2},
        {"prompt": "abc " * 150, "seed": 4, "top_k": 4, "stop": ["7", "qu"]},
    ]
    with served() as (port, session):
        alone = [texts(port, False, **body) for body in bodies]
        with ThreadPoolExecutor(24) as threads:
            crowd = list(threads.map(lambda n: texts(port, n % 3 != 0, **bodies[n % 4]), range(24)))
        assert crowd == [alone[n % 4] for n in range(24)]
        assert alone[2][0] == alone[2][1]
        assert len(set(alone[0])) == 3
        assert not any(stop in text for text in alone[3] for stop in ("7", "qu"))
        assert not session.requests


def test_a_client_that_leaves_frees_its_slots() -> None:
    with served(slots=4) as (port, session):
        answer = post(port, prompt="abc", n=64, max_tokens=LIMIT, seed=0, stream=True)
        assert answer.readline().startswith(b"data: ")
        answer.close()
        until = time.monotonic() + 5
        while session.requests and time.monotonic() < until:
            time.sleep(0.005)
        assert not session.requests
        assert texts(port, False, prompt="abc", seed=0)[0]


def test_log_probs_over_http_are_those_of_the_model() -> None:
    with served() as (port, _):
        choice = json.loads(post(port, prompt="2+3=", seed=4, logprobs=3, temperature=0.7, top_p=0.9).read())["choices"][0]
    ids = np.array(choice["logprobs"]["token_ids"])
    logps_TV = next_logits(model_of("qwen3"), np.array(tokenizer()("2+3=")["input_ids"]), ids).log_softmax(-1)
    logps = logps_TV[torch.arange(len(ids)), torch.from_numpy(ids)]
    found = torch.tensor(choice["logprobs"]["token_logprobs"])
    assert float((found - logps).abs().mean()) < 0.02
    assert all(len(top) == 3 for top in choice["logprobs"]["top_logprobs"])


# Several adapters over one base.

ALPHABET = "0123456789+=abcdefghijklmnopqrstuvwxyz ,"
BASE = TinyModel(layers=2, width=64, heads=4, kv_heads=2, head_size=16, mlp_width=128, context=256)
ADAPTERS = {
    "plain": Lora(rank=4),
    "other": Lora(rank=8, alpha=32.0),
    "scaled": Lora(rank=2, rslora=True, targets=("q_proj", "v_proj")),
}
NEW = 24


def save_adapters(root: Path) -> list[str]:
    """The folder of a base, and those of adapters over it whose matrices are far from 0."""
    base = root / "base"
    load_policy(Model(tiny=BASE, device="cpu"), alphabet=ALPHABET, seed=0).save(base)
    for seed, (name, settings) in enumerate(ADAPTERS.items(), 1):
        adapted = load_policy(Model(source=str(base), lora=settings, device="cpu"), alphabet=None, seed=seed)
        shake(adapted.model, seed)
        lora.save(adapted.model, root / name)
    return [str(root / name) for name in (*ADAPTERS, "base")]


def greedy(port: int, name: str) -> list[int]:
    answer = post(port, model=name, prompt="12+34=", max_tokens=NEW, temperature=0, logprobs=1)
    ids: list[int] = json.loads(answer.read())["choices"][0]["logprobs"]["token_ids"]
    return ids


def test_adapters_over_one_base_answer_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32: one after the other and at once, each with the greedy tokens of its own merged weights on a CPU."""
    monkeypatch.setattr(run_model, "_default_settings", lambda: Model(dtype="float32", device=DEVICE))
    names = save_adapters(tmp_path)
    models = run_model.load_models(names, Path("runs"))
    assert [lora.is_attached(model.policy.model) for model in models] == [True, True, True, False]
    sessions = {name: open_session(model.policy, 4, 100) for name, model in zip(names, models, strict=True)}
    with serving(sessions) as port:
        found = {name: greedy(port, name) for name in names}
        with ThreadPoolExecutor(8) as threads:
            crowd = list(threads.map(lambda name: greedy(port, name), names * 4))
    assert len({tuple(ids) for ids in found.values()}) == len(names), "the adapters matter"
    assert crowd == [found[name] for name in names * 4]
    weights = [
        {n.replace(".base_layer", ""): p for n, p in m.policy.model.named_parameters() if "lora_" not in n} for m in models
    ]
    assert all({n: p.data_ptr() for n, p in own.items()} == {n: p.data_ptr() for n, p in weights[0].items()} for own in weights)
    for name in names:
        alone = run_model.load_model(name, Path("runs"), Model(dtype="float32", device="cpu")).policy
        plain = (alone.merge_adapter() if lora.is_attached(alone.model) else alone).model
        plain.set_attn_implementation("eager")
        prompt_ids = np.array(alone.tokenizer("12+34=")["input_ids"])
        expected = generate(plain, prompt_ids, Sampling(max_new_tokens=NEW))
        assert_same_greedy(plain, prompt_ids, np.array(found[name]), expected)


# Schemas and required calls. A captured step can't ask a grammar; plain torch can, on a GPU too.

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
CHAT = {"messages": [{"role": "user", "content": "1+2"}], "n": 6, "seed": 1, "max_tokens": 200}
NUMBER = {"type": "integer", "minimum": -99, "maximum": 99}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@contextmanager
def chatting(kind: str) -> Iterator[tuple[int, Session]]:
    """A model with random weights that can write JSON and the tags of calls."""
    pytest.importorskip("llguidance")
    shape = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=512)
    words = build_tokenizer(PRINTABLE, chat=True)
    model = Policy(build_model(shape, words, 0).to(DEVICE, torch.float32), words)
    session = open_session(model, SLOTS, 300) if kind == "default" else torch_session(model, SLOTS, 300)
    with serving({"small": session}) as port:
        yield port, session


def chat_or_refusal(port: int, session: Session, **body: Any) -> list[dict[str, Any]]:
    """The choices of a chat completion; none if the session can't follow a grammar, and the request was refused for that."""
    answer = request(port, "/v1/chat/completions", **CHAT, **body)
    text = answer.read().decode()
    if not session.can_constrain:
        assert answer.status == 400, text
        assert "CUDA graphs" in text
        return []
    assert answer.status == 200, text
    choices: list[dict[str, Any]] = json.loads(text)["choices"]
    assert len(choices) == CHAT["n"]
    return choices


@pytest.mark.parametrize("kind", ["torch", "default"])
def test_a_schema_gives_valid_json_or_is_refused(kind: str) -> None:
    schema = closed(colour={"enum": ["red", "blue"]}, size=NUMBER, ok={"type": "boolean"})
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    with chatting(kind) as (port, session):
        assert session.can_constrain or kind == "default"
        choices = chat_or_refusal(port, session, response_format=response_format)
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        found = json.loads(choice["message"]["content"])
        assert [*found] == ["colour", "size", "ok"]
        assert found["colour"] in ("red", "blue")
        assert type(found["size"]) is int
        assert -99 <= found["size"] <= 99
        assert type(found["ok"]) is bool


@pytest.mark.parametrize("kind", ["torch", "default"])
def test_a_required_call_is_made_or_refused(kind: str) -> None:
    schemas = {"add": closed(a=NUMBER, b=NUMBER), "answer": closed(yes={"type": "boolean"})}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]
    with chatting(kind) as (port, session):
        choices = chat_or_refusal(port, session, tools=tools, tool_choice="required")
    for choice in choices:
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert {*arguments} == {*schemas[call["function"]["name"]]["properties"]}
        assert all(type(value) in (int, bool) for value in arguments.values())
