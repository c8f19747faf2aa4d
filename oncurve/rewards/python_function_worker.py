"""Calls a reward function inside a worker process (`python -m oncurve.rewards.python_function_worker FILE:NAME`)."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from oncurve.plugins import load_function
from oncurve.workers.child import serve


def call(function: Callable[..., Any], job: dict[str, Any]) -> Any:
    """What the function returns, awaited where it must be, as JSON has it: arrays and tensors become lists."""
    result = function(*job["arguments"], **job["named"])
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return _plain(result)


async def _awaited(result: Any) -> Any:
    return await result


def _plain(result: Any) -> Any:
    if hasattr(result, "tolist"):
        return result.tolist()
    return [_plain(part) for part in result] if isinstance(result, list | tuple) else result


if __name__ == "__main__":
    loaded = load_function(sys.argv[1], "rewards.python.function")
    serve(partial(call, loaded), memory=1 << 45)  # a function of the user's may map what it likes; its time is what is limited
