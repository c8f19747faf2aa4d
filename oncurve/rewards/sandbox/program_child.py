"""What a locked child does: runs a program on its input, serves a program's functions, or runs tests against them.

Tests and program live in two processes. The tests' process holds stand-ins for the program's functions and classes, and only
plain values come back (`values`): a program can say what its functions return, and nothing else. It can't end the tests early,
pass them itself, or return an object that equals everything.
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

LONGEST_REPLY = 16 << 20
MOST_ITEMS = 1_000_000


def fresh_streams() -> None:
    """Python's own streams again on the descriptors 0, 1 and 2: the zygote's objects belong to other files."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="replace")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="replace", write_through=True)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def execute(program: str, name: str = "__main__") -> dict[str, Any]:
    """Runs a program's text as a module of its own, and gives its names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(program, "<program>", "exec"), vars(module))
    return vars(module)


def run_program(program: str) -> int:
    """Runs a program as Python would run a script; its exit code."""
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
        self.kept: list[Any] = []

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept) - 1


def serve_program(program: str, requests: int, replies: int) -> int:
    """Runs the program, says which names it has, then answers calls until the tests are done."""
    asked, told, handles = os.fdopen(requests, "rb"), os.fdopen(replies, "wb"), _Handles()
    names: dict[str, Any] = {}

    def say(reply: dict[str, Any]) -> None:
        told.write(json_values.line(reply))
        told.flush()

    try:
        names = execute(program)
        say({"names": _offered(names, handles)})
    except BaseException as error:  # a program may raise anything, SystemExit included
        say({"error": _error_fields(error)})
        return 1
    for line in asked:
        try:
            say(_serve(json.loads(line), names, handles))
        except BaseException as error:  # what a function of the program raises is its result
            say({"error": _error_fields(error)})
    return 0


def _offered(names: dict[str, Any], handles: _Handles) -> dict[str, Any]:
    offered: dict[str, Any] = {}
    for name, value in list(names.items()):
        if isinstance(value, types.ModuleType):
            offered[name] = {"module": value.__name__}
        elif callable(value):
            offered[name] = {"call": True}
        elif not name.startswith("__"):
            offered[name] = {"value": json_values.encode(value, handles.keep)}
    return offered


def _serve(request: dict[str, Any], names: dict[str, Any], handles: _Handles) -> dict[str, Any]:
    def resolve(number: int) -> Any:
        return handles.kept[number]

    target = names[request["name"]] if "name" in request else resolve(request["handle"])
    if "value" in request:
        setattr(target, request["attribute"], json_values.decode(request["value"], resolve))
        return {}
    if "attribute" in request:
        value = getattr(target, request["attribute"])
        return {"call": handles.keep(value)} if callable(value) else {"result": json_values.encode(value, handles.keep)}
    if "items" in request:
        listed = [item for item, _ in zip(target, range(MOST_ITEMS), strict=False)]
        return {"result": json_values.encode(listed, handles.keep)}
    arguments = json_values.decode(request["arguments"], resolve)
    named = json_values.decode(request["named"], resolve)
    result = json_values.encode(target(*arguments, **named), handles.keep)
    return {"result": result, "arguments": json_values.encode(arguments, handles.keep)}


def _error_fields(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)[:500]]


class Remote:
    """The tests' end of the line to a program."""

    def __init__(self, requests: int, replies: int) -> None:
        self._asked, self._told = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")

    def reply(self) -> dict[str, Any]:
        line = self._told.readline(LONGEST_REPLY)
        if not line.endswith(b"\n"):
            raise RuntimeError("the program ended" if len(line) < LONGEST_REPLY else "the program returned too much")
        reply = json.loads(line)
        if "error" in reply:
            kind, message = reply["error"]
            raise _error(str(kind), str(message))
        return dict(reply)

    def ask(self, **request: Any) -> dict[str, Any]:
        self._asked.write(json_values.line(request))
        self._asked.flush()
        return self.reply()

    def plain(self, data: Any) -> Any:
        return json_values.decode(data, lambda number: Opaque(self, number))

    def call(self, target: dict[str, Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Calls, and lets changes that the program made to lists and dicts it was given be seen here too."""
        sent = [json_values.encode(list(arguments), _handle_of), json_values.encode(named, _handle_of)]
        reply = self.ask(**target, arguments=sent[0], named=sent[1])
        for mine, theirs in zip(arguments, self.plain(reply["arguments"]), strict=True):
            _follow(mine, theirs)
        return self.plain(reply["result"])

    def function(self, **target: Any) -> Callable[..., Any]:
        return lambda *arguments, **named: self.call(target, arguments, named)


class Opaque:
    """Stands for an object of the program: its attributes and items can be asked for, but never whether it equals something."""

    def __init__(self, remote: Remote, number: int) -> None:
        self.__dict__.update(_remote=remote, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reply = self._remote.ask(handle=self._number, attribute=name)
        return self._remote.function(handle=reply["call"]) if "call" in reply else self._remote.plain(reply["result"])

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote.ask(handle=self._number, attribute=name, value=json_values.encode(value, _handle_of))

    def __iter__(self) -> Any:
        return iter(self._remote.plain(self._remote.ask(handle=self._number, items=True)["result"]))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._remote.call({"handle": self._number}, arguments, named)


def _handle_of(value: Any) -> int:
    if isinstance(value, Opaque):
        return int(value._number)
    raise TypeError(f"an argument of type {type(value).__name__} can't be passed to the program")


def _follow(mine: Any, theirs: Any) -> None:
    if isinstance(mine, list) and isinstance(theirs, list) and mine != theirs:
        mine[:] = theirs
    elif isinstance(mine, dict) and isinstance(theirs, dict) and mine != theirs:
        mine.clear()
        mine.update(theirs)


def _error(kind: str, message: str) -> BaseException:
    """An exception as the program raised it, where Python has one of that name; tests may ask for it."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):
            return known(message)
    return RuntimeError(f"{kind}: {message}")


def run_tests(job: dict[str, Any], requests: int, replies: int, results: int) -> int:
    """Runs setup and tests against a program served elsewhere; one line of JSON per test goes to `results`."""
    out = os.fdopen(results, "wb")
    remote = Remote(requests, replies)
    try:
        offered = remote.reply()["names"]
    except Exception as error:
        _say(out, {"broken": f"the program did not load: {_short(error)}"})
        return 1
    names = _names(remote, offered)
    try:
        exec(compile(job.get("setup") or "", "<setup>", "exec"), names)
        tests = _tests(job, names)
    except Exception as error:
        _say(out, {"broken": f"the tests did not load: {_short(error)}", "fault": "tests"})
        return 1
    for title, test in tests:
        _say(out, _outcome(title, test))
    return 0


def _names(remote: Remote, offered: dict[str, Any]) -> dict[str, Any]:
    """The program's names as the tests see them. Modules are imported afresh, and only those of the standard library."""
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    for name, what in offered.items():
        if "call" in what:
            names[name] = remote.function(name=name)
        elif "value" in what:
            names[name] = remote.plain(what["value"])
        elif str(what.get("module", "")).partition(".")[0] in sys.stdlib_module_names:
            with contextlib.suppress(ImportError):
                names[name] = importlib.import_module(what["module"])
    return names


def _tests(job: dict[str, Any], names: dict[str, Any]) -> list[tuple[str, Callable[[], Any]]]:
    """The tests of a job: snippets, and those of a text: its `test_…` functions, its `check` of the entry point, or itself."""
    snippets = [(text, _snippet(text, names)) for text in job.get("tests") or ()]
    text = job.get("test_code")
    if not text:
        return snippets
    entry = str(job.get("entry_point") or "")
    tree = ast.parse(text)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    wanted = [name for name in defined if name.startswith("test")]
    if not wanted and not ("check" in defined and entry):
        return [*snippets, ("the tests", _snippet(text, names))]
    exec(compile(tree, "<tests>", "exec"), names)
    if wanted:
        return [*snippets, *((name, names[name]) for name in wanted)]
    return [*snippets, ("check", lambda: names["check"](names[entry]))]


def _snippet(text: str, names: dict[str, Any]) -> Callable[[], None]:
    return lambda: exec(compile(text, "<test>", "exec"), names)


def _outcome(title: str, test: Callable[[], Any]) -> dict[str, Any]:
    try:
        test()
    except Exception as error:
        return {"passed": False, "why": f"{title.strip()[:120]}: {_short(error)}"}
    return {"passed": True}


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _say(out: BinaryIO, data: dict[str, Any]) -> None:
    out.write(json_values.line(data))
    out.flush()
