"""Training: the loop, the learner, and one file per stage.

`oncurve.train` names both this package and the function that trains. Python binds the name to the package as soon as any module
of it is imported, so the package itself can be called, and hands on to `oncurve.api.train`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return import_module("oncurve.api").train(*arguments, **named)


sys.modules[__name__].__class__ = _Callable
