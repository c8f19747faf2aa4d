"""What the program's process runs: the program as a script on its input, or a server for its functions.

The server offers the program's names to the tests, which run in another process (`tests_child`). It receives calls with plain
arguments and returns plain results (`value_codec`); objects of the program stay here and are passed by reference. Tests and
expected values never enter this process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import itertools
import json
import operator
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from oncurve.rewards.sandbox import value_codec

MAX_CHUNK = 4096
"""Items of an iterator that are passed at once."""
SHARED_MODULES = frozenset(
    ("math", "cmath", "itertools", "functools", "operator", "copy", "collections", "fractions", "decimal", "statistics",
     "string", "heapq", "bisect", "datetime", "re", "random")
)  # fmt: skip
"""Modules whose functions tests use from their own process if a program imported them by name."""


def open_streams() -> None:
    """Opens Python's standard streams on the descriptors 0, 1 and 2; the zygote's stream objects belong to other files."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="replace")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="replace", write_through=True)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def execute(program: str) -> dict[str, Any]:
    """Runs a program as the main module and returns its names."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(program, "<program>", "exec"), vars(module))
    return vars(module)


def run_program(program: str) -> int:
    """Runs a program as a script and returns its exit code. Like Python, waits for its threads and runs its exit functions."""
    code = 0
    try:
        execute(program)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    return code


def serve_program(program: str, requests: int, replies: int) -> int:
    """Runs the program, sends the names that it defines, then serves requests until the tests end."""
    return ProgramServer(requests, replies).serve(program)


class ProgramServer:
    """Serves the objects of a program. A reference is the number of an object, or a function of the tests to call back."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._names: dict[str, Any] = {}

    def serve(self, program: str) -> int:
        try:
            self._names = execute(program)
            send_line(self._replies, {"names": self._exports()})
        except BaseException as error:  # a program may raise anything, SystemExit included
            send_line(self._replies, {"error": self._error(error)})
            return 1
        while line := self._requests.readline():
            self._answer(json.loads(line))
        return 0

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            reply = getattr(self, f"_serve_{request['request']}")(request)
        except BaseException as error:  # what a function of the program raises is its result
            reply = {"error": self._error(error)}
        send_line(self._replies, reply)

    def _exports(self) -> dict[str, Any]:
        exports: dict[str, Any] = {}
        for name, value in list(self._names.items()):
            module = getattr(value, "__module__", None)
            if name.startswith("__"):
                continue
            if isinstance(value, types.ModuleType):
                exports[name] = {"module": value.__name__}
            elif module in SHARED_MODULES and getattr(value, "__name__", None) == name:
                exports[name] = {"module": module, "attribute": name}
            else:
                with contextlib.suppress(Exception):  # a value that can't be passed is no use to tests
                    exports[name] = {"value": self._encode(value)}
        return exports

    def _encode(self, value: Any) -> Any:
        return value_codec.encode(value, self._refer)

    def _decode(self, data: Any) -> Any:
        return value_codec.decode(data, self._resolve)

    def _refer(self, value: Any) -> dict[str, Any]:
        """A reference to an object of the program: always the same number for the same object."""
        if isinstance(value, _TestFunction):
            return value_codec.reference("own", value.number)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # keeps it alive, so that its id stays its own
        number = self._numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return value_codec.reference("exception", [number, _lineage(value)])
        if isinstance(value, types.CoroutineType):
            return value_codec.reference("coroutine", number)
        return value_codec.reference("callable" if callable(value) else "object", number)

    def _resolve(self, kind: str, content: Any) -> Any:
        if kind == "namedtuple":
            name, fields = content
            own = self._names.get(name)
            return own if list(getattr(own, "_fields", ())) == fields else value_codec.build_namedtuple(name, fields)
        if kind == "object":
            return self._objects[content]
        if kind == "standard":
            module, name = content
            return getattr(__import__(module, fromlist=[name]), name)
        return (_TestIterator if kind == "iterator" else _TestFunction if kind == "function" else _TestObject)(self, content)

    def call_back(self, number: int, action: str, *arguments: Any, **named: Any) -> Any:
        """Uses an object of the tests while they wait for a reply."""
        request = {"back": action, "number": number, "arguments": self._encode(list(arguments)), "named": self._encode(named)}
        send_line(self._replies, request)
        while line := self._requests.readline():
            reply = json.loads(line)
            if "request" in reply:
                self._answer(reply)
            elif "error" in reply:
                kind, message = reply["error"]
                error = getattr(builtins, kind, None)
                raise (error if isinstance(error, type) and issubclass(error, Exception) else RuntimeError)(message)
            else:
                return self._decode(reply["result"])
        raise EOFError("the tests ended")

    def _error(self, error: BaseException) -> dict[str, Any]:
        fields: dict[str, Any] = {"lineage": _lineage(type(error)), "message": "", "arguments": None, "attributes": None}
        with contextlib.suppress(BaseException):
            fields["message"] = str(error)[:500]
        with contextlib.suppress(BaseException):
            fields["arguments"] = self._encode(list(error.args))
            fields["attributes"] = self._encode({k: v for k, v in vars(error).items() if not k.startswith("_")})
        return fields

    def _target(self, request: dict[str, Any]) -> Any:
        return self._objects[request["object"]]

    def _serve_call(self, request: dict[str, Any]) -> dict[str, Any]:
        sent = request["arguments"]
        arguments, named = self._decode(sent)
        result = self._encode(self._target(request)(*arguments, **named))
        changed = self._encode([arguments, named])
        return {"result": result} if changed == sent else {"result": result, "changed": changed}

    def _serve_get(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"result": self._encode(getattr(self._target(request), request["name"]))}

    def _serve_set(self, request: dict[str, Any]) -> dict[str, Any]:
        setattr(self._target(request), request["name"], self._decode(request["value"]))
        return {}

    def _serve_operator(self, request: dict[str, Any]) -> dict[str, Any]:
        arguments = self._decode(request["arguments"])
        return {"result": self._encode(_OPERATORS[request["name"]](self._target(request), *arguments))}

    def _serve_next(self, request: dict[str, Any]) -> dict[str, Any]:
        items: list[Any] = []
        try:
            for item in itertools.islice(self._target(request), min(request["count"], MAX_CHUNK)):
                items.append(self._encode(item))
        except BaseException as error:
            return {"items": items, "failed": self._error(error)}
        return {"items": items, "last": len(items) < min(request["count"], MAX_CHUNK)}


def _await(coroutine: Any) -> Any:
    import asyncio  # large: every fork would copy its pages

    async def run() -> Any:
        return await coroutine

    return asyncio.run(run())


_UNARY = ("len", "bool", "str", "repr", "hash", "abs", "int", "float", "complex", "round", "iter", "reversed")
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in (*_UNARY, "isinstance", "issubclass")},
    **{name: getattr(operator, name) for name in ("neg", "pos", "invert", "index", "getitem", "setitem", "delitem")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")},
    **{name: getattr(operator, name) for name in ("and_", "or_", "xor", "lshift", "rshift")},
    "await": _await,
    "is_function": lambda value: isinstance(value, types.FunctionType | types.BuiltinFunctionType),
    "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None),
}


class _TestFunction:
    """A function of the tests, such as a lambda that they pass as an argument."""

    def __init__(self, server: ProgramServer, number: int) -> None:
        self.number, self._server = number, server

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._server.call_back(self.number, "call", *arguments, **named)


class _TestIterator(_TestFunction):
    """An iterator of the tests."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        items = self._server.call_back(self.number, "next")
        if not items:
            raise StopIteration
        return items[0]


class _TestObject(_TestFunction):
    """An object of a class that the tests define: its public attributes, length and items."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._server.call_back(self.number, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("number", "_server"):
            self.__dict__[name] = value
        else:
            self._server.call_back(self.number, "set", name, value)

    def __len__(self) -> int:
        return int(self._server.call_back(self.number, "len"))

    def __getitem__(self, key: Any) -> Any:
        return self._server.call_back(self.number, "getitem", key)


def _lineage(kind: type) -> list[list[Any]]:
    """An exception's class and its base classes, each with whether it is a built-in one."""
    return [[c.__name__, vars(builtins).get(c.__name__) is c] for c in kind.__mro__ if issubclass(c, BaseException)]


def send_line(stream: BinaryIO, data: dict[str, Any]) -> None:
    """Sends JSON data as one line."""
    stream.write(value_codec.to_line(data))
    stream.flush()
