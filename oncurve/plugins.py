"""Finds a function or a class by name: `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from oncurve.errors import RecipeError, did_you_mean


def load_function(reference: str, where: str) -> Callable[..., Any]:
    """The function; `where` is the recipe's key that names it."""
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name:
        raise _error(where, reference, "it is not written as module:function or file.py:function", "write both parts")
    found: Any = _module(source, reference, where)
    for part in name.split("."):
        known = [word for word in vars(found) if not word.startswith("_")] if hasattr(found, "__dict__") else []
        if not hasattr(found, part):
            raise _error(
                where, reference, f"'{source}' has no '{part}'{did_you_mean(part, known)}", "name a function that is there"
            )
        found = getattr(found, part)
    if not callable(found):
        raise _error(where, reference, f"'{name}' is a {type(found).__name__}, not a function", "name a function")
    return found  # type: ignore[no-any-return]


def _module(source: str, reference: str, where: str) -> ModuleType:
    try:
        return _file_module(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError as error:
        raise _error(where, reference, f"there is no file '{error.filename}'", "mend the path") from None
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        because = f"importing '{source}' failed: {type(error).__name__}: {error}"
        raise _error(where, reference, because, "mend the module, or the name") from error


def _file_module(path: Path) -> ModuleType:
    """Runs a file as a module of its own. Python knows it by a name made from its path: dataclasses need one."""
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
