"""Several models behind one address: clients choose one by its name."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from oncurve.engines.native.session import torch_session
from oncurve.local_http import listen
from oncurve.serve.server import CompletionServer, EngineThread, ServedModel
from tests.models.architectures import make_policy
from tests.serve.serving import MODEL, endpoint

SEEDS = {"run-1": 0, "run-1@grpo-5": 1, "folder/other": 2}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    policies = {name: make_policy("llama", seed) for name, seed in SEEDS.items()}
    engines = {name: EngineThread(torch_session(policy, 4, 100)) for name, policy in policies.items()}
    with listen("127.0.0.1", 0) as listening:
        server = CompletionServer(*(ServedModel(name, policies[name], engine) for name, engine in engines.items()))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.02)
            assert thread.is_alive(), "the server ended before it started"
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300) as connection:
        yield connection


def complete(client: openai.OpenAI, model: str, seed: int = 1) -> str:
    return client.completions.create(model=model, prompt="1+2=", max_tokens=20, seed=seed).choices[0].text


def test_all_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [*SEEDS]
    assert [client.models.retrieve(name).id for name in SEEDS] == [*SEEDS]


def test_an_unknown_model_is_refused_with_the_names(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'run-1', 'run-1@grpo-5', 'folder/other'") as error:
        complete(client, "run-2")
    assert (error.value.param, error.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError, match="'run-1'"):
        client.models.retrieve("run-2")


def test_each_model_answers_as_it_does_alone(client: openai.OpenAI) -> None:
    """While the others answer too."""
    alone = {}
    for name, seed in SEEDS.items():
        with endpoint(make_policy("llama", seed)) as single, single.client() as other:
            alone[name] = complete(other, MODEL)
    assert len(set(alone.values())) == len(alone)
    names = [*SEEDS] * 3
    with ThreadPoolExecutor(len(names)) as threads:
        assert list(threads.map(lambda name: complete(client, name), names)) == [alone[name] for name in names]


def test_metrics_have_the_name_of_their_model(address: str, client: openai.OpenAI) -> None:
    def completions() -> dict[str, float]:
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        assert sum(line.startswith("# TYPE oncurve_completions_total") for line in lines) == 1
        start = 'oncurve_completions_total{model="'
        parts = [line.removeprefix(start).split('"} ') for line in lines if line.startswith(start)]
        return {name: float(value) for name, value in parts}

    before = completions()
    complete(client, "run-1@grpo-5")
    after = completions()
    assert {name: after[name] - before[name] for name in SEEDS} == {"run-1": 0, "run-1@grpo-5": 1, "folder/other": 0}
