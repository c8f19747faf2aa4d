"""Models that the Playground asks: `oncurve serve` as a process for each. The studio itself never loads one.

A server has a key that only the studio knows, and ends with the studio, however that ends: its standard input closes then.
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

MOST = 2
"""Models held at once: two can be compared. A third takes the place of the one that was asked least lately."""


@dataclass
class ModelServer:
    """One process. ``card`` is what the endpoint says of its model."""

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

    def ready(self) -> ModelServer:
        """Waits until it listens; whoever comes second waits for the first."""
        with self.lock:
            if not self.address:
                assert self.process.stdout is not None
                line = self.process.stdout.readline()
                if not line:
                    raise self._fault()
                self.address = json.loads(line)["address"]
                with urlopen(Request(f"{self.address}/v1/models", headers=self.headers), timeout=30) as told:
                    self.card = json.load(told)["data"][0]
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

    def _fault(self) -> ModelError:
        """The command's own words: its first line says what is wrong, the next ones why and what to do."""
        self.process.wait()
        if self.errors.closed:
            return ModelError(self.target, "unloaded", because="it was ended while it was loading", fix="sample again")
        self.errors.seek(0)
        said = " ".join(self.errors.read().decode("utf-8", "replace").split()).removeprefix("error ")
        what, _, rest = said.partition(" because ")
        because, _, fix = rest.partition(" fix ")
        return ModelError(
            self.target, what or "can't be served", because=because or "its process ended", fix=fix or "choose another model"
        )


class ModelServers:
    """The processes of one studio."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir, self._lock = runs_dir, threading.Lock()
        self._all: dict[str, ModelServer] = {}

    def open(self, target: str, *, trusted: bool = False) -> ModelServer:
        """The server of a model, started if need be, once it answers. ``trusted``: the user has agreed to what it runs."""
        with self._lock:
            found = self._all.get(target)
            if found is None or found.process.poll() is not None:
                found = self._all[target] = self._start(target, trusted)
        try:
            return found.ready()
        except ModelError:
            with self._lock:
                self._all = {name: one for name, one in self._all.items() if one is not found}
            raise

    def there(self) -> list[str]:
        with self._lock:
            return [name for name, one in self._all.items() if one.process.poll() is None]

    def close(self, target: str | None = None) -> None:
        """Ends one, or all."""
        with self._lock:
            chosen = [name for name in self._all if target in (None, name)]
            ended = [self._all.pop(name) for name in chosen]
        for one in ended:
            one.end()

    def _start(self, target: str, trusted: bool) -> ModelServer:
        for one in sorted(self._all.values(), key=lambda one: one.used)[: max(0, len(self._all) - MOST + 1)]:
            del self._all[one.target]
            one.end()
        key = secrets.token_urlsafe(24)
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (it is read when the process has ended)
        command = [sys.executable, "-m", "oncurve", "serve", "--port", "0", "--json", "--until-closed"]
        process = subprocess.Popen(
            [*command, *(["--trust"] if trusted else []), "--runs", str(self._runs_dir), "--", target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env={**os.environ, "ONCURVE_SERVE_KEY": key, "COLUMNS": "10000"},
        )  # fmt: skip
        return ModelServer(target, key, process, errors)
