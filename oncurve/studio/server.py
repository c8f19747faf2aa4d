"""Serving the studio: an address that is free, a token where others could reach it, a browser if asked for."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

import uvicorn

from oncurve.errors import RunError
from oncurve.studio.app import make_app
from oncurve.studio.guard import is_loopback


class Server(uvicorn.Server):
    """The server of a studio. Asked to stop, it ends open event streams first: their pages would never leave by themselves."""

    def __init__(self, runs_dir: Path, token: str | None = None) -> None:
        self._stopping = asyncio.Event()
        app = make_app(runs_dir, self._stopping, token)
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=3))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket on that address; port 0 takes any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        taken = error.errno == errno.EADDRINUSE
        raise RunError(
            f"--port {port}" if taken else f"--host {host}",
            "already in use" if taken else "can't be listened on",
            because="another program, perhaps another studio, listens there" if taken else str(error),
            fix="name another with --port, or --port 0 for any that is free" if taken else "use 127.0.0.1",
        ) from error
    return listening


def serve(runs_dir: Path, host: str, port: int, *, say: Callable[[str], None], open_browser: bool = False) -> None:
    """Serves until Ctrl-C."""
    with listen(host, port) as listening:
        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
        server = Server(runs_dir, token)
        say(address)
        if open_browser:
            threading.Thread(target=_open_when_ready, args=(server, address), daemon=True).start()
        asyncio.run(server.serve(sockets=[listening]))


def _open_when_ready(server: uvicorn.Server, address: str) -> None:
    while not server.started and not server.should_exit:
        time.sleep(0.05)
    webbrowser.open(address)
