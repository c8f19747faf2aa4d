"""What the tests' process runs: setup and tests, with proxies of the program's functions and objects.

The names that tests use come from this side: built-in functions, imports, and what setup and tests define. The program adds
only names that none of these has, so it can't replace `set` or `math.isclose`. It can choose what its functions return, and
nothing else: it never sees an expected value, because a comparison or sum of its object with a plain value is not passed on.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import itertools
import json
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from oncurve.rewards.sandbox import value_codec
from oncurve.rewards.sandbox.program_child import SHARED_MODULES, send_line

MAX_REPLY_BYTES = 16 << 20
_PREDICATES = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint")
"""Methods of built-in types that compare with their argument, which may be the expected value. They are not called on an object
of the program with a plain value, unless the tests use attributes that no built-in type has, because the program then returns
objects of its own classes."""
_PLAIN_TYPES = (str, bytes, int, float, complex, list, tuple, set, frozenset, dict)
_DUNDERS = ("__name__", "__doc__", "__dict__")
_HELPERS = {
    **dict.fromkeys(("isclose", "isnan", "isinf", "isfinite", "fabs", "floor", "ceil"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    "deepcopy": "copy",
    "Fraction": "fractions",
    "Decimal": "decimal",
}
"""Functions that tests wrap around what they test."""


Plain = TypeVar("Plain", int, bool, str, float, complex)


class RemoteProgram:
    """The tests' connection to the program's process."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")
        self._proxies: dict[int, Any] = {}
        self._exceptions: dict[str, type[BaseException]] = {}
        self._own: list[Any] = []
        self.has_own_methods = False

    def read_reply(self) -> dict[str, Any]:
        """Waits for the program's reply and returns it. While waiting, runs the tests' functions that the program calls."""
        while True:
            line = self._replies.readline(MAX_REPLY_BYTES)
            if not line.endswith(b"\n"):
                raise RuntimeError("the program ended" if len(line) < MAX_REPLY_BYTES else "the program returned too much")
            reply = json.loads(line)
            if "back" in reply:
                self._send(self._serve(reply))
                continue
            if "error" in reply:
                raise self.error(reply["error"])
            return dict(reply)

    def request(self, kind: str, target: int, **more: Any) -> dict[str, Any]:
        self._send({"request": kind, "object": target, **more})
        return self.read_reply()

    def _send(self, data: dict[str, Any]) -> None:
        try:
            send_line(self._requests, data)
        except BrokenPipeError:
            raise RuntimeError("the program ended") from None

    def operator(self, name: str, target: int, *arguments: Any) -> Any:
        return self.decode(self.request("operator", target, name=name, arguments=self.encode(list(arguments)))["result"])

    def call(self, target: int, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Calls a function, and applies the changes that it made to its arguments."""
        sent = [list(arguments), named]
        reply = self.request("call", target, arguments=self.encode(sent))
        if "changed" in reply:
            changed, changed_named = self.decode(reply["changed"])
            for argument, value in zip(arguments, changed, strict=True):
                _apply_changes(argument, value)
            for name, argument in named.items():
                _apply_changes(argument, changed_named[name])
        return self.decode(reply["result"])

    def encode(self, value: Any) -> Any:
        return value_codec.encode(value, self._refer)

    def decode(self, data: Any) -> Any:
        return value_codec.decode(data, self._resolve)

    def _refer(self, value: Any) -> dict[str, Any]:
        """A reference that stands for a value: the program's own objects under the program's number, standard functions by
        name, and functions, iterators and objects that tests define under a number of ours."""
        if isinstance(value, RemoteObject):
            return value_codec.reference("object", value._number)
        if isinstance(value, type) and (number := vars(value).get("_program_number")) is not None:
            return value_codec.reference("object", number)
        if isinstance(value, type | types.BuiltinFunctionType | types.FunctionType):
            module = str(value.__module__).lstrip("_")  # operator's functions are those of _operator
            if module in SHARED_MODULES:
                return value_codec.reference("standard", [module, value.__name__])
        if isinstance(value, Iterator):
            return value_codec.reference("iterator", self._own_number(value))
        if isinstance(value, types.FunctionType | types.MethodType):
            return value_codec.reference("function", self._own_number(value))
        if getattr(type(value), "__module__", None) == "tests":
            return value_codec.reference("test object", self._own_number(value))
        raise TypeError(f"a value of type {type(value).__name__} can't be passed to the program")

    def _own_number(self, value: Any) -> int:
        self._own.append(value)
        return len(self._own) - 1

    def _resolve(self, kind: str, content: Any) -> Any:
        if kind == "namedtuple":
            return value_codec.build_namedtuple(*content)
        if kind == "own":
            return self._own[int(content)]
        if kind == "exception":
            number, lineage = content
            return self.exception_class(lineage, int(number))
        proxy = {"object": RemoteObject, "callable": RemoteCallable, "coroutine": RemoteCoroutine}[kind]
        return self._proxies.setdefault(int(content), proxy(self, int(content)))

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Performs an operation of the program on an object of the tests. Only the operations listed here are possible; the
        program can't reach anything else in the object."""
        try:
            value, arguments = self._own[int(request["number"])], self.decode(request["arguments"])
            return {"result": self.encode(self._use(value, request["back"], arguments, self.decode(request["named"])))}
        except Exception as error:
            return {"error": [type(error).__name__, str(error)[:500]]}

    def _use(self, value: Any, action: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        is_object = getattr(type(value), "__module__", None) == "tests"
        if action == "call" and (is_object or isinstance(value, types.FunctionType | types.MethodType)):
            return value(*arguments, **named)
        if action == "next" and isinstance(value, Iterator):
            return list(itertools.islice(value, 1))
        if action == "get" and is_object and not str(arguments[0]).startswith("_"):
            return getattr(value, arguments[0])
        if action == "set" and is_object and not str(arguments[0]).startswith("_"):
            return setattr(value, *arguments)
        if action in ("len", "getitem") and is_object:
            return len(value) if action == "len" else value[arguments[0]]
        raise TypeError(f"a program can't do this with a {type(value).__name__}")

    def error(self, fields: dict[str, Any]) -> BaseException:
        """The program's exception. Those that would end a loop of the tests early become a RuntimeError."""
        lineage, message = fields["lineage"], str(fields["message"])
        kind = self.exception_class(lineage)
        if issubclass(kind, StopIteration | StopAsyncIteration | GeneratorExit):
            return RuntimeError(f"the program raised {kind.__name__}")
        error: BaseException
        with contextlib.suppress(Exception):
            error = kind(*self.decode(fields["arguments"])) if fields["arguments"] is not None else kind(message)
            if not lineage[0][1]:
                error._message = message  # type: ignore[attr-defined]
            for name, value in self.decode(fields["attributes"] or {"~": "dict", "v": []}).items():
                setattr(error, name, value)
            return error
        return RuntimeError(f"{kind.__name__}: {message}")

    def exception_class(self, lineage: Sequence[Sequence[Any]], number: int | None = None) -> type[BaseException]:
        """The class that stands for the program's exception here: the built-in one, or one of this name with the same bases."""
        (name, is_builtin), *bases = lineage
        if is_builtin:
            builtin = vars(builtins).get(name)
            return builtin if isinstance(builtin, type) and issubclass(builtin, BaseException) else Exception
        if name not in self._exceptions:
            base = self.exception_class(bases) if bases else Exception
            self._exceptions[name] = type(str(name), (base,), {"__init__": _keep_arguments, "__str__": _message})
        if number is not None:
            self._exceptions[name]._program_number = number  # type: ignore[attr-defined]
        return self._exceptions[name]


def _keep_arguments(error: BaseException, *arguments: Any, **_: Any) -> None:
    error.args = arguments


def _message(error: BaseException) -> str:
    """What the program's `str` of it says, or its arguments if the tests made it."""
    arguments = str(error.args[0]) if len(error.args) == 1 else str(error.args or "")
    return str(vars(error).get("_message", arguments))


class RemoteObject:
    """Proxy of an object of the program.

    Its attributes, methods, items, length and conversions are the program's. Operators are passed on only between two objects
    of the program: with a plain value on the other side they would show the program what is expected of it, so there `==` is
    false and the others raise.
    """

    def __init__(self, remote: RemoteProgram, number: int) -> None:
        self.__dict__.update(_remote=remote, _number=number, _unread=deque())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _DUNDERS:
            raise AttributeError(name)
        value = self._remote.decode(self._remote.request("get", self._number, name=name)["result"])
        if name in _PREDICATES and isinstance(value, RemoteObject) and not self._remote.has_own_methods:
            return _between_objects(value, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote.request("set", self._number, name=name, value=self._remote.encode(value))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and bool(self._remote.operator("isinstance", value._number, self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._remote.operator("iter", self._number)
        if not isinstance(iterator, RemoteObject):
            return iter(iterator)
        return iterator._items()

    def __next__(self) -> Any:
        return next(self._items())

    def _items(self) -> Iterator[Any]:
        """The items of an iterator, fetched in chunks that grow, so that few are fetched if few are used."""
        count = 1
        while True:
            while self._unread:
                item = self._unread.popleft()
                if isinstance(item, BaseException):
                    raise item
                yield item
            if self.__dict__.get("_is_read"):
                return
            reply = self._remote.request("next", self._number, count=count)
            self._unread.extend(self._remote.decode(reply["items"]))
            if "failed" in reply:
                self._unread.append(self._remote.error(reply["failed"]))
            self.__dict__["_is_read"] = "failed" in reply or bool(reply["last"])
            count = min(count * 2, 4096)

    def __getitem__(self, key: Any) -> Any:
        return self._remote.operator("getitem", self._number, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remote.operator("setitem", self._number, key, value)

    def __delitem__(self, key: Any) -> None:
        self._remote.operator("delitem", self._number, key)

    def __enter__(self) -> Any:
        return self._remote.operator("enter", self._number)

    def __exit__(self, *_: object) -> None:
        self._remote.operator("exit", self._number)

    def __len__(self) -> int:
        return _expect(int, self._remote.operator("len", self._number))

    def __bool__(self) -> bool:
        return _expect(bool, self._remote.operator("bool", self._number))

    def __str__(self) -> str:
        return _expect(str, self._remote.operator("str", self._number))

    def __repr__(self) -> str:
        return _expect(str, self._remote.operator("repr", self._number))

    def __hash__(self) -> int:
        return _expect(int, self._remote.operator("hash", self._number))

    def __int__(self) -> int:
        return _expect(int, self._remote.operator("int", self._number))

    def __index__(self) -> int:
        return _expect(int, self._remote.operator("index", self._number))

    def __float__(self) -> float:
        return _expect(float, self._remote.operator("float", self._number))

    def __complex__(self) -> complex:
        return _expect(complex, self._remote.operator("complex", self._number))


class RemoteCallable(RemoteObject):
    """Proxy of a function, a class, or an object that can be called."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._remote.call(self._number, arguments, named)


class RemoteCoroutine(RemoteObject):
    """Proxy of a coroutine, which runs to its end in the program's process when it is awaited."""

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._remote.operator("await", self._number)

    def send(self, _: object) -> Any:
        raise StopIteration(self._remote.operator("await", self._number))

    def __next__(self) -> Any:
        return self.send(None)

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None:
        pass


def _expect(kind: type[Plain], value: Any) -> Plain:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, the program returned {type(value).__name__}")
    return value


def _unary(name: str) -> Callable[[Any], Any]:
    return lambda self: self._remote.operator(name, self._number)


def _binary(name: str) -> Callable[[Any, Any], Any]:
    def operate(self: RemoteObject, other: Any) -> Any:
        if not isinstance(other, RemoteObject):
            return NotImplemented
        return self._remote.operator(name, self._number, other)

    return operate


for _class in (RemoteObject, RemoteCallable, RemoteCoroutine):
    _class.__doc__ = property(lambda self: self.__getattr__("__doc__"))  # type: ignore[assignment]  # the program's, not ours
for _name in ("neg", "pos", "invert", "abs", "round", "reversed"):
    setattr(RemoteObject, f"__{_name}__", _unary(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor",
              "and_", "or_", "lshift", "rshift"):  # fmt: skip
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _binary(_name))


def _between_objects(method: RemoteObject, name: str) -> Callable[[Any], Any]:
    """A method that compares; only with another object of the program."""

    def compare(other: Any) -> Any:
        if not isinstance(other, RemoteObject):
            raise TypeError(f"'{name}' of an object of the program with a plain value")
        return method._remote.call(method._number, (other,), {})

    return compare


def _apply_changes(argument: Any, changed: Any) -> None:
    if type(argument) is not type(changed) or argument == changed:
        return
    if isinstance(argument, list | bytearray):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)
    elif isinstance(argument, deque):
        argument.clear()
        argument.extend(changed)


def run_tests(job: dict[str, Any], requests: int, replies: int, results: int) -> int:
    """Runs setup and tests against a program in another process; one line of JSON per test goes to ``results``."""
    out = os.fdopen(results, "wb")
    remote = RemoteProgram(requests, replies)
    try:
        exports = remote.read_reply()["names"]
    except Exception as error:
        send_line(out, {"broken": f"the program did not load: {_short(error)}"})
        return 1
    module = types.ModuleType("tests")
    names = vars(module)
    sys.modules["tests"] = module
    try:
        names.update(program_names(remote, exports, job))
        exec(compile(job.get("setup") or "", "<setup>", "exec"), names)
        tests = _tests(job, names)
    except BaseException as error:
        send_line(out, {"broken": f"the tests did not load: {_short(error)}", "fault": "tests"})
        return 1
    for title, test in tests:
        send_line(out, _run_test(title, test))
    return 0


def program_names(remote: RemoteProgram, exports: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The program's names that tests may use.

    Built-in names stay the tests' own, except for the function under test. So do modules of the standard library that the tests
    use (`math.isclose`), and functions that they wrap around what they test (`isclose`).
    """
    used = _TestNames.of(job)
    remote.has_own_methods = used.has_own_methods
    target = job.get("entry_point") or used.builtin_target()
    names: dict[str, Any] = {}
    for name, export in exports.items():
        if name in vars(builtins) and name != target:
            continue
        if "module" in export:
            value = _standard(export)
        elif name in used.modules or name in used.helpers:
            continue
        else:
            value = remote.decode(export["value"])
        if value is not None:
            names[name] = value
    for name in used.modules:
        names[name] = importlib.import_module(name)
    for name in used.helpers:
        names[name] = getattr(importlib.import_module(_HELPERS[name]), name)
    return names


def _standard(export: dict[str, Any]) -> Any:
    """What a program imported from the standard library, imported again; None for anything else."""
    module, attribute = str(export["module"]), export.get("attribute")
    if attribute is not None:
        return getattr(importlib.import_module(module), str(attribute), None) if module in SHARED_MODULES else None
    if module.partition(".")[0] in sys.stdlib_module_names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(module)
    return None


class _TestNames:
    """The names that a job's tests use and do not define."""

    def __init__(self, trees: Sequence[ast.AST]) -> None:
        nodes = [node for tree in trees for node in ast.walk(tree)]
        loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        self.called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        attribute_bases = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
        self.trees, self.free = trees, loaded - _defined(nodes)
        self.modules = (self.free & attribute_bases & sys.stdlib_module_names) - self.called
        tested = self.free - vars(builtins).keys() - self.modules - _HELPERS.keys()
        self.helpers = (self.free & _HELPERS.keys()) if tested else set()
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        of_modules = {
            n.attr
            for n in nodes
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in self.modules
        }
        self.has_own_methods = bool(attributes - of_modules - {name for kind in _PLAIN_TYPES for name in dir(kind)})
        self.has_target = bool(tested or self.free & _HELPERS.keys())

    @classmethod
    def of(cls, job: dict[str, Any]) -> _TestNames:
        texts = [job.get("setup") or "", *(job.get("tests") or ()), job.get("test_code") or ""]
        return cls([ast.parse(text) for text in texts])

    def builtin_target(self) -> str | None:
        """The function under test if it has the name of a built-in function (`assert sum(10, 15) == 6`). It is found if no test
        uses another name of the program, and every test calls this function with arguments that contain no calls."""
        calls = [_innermost_calls(tree) for tree in self.trees if tree.body]  # type: ignore[attr-defined]
        shared = set.intersection(*calls) & self.free if calls and not self.has_target else set()
        return shared.pop() if len(shared) == 1 else None


def _innermost_calls(tree: ast.AST) -> set[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    inner = [c for c in calls if not any(isinstance(n, ast.Call) for a in (*c.args, *c.keywords) for n in ast.walk(a))]
    return {call.func.id for call in inner if isinstance(call.func, ast.Name)}


def _defined(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that tests bind: by assignment, import, definition or as a parameter."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
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
    candidate = names.get(entry)
    exec(compile(tree, "<tests>", "exec"), names)
    if functions:
        return [*snippets, *((name, names[name]) for name in functions)]
    return [*snippets, ("check", lambda: names["check"](candidate))]


def _snippet(text: str, names: dict[str, Any]) -> Callable[[], None]:
    return lambda: exec(compile(text, "<test>", "exec"), names)


def _run_test(title: str, test: Callable[[], Any]) -> dict[str, Any]:
    try:
        test()
    except BaseException as error:
        return {"passed": False, "why": f"{title.strip()[:120]}: {_short(error)}"}
    return {"passed": True}


def _short(error: BaseException) -> str:
    message = "its message can't be read"
    with contextlib.suppress(Exception):  # it may hold an object of the program
        message = str(error)
    return f"{type(error).__name__}: {message}"[:200]
