"""Where a run is executed: versions, host, and whether a process is still the one that was written down."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

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


def process_start(pid: int) -> int | None:
    """When a live process started, in clock ticks since boot; None where it is dead, or the system has no /proc.

    Together with the pid this names a process for good: pids are given out again, start times are not. A zombie is dead.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name, in parentheses, may itself hold spaces and parentheses: fields are counted after the last one.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def is_alive(pid: int, started: int | None) -> bool:
    """Whether process ``pid`` is the one that started at ``started`` and still runs."""
    if Path("/proc/self/stat").exists():
        now = process_start(pid)
        return now is not None and (started is None or now == started)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
