"""MCP servers as tools: a program that speaks the Model Context Protocol over its standard input and output.

Messages are JSON-RPC 2.0, one in each line. All completions share one server, which is started when a task names it and ends
with the trainer: its standard input closes. If it ends before, the next call starts it again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any

from oncurve import __version__
from oncurve.agents.tools import Tool
from oncurve.errors import RecipeError

PROTOCOL = "2025-06-18"
START_S = 120.0
"""Seconds in which a server must have listed its tools."""


class McpError(Exception):
    """A call that a server has refused or could not answer. Its text is the tool's answer."""


class McpServer:
    """A running server, started in a folder."""

    def __init__(self, command: str, folder: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            shlex.split(command),
            cwd=folder,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self._waiting: dict[int, Future[Mapping[str, Any]]] = {}
        self._errors: deque[str] = deque(maxlen=5)
        self._error_reader = threading.Thread(target=self._read_errors, name="oncurve-mcp", daemon=True)
        self._error_reader.start()
        threading.Thread(target=self._read, name="oncurve-mcp", daemon=True).start()
        client = {"name": "oncurve", "version": __version__}
        self.request("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}, START_S)
        self._send({"method": "notifications/initialized"})

    def tools(self) -> list[Mapping[str, Any]]:
        """Its tools as it describes them; a server may list them in pages."""
        tools: list[Mapping[str, Any]] = []
        cursor: dict[str, Any] = {}
        while True:
            page = self.request("tools/list", cursor, START_S)
            tools += page["tools"]
            if not all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in tools):
                raise McpError("a tool is not an object with a name")
            if not page.get("nextCursor"):
                return tools
            cursor = {"cursor": page["nextCursor"]}

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A tool's result as text."""
        result = self.request("tools/call", {"name": name, "arguments": dict(arguments)})
        content = result.get("content", [])
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise McpError("the result's content is not a list of objects")
        parts = [part.get("text", f"[{part.get('type')}]") for part in content]
        text = "\n".join(map(str, parts))
        if result.get("isError"):
            raise McpError(text)
        return text

    def request(self, method: str, parameters: Mapping[str, Any], timeout_s: float | None = None) -> Mapping[str, Any]:
        """The server's result. Raises McpError if it answers with an error, has ended, or takes too long."""
        number, answer = next(self._numbers), Future[Mapping[str, Any]]()
        self._waiting[number] = answer
        try:
            self._send({"id": number, "method": method, "params": dict(parameters)})
            return answer.result(timeout_s)
        except TimeoutError:
            raise McpError(f"no answer to {method} in {timeout_s:g} s") from None
        except OSError:
            raise McpError(self.ended) from None
        finally:
            self._waiting.pop(number, None)

    @property
    def ended(self) -> str:
        """That the server has ended, and what it printed last."""
        self._error_reader.join(1.0)  # longer only if the server has left a process behind
        said = " ".join(self._errors)
        return "the server has ended" + (f": {said[-300:]}" if said else "")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:  # some servers print other lines too
                continue
            if isinstance(message, dict):
                self._handle(message)
        self.process.wait()
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(McpError(self.ended))

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "method" in message:
            if "id" in message:  # a request of the server: a ping, or one that we do not support
                known = message["method"] == "ping"
                refusal = {"error": {"code": -32601, "message": "not supported"}}
                with contextlib.suppress(OSError):
                    self._send({"id": message["id"], **({"result": {}} if known else refusal)})
            return
        number, result = message.get("id"), message.get("result") or {}
        answer = self._waiting.get(number) if isinstance(number, int) else None
        if answer is None or answer.done():
            return
        if "error" in message:
            error = message["error"]
            answer.set_exception(McpError(str(error.get("message", error) if isinstance(error, dict) else error)))
        elif not isinstance(result, dict):
            answer.set_exception(McpError("the result is not an object"))
        else:
            answer.set_result(result)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line.strip())


@lru_cache
def _holder(command: str, folder: str) -> list[McpServer]:
    """The one server of a command and folder in this process, replaced if it has ended."""
    return []


_STARTING = threading.Lock()


def _server(command: str, folder: str) -> McpServer:
    with _STARTING:
        holder = _holder(command, folder)
        if not holder or not holder[0].is_running:
            holder[:] = [McpServer(command, folder)]
        return holder[0]


def _call(command: str, folder: str, name: str, /, **arguments: Any) -> str:
    return _server(command, folder).call(name, arguments)


def mcp_tools(command: str, where: str, prefix: str = "") -> list[Tool]:
    """The tools of the server that a command starts in the current folder, with a prefix to their names. Raises RecipeError,
    which names ``where``, if it can't be started."""
    folder = os.getcwd()
    try:
        if not shlex.split(command):
            raise ValueError("it names no program")
        listed = _server(command, folder).tools()
    except (OSError, ValueError, KeyError, TypeError, McpError) as error:
        raise RecipeError(
            where,
            f"{command!r} is not a usable MCP server",
            because=f"{error}" or type(error).__name__,
            fix="check the command: run alone, it waits for messages on its standard input",
        ) from error
    tools = []
    for tool in listed:
        parameters = tool.get("inputSchema") or {"type": "object", "properties": {}}
        name = f"{prefix}{tool['name']}"
        function = {"name": name, "description": tool.get("description", ""), "parameters": parameters}
        call = partial(_call, command, folder, str(tool["name"]))
        tools.append(Tool(name, call, {"type": "function", "function": function}))
    return tools
