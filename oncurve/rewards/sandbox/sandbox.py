"""Which walls this machine can put around a program, and a sandbox behind the best of them that really holds.

    bubblewrap   own user, mount, network, pid and ipc namespaces, an empty file system, and the lock of `seccomp` inside
    seccomp      limits, no capabilities, files by Landlock, system calls by seccomp; no namespaces
    trusted      limits on time, memory and output alone; only where the recipe says `trusted = true`

A level counts only after a program was seen to be refused what it must be refused (`SELF_TEST`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oncurve.errors import RewardError
from oncurve.workers.pool import WorkerDiedError, WorkerFailedError, Workers

Level = Literal["bubblewrap", "seccomp", "trusted"]

GRACE = 1.5
"""Seconds beyond its own limit that a zygote has to report before it is taken to be stuck and replaced."""
SCRATCH_SIZE = 256 << 20
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Of zygotes: a program that prints a set prints it in the same order each time. Programs themselves have none of it."""
_BOOT = Path(__file__).with_name("boot.py")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")

SELF_TEST = """
import os, socket

def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False

open("scratch", "w").write("x")
attempts = [
    lambda: open("/etc/passwd").read(), lambda: os.listdir("/root" if os.getuid() == 0 else "/home"), os.fork,
    lambda: socket.socket(), lambda: os.kill(os.getppid(), 0), lambda: os.execv("/bin/true", ["true"]),
    lambda: open("/tmp/oncurve-self-test", "w"), lambda: os.chmod("/", 0o777),
]
print([refused(attempt) for attempt in attempts].count(False), os.environ.get("USER"), open("scratch").read())
"""
SELF_TEST_ANSWER = "0 None x\n"

DESCRIPTIONS = {
    "bubblewrap": "own namespaces by bubblewrap, system calls by seccomp",
    "seccomp": "files by Landlock, system calls by seccomp; bubblewrap is not installed or does not work here",
    "trusted": "NOT isolated: limits on time, memory and output alone, as the recipe says trusted = true",
}


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 5.0
    memory: int = 1 << 30
    output: int = 1 << 20
    file_size: int = 16 << 20
    open_files: int = 64

    def job(self, **more: Any) -> dict[str, Any]:
        cpu = self.seconds + 1  # the wall clock decides for one thread; this is for many, and for a zygote that is gone
        mine = {"seconds": self.seconds, "cpu": cpu, "memory": self.memory, "output": self.output}
        return {**mine, "file_size": self.file_size, "open_files": self.open_files, **more}


@dataclass(frozen=True)
class Sandbox:
    """Runs programs at one level. `workers` are zygotes: each runs one program at a time."""

    level: Level
    workers: Workers = field(repr=False)

    @property
    def described(self) -> str:
        return f"sandbox: {self.level} ({DESCRIPTIONS[self.level]})"

    def run(self, job: dict[str, Any], limits: Limits) -> Any:
        """What the zygote says of a job; TimeoutError or WorkerDiedError where it is stuck or gone, and then replaced."""
        return self.workers.ask(limits.job(**job), limits.seconds + GRACE)


_FOUND: dict[Any, Sandbox] = {}
_LOCK = threading.Lock()


def find_sandbox(where: str, *, trusted: bool = False, count: int | None = None, package: str | None = None) -> Sandbox:
    """The best sandbox of this machine, made once; RewardError where there is none and the recipe does not do without.

    Programs have the standard library; with `package`, that package too, imported before they are forked.
    """
    count = count or min(8, os.cpu_count() or 1)
    with _LOCK:
        key = (trusted, count, package)
        if key not in _FOUND:
            _FOUND[key] = _find(where, trusted, count, package)
        return _FOUND[key]


def _find(where: str, trusted: bool, count: int, package: str | None) -> Sandbox:
    tried: list[str] = []
    for level in ("bubblewrap", "seccomp"):
        sandbox, fault = make_sandbox(level, count, package)
        if sandbox is not None:
            return sandbox
        tried.append(f"{level}: {fault}")
    if trusted:
        return _build_sandbox("trusted", count, package)
    raise RewardError(
        where,
        "programs of the model can't be run safely here",
        because="; ".join(tried),
        fix="install bubblewrap (apt install bubblewrap), or set `trusted = true` on a machine that holds nothing of value",
    )


def make_sandbox(level: Level, count: int, package: str | None = None) -> tuple[Sandbox | None, str]:
    """A sandbox of this level that passed the self-test, or why there is none."""
    if not sys.platform.startswith("linux"):
        return None, "only Linux has it"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return None, "bwrap is not installed"
    sandbox = _build_sandbox(level, count, package)
    fault = _fault(sandbox)
    if fault is None:
        return sandbox, ""
    sandbox.workers.close()
    return None, fault


def _build_sandbox(level: Level, count: int, package: str | None) -> Sandbox:
    """Without a file system of its own a sandbox gets a folder, which goes with it, whatever a killed zygote left inside."""
    if level == "bubblewrap":
        return Sandbox(level, Workers(command(level, "/scratch", package), count, ENVIRONMENT))
    scratch = tempfile.mkdtemp(prefix="oncurve-sandbox-")
    workers = Workers(command(level, scratch, package), count, ENVIRONMENT)
    weakref.finalize(workers, shutil.rmtree, scratch, ignore_errors=True)
    return Sandbox(level, workers)


def _fault(sandbox: Sandbox) -> str | None:
    try:
        seen = sandbox.run({"kind": "program", "program": SELF_TEST}, Limits(seconds=10.0))
    except (TimeoutError, WorkerDiedError, WorkerFailedError) as error:
        return str(error)
    if seen["ended"] != "exit 0" or seen["output"] != SELF_TEST_ANSWER:
        return f"the self-test ended in {seen['ended']}: {seen['output'].strip()[-200:]!r}"
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
        "libraries": libraries,
        "package": package,
    }
    python = [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", str(_BOOT), json.dumps(settings)]
    return [*_bubblewrap([*readable, python[0]]), *python] if level == "bubblewrap" else python


def readable_paths() -> list[str]:
    """What a program may read: the standard library, shared libraries, and the sandbox's own code."""
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(sys.base_prefix) / "lib")]
    paths = [*_LIBRARIES, *own, str(_BOOT.parent)]
    return list(dict.fromkeys(path for path in paths if Path(path).is_dir()))


def _bubblewrap(readable: Sequence[str]) -> list[str]:
    """An empty file system with what is readable, no capability, and every namespace of its own."""
    binds = [word for path in readable for word in ("--ro-bind", path, path)]
    walls = ["--unshare-all", "--as-pid-1", "--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    walls += [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    scratch = ["--size", str(SCRATCH_SIZE), "--tmpfs", "/scratch", "--chdir", "/scratch"]
    return [shutil.which("bwrap") or "bwrap", *walls, *binds, *scratch]
