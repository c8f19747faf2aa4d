"""Whether a process of this machine is still there, and still the one that was written down."""

from __future__ import annotations

import os
from pathlib import Path


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


def is_alive(pid: int, started: int | None = None) -> bool:
    """Whether a process runs; where ``started`` is known, whether it is the one that started then."""
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
