"""Serving a model until it is told to end."""

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
from oncurve.local_http import SERVING, address_of, is_loopback, listen
from oncurve.models.policy import Policy
from oncurve.serve.app import ServedModel, make_app
from oncurve.serve.engine_thread import EngineThread

SLOTS_CPU, SLOTS_GPU = 8, 64
"""Completions decoded at once, where the command does not say."""


class ServeServer(uvicorn.Server):
    """A model behind a socket. Asked to stop, it finishes what is being said for a moment, then ends."""

    def __init__(self, served: ServedModel, key: str | None = None) -> None:
        app = make_app(served, key)
        super().__init__(uvicorn.Config(app, **SERVING))


def key_for(host: str, name: str) -> tuple[str | None, bool]:
    """(the key, whether it was made here): the environment's where it has one, else one is made for any but a local address."""
    given = os.environ.get(name)
    if given is not None and len(given) < 8:
        raise RecipeError(
            name, "too short for a key", because="it could be guessed", fix="use 8 characters or more, or unset it"
        )
    if given is not None or is_loopback(host):
        return given, False
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
    say: Callable[[str], None],
    until_closed: bool = False,
) -> None:
    """Serves until Ctrl-C; with ``until_closed`` also until standard input closes, for programs that start it."""
    with listen(host, port) as listening:
        chosen = slots or (SLOTS_GPU if policy.device.type == "cuda" else SLOTS_CPU)
        worker = EngineThread(open_session(policy, chosen, min(max_tokens, policy.max_positions)))
        server = ServeServer(ServedModel(name, policy, worker), key)
        if until_closed:
            threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
        threading.Thread(target=_say_when_ready, args=(server, say, address_of(listening, host)), daemon=True).start()
        try:
            asyncio.run(server.serve(sockets=[listening]))
        finally:
            worker.close()


def _end_with_input(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    server.should_exit = True


def _say_when_ready(server: uvicorn.Server, say: Callable[[str], None], address: str) -> None:
    while not server.started:
        if server.should_exit:
            return
        threading.Event().wait(0.02)
    say(address)
