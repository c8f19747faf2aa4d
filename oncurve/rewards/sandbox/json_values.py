"""Encodes plain Python values as JSON: how arguments and results pass between the tests' and the program's process.

Lists, strings, numbers, None and booleans are JSON themselves; tuples, sets, dicts, bytes, complex numbers and built-in types
are tagged. Anything else stays in its process and is passed as a handle. What arrives is always a plain value: an object of the
program with its own `==` can't get through.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
_TAG = "~"


def encode(value: Any, handle: Callable[[Any], int], depth: int = 0) -> Any:
    """A value as JSON data. ``handle`` stores an object that can't be encoded and returns its number."""
    if depth > MAX_DEPTH:
        raise ValueError(f"a value nested deeper than {MAX_DEPTH}")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bool | int | float | str):  # an enum member or a subclass of str: its plain value
        base = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return base(value)
    for kind, name in ((tuple, "tuple"), (set, "set"), (frozenset, "frozenset")):
        if isinstance(value, kind):
            return {_TAG: name, "v": [encode(part, handle, depth + 1) for part in value]}
    if isinstance(value, list):
        return [encode(part, handle, depth + 1) for part in value]
    if isinstance(value, dict):
        pairs = [[encode(key, handle, depth + 1), encode(part, handle, depth + 1)] for key, part in value.items()]
        return {_TAG: "dict", "v": pairs}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "v": bytes(value).decode("latin-1")}
    if isinstance(value, complex):
        return {_TAG: "complex", "v": [value.real, value.imag]}
    if isinstance(value, type) and vars(builtins).get(name := str(getattr(value, "__name__", ""))) is value:
        return {_TAG: "builtin", "v": name}
    return {_TAG: "handle", "v": handle(value)}


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """The value that `encode` encoded. ``resolve`` turns a handle's number into the object that represents it here."""
    if isinstance(data, list):
        return [decode(part, resolve) for part in data]
    if not isinstance(data, dict):
        return data
    kind, content = data[_TAG], data["v"]
    if kind == "handle":
        return resolve(int(content))
    if kind == "builtin":
        return _builtin_type(str(content))
    if kind == "bytes":
        return str(content).encode("latin-1")
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decode(key, resolve): decode(part, resolve) for key, part in content}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(part, resolve) for part in content)


def _builtin_type(name: str) -> type:
    """A built-in type by name. Anything else, such as `eval`, is refused."""
    builtin = getattr(builtins, name)
    if not isinstance(builtin, type):
        raise TypeError(f"{name} is not a type")
    return builtin


def to_line(data: Any) -> bytes:
    """JSON data as one line."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"
