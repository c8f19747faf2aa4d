"""Calls a reward function in a worker process (`python -m oncurve.rewards.python_function_worker FILE:NAME`)."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from oncurve.plugins import load_function, place_of_error
from oncurve.workers.child import serve


def call(function: Callable[..., Any], job: dict[str, Any]) -> Any:
    """Calls the function and returns its result as JSON values: arrays and tensors become lists. The result of an `async`
    function is awaited."""
    result = function(*job["arguments"], **job["named"])
    if inspect.isawaitable(result):
        result = asyncio.run(_await(result))
    return _to_json(result)


async def _await(result: Any) -> Any:
    return await result


def _to_json(result: Any) -> Any:
    if hasattr(result, "tolist"):
        return result.tolist()
    return [_to_json(part) for part in result] if isinstance(result, list | tuple) else result


if __name__ == "__main__":
    function = load_function(sys.argv[1], "rewards.python.function")
    serve(
        partial(call, function),
        memory=1 << 45,  # only its time is limited: a user's function may map as much as it likes
        place_of=partial(place_of_error, function=function),
    )
