"""Where a run is executed: versions of all that its bits depend on."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "triton", "vllm")
"""Packages whose versions may change a run's bits, or its files."""


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def oncurve_version() -> str:
    return version_of("oncurve") or "uninstalled"


def environment() -> dict[str, str]:
    """Versions of all that a run's bits depend on, without importing any of it."""
    found = {package: version_of(package) for package in PACKAGES}
    return {
        "oncurve": oncurve_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{package: version for package, version in found.items() if version is not None},
    }
