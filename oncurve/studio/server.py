"""The studio's web server: the application with its routes and built page, and serving it with a token and a browser."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from oncurve.errors import OncurveError, RunError
from oncurve.local_http import (
    JsonBodies,
    PrometheusMetric,
    address_of,
    is_loopback,
    listen,
    prometheus_response,
    server_config,
)
from oncurve.studio.auth import StudioGuard
from oncurve.studio.model_servers import ModelServers
from oncurve.studio.planner import planner
from oncurve.studio.playground import play
from oncurve.studio.routes import api
from oncurve.studio.run_list import overview

STATIC = Path(__file__).parent / "static"
FOREVER = "public, max-age=31536000, immutable"
"""Cache header of files whose names contain a hash of their content."""


class Assets(StaticFiles):
    """The built files, which a browser may cache forever."""

    def file_response(self, *args: object, **named: object) -> Response:
        response = super().file_response(*args, **named)  # type: ignore[arg-type]
        response.headers["cache-control"] = FOREVER
        return response


STREAMS = ("/api/live", "/api/playground/sample")
"""Responses that a page reads while they are written. A compressor would hold their lines back."""


class Compressed:
    """Middleware that compresses every response but the streams."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.compressing = app, GZipMiddleware(app, minimum_size=1000, compresslevel=5)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_stream = scope["type"] != "http" or scope["path"] in STREAMS
        await (self.app if is_stream else self.compressing)(scope, receive, send)


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OncurveError)
    message = {"where": error.where, "what": str(error.what), "because": error.because, "fix": error.fix}
    return JSONResponse({"error": message}, 404 if isinstance(error, RunError) else 422)


def _body_error(status: int, message: str) -> JSONResponse:
    fix = "reload the page, and report it if it happens again"
    return JSONResponse(
        {"error": {"where": "request", "what": message, "because": "this server refuses it", "fix": fix}}, status
    )


def prometheus_metrics(runs_dir: Path) -> Iterator[PrometheusMetric]:
    """Status, progress, last held-out results and last metrics of every run, by its name."""
    runs = overview(runs_dir)
    statuses = [({"run": run["name"], "status": run["status"]}, 1) for run in runs]
    yield PrometheusMetric("oncurve_run_status", "gauge", "1 for the status that a run has.", statuses)
    steps = [({"run": run["name"], "stage": s["name"]}, s["done"]) for run in runs for s in run["stages"]]
    yield PrometheusMetric("oncurve_run_steps", "gauge", "Steps that a stage has done.", steps)
    for key, text in (("accuracy", "Last held-out accuracy."), ("heldout_reward", "Last mean reward on held-out prompts.")):
        values = [({"run": run["name"]}, run[key]) for run in runs if run[key] is not None]
        yield PrometheusMetric(f"oncurve_run_{key}", "gauge", text, values)
    last = [({"run": run["name"], "metric": name}, value) for run in runs for name, value in run["metrics"].items()]
    text = "The last step's value of each metric."
    yield PrometheusMetric("oncurve_run_metric", "gauge", text, [item for item in last if item[1] is not None])


def make_app(
    runs_dir: Path,
    stopping: asyncio.Event,
    servers: ModelServers,
    token: str | None = None,
    *,
    allow_code: bool = False,
    embedded: bool = False,
) -> ASGIApp:
    """The studio for a folder of runs. If ``token`` is set, every request needs it. ``stopping`` ends open event streams.

    ``allow_code`` lets the page run a run's code and send keys. It requires a token, because every user of the machine can
    reach a loopback port. ``embedded`` lets a notebook on this machine show it in a frame.
    """
    if allow_code and token is None:
        raise ValueError("allow_code needs a token")
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, title="Oncurve Studio")
    app.state.runs_dir, app.state.stopping, app.state.servers = runs_dir, stopping, servers
    app.state.allow_code = allow_code
    app.add_exception_handler(OncurveError, _error_response)
    app.include_router(api)
    app.include_router(play)
    app.include_router(planner)
    app.mount("/assets", Assets(directory=STATIC / "assets", check_dir=False))

    @app.get("/")
    def index() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    @app.get("/metrics")
    def metrics() -> Response:
        return prometheus_response(prometheus_metrics(runs_dir))

    @app.get("/icon.svg")
    def icon() -> FileResponse:
        return FileResponse(STATIC / "icon.svg")

    return StudioGuard(Compressed(JsonBodies(app, _body_error)), token, embedded=embedded)


class StudioServer(uvicorn.Server):
    """The studio's server. On shutdown it first ends open event streams, which would keep it waiting, and the models of the
    Playground."""

    def __init__(self, runs_dir: Path, token: str | None = None, *, allow_code: bool = False, embedded: bool = False) -> None:
        self._stopping, self._servers = asyncio.Event(), ModelServers(runs_dir)
        app = make_app(runs_dir, self._stopping, self._servers, token, allow_code=allow_code, embedded=embedded)
        super().__init__(server_config(app))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._servers.close)
        await super().shutdown(sockets)


def serve(
    runs_dir: Path,
    host: str,
    port: int,
    *,
    announce: Callable[[str], None],
    open_browser: bool = False,
    allow_code: bool = False,
) -> None:
    """Serves until Ctrl-C. Makes a token if other machines can reach the address, or if the page may run code."""
    with listen(host, port) as listening:
        token = None if is_loopback(host) and not allow_code else secrets.token_urlsafe(24)
        address = address_of(listening, host) + "/" + (f"?token={token}" if token else "")
        server = StudioServer(runs_dir, token, allow_code=allow_code)
        announce(address)
        if open_browser:
            threading.Thread(target=_open_when_ready, args=(server, address), daemon=True).start()
        asyncio.run(server.serve(sockets=[listening]))


def _open_when_ready(server: uvicorn.Server, address: str) -> None:
    while not server.started and not server.should_exit:
        time.sleep(0.05)
    webbrowser.open(address)
