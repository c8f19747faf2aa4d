"""The sandbox of the strongest isolation level that works on this machine.

    bubblewrap   own user, mount, network, pid and ipc namespaces, a file system of readable folders only, and all of `seccomp`
    seccomp      limits, no capabilities, files restricted by Landlock, system calls by seccomp; no namespaces
    trusted      limits on time, memory and output only; needs `trusted = true` in the recipe

A level is used only after a self-test: a program attempts forbidden operations, and each attempt must be refused (`SELF_TEST`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from oncurve.errors import RewardError
from oncurve.rewards.sandbox.zygote import remove_folder
from oncurve.workers.pool import WorkerDiedError, WorkerFailedError, Workers

Level = Literal["bubblewrap", "seccomp", "trusted"]

GRACE = 30.0
"""Seconds after a program's time limit within which its zygote must have removed the program's files and replied, even on a
busy machine. Otherwise the zygote is replaced."""
SCRATCH_SIZE = 256 << 20
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Environment of zygotes: sets are printed in the same order each time. The programs' own environment does not have it."""
_BOOT = Path(__file__).with_name("boot.py")
_STDIN_FILE = "/scratch/stdin"
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")

SELF_TEST = """
import fcntl, os, socket

def refused(attempt, error=OSError):
    try:
        attempt()
    except error:
        return True
    return False

open("scratch", "w").write("x")
attempts = [
    lambda: open("/etc/passwd").read(), lambda: os.listdir("/root" if os.getuid() == 0 else "/home"), os.fork,
    lambda: socket.socket(), lambda: os.kill(os.getppid(), 0), lambda: os.execv("/bin/true", ["true"]),
    lambda: open("/tmp/oncurve-self-test", "w"), lambda: os.chmod("/", 0o777),
]
signals = [lambda: fcntl.fcntl(0, 8, os.getppid()), lambda: socket.socketpair(type=2)[0].sendto(b"x", "\\0oncurve-self-test")]
refusals = [refused(attempt) for attempt in attempts] + [refused(attempt, PermissionError) for attempt in signals]
print(refusals.count(False), os.environ.get("USER"), open("scratch").read())
"""
SELF_TEST_ANSWER = "0 None x\n"

DESCRIPTIONS = {
    "bubblewrap": "namespaces by bubblewrap, system calls by seccomp",
    "seccomp": "files by Landlock, system calls by seccomp; bubblewrap is not installed or does not work here",
    "trusted": "NOT isolated: only time, memory and output are limited, because the recipe sets trusted = true",
}


@dataclass(frozen=True)
class Limits:
    """The resources that one program may use; sizes in bytes."""

    seconds: float = 5.0
    memory: int = 1 << 30
    output: int = 1 << 20
    file_size: int = 16 << 20
    open_files: int = 64

    def job(self, **more: Any) -> dict[str, Any]:
        cpu = self.seconds + 1  # the CPU limit also stops programs with many threads, and children of a zygote that died
        limits = {"seconds": self.seconds, "cpu": cpu, "memory": self.memory, "output": self.output}
        return {**limits, "file_size": self.file_size, "open_files": self.open_files, **more}


@dataclass(frozen=True)
class Sandbox:
    """Runs programs at one isolation level. ``workers`` are zygotes (zygote.py); each runs one program at a time."""

    level: Level
    workers: Workers = field(repr=False)

    @property
    def description(self) -> str:
        return f"sandbox: {self.level} ({DESCRIPTIONS[self.level]})"

    def run(self, job: dict[str, Any], limits: Limits) -> Any:
        """Sends a job to a zygote and returns its reply. If the zygote hangs or dies, it is replaced, and this raises
        TimeoutError or WorkerDiedError."""
        return self.workers.ask(limits.job(**job), limits.seconds + GRACE)


_SANDBOXES: dict[Any, Sandbox] = {}
_LOCK = threading.Lock()


def find_sandbox(where: str, *, trusted: bool = False, count: int | None = None, package: str | None = None) -> Sandbox:
    """The strongest sandbox of this machine, started once. Raises RewardError if there is none and ``trusted`` is false.

    Programs can import the standard library, and ``package`` if it is set; zygotes import it before they fork.
    """
    count = count or min(8, os.cpu_count() or 1)
    with _LOCK:
        key = (trusted, count, package)
        if key not in _SANDBOXES:
            _SANDBOXES[key] = _find(where, trusted, count, package)
        return _SANDBOXES[key]


def _find(where: str, trusted: bool, count: int, package: str | None) -> Sandbox:
    faults: list[str] = []
    for level in ("bubblewrap", "seccomp"):
        sandbox, fault = build_sandbox(level, count, package)
        if sandbox is not None:
            return sandbox
        faults.append(f"{level}: {fault}")
    if trusted:
        return _start_sandbox("trusted", count, package)
    raise RewardError(
        where,
        "programs that the model writes can't be run safely on this machine",
        because="; ".join(faults),
        fix="install bubblewrap (apt install bubblewrap), or set `trusted = true` on a machine with nothing of value on it",
    )


def build_sandbox(level: Level, count: int, package: str | None = None) -> tuple[Sandbox | None, str]:
    """A sandbox of this level that passed the self-test, or None and the reason."""
    if not sys.platform.startswith("linux"):
        return None, "only Linux has it"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return None, "bwrap is not installed"
    sandbox = _start_sandbox(level, count, package)
    fault = _run_self_test(sandbox)
    if fault is None:
        return sandbox, ""
    sandbox.workers.close()
    return None, fault


def _start_sandbox(level: Level, count: int, package: str | None) -> Sandbox:
    """Without bubblewrap's file system, zygotes get a temporary folder, which is removed with the sandbox."""
    if level == "bubblewrap":
        return Sandbox(level, Workers(command(level, "/scratch", package), count, ENVIRONMENT))
    scratch = tempfile.mkdtemp(prefix="oncurve-sandbox-")
    return Sandbox(level, Workers(command(level, scratch, package), count, ENVIRONMENT, partial(_remove_scratch, scratch)))


def _remove_scratch(scratch: str) -> None:
    """Removes the folder. Children of killed zygotes die a moment after them, so the first try may fail."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            remove_folder(scratch)
            return
        time.sleep(0.02)


def _run_self_test(sandbox: Sandbox) -> str | None:
    """What is wrong with the sandbox; None if it refuses everything that it must."""
    try:
        outcome = sandbox.run({"kind": "program", "program": SELF_TEST}, Limits(seconds=10.0))
    except (TimeoutError, WorkerDiedError, WorkerFailedError) as error:
        return str(error)
    if outcome["ended"] != "exit 0" or outcome["output"] != SELF_TEST_ANSWER:
        return f"the self-test ended in {outcome['ended']}: {(outcome['output'] + outcome['errors']).strip()[-200:]!r}"
    return None


def command(level: Level, scratch: str, package: str | None = None) -> list[str]:
    """The command line of a zygote."""
    libraries = [] if package is None else [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    readable = [*readable_paths(), *dict.fromkeys(libraries)]
    settings = {
        "locked": level != "trusted",
        "need_landlock": level == "seccomp",
        "readable": readable,
        "scratch": scratch,
        "stdin_file": _STDIN_FILE if level == "bubblewrap" else None,
        "libraries": libraries,
        "package": package,
    }
    python = [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", str(_BOOT), json.dumps(settings)]
    return [*_bubblewrap([*readable, python[0]]), *python] if level == "bubblewrap" else python


def readable_paths() -> list[str]:
    """What a program may read: the standard library, shared libraries, and the sandbox's code."""
    standard_library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(sys.base_prefix) / "lib")]
    paths = [*_LIBRARIES, *standard_library, str(_BOOT.parent)]
    return list(dict.fromkeys(path for path in paths if Path(path).is_dir()))


def _bubblewrap(readable: Sequence[str]) -> list[str]:
    """bubblewrap's command line: all namespaces, no capabilities, and a file system of the readable folders only."""
    binds = [word for path in readable for word in ("--ro-bind", path, path)]
    isolation = ["--unshare-all", "--as-pid-1", "--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    isolation += [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    scratch = [
        "--size",
        str(SCRATCH_SIZE),
        "--tmpfs",
        "/scratch",
        "--chdir",
        "/scratch",
        "--symlink",
        _STDIN_FILE,
        "/dev/stdin",
    ]
    return [shutil.which("bwrap") or "bwrap", *isolation, *binds, *scratch]
