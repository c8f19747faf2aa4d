"""Environments and tools that a recipe can name for a task: built in, from a plug-in or another package, or the user's own."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, SupportsIndex
from weakref import WeakValueDictionary

import numpy as np

from oncurve.agents.gymnasium_environment import gymnasium_class
from oncurve.agents.mcp_client import mcp_tools
from oncurve.agents.openenv_environment import openenv_class
from oncurve.agents.textarena_environment import textarena_class
from oncurve.agents.tool_environment import TOOL_TIMEOUT_S, ToolEnvironment
from oncurve.agents.verifiers_environment import verifiers_class
from oncurve.errors import RecipeError, did_you_mean
from oncurve.plugins import Registry, load_function
from oncurve.recipe.schema.base import Section
from oncurve.records import Environment, History, Prompt, StatefulEnvironment
from oncurve.tasks.puzzles.calculator import Calculator


class McpTools(Section):
    """All tools of an MCP server."""

    mcp: str
    """The command that starts the server, which speaks over its standard input and output."""
    prefix: str = ""
    """The start of its tools' names, so that two servers can have tools of one name."""


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

FROM_ELSEWHERE: Mapping[str, Callable[[str, str, Mapping[str, Any]], type]] = {
    "gymnasium": gymnasium_class,
    "openenv": openenv_class,
    "textarena": textarena_class,
    "verifiers": verifiers_class,
}
"""Other packages' environments, which a recipe names as `package:id`: (id, the recipe's key, its options) -> a class."""

_BY_KEY: WeakValueDictionary[str, ToolEnvironment | PureEnvironment] = WeakValueDictionary()
"""This process's newest environment of each key (`send_as_key`)."""
_LOADED: dict[str, object] = {}
"""Environments that were loaded because another process sent their key. Prompts come and go, so they are kept."""
_LOADING = threading.RLock()


class PureEnvironment:
    """A user's environment of the pure form. Processes send each other this wrapper as its key; the user's own object can be
    copied and pickled as usual."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.sent_as: tuple[Callable[..., object], tuple[object, ...]] | None = None

    @property
    def calls(self) -> tuple[str, ...]:
        return self.environment.calls

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        return self.environment.reply(prompt, turns, dice)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PureEnvironment) and self.environment == other.environment

    def __hash__(self) -> int:
        return hash(type(self.environment))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.sent_as or super().__reduce_ex__(protocol)


def send_as_key(environment: ToolEnvironment | PureEnvironment, key: str, load: Callable[[], object] | None = None) -> None:
    """Pickle an environment as its key from now on. Ranks, and samplers of a Ray cluster, send each other prompts, and each
    process then uses its own environment of that key. If it has none, it calls ``load``.

    An environment itself can't be sent in general: its class may be local, its file's module may have been imported again, and
    it may hold a server.
    """
    _BY_KEY[key], environment.sent_as = environment, (_find_or_load, (key, load))


def _find_or_load(key: str, load: Callable[[], object] | None) -> object:
    with _LOADING:
        found = _BY_KEY.get(key)  # once: it may end with its last prompt at any time
        if found is not None:
            return found
        if load is None:
            raise KeyError(key)
        return _LOADED.setdefault(key, load())


def load_environment(
    name: str | None,
    where: str,
    tools: Sequence[str | McpTools] = (),
    max_turns: int | None = None,
    timeout_s: float = TOOL_TIMEOUT_S,
    history: History = "tokens",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Environment | StatefulEnvironment | None:
    """The environment that a recipe names under ``where``: one of `ENVIRONMENTS`, `file.py:Class`, or `PACKAGE:ID` of another
    package (`FROM_ELSEWHERE`). ``tools`` are functions (`file.py:name`) and MCP servers that the policy can call as well.
    ``options`` are the arguments of the environment's class."""
    built = _build_environment(name, where, tools, max_turns, timeout_s, history, options)
    environment = PureEnvironment(built) if built is not None and not isinstance(built, ToolEnvironment) else built
    if environment is not None:
        arguments = (name, where, tuple(tools), max_turns, timeout_s, history, dict(options))
        send_as_key(environment, repr(arguments), partial(load_environment, *arguments))
    return environment


def _build_environment(
    name: str | None,
    where: str,
    tools: Sequence[str | McpTools],
    max_turns: int | None,
    timeout_s: float,
    history: History,
    options: Mapping[str, Any],
) -> ToolEnvironment | Environment | None:
    kind = None if name is None else _find_environment(name, where, options)
    if kind is not None and not _is_stateful(kind):
        environment = _pure_environment(str(name), kind, where)
        if tools:
            because = "this environment answers calls itself; only one with `reset` can be combined with task.tools"
            what = f"tools together with the environment '{name}'"
            raise RecipeError("task.tools", what, because=because, fix="remove task.tools or the environment")
        return environment
    functions: list[object] = []
    for index, tool in enumerate(tools):
        place = f"task.tools[{index}]"
        functions += [load_function(tool, place)] if isinstance(tool, str) else mcp_tools(tool.mcp, place, tool.prefix)
    if kind is None and not functions:
        return None
    return ToolEnvironment(
        functions, kind, max_turns=max_turns, timeout_s=timeout_s, history=history, where="task.tools", factory_where=where
    )


def _find_environment(name: str, where: str, options: Mapping[str, Any]) -> EnvironmentType:
    package, _, address = name.partition(":")
    if name not in ENVIRONMENTS and package in FROM_ELSEWHERE:
        return FROM_ELSEWHERE[package](address, where, options)
    if name in ENVIRONMENTS or ":" in name:
        kind: EnvironmentType = ENVIRONMENTS[name] if name in ENVIRONMENTS else load_function(name, where)
        return _with_options(kind, name, f"{where}_options", options) if options else kind
    raise RecipeError(
        where,
        f"there is no environment '{name}'{did_you_mean(name, ENVIRONMENTS)}",
        because=f"there are: {', '.join(ENVIRONMENTS)}",
        fix=f"name one of them, a class of yours as file.py:Class, or PACKAGE:ID of {', '.join(FROM_ELSEWHERE)}",
    )


def _with_options(kind: EnvironmentType, name: str, where: str, options: Mapping[str, Any]) -> EnvironmentType:
    """The class with ``options`` as the arguments of its instances. Raises RecipeError if it does not take them."""
    if not isinstance(kind, type):
        return kind  # no environment: the error comes where it is used

    class WithOptions(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(**options)

    WithOptions.__name__, WithOptions.__module__ = kind.__name__, kind.__module__
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        because = f"'{name}' is created with them, and its class does not take them: {error}"
        raise RecipeError(where, dict(options), because=because, fix="correct the names, or remove the options") from None
    return WithOptions


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
            fix="correct the class: it is created without arguments, or with those of environment_options",
        ) from error
    if not callable(getattr(environment, "reply", None)) or not isinstance(getattr(environment, "calls", None), tuple):
        fix = "add what is missing" if isinstance(kind, type) else "name the class itself"
        raise RecipeError(where, name, because=FORMS, fix=fix)
    return environment  # type: ignore[return-value]
