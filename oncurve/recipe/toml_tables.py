"""Parses TOML text, also from untrusted files: nesting too deep for Python's parser is refused. Imports nothing heavy."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 60
"""How deep tables and lists may be nested. The deepest of our own recipes has 5 levels; a JSON schema may need more."""
MAX_DOTS = 200
"""Dots in a key: Python's parser takes minutes for a key of thousands of parts."""


class NestedTooDeeply(ValueError):
    pass


def parse_tables(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises TOMLDecodeError, or NestedTooDeeply."""
    if any(line.partition("=")[0].partition("#")[0].count(".") > MAX_DOTS for line in text.splitlines()):
        raise NestedTooDeeply
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise NestedTooDeeply from None
    except ValueError as error:  # a number with thousands of digits
        raise tomllib.TOMLDecodeError(str(error)) from None
    check_depth(tables)
    return tables


def check_depth(tables: Mapping[str, Any]) -> None:
    level: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        values = [value.values() if isinstance(value, Mapping) else value for value in level]
        level = [item for inside in values for item in inside if isinstance(item, Mapping | list | tuple)]
        if not level:
            return
    raise NestedTooDeeply
