"""Errors on their way from one process to another: as JSON, and back as what they were."""

from __future__ import annotations

from typing import Any

from oncurve import errors
from oncurve.errors import OncurveError, ScaleError


def told(error: BaseException, who: str) -> dict[str, Any]:
    """An error as plain data. One that is no user's error has its kind and text; its traceback stands where it was raised."""
    if isinstance(error, OncurveError):
        what = {"where": error.where, "what": str(error.what), "because": error.because, "fix": error.fix}
        return {"kind": type(error).__name__, "exit_code": error.exit_code, **what}
    return {
        "kind": "ScaleError",
        "exit_code": 1,
        "where": who,
        "what": f"ended with {type(error).__name__}",
        "because": str(error)[:400] or "it gave no reason",
        "fix": "the traceback above, in what that process wrote, says where; please report it",
    }


def untold(data: dict[str, Any]) -> OncurveError:
    """The error again, of its own class where that is one of `oncurve.errors`."""
    kind = getattr(errors, str(data["kind"]), ScaleError)
    error: OncurveError = kind(data["where"], data["what"], because=data["because"], fix=data["fix"])
    error.exit_code = int(data["exit_code"])
    return error
