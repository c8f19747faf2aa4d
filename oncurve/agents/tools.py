"""Tools: typed functions with docstrings that the policy can call.

A tool's JSON schema, which the chat template shows to the model, comes from its signature and its docstring in Google's format
(transformers' `get_json_schema`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oncurve.errors import RecipeError

ToolFunction = Callable[..., Any]
EXAMPLE = 'def search(query: str) -> str: """Search the shop. Args: query: What to look for. Returns: What was found."""'
NOT_TOOLS = frozenset({"reset", "get_reward", "get_turn_reward"})
"""Public methods of an environment that the policy can't call."""
NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A function that the policy can call, with its JSON schema as the chat template gets it."""

    name: str
    function: ToolFunction
    schema: Mapping[str, Any]

    def argument_fault(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the types of the arguments; None if nothing is. Names are checked by the call itself."""
        properties = self.schema["function"].get("parameters", {}).get("properties", {})
        for name, value in arguments.items():
            expected = properties.get(name)
            kind = expected.get("type") if isinstance(expected, Mapping) else None  # a schema may be `true`: anything
            types = JSON_TYPES.get(kind) if isinstance(kind, str) else None
            if types is None or (value is None and expected.get("nullable")):
                continue
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                return f"argument '{name}' must be of type {kind}, not {value!r:.80}"
        return None


def describe_tool(function: object, where: str) -> Tool:
    """Converts a function to a tool. The schema is the function's attribute `json_schema` if it has one, else it is built from
    the signature and the docstring. Raises RecipeError, which names ``where``, if the function can't be a tool."""
    if isinstance(function, Tool):
        return function
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str) or isinstance(function, type) or name == "<lambda>":
        what = f"class {name}" if isinstance(function, type) else repr(function)
        raise RecipeError(where, f"{what} is not a tool", because="a tool is a function with a name", fix=f"write {EXAMPLE}")
    if (described := getattr(function, "json_schema", None)) is not None:
        return Tool(name, function, described)
    from transformers.utils import get_json_schema  # takes a second to import

    try:
        schema = get_json_schema(function)
    except Exception as error:  # one of several classes of transformers, and whatever evaluating type hints raises
        raise RecipeError(
            where,
            f"the tool '{name}' can't be described to the model",
            because=" ".join(str(error).split())[:300],
            fix=f"give every argument a type hint and a line in the docstring: {EXAMPLE}",
        ) from error
    by_position = [p.name for p in inspect.signature(function).parameters.values() if p.kind in NOT_BY_NAME]
    if by_position:
        because = "the model passes every argument by its name"
        fix = "make it an argument with a name; several values are a list"
        raise RecipeError(where, f"the tool '{name}' takes '{by_position[0]}' by its position", because=because, fix=fix)
    return Tool(name, function, schema)


def method_names(environment: type) -> list[str]:
    """The methods of an environment's class that are tools: the public functions, by name as TRL lists them."""
    members = inspect.getmembers(environment, inspect.isfunction)
    return [name for name, _ in members if name not in NOT_TOOLS and not name.startswith("_")]


def describe_methods(environment: type, where: str) -> list[Tool]:
    """The tools of an environment's class; their functions take the instance first."""
    unbound = object()  # a bound method has no `self` in its signature
    tools = [describe_tool(getattr(environment, name).__get__(unbound), where) for name in method_names(environment)]
    return [Tool(tool.name, getattr(environment, tool.name), tool.schema) for tool in tools]


def check_names(tools: Sequence[Tool], where: str) -> None:
    """Raises RecipeError if two tools have one name."""
    names = [tool.name for tool in tools]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        because = "the model calls a tool by its name"
        fix = 'rename one of the functions, or give the tools of an MCP server a prefix: { mcp = "…", prefix = "shop_" }'
        raise RecipeError(where, f"two tools are called '{double}'", because=because, fix=fix)
