"""Encodes Python values as JSON: how arguments and results pass between the tests' and the program's process.

Strings, booleans, None, numbers and lists are JSON themselves; other plain values are tagged: large integers, tuples, sets,
dicts, bytes, complex numbers, fractions, decimals, dates, deques, counters, named tuples, built-in types. Anything else stays
in its process and is passed by reference. What arrives is always a plain value or a reference: an object of the program with
its own `==` can't get through.
"""

from __future__ import annotations

import builtins
import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from types import BuiltinFunctionType
from typing import Any

MAX_DEPTH = 200
_TAG = "~"
_SMALL = 1 << 53


def encode(value: Any, refer: Callable[[Any], dict[str, Any]], depth: int = 0) -> Any:
    """A value as JSON data. ``refer`` returns the reference to an object that is no plain value."""
    if depth > MAX_DEPTH:
        raise ValueError(f"a value nested deeper than {MAX_DEPTH}")
    if value is None or type(value) in (bool, float, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        plain = int(value)
        return {_TAG: "int", "v": hex(plain)} if abs(plain) > _SMALL else plain
    if isinstance(value, bool | float | str):  # an enum member or a subclass of str is passed as its plain value
        return next(kind(value) for kind in (bool, float, str) if isinstance(value, kind))

    def inner(part: Any) -> Any:
        return encode(part, refer, depth + 1)

    if type(value) is list:
        return [inner(part) for part in value]
    name, parts = _parts(value)
    if name is not None:
        return {_TAG: name, "v": inner(parts)}
    return refer(value)


def _parts(value: Any) -> tuple[str | None, Any]:
    """The tag of a plain value and what it is made of; no tag for other objects."""
    if isinstance(value, tuple):
        fields = getattr(type(value), "_fields", None)
        if isinstance(fields, tuple):
            return "namedtuple", [type(value).__name__, list(fields), list(value)]
        return "tuple", list(value)
    if isinstance(value, list | set | frozenset):
        return next(k.__name__ for k in (list, set, frozenset) if isinstance(value, k)), list(value)
    if isinstance(value, dict):
        return _dict_parts(value)
    if isinstance(value, bytes | bytearray):
        return ("bytes" if isinstance(value, bytes) else "bytearray"), bytes(value).decode("latin-1")
    if isinstance(value, deque):
        return "deque", [list(value), value.maxlen]
    if type(value) in (complex, Fraction, Decimal, range, slice, datetime, date, time, timedelta):
        return type(value).__name__, _NUMBERS[type(value)](value)
    if value is Ellipsis:
        return "Ellipsis", None
    if isinstance(value, type) or type(value) is BuiltinFunctionType:
        name = str(value.__name__)
        return ("builtin", name) if vars(builtins).get(name) is value else (None, None)
    return None, None


def _dict_parts(value: dict[Any, Any]) -> tuple[str, Any]:
    items = [[key, part] for key, part in value.items()]
    if isinstance(value, defaultdict):
        factory: Any = value.default_factory
        return "defaultdict", [factory if isinstance(factory, type) and _parts(factory)[0] == "builtin" else None, items]
    return ("OrderedDict" if isinstance(value, OrderedDict) else "Counter" if isinstance(value, Counter) else "dict"), items


_NUMBERS: dict[type, Callable[[Any], Any]] = {
    complex: lambda v: [v.real, v.imag],
    Fraction: lambda v: [v.numerator, v.denominator],
    Decimal: str,
    range: lambda v: [v.start, v.stop, v.step],
    slice: lambda v: [v.start, v.stop, v.step],
    datetime: lambda v: v.isoformat(),
    date: lambda v: v.isoformat(),
    time: lambda v: v.isoformat(),
    timedelta: lambda v: [v.days, v.seconds, v.microseconds],
}


def decode(data: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """The value that `encode` encoded. ``resolve(kind, content)`` returns what a reference stands for here."""
    if isinstance(data, list):
        return [decode(part, resolve) for part in data]
    if not isinstance(data, dict):
        return data
    kind, content = str(data[_TAG]), data["v"]
    if kind not in _BUILD:
        return resolve(kind, content)
    if kind == "namedtuple":
        named = resolve(kind, content[:2])
        return named(*decode(content[2], resolve))
    return _BUILD[kind](decode(content, resolve))


def reference(kind: str, content: Any) -> dict[str, Any]:
    """A reference to an object of this process."""
    return {_TAG: kind, "v": content}


def build_namedtuple(name: str, fields: list[str]) -> Any:
    """A class of named tuples."""
    return namedtuple(name, fields)


def _pairs(kind: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda content: kind(dict(content))


def _builtin(name: str) -> Any:
    """A built-in type or harmless built-in function by name. `eval`, `open` and their like are refused."""
    value = getattr(builtins, name)
    if not isinstance(value, type) and name not in ("abs", "all", "any", "divmod", "hash", "len", "max", "min", "pow", "round",
                                                   "sorted", "sum", "chr", "ord", "bin", "hex", "oct", "repr"):  # fmt: skip
        raise TypeError(f"{name} is not passed between processes")
    return value


_BUILD: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
    "dict": _pairs(dict),
    "OrderedDict": _pairs(OrderedDict),
    "Counter": _pairs(Counter),
    "defaultdict": lambda content: defaultdict(content[0], dict(content[1])),
    "bytes": lambda text: text.encode("latin-1"),
    "bytearray": lambda text: bytearray(text.encode("latin-1")),
    "deque": lambda content: deque(content[0], content[1]),
    "complex": lambda content: complex(*content),
    "Fraction": lambda content: Fraction(*content),
    "Decimal": Decimal,
    "range": lambda content: range(*content),
    "slice": lambda content: slice(*content),
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda content: timedelta(*content),
    "Ellipsis": lambda _: Ellipsis,
    "builtin": _builtin,
    "namedtuple": list,
}


def to_line(data: Any) -> bytes:
    """JSON data as one line."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"
