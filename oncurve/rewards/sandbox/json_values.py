"""Plain values as JSON: how arguments and results cross from one process to another.

Lists, texts, numbers, None and truth values are themselves; tuples, sets, dicts, bytes, complex numbers and Python's own types
are marked. Anything else stays where it is and travels as a handle. What arrives is always plain: no class of a program comes
along, so no `==` of its making either.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

DEEPEST = 100
_MARK = "~"


def encode(value: Any, handle: Callable[[Any], int], depth: int = 0) -> Any:
    """A value as JSON can write it; `handle` keeps an object that can't travel and gives it a number."""
    if depth > DEEPEST:
        raise ValueError(f"a value nested deeper than {DEEPEST}")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bool | int | float | str):  # an enumeration, a text of its own kind: its plain value
        base = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return base(value)
    for kind, name in ((tuple, "tuple"), (set, "set"), (frozenset, "frozenset")):
        if isinstance(value, kind):
            return {_MARK: name, "v": [encode(part, handle, depth + 1) for part in value]}
    if isinstance(value, list):
        return [encode(part, handle, depth + 1) for part in value]
    if isinstance(value, dict):
        pairs = [[encode(key, handle, depth + 1), encode(part, handle, depth + 1)] for key, part in value.items()]
        return {_MARK: "dict", "v": pairs}
    if isinstance(value, bytes | bytearray):
        return {_MARK: "bytes", "v": bytes(value).decode("latin-1")}
    if isinstance(value, complex):
        return {_MARK: "complex", "v": [value.real, value.imag]}
    if isinstance(value, type) and vars(builtins).get(called := str(getattr(value, "__name__", ""))) is value:
        return {_MARK: "builtin", "v": called}
    return {_MARK: "handle", "v": handle(value)}


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """The value again; `resolve` turns a handle's number into what stands for it here."""
    if isinstance(data, list):
        return [decode(part, resolve) for part in data]
    if not isinstance(data, dict):
        return data
    kind, held = data[_MARK], data["v"]
    if kind == "handle":
        return resolve(int(held))
    if kind == "builtin":
        return _builtin_type(str(held))
    if kind == "bytes":
        return str(held).encode("latin-1")
    if kind == "complex":
        return complex(*held)
    if kind == "dict":
        return {decode(key, resolve): decode(part, resolve) for key, part in held}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(part, resolve) for part in held)


def _builtin_type(name: str) -> type:
    """Only a type travels by name: `eval` is no type."""
    found = getattr(builtins, name)
    if not isinstance(found, type):
        raise TypeError(f"{name} is not a type")
    return found


def line(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"
