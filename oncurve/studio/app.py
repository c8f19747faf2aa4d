"""The application: the routes, the built page, and what an error looks like."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from oncurve.errors import OncurveError, RunError
from oncurve.studio.guard import Guard
from oncurve.studio.planning import planner
from oncurve.studio.playground import play
from oncurve.studio.routes import api
from oncurve.studio.servers import Servers

STATIC = Path(__file__).parent / "static"
FOREVER = "public, max-age=31536000, immutable"
"""For files whose names change with their content."""


class Assets(StaticFiles):
    """Built files, which a browser need never ask for twice."""

    def file_response(self, *args: object, **named: object) -> Response:
        answer = super().file_response(*args, **named)  # type: ignore[arg-type]
        answer.headers["cache-control"] = FOREVER
        return answer


async def _told(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OncurveError)
    words = {"where": error.where, "what": str(error.what), "because": error.because, "fix": error.fix}
    return JSONResponse({"error": words}, 404 if isinstance(error, RunError) else 422)


def make_app(
    runs_dir: Path, stopping: asyncio.Event, servers: Servers, token: str | None = None, *, allow_code: bool = False
) -> ASGIApp:
    """The studio over a folder of runs. With ``token``, nobody comes in without it. ``stopping`` ends open event streams.

    ``allow_code`` lets the page run code of a run and send keys, which needs a token: a loopback port is open to every user of
    the machine.
    """
    if allow_code and token is None:
        raise ValueError("allow_code needs a token")
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, title="Oncurve Studio")
    app.state.runs_dir, app.state.stopping, app.state.servers = runs_dir, stopping, servers
    app.state.allow_code = allow_code
    app.add_exception_handler(OncurveError, _told)
    app.include_router(api)
    app.include_router(play)
    app.include_router(planner)
    app.mount("/assets", Assets(directory=STATIC / "assets", check_dir=False))

    @app.get("/")
    def index() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    @app.get("/icon.svg")
    def icon() -> FileResponse:
        return FileResponse(STATIC / "icon.svg")

    return Guard(app, token)
