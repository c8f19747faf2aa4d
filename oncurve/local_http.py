"""Local HTTP servers: the socket, the host names they answer to, and the checks against requests of other sites' pages.

A server without a key or token answers only to loopback names, so a site that points its own name at 127.0.0.1 (DNS rebinding)
is refused. Requests from another site's page are always refused.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from oncurve.errors import RunError

UVICORN_OPTIONS: Mapping[str, Any] = {
    "log_level": "warning", "access_log": False, "lifespan": "off", "timeout_graceful_shutdown": 3,
    "http": "h11", "loop": "asyncio",
}  # fmt: skip
"""Options of uvicorn: quiet, with the pure-Python loop and parser, so that it behaves the same whatever optional packages are
installed."""


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
