"""Whether a process of this machine still runs, and is still the same one."""

from __future__ import annotations

import os
from pathlib import Path


def process_start(pid: int) -> int | None:
    """When a live process started, in clock ticks since boot; None if it is dead or the system has no /proc.

    Pid and start time together identify a process, as pids are reused. A zombie counts as dead.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name, in parentheses, may contain spaces and parentheses: count fields after the last one.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def is_alive(pid: int, started: int | None = None) -> bool:
    """Whether a process is running. ``started``: its start time, so that another process with a reused id does not count."""
    if Path("/proc/self/stat").exists():
        start = process_start(pid)
        return start is not None and (started is None or start == started)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
