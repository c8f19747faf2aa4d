"""Serving the studio: an address that is free, a token where others could reach it, a browser if asked for."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

import uvicorn

from oncurve.listening import SERVING, address_of, is_loopback, listen
from oncurve.studio.app import make_app
from oncurve.studio.servers import Servers


class Server(uvicorn.Server):
    """The server of a studio. Asked to stop, it ends open event streams first (their pages would never leave by themselves) and
    the models of the Playground."""

    def __init__(self, runs_dir: Path, token: str | None = None, *, allow_code: bool = False) -> None:
        self._stopping, self._servers = asyncio.Event(), Servers(runs_dir)
        app = make_app(runs_dir, self._stopping, self._servers, token, allow_code=allow_code)
        super().__init__(uvicorn.Config(app, **SERVING))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._servers.close)
        await super().shutdown(sockets)


def serve(
    runs_dir: Path,
    host: str,
    port: int,
    *,
    say: Callable[[str], None],
    open_browser: bool = False,
    allow_code: bool = False,
) -> None:
    """Serves until Ctrl-C. A token is needed if others can reach the address, or if the page may run code."""
    with listen(host, port) as listening:
        token = None if is_loopback(host) and not allow_code else secrets.token_urlsafe(24)
        address = address_of(listening, host) + "/" + (f"?token={token}" if token else "")
        server = Server(runs_dir, token, allow_code=allow_code)
        say(address)
        if open_browser:
            threading.Thread(target=_open_when_ready, args=(server, address), daemon=True).start()
        asyncio.run(server.serve(sockets=[listening]))


def _open_when_ready(server: uvicorn.Server, address: str) -> None:
    while not server.started and not server.should_exit:
        time.sleep(0.05)
    webbrowser.open(address)
