"""What a locked child runs: a program on its input, a server for a program's functions, or tests that call them.

Tests and program run in two processes. The tests' process has proxies of the program's functions and classes, and only plain
values come back (`json_values`): a program can choose what its functions return, and nothing else. It can't end the tests
early, pass them itself, or return an object that equals everything.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from oncurve.rewards.sandbox import json_values

MAX_REPLY_BYTES = 16 << 20
MAX_ITEMS = 1_000_000


def open_streams() -> None:
    """Opens Python's standard streams on the descriptors 0, 1 and 2; the zygote's stream objects belong to other files."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="replace")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="replace", write_through=True)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def execute(program: str, name: str = "__main__") -> dict[str, Any]:
    """Runs a program as a module and returns its names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(program, "<program>", "exec"), vars(module))
    return vars(module)


def run_program(program: str) -> int:
    """Runs a program as a script and returns its exit code."""
    try:
        execute(program)
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()


class _Handles:
    """Objects that can't leave their process, by number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def add(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1


def serve_program(program: str, requests: int, replies: int) -> int:
    """Runs the program, sends the names that it defines, then serves calls until the tests end."""
    request_lines, reply_stream, handles = os.fdopen(requests, "rb"), os.fdopen(replies, "wb"), _Handles()
    names: dict[str, Any] = {}
    try:
        names = execute(program)
        _send(reply_stream, {"names": _exported_names(names, handles)})
    except BaseException as error:  # a program may raise anything, SystemExit included
        _send(reply_stream, {"error": _error_fields(error)})
        return 1
    for line in request_lines:
        try:
            _send(reply_stream, _serve(json.loads(line), names, handles))
        except BaseException as error:  # what a function of the program raises is its result
            _send(reply_stream, {"error": _error_fields(error)})
    return 0


def _exported_names(names: dict[str, Any], handles: _Handles) -> dict[str, Any]:
    exported: dict[str, Any] = {}
    for name, value in list(names.items()):
        if isinstance(value, types.ModuleType):
            exported[name] = {"module": value.__name__}
        elif callable(value):
            exported[name] = {"call": True}
        elif not name.startswith("__"):
            exported[name] = {"value": json_values.encode(value, handles.add)}
    return exported


def _serve(request: dict[str, Any], names: dict[str, Any], handles: _Handles) -> dict[str, Any]:
    def resolve(number: int) -> Any:
        return handles.objects[number]

    target = names[request["name"]] if "name" in request else resolve(request["handle"])
    if "value" in request:
        setattr(target, request["attribute"], json_values.decode(request["value"], resolve))
        return {}
    if "attribute" in request:
        value = getattr(target, request["attribute"])
        return {"call": handles.add(value)} if callable(value) else {"result": json_values.encode(value, handles.add)}
    if "items" in request:
        items = [item for item, _ in zip(target, range(MAX_ITEMS), strict=False)]
        return {"result": json_values.encode(items, handles.add)}
    arguments = json_values.decode(request["arguments"], resolve)
    named = json_values.decode(request["named"], resolve)
    result = json_values.encode(target(*arguments, **named), handles.add)
    return {"result": result, "arguments": json_values.encode(arguments, handles.add)}


def _error_fields(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)[:500]]


class RemoteProgram:
    """The tests' connection to the program's process."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")

    def read_reply(self) -> dict[str, Any]:
        line = self._replies.readline(MAX_REPLY_BYTES)
        if not line.endswith(b"\n"):
            raise RuntimeError("the program ended" if len(line) < MAX_REPLY_BYTES else "the program returned too much")
        reply = json.loads(line)
        if "error" in reply:
            kind, message = reply["error"]
            raise _error(str(kind), str(message))
        return dict(reply)

    def request(self, **request: Any) -> dict[str, Any]:
        _send(self._requests, request)
        return self.read_reply()

    def decode(self, data: Any) -> Any:
        return json_values.decode(data, lambda number: RemoteObject(self, number))

    def call(self, target: dict[str, Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Calls a function, and applies the changes that it made to its list and dict arguments."""
        positional, keywords = json_values.encode(list(arguments), _handle_of), json_values.encode(named, _handle_of)
        reply = self.request(**target, arguments=positional, named=keywords)
        for argument, changed in zip(arguments, self.decode(reply["arguments"]), strict=True):
            _apply_changes(argument, changed)
        return self.decode(reply["result"])

    def function(self, **target: Any) -> Callable[..., Any]:
        return lambda *arguments, **named: self.call(target, arguments, named)


class RemoteObject:
    """Proxy of an object of the program: it has its attributes and items, but compares by identity here."""

    def __init__(self, remote: RemoteProgram, number: int) -> None:
        self.__dict__.update(_remote=remote, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reply = self._remote.request(handle=self._number, attribute=name)
        return self._remote.function(handle=reply["call"]) if "call" in reply else self._remote.decode(reply["result"])

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote.request(handle=self._number, attribute=name, value=json_values.encode(value, _handle_of))

    def __iter__(self) -> Any:
        return iter(self._remote.decode(self._remote.request(handle=self._number, items=True)["result"]))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._remote.call({"handle": self._number}, arguments, named)


def _handle_of(value: Any) -> int:
    if isinstance(value, RemoteObject):
        return int(value._number)
    raise TypeError(f"an argument of type {type(value).__name__} can't be passed to the program")


def _apply_changes(argument: Any, changed: Any) -> None:
    if isinstance(argument, list) and isinstance(changed, list) and argument != changed:
        argument[:] = changed
    elif isinstance(argument, dict) and isinstance(changed, dict) and argument != changed:
        argument.clear()
        argument.update(changed)


def _error(kind: str, message: str) -> BaseException:
    """The program's exception, if it is a built-in one, because tests may expect it; else a RuntimeError with its name."""
    builtin = getattr(builtins, kind, None)
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        with contextlib.suppress(TypeError):
            return builtin(message)
    return RuntimeError(f"{kind}: {message}")


def run_tests(job: dict[str, Any], requests: int, replies: int, results: int) -> int:
    """Runs setup and tests against a program in another process; one line of JSON per test goes to ``results``."""
    out = os.fdopen(results, "wb")
    remote = RemoteProgram(requests, replies)
    try:
        exported = remote.read_reply()["names"]
    except Exception as error:
        _send(out, {"broken": f"the program did not load: {_short(error)}"})
        return 1
    names = _names(remote, exported)
    try:
        exec(compile(job.get("setup") or "", "<setup>", "exec"), names)
        tests = _tests(job, names)
    except Exception as error:
        _send(out, {"broken": f"the tests did not load: {_short(error)}", "fault": "tests"})
        return 1
    for title, test in tests:
        _send(out, _run_test(title, test))
    return 0


def _names(remote: RemoteProgram, exported: dict[str, Any]) -> dict[str, Any]:
    """The program's names for the tests. Modules are imported anew, and only those of the standard library."""
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    for name, export in exported.items():
        if "call" in export:
            names[name] = remote.function(name=name)
        elif "value" in export:
            names[name] = remote.decode(export["value"])
        elif str(export.get("module", "")).partition(".")[0] in sys.stdlib_module_names:
            with contextlib.suppress(ImportError):
                names[name] = importlib.import_module(export["module"])
    return names


def _tests(job: dict[str, Any], names: dict[str, Any]) -> list[tuple[str, Callable[[], Any]]]:
    """The tests of a job: its snippets, and the `test_…` functions of its test module, else `check`, else the module."""
    snippets = [(text, _snippet(text, names)) for text in job.get("tests") or ()]
    text = job.get("test_code")
    if not text:
        return snippets
    entry = str(job.get("entry_point") or "")
    tree = ast.parse(text)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions = [name for name in defined if name.startswith("test")]
    if not functions and not ("check" in defined and entry):
        return [*snippets, ("the tests", _snippet(text, names))]
    exec(compile(tree, "<tests>", "exec"), names)
    if functions:
        return [*snippets, *((name, names[name]) for name in functions)]
    return [*snippets, ("check", lambda: names["check"](names[entry]))]


def _snippet(text: str, names: dict[str, Any]) -> Callable[[], None]:
    return lambda: exec(compile(text, "<test>", "exec"), names)


def _run_test(title: str, test: Callable[[], Any]) -> dict[str, Any]:
    try:
        test()
    except Exception as error:
        return {"passed": False, "why": f"{title.strip()[:120]}: {_short(error)}"}
    return {"passed": True}


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _send(stream: BinaryIO, data: dict[str, Any]) -> None:
    stream.write(json_values.to_line(data))
    stream.flush()
