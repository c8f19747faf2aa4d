"""The studio's server in a thread, and HTTP requests to it."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.local_http import listen
from oncurve.studio.server import StudioServer


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Served:
    """A running studio."""

    address: str
    runs_dir: Path

    def ask(
        self,
        path: str,
        headers: dict[str, str] | None = None,
        body: Any = None,
        method: str | None = None,
        timeout: float = 120,
    ) -> Answer:
        sent = {"content-type": "application/json"} if body is not None else {}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {**sent, **(headers or {})}, method=method)
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=timeout) as response:
                return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@contextmanager
def served(runs_dir: Path, token: str | None = None, *, allow_code: bool = False) -> Iterator[Served]:
    with listen("127.0.0.1", 0) as listening:
        server = StudioServer(runs_dir, token, allow_code=allow_code)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.02)
            assert thread.is_alive(), "the server ended before it began"
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", runs_dir)
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive(), "the server does not end"
