"""Environments of OpenEnv: of a running server (`openenv:http://localhost:8000`), or of an app that is started here
(`openenv:file.py:app`).

Each completion has its own session, a WebSocket, which ends with its episode. An environment that lists tools over MCP has
these tools; any other has one tool, `step`, whose arguments are the fields of its action. This module only exchanges messages
with the server and does not import OpenEnv's package.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from oncurve.agents.gymnasium_environment import observation_text
from oncurve.errors import MissingPackage, RecipeError, pip_install
from oncurve.plugins import load_function

START_S = 600.0
"""Seconds within which a server must describe its environment. OpenEnv's package takes a while to import."""
EXIT_S = 10.0
"""Seconds to wait until a failed server has ended."""
SEEDS = 1 << 31
"""Seeds are below this number, because NumPy's older generators take no larger ones."""
MCP_FIELDS = frozenset({"type", "tool_name", "arguments"})
"""Fields of the action of an environment that lists tools over MCP. Its schema may also have no fields."""


class OpenEnvError(Exception):
    """An error that a server returned. The tool's result has its text."""


def openenv_class(address: str, where: str, options: Mapping[str, Any]) -> type:
    """A class of environments by TRL's contract. Raises an error, which names ``where``, if there is no such environment."""
    try:
        import websockets.sync.client  # noqa: F401
    except ModuleNotFoundError as error:
        because = "environments of OpenEnv are an optional extra"
        raise MissingPackage(where, "websockets is not installed", because=because, fix=pip_install("openenv")) from error
    if options:
        because = "the server creates the environments; each `reset` gets the row's columns"
        fix = "set them where the server or its app is configured, or give them as columns"
        raise RecipeError(f"{where}_options", dict(options), because=because, fix=fix)
    app = None if address.startswith(("http://", "https://")) else _App.of(address)

    def url() -> str:
        return address.rstrip("/") if app is None else app.url()

    try:
        action = _read_json(f"{url()}/schema")["action"]
        fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
        has_tools = fields.keys() <= MCP_FIELDS
        tools = _list_tools(url()) if has_tools else [_step_tool(action, fields)]
    except Exception as error:  # of the network, of a server, or of its module
        because = (None if app is None else app.last_words()) or f"{type(error).__name__}: {error}"
        fix = "start the server first, or correct its address" if app is None else "name the FastAPI app of a module or file"
        raise RecipeError(where, f"no server of OpenEnv at '{address}'", because=because, fix=fix) from error

    class OpenEnvEnvironment:
        has_group_seed = True
        """Without a column `seed`, all completions of a group get the same episode."""
        _session: _Session | None = None
        _reward, _is_over = 0.0, False

        def reset(self, seed: int, **columns: Any) -> str:
            """Begins a session. The environment's own `reset` gets a seed and those of the row's columns that it accepts."""
            self._session = _Session(url())
            result = self._session.request("reset", {**columns, "seed": seed % SEEDS})
            self._count(result)
            return f"\n{_observation_text(result['observation'])}"

        def get_reward(self) -> float:
            """The sum of the rewards. Ends the session."""
            assert self._session is not None
            self._session.close()
            return self._reward

        def _act(self, action: Mapping[str, Any]) -> str:
            assert self._session is not None
            if self._is_over:
                raise ValueError("the episode is over")
            result = self._session.request("step", action)
            self._count(result)
            text = _tool_text(result["observation"]) if has_tools else _observation_text(result["observation"])
            rewarded = "" if result.get("reward") is None else f"; reward {float(result['reward']):g}"
            return text + rewarded + ("; over" if self._is_over else "")

        def _count(self, result: Mapping[str, Any]) -> None:
            self._reward += float(result.get("reward") or 0.0)
            self._is_over = bool(result.get("done"))

        def __del__(self) -> None:
            if self._session is not None:  # an episode that failed has not asked for its reward
                self._session.close()

    for tool in tools:
        setattr(OpenEnvEnvironment, tool["name"], _method(tool, has_tools))
    OpenEnvEnvironment.__name__ = "openenv"
    return OpenEnvEnvironment


def _read_json(url: str) -> Any:
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if _is_local(url) else []))
    with opener.open(url, timeout=START_S) as answer:
        return json.load(answer)


def _is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "http://localhost:"))


class _Session:
    """A connection to a server, with an environment of its own."""

    def __init__(self, url: str) -> None:
        from websockets.sync.client import connect

        proxy: Literal[True] | None = None if _is_local(url) else True
        address = f"ws{url.removeprefix('http')}/ws"
        self._stack = contextlib.ExitStack()
        connection = connect(address, open_timeout=START_S, close_timeout=1.0, max_size=None, proxy=proxy)
        self._socket = self._stack.enter_context(connection)

    def request(self, kind: str, data: Mapping[str, Any]) -> Any:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # a full server sends an error and closes: it can still be read
            self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        answer = json.loads(self._socket.recv())
        if answer["type"] == "error":
            error = answer["data"]
            raise OpenEnvError(f"{error.get('message')} ({error.get('code')})")
        return answer["data"]

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may be closed already, or the server may have ended
            self._stack.close()


def _method(tool: Mapping[str, Any], has_tools: bool) -> Callable[..., str]:
    """A tool as a method."""
    name, parameters = str(tool["name"]), tool["parameters"]
    known, needed = parameters.get("properties", {}).keys(), parameters.get("required", ())

    def method(self: Any, **arguments: Any) -> str:
        faults = [f"{key} is missing" for key in needed if key not in arguments]
        faults += [f"there is no argument {key}" for key in arguments if key not in known]
        if faults:
            raise ValueError("; ".join(faults))
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments} if has_tools else arguments
        return str(self._act(action))

    method.__name__ = name
    method.json_schema = {"type": "function", "function": dict(tool)}  # type: ignore[attr-defined]
    return method


def _step_tool(action: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an action as that of a tool."""
    parameters = {"type": "object", "properties": dict(fields), "required": list(action.get("required", ()))}
    if "$defs" in action:
        parameters["$defs"] = action["$defs"]
    return {"name": "step", "description": action.get("description", "Act."), "parameters": parameters}


def _list_tools(url: str) -> list[dict[str, Any]]:
    session = _Session(url)
    listed = session.request("step", {"type": "list_tools"})["observation"]["tools"]
    session.close()
    if not listed:
        raise ValueError("its action has no fields, and it lists no tools")
    return [
        {"name": tool["name"], "description": tool["description"], "parameters": tool.get("input_schema") or {}}
        for tool in listed
    ]


def _observation_text(observation: Mapping[str, Any]) -> str:
    return observation_text({name: value for name, value in observation.items() if name != "metadata"})


def _tool_text(observation: Mapping[str, Any]) -> str:
    """The result of an MCP tool. Raises OpenEnvError if it is an error."""
    if observation.get("error") is not None:
        raise OpenEnvError(str(observation["error"].get("message", observation["error"])))
    result = observation.get("result")
    if not isinstance(result, Mapping) or "content" not in result:
        return observation_text(result)
    text = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in result["content"])
    if result.get("is_error"):
        raise OpenEnvError(text)
    return text


class _App:
    """An app from a module or file, which runs in a child process. `url` starts the child, and restarts it if it has ended. The
    child ends with this process at the latest."""

    def __init__(self, reference: str, folder: str) -> None:
        self.reference, self.folder, self._lock = reference, folder, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def of(reference: str) -> _App:
        """The instance for an app; a process has one per app. The app's file is relative to the current folder."""
        return _only_app(reference, os.getcwd())

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def url(self) -> str:
        with self._lock:
            if not self.is_running():
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    self._port, number = listener.getsockname()[1], listener.fileno()
                    command = [sys.executable, "-m", __name__, self.reference, str(number)]
                    self._output = tempfile.TemporaryFile()  # noqa: SIM115
                    self._process = subprocess.Popen(
                        command,
                        cwd=self.folder,
                        stdin=subprocess.PIPE,
                        stdout=self._output,
                        stderr=self._output,
                        pass_fds=[number],
                    )
            return f"http://127.0.0.1:{self._port}"

    def last_words(self) -> str | None:
        """The end of the process's output; None if it is still running."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)  # its socket closes a moment before it ends
        if self.is_running():
            return None
        self._output.seek(0)
        return " ".join(self._output.read().decode(errors="replace").split())[-300:] or "it ended"

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@cache
def _only_app(reference: str, folder: str) -> _App:
    return _App(reference, folder)


def _serve(reference: str, number: int) -> None:
    """Serve an app at a socket until the standard input closes."""
    import uvicorn

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    try:
        app = load_function(reference, "task.environment")
    except RecipeError as error:
        sys.exit(error.because)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[socket.socket(fileno=number)])


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
