"""Environments and tools that a recipe can name for a task: built in, from a plug-in, or of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from oncurve.agents.gymnasium_environment import gymnasium_class
from oncurve.agents.mcp_client import mcp_tools
from oncurve.agents.openenv_environment import openenv_class
from oncurve.agents.textarena_environment import textarena_class
from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.agents.verifiers_environment import verifiers_class
from oncurve.errors import RecipeError, did_you_mean
from oncurve.plugins import Registry, load_function
from oncurve.recipe.schema.base import Section
from oncurve.records import Environment, History, StatefulEnvironment
from oncurve.tasks.puzzles.calculator import Calculator


class McpTools(Section):
    """All tools of an MCP server."""

    mcp: str
    """The command that starts the server, which speaks over its standard input and output."""


EnvironmentType = Callable[[], object]
FORMS = (
    "an environment is a class with `reset(**columns)`, whose other public methods are tools, or a class with `calls`, a tuple "
    "of texts, and a method `reply(prompt, turns, dice)`"
)


def _environment_fault(plugin: object) -> str | None:
    if isinstance(plugin, type) and any(callable(getattr(plugin, method, None)) for method in ("reply", "reset")):
        return None
    return FORMS


ENVIRONMENTS: Registry[EnvironmentType] = Registry("environment", {"calculator": Calculator}, _environment_fault)
"""Every environment by its name in `task.environment`; each is created without arguments."""

FROM_ELSEWHERE: Mapping[str, Callable[[str, str], type]] = {
    "gymnasium": gymnasium_class,
    "openenv": openenv_class,
    "textarena": textarena_class,
    "verifiers": verifiers_class,
}
"""Other packages' environments, which a recipe names as `package:id`: (id, the recipe's key) -> a class."""


def load_environment(
    name: str | None,
    where: str,
    tools: Sequence[str | McpTools] = (),
    max_turns: int | None = None,
    timeout_s: float = 10.0,
    history: History = "tokens",
) -> Environment | StatefulEnvironment | None:
    """The environment that a recipe names under ``where``: one of `ENVIRONMENTS`, or `file.py:Class`. With ``tools``, functions
    as `file.py:name` and MCP servers, that the policy can call besides."""
    kind = None if name is None else _find_environment(name, where)
    if kind is not None and not _is_stateful(kind):
        environment = _pure_environment(str(name), kind, where)
        if tools:
            because = "it replies by itself, and an environment with `reset` has its tools as methods"
            raise RecipeError(
                "task.tools", f"tools beside '{name}'", because=because, fix="remove task.tools or the environment"
            )
        return environment
    functions: list[object] = []
    for index, tool in enumerate(tools):
        place = f"task.tools[{index}]"
        functions += [load_function(tool, place)] if isinstance(tool, str) else mcp_tools(tool.mcp, place)
    if kind is None and not functions:
        return None
    options = {
        "max_turns": max_turns,
        "timeout_s": timeout_s,
        "history": history,
        "where": "task.tools",
        "factory_where": where,
    }
    return ToolEnvironment(functions, kind, **options)  # type: ignore[arg-type]


def _find_environment(name: str, where: str) -> EnvironmentType:
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    package, _, address = name.partition(":")
    if package in FROM_ELSEWHERE:
        return FROM_ELSEWHERE[package](address, where)
    if ":" in name:
        return load_function(name, where)
    raise RecipeError(
        where,
        f"there is no environment '{name}'{did_you_mean(name, ENVIRONMENTS)}",
        because=f"there are: {', '.join(ENVIRONMENTS)}",
        fix=f"name one of them, a class of yours as file.py:Class, or PACKAGE:ID of {', '.join(FROM_ELSEWHERE)}",
    )


def _is_stateful(kind: EnvironmentType) -> bool:
    return isinstance(kind, type) and hasattr(kind, "reset") and not hasattr(kind, "reply")


def _pure_environment(name: str, kind: EnvironmentType, where: str) -> Environment:
    try:
        environment = kind()
    except Exception as error:  # creating one runs the user's code, which may raise anything
        raise RecipeError(
            where,
            name,
            because=f"creating it failed: {type(error).__name__}: {error}",
            fix="give a class that takes no arguments",
        ) from error
    if not callable(getattr(environment, "reply", None)) or not isinstance(getattr(environment, "calls", None), tuple):
        fix = "add what is missing" if isinstance(kind, type) else "name the class itself"
        raise RecipeError(where, name, because=FORMS, fix=fix)
    return environment  # type: ignore[return-value]
