"""Local HTTP servers: the socket, the host names they answer to, the checks against requests of other sites' pages, and what
they accept (headers within a time limit, bodies within a time and a size limit, strict JSON). The module also formats
metrics for Prometheus.

A server without a key or token answers only to loopback names, so a site that points its own name at 127.0.0.1 (DNS rebinding)
is refused. Requests from another site's page are always refused. NaN, 1e999 and lone surrogates, which Python's JSON parser
takes, are refused before any handler meets them (`oncurve.strict_json`).
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from oncurve.errors import RunError
from oncurve.strict_json import parse_json

HEADER_S = 10.0
"""How long a client may take to send a request's headers, from the connection or the first byte on."""
BODY_S = 60.0
BODY_BYTES = 16 * 2**20
"""Far more than the longest context needs as text."""
INLINE_BYTES = 65_536
"""Larger bodies are parsed in a thread, so that other requests are answered meanwhile."""

JSON = "application/json"

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


def rejection_reason(
    method: str, headers: Mapping[str, str], *, local_only: bool, types: Sequence[str] = (JSON,)
) -> tuple[int, str] | None:
    """(status, message) if a request is refused: a foreign Host, a page of another site, or a body of another type."""
    host = headers.get("host", "")
    if local_only and not is_loopback(host_of_header(host)):
        return 421, "This server answers to 127.0.0.1 and localhost only."
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return 403, "Requests from other sites are refused."
    is_navigation = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_navigation:
        return 403, "Requests from other sites are refused."
    if method not in ("GET", "HEAD") and _content_type(headers) not in types:
        return 415, f"The body must be {' or '.join(types)}."
    return None


def _content_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0 chooses a free port. Clients that connect before the server runs are queued."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
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


class KeyMiddleware:
    """Lets a request through if it has the key, or, on a server without one, if it comes from this machine.

    The key is the value of ``header``, with or without `Bearer`; ``wrong_key`` is the response to a request without it, and
    ``types`` are the types of bodies that the application reads.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        header: str,
        wrong_key: Response,
        respond_error: RespondError,
        types: Sequence[str] = (JSON,),
    ) -> None:
        self.app, self.key, self.header, self.types = app, key, header, types
        self.wrong_key, self.respond_error = wrong_key, respond_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejection = self._rejection(scope) if scope["type"] == "http" else None
        await (rejection or self.app)(scope, receive, send)

    def _rejection(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        reason = rejection_reason(scope["method"], headers, local_only=self.key is None, types=self.types)
        if reason is not None:
            return self.respond_error(*reason)
        key = read_key(headers.get(self.header, ""))
        is_wrong = self.key is not None and not hmac.compare_digest(key, self.key.encode())
        return self.wrong_key if is_wrong else None


def read_key(value: str) -> bytes:
    """The key in a header, with or without `Bearer` before it. The scheme's case does not matter (RFC 9110, 11.1)."""
    scheme, _, key = value.partition(" ")
    return (key if scheme.lower() == "bearer" else value).encode("utf-8", "replace")


class JsonBodies:
    """Middleware that reads a request's body before the application sees it, and refuses what is too large, too slow or not
    strict JSON. Put it behind the check of keys and tokens: strangers' bodies are not read. Bodies of ``others``, types that
    the application parses itself, are only limited."""

    def __init__(self, app: ASGIApp, respond_error: RespondError, others: Sequence[str] = ()) -> None:
        self.app, self.respond_error, self.others = app, respond_error, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body = await self._read(headers, receive)
        if isinstance(body, bytes) and body and _content_type(headers) not in self.others:
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
    try:
        parse_json(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None


@dataclass(frozen=True, slots=True)
class PrometheusMetric:
    """A metric of a server, with a value for each set of labels.

    Example: PrometheusMetric("oncurve_tokens_total", "counter", "Tokens generated.", [({"model": "sums"}, 1024)])
    """

    name: str
    type: Literal["counter", "gauge"]
    help: str
    values: Iterable[tuple[Mapping[str, str], float]]


def prometheus_response(metrics: Iterable[PrometheusMetric]) -> Response:
    """Metrics in the text format 0.0.4, for a scraper."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.type}"]
        lines += [f"{metric.name}{_labels(labels)} {value:.17g}" for labels, value in metric.values]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8")


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"
