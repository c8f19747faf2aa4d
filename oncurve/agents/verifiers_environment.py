"""Tasksets of verifiers 0.4 by id, such as `verifiers:my-taskset`: the tools of their toolsets, and their rewards.

verifiers runs a task as an agent program in a sandbox. Here the sampler is the agent: each completion has its own toolsets,
which run in this process, and the task's rewards score the conversation. A taskset that needs more is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oncurve.errors import MissingPackage, RecipeError, pip_install
from oncurve.workers.event_loop import shared_loop

START_S = 120.0
"""Seconds within which the toolsets must list their tools."""


def verifiers_class(id: str, where: str, options: Mapping[str, Any]) -> type:
    """A class of environments by TRL's contract. Raises an error, which names ``where``, if the tasks can't run here."""
    try:
        from verifiers.v1 import Trace
        from verifiers.v1.mcp.server import _call_state
        from verifiers.v1.state import state_cls
    except ImportError as error:
        because = "support for tasksets of verifiers 0.4 is an optional extra"
        raise MissingPackage(where, "verifiers 0.4 is not installed", because=because, fix=pip_install("verifiers")) from error
    taskset = _load(id, where, options)
    tasks = _Tasks(taskset)
    first = tasks[0]
    if (fault := _fault(id, taskset, first)) is not None:
        fix = 'run it as an agent program, [task] type = "agent", or use another taskset'
        raise RecipeError(where, f"verifiers:{id}", because=fault, fix=fix)
    shared = [_Server(toolset) for toolset in type(taskset).toolsets(taskset.config)]

    class VerifiersEnvironment:
        async def reset(self, idx: int, **columns: Any) -> str:
            """Begins the task of this number."""
            self._task = tasks[idx]
            self._state = state_cls(type(self._task))()
            own = [_Server(toolset) for toolset in type(self._task).toolsets(self._task.config)]
            for server in own:
                await server.begin(self._task.data)
            for server in shared:
                await server.begin(None)
            self._servers = {server.name: server for server in (*shared, *own)}
            return "\n" + "\n\n".join(filter(None, (self._task.data.system_prompt, self._task.data.prompt_text)))

        async def get_reward(self, messages: Sequence[Mapping[str, Any]]) -> float:
            """The weighted sum of the task's rewards."""
            trace = _trace(Trace, self._task, self._state, messages)
            await self._task.score(trace)
            return float(trace.reward)

        async def _call(self, server: str, tool: str, arguments: Mapping[str, Any]) -> str:
            token = _call_state.set(self._state)
            try:
                return await self._servers[server].call(tool, arguments)
            finally:
                _call_state.reset(token)

    servers = [*shared, *(_Server(toolset) for toolset in type(first).toolsets(first.config))]
    for server in servers:
        for tool in asyncio.run_coroutine_threadsafe(server.tools(), shared_loop()).result(START_S):
            method = _method(server.name, tool)
            setattr(VerifiersEnvironment, method.__name__, method)
    VerifiersEnvironment.__name__ = id
    return VerifiersEnvironment


def _load(id: str, where: str, options: Mapping[str, Any]) -> Any:
    """The taskset of an id. ``options`` are keys of its configuration."""
    from verifiers.v1.utils import loaders

    try:
        return loaders.load_taskset(loaders.taskset_config_type(id)(id=id, **options))
    except Exception as error:  # importing it runs others' code
        because = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fix = "name an installed taskset of verifiers 0.4; version 0.4 does not load the environments of earlier versions"
        raise RecipeError(where, f"verifiers:{id}", because=because, fix=fix) from error


class _Tasks:
    """A taskset's tasks by number, loaded when they are first needed: some tasksets are infinite."""

    def __init__(self, taskset: Any) -> None:
        self._rest: Iterator[Any] = iter(taskset)
        self._loaded: list[Any] = []
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Any:
        with self._lock:
            self._loaded += itertools.islice(self._rest, max(0, number + 1 - len(self._loaded)))
        if not 0 <= number < len(self._loaded):
            raise ValueError(f"there is no task {number}: the taskset has {len(self._loaded)}")
        return self._loaded[number]


def _fault(id: str, taskset: Any, task: Any) -> str | None:
    """Why a taskset can't run here; None if it can."""
    from verifiers.v1 import SingleAgentEnv, Task, Toolset
    from verifiers.v1.utils.decorators import discover_decorated
    from verifiers.v1.utils.loaders import environment_class

    def needs_runtime(function: Callable[..., Any]) -> bool:
        parameter = inspect.signature(function).parameters.get("runtime")
        return parameter is not None and parameter.default is inspect.Parameter.empty

    kind, data = type(task), task.data
    scorers = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    toolsets = [*type(taskset).toolsets(taskset.config), *kind.toolsets(task.config)]
    if environment_class(id) is not SingleAgentEnv:
        return "it has its own environment class, for several agents or another control flow"
    if kind.NEEDS_CONTAINER or data.image is not None:
        return "its tasks need a container"
    if any(getattr(kind, hook) is not getattr(Task, hook) for hook in ("setup", "finalize", "stage_verifier")) or data.skills:
        return "its tasks prepare a sandbox (setup, finalize, stage_verifier or skills), and there is none here"
    if any(map(needs_runtime, scorers)):
        return "a reward looks into a sandbox (its parameter `runtime`), and there is none here"
    if task.hooks("stop") or discover_decorated(task, "intercept"):
        return "it stops or rewrites the conversation (@stop, @intercept), which the sampler can't do"
    if not isinstance(data.prompt, str) and [message.role for message in data.prompt or ()] != ["user"]:
        return "its prompt is not a single user message"
    if any(type(toolset).register is not Toolset.register or getattr(toolset.config, "url", None) for toolset in toolsets):
        return "a toolset is a server elsewhere, or registers its tools itself"
    return None


class _Server:
    """A toolset in this process, behind a server of the package mcp, which describes its tools and checks their arguments."""

    def __init__(self, toolset: Any) -> None:
        from mcp.server.mcpserver import MCPServer
        from verifiers.v1.utils.decorators import discover_decorated

        self.toolset, self.name, self._has_begun = toolset, toolset.server_name, False
        self._server = MCPServer(self.name or "tools")
        for function in discover_decorated(toolset, "tool"):
            name, description = getattr(function, "tool_name", None) or function.__name__, (function.__doc__ or "").strip()
            self._server.add_tool(function, name=name, description=description or None)

    async def begin(self, data: Any) -> None:
        """Prepares the toolset once. ``data``: of the task that it belongs to; None if it belongs to the taskset."""
        if not self._has_begun:
            self._has_begun = True
            await self.toolset.setup()
            if data is not None:
                await self.toolset.setup_task(data)

    async def tools(self) -> list[Any]:
        return list(await self._server.list_tools())

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        result: Any = await self._server.call_tool(tool, dict(arguments))
        if not hasattr(result, "content"):
            raise ValueError("the tool asks a person for input")
        text = "\n".join(str(getattr(part, "text", f"[{part.type}]")) for part in result.content)
        if result.is_error:
            raise ValueError(text)
        return text


def _method(server: str, tool: Any) -> Callable[..., Any]:
    """A tool as a method, under the name that verifiers gives it: the server's and its own."""

    async def method(self: Any, **arguments: Any) -> str:
        return str(await self._call(server, tool.name, arguments))

    method.__name__ = f"{server}_{tool.name}" if server else tool.name
    function = {"name": method.__name__, "description": tool.description or "", "parameters": tool.input_schema}
    method.json_schema = {"type": "function", "function": function}  # type: ignore[attr-defined]
    return method


def _trace(kind: Any, task: Any, state: Any, messages: Sequence[Mapping[str, Any]]) -> Any:
    """The conversation as verifiers records it: its messages with their tool calls, but no token ids and no times."""
    from verifiers.v1 import (
        AgentConfig,
        AgentInfo,
        AssistantMessage,
        MessageNode,
        SystemMessage,
        ToolCall,
        ToolMessage,
        TraceTask,
        UserMessage,
    )

    data, open_calls = task.data, 0
    said: list[Any] = [] if data.system_prompt is None else [SystemMessage(content=data.system_prompt)]
    said.append(UserMessage(content=data.prompt_text))
    given = len(said)
    ids: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            ids = [f"call_{open_calls + index}" for index in range(len(calls))]
            open_calls += len(calls)
            made = [
                ToolCall(id=number, name=call["name"], arguments=json.dumps(call["arguments"]))
                for number, call in zip(ids, calls, strict=True)
            ]
            said.append(AssistantMessage(content=message["content"], tool_calls=made or None))
        else:
            content = message["content"] if isinstance(message["content"], str) else json.dumps(message["content"])
            said.append(ToolMessage(tool_call_id=ids.pop(0) if ids else "", content=content, name=message.get("name")))
    nodes = [
        MessageNode(
            parent=index - 1 if index else None, message=message, sampled=index >= given and message.role == "assistant"
        )
        for index, message in enumerate(said)
    ]
    recorded = TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)
    return kind(task=recorded, agent=AgentInfo(config=AgentConfig()), nodes=nodes, state=state, is_completed=True, ok=True)
