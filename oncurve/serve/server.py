"""Serves a model until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from collections.abc import Callable

import uvicorn

from oncurve.engines.native.session import open_session
from oncurve.errors import RecipeError
from oncurve.local_http import UVICORN_OPTIONS, address_of, is_loopback, listen
from oncurve.models.policy import Policy
from oncurve.serve.app import ServedModel, make_app
from oncurve.serve.engine_thread import EngineThread

SLOTS_CPU, SLOTS_GPU = 8, 64
"""Completions decoded at once if --slots is not given."""


class CompletionServer(uvicorn.Server):
    """A model behind a socket. When stopped, it waits a moment for running responses, then ends."""

    def __init__(self, served: ServedModel, key: str | None = None) -> None:
        super().__init__(uvicorn.Config(make_app(served, key), **UVICORN_OPTIONS))


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
