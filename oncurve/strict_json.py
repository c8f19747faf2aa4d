"""JSON that every part of the program can store, write again and send.

Python's parser takes NaN, 1e999, lone surrogates and lists nested a thousand deep, which databases, templates, tokenizers and
browsers do not.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 200


def parse_json(text: str) -> Any:
    """The value of a text. Raises ValueError, with the reason, if it is not such JSON."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse)
        _check_depth(value)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a text has half of a character (a lone surrogate)") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inside for item in items]
        if not level:
            return
    raise RecursionError
