"""GRPO, graded on the curve of its own group.

import oncurve
oncurve.train(oncurve.load_recipe("arithmetic"))
oncurve.train(model="tiny", prompts=["3+4=", "5+6="], rewards=[my_function], group_size=8)
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    # Read when torch is imported. Without it, OpenMP's threads spin while they wait, and take the cores that others need.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

__version__ = "0.2.0"

if TYPE_CHECKING:
    from oncurve.api import Run, load_recipe, train
    from oncurve.recipe.schema.recipe import Recipe

_HOMES = {"train": "oncurve.api", "Run": "oncurve.api", "load_recipe": "oncurve.api", "Recipe": "oncurve.recipe.schema.recipe"}

__all__ = ["Recipe", "Run", "load_recipe", "train"]


def check_platform() -> None:
    """Raises a PlatformError on Windows, which lacks modules that ours import."""
    if sys.platform.startswith("win"):
        from oncurve.errors import PlatformError

        because = "Oncurve uses the processes, locks and signals of POSIX"
        raise PlatformError("oncurve", "Windows", because=because, fix="use WSL, which counts as Linux")


def __dir__() -> list[str]:
    """The names that are loaded when first used, so that Tab finds them."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: importing the package must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'oncurve' has no attribute '{name}'")
    check_platform()
    from importlib import import_module
    from warnings import filterwarnings

    filterwarnings("ignore", message="IProgress not found")  # of tqdm, in a notebook without ipywidgets
    return getattr(import_module(_HOMES[name]), name)
