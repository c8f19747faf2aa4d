"""Programs that try to get out, to stay, to take everything, or to pass tests that they do not solve.

Each attack prints ESCAPED where it succeeds. All run at every level that this machine has; there must be one.
"""

import gc
import os
import platform
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import RewardError
from oncurve.rewards.sandbox import lockdown
from oncurve.rewards.sandbox import sandbox as levels
from oncurve.rewards.sandbox.sandbox import Limits, Sandbox, build_sandbox
from oncurve.workers.pool import WorkerDiedError
from tests.rewards.sandbox.levels import BUILT, LEVELS, PATIENT, SANDBOXES

CANARY, KEPT = Path(f"/tmp/oncurve-canary-{os.getpid()}"), Path(f"/tmp/oncurve-canary-kept-{os.getpid()}")


@pytest.fixture(scope="module", autouse=True)
def _remove_the_canary() -> Iterator[None]:
    yield
    KEPT.unlink(missing_ok=True)


def run(sandbox: Sandbox, program: str, limits: Limits = PATIENT, **job: Any) -> dict[str, Any]:
    return dict(sandbox.run({"kind": "program", "program": program, **job}, limits))


def test_this_machine_has_a_sandbox() -> None:
    assert SANDBOXES, "install bubblewrap, or use a kernel with Landlock"


def test_every_level_works_in_ci() -> None:
    """In CI, where bubblewrap is installed, every level must work, so that none goes untested."""
    wanted = set(LEVELS) if "CI" in os.environ and shutil.which("bwrap") else set(SANDBOXES)
    assert set(SANDBOXES) == wanted, {level: fault for level, (_, fault) in BUILT.items() if fault}


def attempt(line: str, before: str = "") -> str:
    caught = "except BaseException as error:\n    print(type(error))"
    return f"import os, sys, ctypes\n{before}\ntry:\n    {line}\n    print('ESCAPED')\n{caught}"


LIBC = """
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno())
"""

ATTACKS = {
    "fork": attempt("os.fork()"),
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork(); print('ESCAPED')\n    except OSError:\n        break",
    "subprocess": attempt("subprocess.run(['/bin/sh', '-c', 'true'], check=True)", "import subprocess"),
    "multiprocessing": attempt(
        "p = multiprocessing.get_context('fork').Process(target=print); p.start()", "import multiprocessing"
    ),
    "vfork by hand": attempt("call(58) if os.uname().machine == 'x86_64' else os.fork()", LIBC),
    "clone3 by hand": attempt("call(435, ctypes.create_string_buffer(88), 88)", LIBC),
    "system": attempt("assert os.system('true') == 0"),
    "execve": attempt("os.execv('/bin/true', ['true'])"),
    "read /etc/passwd": attempt("open('/etc/passwd').read()"),
    "read a home": attempt("os.listdir(os.path.expanduser('~root')) + os.listdir('/root')"),
    "read the trainer's memory": attempt("open(f'/proc/{os.getppid()}/mem', 'rb').read(1)"),
    "read a process's environment": attempt("open(f'/proc/{os.getppid()}/environ', 'rb').read()"),
    "own environment": attempt("assert 'ONCURVE_SECRET' in os.environ"),
    "environment by the back door": attempt("open('/proc/self/environ').read()"),
    "symlink out": attempt("os.symlink('/etc/passwd', 'link'); open('link').read()"),
    "dots out": attempt("open('../../../../../etc/passwd').read()"),
    "hard link out": attempt("os.link('/etc/passwd', 'link'); open('link').read()"),
    "write outside": attempt(f"open({str(CANARY)!r}, 'w').write('x')"),
    "remove outside": attempt(f"os.remove({str(KEPT)!r})"),
    "chmod outside": attempt("os.chmod('/tmp', 0o777)"),
    "rename outside": attempt(f"open('mine', 'w').close(); os.rename('mine', {str(CANARY)!r})"),
    "write the standard library": attempt("open(os.__file__, 'a')"),
    "tcp": attempt("socket.create_connection(('127.0.0.1', 22), 1)", "import socket"),
    "udp": attempt("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))", "import socket"),
    "unix socket": attempt("socket.socket(socket.AF_UNIX).connect('/run/systemd/notify')", "import socket"),
    "raw socket": attempt("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "import socket"),
    "name lookup": attempt("socket.getaddrinfo('example.org', 80)", "import socket"),
    "kill the parent": attempt("os.kill(os.getppid(), 9)"),
    "kill everybody": attempt("os.kill(-1, 9)"),
    "kill the group of another": attempt("os.killpg(os.getppid(), 9)"),
    "signal by pidfd": attempt("signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)", "import signal"),
    "limit the parent": attempt("resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))", "import resource"),
    "raise own limits": attempt("resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))", "import resource"),
    "ptrace the parent": attempt("call(101 if os.uname().machine == 'x86_64' else 117, 16, os.getppid(), 0, 0)", LIBC),
    "write into the parent": attempt("call(311 if os.uname().machine == 'x86_64' else 271, os.getppid(), 0, 0, 0, 0, 0)", LIBC),
    "new namespace": attempt("call(272 if os.uname().machine == 'x86_64' else 97, 0x10000000)", LIBC),
    "mount": attempt("assert libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0", LIBC),
    "chroot": attempt("os.chroot('.')"),
    "become another": attempt("os.setuid(12345)"),
    "io_uring": attempt("call(425, 8, ctypes.create_string_buffer(120))", LIBC),
    "keep a daemon": attempt("os.fork() or os.setsid()"),
    "outlive the parent": attempt("assert libc.prctl(1, 0, 0, 0, 0) == 0", LIBC),
    "hidden memory": attempt("os.memfd_create('x')"),
    "shared memory": attempt("call(29 if os.uname().machine == 'x86_64' else 194, 1, 4096, 0o1666)", LIBC),
    "device": attempt("os.mknod('disk', 0o60666, os.makedev(8, 0))"),
    "a descriptor of the zygote": (
        "import os\nfor fd in range(3, 200):\n    try:\n        os.fstat(fd)\n    except OSError:\n"
        "        continue\n    print('ESCAPED', fd)"
    ),
}


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_programs_can_t_escape(sandbox: Sandbox, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCURVE_SECRET", "x")
    KEPT.write_text("kept")
    seen = run(sandbox, ATTACKS[attack])
    assert "ESCAPED" not in seen["output"], seen
    assert seen["ended"] == "exit 0", seen
    assert not CANARY.exists()
    assert KEPT.read_text() == "kept"
    assert run(sandbox, "print('next')")["output"] == "next\n"


EXHAUSTING = {
    "endless loop": ("while True: pass", "time"),
    "endless sleep": ("import time\ntime.sleep(100)", "time"),
    "hang in C": ("9**9**9", "time"),
    "endless output": ("while True: print('x' * 1000)", "output"),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "memory bomb": ("x = bytearray(1 << 40)", "exit 1"),
    "slow memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "exit 1"),
    "large file": ("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 16))", None),
    "many files": ("kept = []\nwhile True: kept.append(open(str(len(kept)), 'w'))", "exit 1"),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", None),
    "thread bomb": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()", "time"),
    "deaf to signals": (
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)",
        "time",
    ),
    "alarm games": ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "time"),
    "closes its output and goes on": ("import os\nos.close(1); os.close(2)\nwhile True: pass", "time"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "signal 9"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "signal 11"),
    "leaves at once": ("import os\nos._exit(7)", "exit 7"),
}


@pytest.mark.parametrize("attack", list(EXHAUSTING))
def test_nothing_outlives_its_limits(sandbox: Sandbox, attack: str) -> None:
    program, ended = EXHAUSTING[attack]
    seconds = 0.7 if ended == "time" else 8.0  # what must end by another limit gets the time to reach it
    run(sandbox, "")
    seen = run(sandbox, program, Limits(seconds=seconds, memory=300 << 20, output=64 << 10, file_size=1 << 20))
    assert ended is None or seen["ended"] == ended, seen
    assert len(seen["output"]) < 256 << 10
    assert run(sandbox, "print('next')")["output"] == "next\n"


@pytest.mark.parametrize(
    ("program", "stdin", "output"),
    [
        ("import sys\nprint(len(sys.stdin.read()))", "x" * 200_000, "200000\n"),
        ("print(input(), input())", "a\nb\n", "a b\n"),
        ("import sys\nprint(sys.stdin.readlines())", "", "[]\n"),
        ("import os\nprint(os.read(0, 9))", "abc", "b'abc'\n"),
        ("import sys\nprint(sys.stdin.isatty(), __name__)", "", "False __main__\n"),
        ("print('é')", "", "é\n"),
        ("import numbers, xml.dom, zlib, hashlib\nprint(hashlib.md5(b'').hexdigest()[:4])", "", "d41d\n"),
        ("import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()", "", "1\n"),
        ("import tempfile\nf = tempfile.NamedTemporaryFile('w+')\nf.write('x')\nf.seek(0)\nprint(f.read())", "", "x\n"),
        ("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))", "", "5\n"),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()", "", "1\n"),
        ("import atexit\natexit.register(print, 'end')\nprint('begin')", "", "begin\nend\n"),
        ("import sys\nprint('log', file=sys.stderr)\nprint(2)", "", "2\n"),
        ("x = 3\nprint(x is 3)", "", "True\n"),
        ("print(open('/dev/stdin').read())", "abc", "abc\n"),
        ("import sys\nprint(1)\nsys.exit()", "", "1\n"),
        ("import warnings\nwarnings.warn('old')\nprint(1)", "", "1\n"),
        ("from concurrent.futures import ThreadPoolExecutor\nprint(list(ThreadPoolExecutor(4).map(abs, [-1])))", "", "[1]\n"),
        ("import os\nfor i in range(300): open(str(i), 'w').close()\nprint(len(os.listdir('.')))", "", "300\n"),
    ],
)
def test_honest_programs_run(sandbox: Sandbox, program: str, stdin: str, output: str) -> None:
    seen = run(sandbox, program, stdin=stdin)
    assert (seen["ended"], seen["output"]) == ("exit 0", output)


def test_programs_leave_nothing_for_the_next(sandbox: Sandbox) -> None:
    run(
        sandbox,
        "import os, sys\nopen('left', 'w').write('x')\nsys.modules['left'] = 1\n"
        "os.environ['LEFT'] = 'x'\nimport math\nmath.pi = 3",
    )
    seen = run(
        sandbox, "import os, sys, math\nprint(os.listdir('.'), 'left' in sys.modules, 'LEFT' in os.environ, math.pi > 3.1)"
    )
    assert seen["output"] == "[] False False True\n"


def test_a_killed_zygote_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, fault = build_sandbox("seccomp", 1)
    assert made is not None, fault
    (pid,) = made.workers.pids
    threading.Timer(0.3, os.killpg, (pid, 9)).start()
    with pytest.raises(WorkerDiedError):
        made.run({"kind": "program", "program": "import time\ntime.sleep(600)"}, Limits(seconds=600.0))
    made.workers.close()
    del made
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_input_can_t_be_changed(sandbox: Sandbox) -> None:
    seen = run(sandbox, "import os\ntry:\n    os.write(0, b'zzz')\nexcept OSError:\n    print(input())", stdin="abc")
    assert seen["output"] == "abc\n"


def test_many_at_once(sandbox: Sandbox) -> None:
    answers: list[str] = []

    def ask(number: int) -> None:
        answers.append(run(sandbox, f"print({number})", PATIENT)["output"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted(f"{number}\n" for number in range(8))


def test_a_zygote_that_is_killed_is_replaced(sandbox: Sandbox) -> None:
    run(sandbox, "")
    (pid,) = sandbox.workers.pids
    killer = threading.Timer(0.2, os.killpg, (pid, 9))
    killer.start()
    with pytest.raises(WorkerDiedError):
        run(sandbox, "import time\ntime.sleep(600)", Limits(seconds=600.0))
    assert run(sandbox, "print(1)")["output"] == "1\n"


def test_no_level_and_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "build_sandbox", lambda *_: (None, "not here"))
    monkeypatch.setattr(levels, "_SANDBOXES", {})
    with pytest.raises(RewardError, match="can't be run safely on this machine") as caught:
        levels.find_sandbox("rewards.code")
    assert "trusted = true" in caught.value.fix
    trusted = levels.find_sandbox("rewards.code", trusted=True, count=1)
    assert trusted.level == "trusted"
    assert "NOT isolated" in trusted.description
    assert trusted.run({"kind": "program", "program": "print(2)"}, PATIENT)["output"] == "2\n"
    assert run(trusted, "while True: pass", Limits(seconds=0.3))["ended"] == "time"
    trusted.workers.close()


def test_a_sandbox_that_fails_its_self_test_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test decides: a sandbox without its lock is refused."""
    unlocked = levels.command
    monkeypatch.setattr(levels, "command", lambda level, scratch, package: unlocked("trusted", scratch))
    sandbox, fault = build_sandbox("seccomp", 1)
    assert sandbox is None
    assert "self-test" in fault


def syscalls_of(header: str) -> dict[str, int]:
    text = Path(header).read_text(encoding="utf-8")
    return {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", text)}


@pytest.mark.parametrize("column", [0, 1], ids=["x86-64", "ARM"])
def test_the_numbers_of_system_calls_are_those_of_the_kernel_s_headers(column: int) -> None:
    """64-bit ARM has the generic numbers. The headers come with a C compiler, which the tests need anyway."""
    headers = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    if column == 0 and platform.machine() != "x86_64":
        pytest.skip("Linux on ARM has no header for x86-64")
    known = syscalls_of(headers[column])
    assert len(known) > 250
    decided = {
        name.lower(): getattr(lockdown, name)
        for name in ("CLONE", "CLONE3", "KILL", "TGKILL", "PRCTL", "PRLIMIT64", "SENDTO", "OPENAT2", "FCNTL", "IOCTL")
    }
    opening = {name: numbers for name, (numbers, _) in lockdown.OPENING.items()}
    rows = {**lockdown.REFUSED, **lockdown.CREATING, **opening, **decided}
    assert {name: numbers[column] for name, numbers in rows.items()} == {name: known.get(name) for name in rows}
