"""Servers on this machine's own address: the socket, the names they answer to, and whose pages may ask.

A server without a key or token answers only to loopback names: a site that points its own name at 127.0.0.1 (DNS rebinding)
is refused, and so is a request that another site's page makes.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from oncurve.errors import RunError

SERVING: Mapping[str, Any] = {
    "log_level": "warning", "access_log": False, "lifespan": "off", "timeout_graceful_shutdown": 3,
    "http": "h11", "loop": "asyncio",
}  # fmt: skip
"""How uvicorn runs: quietly, and on the plain loop and parser, so that a server is the same whichever of its optional parts are
installed."""


def is_loopback(host: str) -> bool:
    """Whether an address to bind to is this machine's own and no other's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without its port: `[::1]:8000` and `localhost:8000` name `::1` and `localhost`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] or header


def refusal(method: str, headers: Mapping[str, str], *, local_only: bool) -> tuple[int, str] | None:
    """Why a request is not answered, as a status and words: a strange Host, another site's page, or not JSON."""
    host = headers.get("host", "")
    if local_only and not is_loopback(host_name(host)):
        return 421, "This server answers to 127.0.0.1 and localhost only."
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return 403, "Other sites may not ask."
    navigates = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not navigates:
        return 403, "Other sites may not ask."
    json = headers.get("content-type", "").partition(";")[0] == "application/json"
    if method not in ("GET", "HEAD") and not json:
        return 415, "Only application/json can be posted."
    return None


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
            because="another program listens there" if taken else str(error),
            fix="name another with --port, or --port 0 for any that is free" if taken else "use 127.0.0.1",
        ) from error
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """http://HOST:PORT of a socket, as a browser writes it."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"
