"""Code from outside of Oncurve: functions that a recipe names, and plug-ins that an installed package declares.

A function or class is written in the recipe as `module:function` or `path/to/file.py:function` (`load_function`).

A plug-in has a name like a built-in reward or task. An installed package declares it as an entry point, and recipes can use the
name without a change to Oncurve (`Registry`):

    # pyproject.toml of the package                          # recipe.toml
    [project.entry-points."oncurve.rewards"]                 [[rewards]]
    politeness = "my_package.rewards:POLITENESS"             type = "politeness"

The entry point is imported when its name is first looked up, never just because the package is installed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Generic, TypeVar

from oncurve.errors import PluginError, RecipeError, did_you_mean, no_such

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Built-in entries of one kind by name, followed by the plug-ins of installed packages.

    ``noun`` is the singular of the kind ("reward"), which also names the entry-point group ("oncurve.rewards"). ``check`` says
    what is wrong with a loaded plug-in, or returns None. Reading names imports nothing; reading an entry imports its plug-in.

    Example: ``REWARDS = Registry("reward", {"answer": RewardType(…)}, check_instance(RewardType))``
    """

    def __init__(self, noun: str, built_in: Mapping[str, T], check: Callable[[object], str | None]) -> None:
        self.noun, self.built_in, self._check = noun, dict(built_in), check

    @property
    def group(self) -> str:
        """The entry-point group in which packages declare plug-ins of this kind."""
        return f"oncurve.{self.noun}s"

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from (name for name in sorted(declared_plugins(self.group)) if name not in self.built_in)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in declared_plugins(self.group)

    def __getitem__(self, name: str) -> T:
        declared = declared_plugins(self.group).get(name, ())
        if not declared:
            return self.built_in[name]
        if name in self.built_in:
            raise self._error(declared[0], f"the {self.noun} '{name}' is built in", "rename the entry point, or uninstall {it}")
        if len(declared) > 1:
            other = package_name(declared[1])
            raise self._error(declared[0], f"{other} declares the same {self.noun} '{name}'", f"uninstall {{it}} or {other}")
        return self._load(declared[0])

    def find(self, name: str, where: str) -> T:
        """The entry of this name; a RecipeError at ``where`` with the closest name if there is none."""
        if name not in self:
            raise no_such(where, self.noun, name, self)
        return self[name]

    def _load(self, declared: EntryPoint) -> T:
        try:
            plugin: T = declared.load()
        except (Exception, SystemExit) as error:  # importing runs the package's code, which may raise anything
            because = f"importing {declared.value} failed: {type(error).__name__}: {error}"
            raise self._error(declared, because, "repair, update or uninstall {it}") from error
        fault = self._check(plugin)
        if fault is not None:
            because = f"{declared.value} is no {self.noun}: {fault}"
            raise self._error(declared, because, f"correct the entry point `{declared.name}`, or uninstall {{it}}")
        return plugin

    def _error(self, declared: EntryPoint, because: str, fix: str) -> PluginError:
        package = package_name(declared)
        what = f"the {self.noun} '{declared.name}' of the package {package} can't be used"
        return PluginError(f'entry point "{self.group}"', what, because=because, fix=fix.format(it=package))


def check_instance(kind: type[Any]) -> Callable[[object], str | None]:
    """A `Registry` check: the plug-in must be an instance of ``kind``."""
    return lambda plugin: None if isinstance(plugin, kind) else f"it is a {type(plugin).__name__}, not a {kind.__name__}"


def check_subclass(kind: type[Any]) -> Callable[[object], str | None]:
    """A `Registry` check: the plug-in must be a subclass of ``kind``."""

    def check(plugin: object) -> str | None:
        if isinstance(plugin, type) and issubclass(plugin, kind):
            return None
        name = plugin.__name__ if isinstance(plugin, type) else type(plugin).__name__
        return f"{name} is no subclass of {kind.__name__}"

    return check


def declared_plugins(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of a group, by name. Imports none of them. A name has several if several packages declare it."""
    return _declared(group, tuple(sys.path))


@lru_cache(maxsize=32)
def _declared(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Reads the metadata of every installed package: 30 ms for 150, so once for a group and search path."""
    declared: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        declared[entry.name] = (*declared.get(entry.name, ()), entry)
    return declared


def package_name(declared: EntryPoint) -> str:
    """The name and version of the package that declares an entry point."""
    distribution = declared.dist
    return "unknown" if distribution is None else f"{distribution.name} {distribution.version}"


def load_function(reference: str, where: str) -> Callable[..., Any]:
    """The function or class that a recipe names as `module:function` or `file.py:function` under the key ``where``."""
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name:
        raise _error(where, reference, "it is not written as module:function or file.py:function", "write both parts")
    target: Any = _import(source, reference, where)
    for part in name.split("."):
        if not hasattr(target, part):
            public = [word for word in getattr(target, "__dict__", {}) if not word.startswith("_")]
            because = f"'{source}' has no '{part}'{did_you_mean(part, public)}"
            raise _error(where, reference, because, "name a function that it defines")
        target = getattr(target, part)
    if not callable(target):
        raise _error(
            where, reference, f"'{name}' is of type {type(target).__name__}: it can't be called", "name a function or a class"
        )
    return target  # type: ignore[no-any-return]


def place_of_error(error: BaseException, function: Callable[..., Any]) -> str:
    """Where a function of the user's failed, such as ` (rewards.py:4)`: the innermost line of the traceback in a file of the
    function's folder. Empty if there is none, or if it can't be found. Never raises: the error itself is what counts."""
    try:
        place = _place_of_error(error, function)
    except Exception:  # what the function wraps and the name of its file are the user's: an endless chain, a name too long
        return ""
    return place if _PLACE.fullmatch(place) else ""


def without_place(failure: str) -> str:
    """A failure's message without the place that `place_of_error` gave it."""
    return _PLACE.sub("", failure)


_PLACE = re.compile(r" \([^()\n]+\.py:[0-9]+\)\Z")
"""A place at the end of a message. Names of files with parentheses are left out, so that the place always can be removed."""


def _place_of_error(error: BaseException, function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    found = (getattr(made, "__code__", None) for made in (function, type(function).__call__))
    file = next((Path(code.co_filename) for code in found if isinstance(code, CodeType)), Path())
    if not file.is_file() or Path(__file__).parent in file.parents:
        return ""
    lines = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((f" ({path.name}:{line})" for path, line in reversed(lines) if path.parent == file.parent), "")


def _import(source: str, reference: str, where: str) -> ModuleType:
    try:
        return _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    except FileNotFoundError as error:
        raise _error(where, reference, f"there is no file '{error.filename}'", "correct the path") from None
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        because = f"importing '{source}' failed: {type(error).__name__}: {error}"
        fix = "correct the module, or its name in the recipe; a module of your own is found in the current folder"
        raise _error(where, reference, because, fix) from error


def _import_module(name: str) -> ModuleType:
    """Imports a module. If it is not installed, it is imported from the current folder, as `python -m` and TRL's scripts do."""
    package, folder = name.partition(".")[0], Path.cwd()
    is_here = (folder / f"{package}.py").is_file() or (folder / package).is_dir()
    if is_here and package not in sys.modules and importlib.util.find_spec(package) is None:
        sys.path.append(str(folder))  # last, so that the folder hides no installed module
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Runs a file as a module. It is registered under a name made from its path, because dataclasses look their module up."""
    path = path.resolve()
    name = f"oncurve_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _error(where: str, reference: str, because: str, fix: str) -> RecipeError:
    return RecipeError(where, reference, because=because, fix=fix)
