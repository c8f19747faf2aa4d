"""A model behind a real socket, and OpenAI's client for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai

from oncurve.engines.native.session import Session, torch_session
from oncurve.local_http import listen
from oncurve.models.policy import Policy
from oncurve.records import Environment, StatefulEnvironment
from oncurve.serve.server import CompletionServer, EngineThread, ServedModel
from tests.models.architectures import make_policy

MODEL = "small"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a {% endif %}"


@dataclass(frozen=True)
class Endpoint:
    address: str
    policy: Policy
    engine: EngineThread

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=300)


def chatting_policy() -> Policy:
    """A small decoder with a chat template that almost never samples the end token."""
    policy = make_policy("qwen3")
    policy.tokenizer.chat_template = TEMPLATE
    return policy


@contextmanager
def endpoint(
    policy: Policy,
    slots: int = 4,
    limit: int = 400,
    key: str | None = None,
    session: Session | None = None,
    environment: Environment | StatefulEnvironment | None = None,
) -> Iterator[Endpoint]:
    with listen("127.0.0.1", 0) as listening:
        engine = EngineThread(session or torch_session(policy, slots, limit))
        server = CompletionServer(ServedModel(MODEL, policy, engine, environment=environment), key=key)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.02)
            assert thread.is_alive(), "the server ended before it started"
        yield Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", policy, engine)
        server.should_exit = True
        thread.join(10)
        engine.close()
