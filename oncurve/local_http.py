"""Local HTTP servers: the socket, the host names they answer to, the checks against requests of other sites' pages, and what
they accept: complete headers in time, bodies of limited size and time, and strict JSON.

A server without a key or token answers only to loopback names, so a site that points its own name at 127.0.0.1 (DNS rebinding)
is refused. Requests from another site's page are always refused. Python's JSON parser takes NaN, 1e999 and lone surrogates,
which nothing after it can store or send back: they are refused before any handler meets them.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import math
import socket
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from oncurve.errors import RunError

HEADER_S = 10.0
"""How long a client may take to send a request's headers, from the connection or the first byte on."""
BODY_S = 60.0
BODY_BYTES = 16 * 2**20
"""Far more than the longest context needs as text."""
MAX_DEPTH = 200
INLINE_BYTES = 65_536
"""Larger bodies are parsed in a thread, so that other requests are answered meanwhile."""

RespondError = Callable[[int, str], Response]
"""The response for a status and a message, in a server's own format."""


def is_loopback(host: str) -> bool:
    """Whether an address to bind to can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of_header(header: str) -> str:
    """The host in a Host header without the port: `::1` for `[::1]:8000`, `localhost` for `localhost:8000`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] or header


def rejection_reason(method: str, headers: Mapping[str, str], *, local_only: bool) -> tuple[int, str] | None:
    """(status, message) if a request is refused: a foreign Host, a page of another site, or a body that is not JSON."""
    host = headers.get("host", "")
    if local_only and not is_loopback(host_of_header(host)):
        return 421, "This server answers to 127.0.0.1 and localhost only."
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return 403, "Requests from other sites are refused."
    is_navigation = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_navigation:
        return 403, "Requests from other sites are refused."
    is_json = headers.get("content-type", "").partition(";")[0] == "application/json"
    if method not in ("GET", "HEAD") and not is_json:
        return 415, "The body must be application/json."
    return None


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        is_taken = error.errno == errno.EADDRINUSE
        raise RunError(
            f"--port {port}" if is_taken else f"--host {host}",
            "already in use" if is_taken else "can't bind to this address",
            because="another program listens there" if is_taken else str(error),
            fix="choose another with --port, or --port 0 for any free one" if is_taken else "use 127.0.0.1",
        ) from error
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """The URL of a socket: http://HOST:PORT."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, and a time limit for headers: a client that sends them byte by byte does not hold a connection."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_timer()  # uvicorn closes a connection that stays idle

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


UVICORN_OPTIONS: Mapping[str, Any] = {
    "log_level": "warning", "access_log": False, "lifespan": "off", "timeout_graceful_shutdown": 3,
    "http": TimedProtocol, "loop": "asyncio",
}  # fmt: skip
"""Options of uvicorn: quiet, with the pure-Python loop and parser, so that it behaves the same whatever optional packages are
installed."""


def server_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(app, **UVICORN_OPTIONS)


class JsonBodies:
    """Middleware that reads a request's body before the application sees it, and refuses what is too large, too slow or no
    strict JSON. Put it behind the check of keys and tokens: strangers' bodies are not read."""

    def __init__(self, app: ASGIApp, respond_error: RespondError) -> None:
        self.app, self.respond_error = app, respond_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = await self._read(Headers(scope=scope), receive)
        if isinstance(body, bytes) and body:
            body = await self._check(body)
        if body is None:
            return  # the client has left
        if isinstance(body, Response):
            body.headers["connection"] = "close"
            await body(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_again, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | Response | None:
        """The complete body, the response that refuses it, or None if the client has left."""
        length = headers.get("content-length", "0")
        too_large = self.respond_error(413, f"The body is larger than {BODY_BYTES // 2**20} MiB.")
        if not length.isdecimal() or len(length) > 18 or int(length) > BODY_BYTES:
            return too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    body += message.get("body", b"")
                    if len(body) > BODY_BYTES:
                        return too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            return self.respond_error(408, f"The body was not complete after {BODY_S:.0f} s.")

    async def _check(self, body: bytes) -> bytes | Response:
        try:
            if len(body) > INLINE_BYTES:
                await asyncio.to_thread(check_json, body)
            else:
                check_json(body)
        except ValueError as error:
            return self.respond_error(400, f"the body is not JSON: {error}")
        return body


def check_json(body: bytes) -> None:
    """Raises ValueError, with the reason, if a body is not JSON that every part of a server can handle."""

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"the number {text[:20]} is too large")
        return value

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        value = json.loads(body.decode("utf-8"), parse_float=finite, parse_constant=refuse)
        _check_depth(value)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("a text has half of a character (a lone surrogate)") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inside for item in items]
        if not level:
            return
    raise RecursionError
