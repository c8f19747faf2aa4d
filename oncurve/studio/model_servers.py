"""The models of the Playground: one `oncurve serve` process for each. The studio itself never loads a model.

Each server has a key that only the studio knows. It ends with the studio, even if the studio is killed: its standard input
closes then.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen

from oncurve.errors import ModelError

MAX_SERVERS = 2
"""Models that run at once, so that two can be compared. A third replaces the least recently used one."""


@dataclass
class ModelServer:
    """One process. ``card`` is the endpoint's description of its model."""

    target: str
    key: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    address: str = ""
    card: dict[str, Any] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json"}

    def wait_until_ready(self) -> ModelServer:
        """Waits until the process listens. Only one thread reads its output; others wait for that one."""
        with self.lock:
            if not self.address:
                assert self.process.stdout is not None
                line = self.process.stdout.readline()
                if not line:
                    raise self._start_error()
                self.address = json.loads(line)["address"]
                with urlopen(Request(f"{self.address}/v1/models", headers=self.headers), timeout=30) as response:
                    self.card = json.load(response)["data"][0]
        self.used = time.monotonic()
        return self

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def _start_error(self) -> ModelError:
        """The error that the command printed: what is wrong, then why, then the fix."""
        self.process.wait()
        if self.errors.closed:
            return ModelError(self.target, "closed", because="it was closed while it was loading", fix="sample again")
        self.errors.seek(0)
        text = " ".join(self.errors.read().decode("utf-8", "replace").split()).removeprefix("error ")
        what, _, rest = text.partition(" because ")
        because, _, fix = rest.partition(" fix ")
        return ModelError(
            self.target, what or "not served", because=because or "its process ended", fix=fix or "choose another model"
        )


class ModelServers:
    """The model servers of one studio."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir, self._lock = runs_dir, threading.Lock()
        self._all: dict[str, ModelServer] = {}

    def open(self, target: str, *, trusted: bool = False) -> ModelServer:
        """The server of a model, ready for requests; starts it if necessary. ``trusted``: the user agreed to what it runs."""
        with self._lock:
            server = self._all.get(target)
            if server is None or server.process.poll() is not None:
                server = self._all[target] = self._start(target, trusted)
        try:
            return server.wait_until_ready()
        except ModelError:
            with self._lock:
                self._all = {name: other for name, other in self._all.items() if other is not server}
            raise

    def running(self) -> list[str]:
        with self._lock:
            return [name for name, server in self._all.items() if server.process.poll() is None]

    def close(self, target: str | None = None) -> None:
        """Ends the server of a model, or all of them."""
        with self._lock:
            chosen = [name for name in self._all if target in (None, name)]
            ended = [self._all.pop(name) for name in chosen]
        for server in ended:
            server.end()

    def _start(self, target: str, trusted: bool) -> ModelServer:
        by_use = sorted(self._all.values(), key=lambda server: server.used)
        for server in by_use[: max(0, len(self._all) - MAX_SERVERS + 1)]:
            del self._all[server.target]
            server.end()
        key = secrets.token_urlsafe(24)
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (read after the process has ended)
        command = [sys.executable, "-m", "oncurve", "serve", "--port", "0", "--json", "--until-closed"]
        process = subprocess.Popen(
            [*command, *(["--trust"] if trusted else []), "--runs", str(self._runs_dir), "--", target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env={**os.environ, "ONCURVE_SERVE_KEY": key, "COLUMNS": "10000"},
        )  # fmt: skip
        return ModelServer(target, key, process, errors)
