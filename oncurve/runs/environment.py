"""The software a run depends on: versions of Python, Oncurve and the packages that determine its bits."""

from __future__ import annotations

import platform
from importlib import metadata

from oncurve import __version__

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "triton", "vllm")
"""Packages whose versions may change a run's bits or files."""


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def oncurve_version() -> str:
    return __version__


def environment() -> dict[str, str]:
    """Versions of everything that a run's bits depend on, read without importing the packages."""
    versions = {package: version_of(package) for package in PACKAGES}
    return {
        "oncurve": oncurve_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{package: version for package, version in versions.items() if version is not None},
    }
