"""Errors in OpenAI's form, so that its clients raise what their users know: BadRequestError, AuthenticationError, …"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from oncurve.errors import OncurveError

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that can't be answered: the status, what is wrong and how to mend it, and which key it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def problem(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


def in_words(error: OncurveError) -> str:
    return f"{error.what}, because {error.because}; {error.fix}"


def answer_errors(app: FastAPI) -> None:
    """Every way in which a request can fail, answered in one form."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return problem(error.status, error.message, error.param, error.code)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return problem(400, *_first(error.errors()))

    async def other(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail))

    async def ours(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OncurveError)
        return problem(400, in_words(error))

    async def fault(_: Request, error: Exception) -> JSONResponse:
        return problem(500, f"{type(error).__name__}: {error}")

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, other)
    app.add_exception_handler(OncurveError, ours)
    app.add_exception_handler(RuntimeError, fault)


def _first(errors: Any) -> tuple[str, str | None]:
    """(message, key) of the first thing that is wrong. Of a union's branches the one that came furthest tells most."""
    deepest = max(errors, key=lambda error: len(error["loc"]))
    first = errors[0] if errors[0]["type"] != deepest["type"] and len(errors[0]["loc"]) == 2 else deepest
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    where = [str(part) for part in first["loc"] if part != "body" and "[" not in str(part)]  # such as list[TextPart]
    name = ".".join(where[:1]) or None
    said = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        said = "not known here: leave it out"
    return f"{'.'.join(where)}: {said}" if where else said, name
