"""Errors in OpenAI's format, so that its clients raise their own exceptions: BadRequestError, AuthenticationError …"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from oncurve.errors import OncurveError

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that can't be answered: the status, a message with its fix, and the key that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    error_type = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": error_type, "param": param, "code": code}}, status)


def error_text(error: OncurveError) -> str:
    return f"{error.what}, because {error.because}; {error.fix}"


def install_error_handlers(app: FastAPI) -> None:
    """Answers every failure of a request in OpenAI's format."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error_response(error.status, error.message, error.param, error.code)

    async def on_invalid_body(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(400, *_message_and_key(error.errors()))

    async def on_http_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, str(error.detail))

    async def on_oncurve_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OncurveError)
        return error_response(400, error_text(error))

    async def on_server_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(500, f"{type(error).__name__}: {error}")

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(OncurveError, on_oncurve_error)
    app.add_exception_handler(RuntimeError, on_server_error)


def _message_and_key(errors: Any) -> tuple[str, str | None]:
    """The first validation error. Of a union's branches, the one that matched furthest has the most useful message."""
    deepest = max(errors, key=lambda error: len(error["loc"]))
    error = errors[0] if errors[0]["type"] != deepest["type"] and len(errors[0]["loc"]) == 2 else deepest
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}", None
    path = [str(part) for part in error["loc"] if part != "body" and "[" not in str(part)]  # without list[TextPart]
    key = ".".join(path[:1]) or None
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown key: leave it out"
    return f"{'.'.join(path)}: {message}" if path else message, key
