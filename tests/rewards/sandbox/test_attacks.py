# ruff: noqa: E501  (programs in tables, one to a line)
"""More than 200 programs that try to get out of the sandbox, to reach other processes, to take everything, or to leave something.

Each attempt prints ESCAPED if it succeeds. All run at every level that this machine has, and after each one an honest program
must run as ever.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncurve.rewards.sandbox import lockdown, zygote
from oncurve.rewards.sandbox.sandbox import Limits, Sandbox, build_sandbox
from tests.rewards.sandbox.levels import PATIENT

pytestmark = pytest.mark.slow
ROOM = Limits(seconds=8.0, memory=400 << 20, output=64 << 10, file_size=1 << 20)
COLUMN = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
HONEST = "import os\nopen('mine', 'w').write('x' * 100000)\nos.mkdir('d')\nprint(sorted(os.listdir('.')) == ['d', 'mine'])"

START = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == 'x86_64'
def call(x86, arm, *arguments):
    if (x86 if X86 else arm) is None: raise OSError(errno.ENOSYS, 'no such call here')
    result = libc.syscall(x86 if X86 else arm, *arguments)
    if result < 0: raise OSError(ctypes.get_errno(), 'refused')
    return result
def text(value): return ctypes.create_string_buffer(value.encode() if isinstance(value, str) else value)
VICTIM = int(open(0).read() or os.getppid())
"""


def attempt(line: str) -> str:
    body = "\n".join(f"    {part}" for part in line.split("\n"))
    return f"{START}\ntry:\n{body}\n    print('ESCAPED')\nexcept BaseException as error:\n    print(type(error).__name__)"


SIGNALS = {
    "F_SETOWN": "r, w = os.pipe(); fcntl.fcntl(r, 8, VICTIM); fcntl.fcntl(r, 4, os.O_ASYNC); os.write(w, b'x')",
    "F_SETOWN a group": "r, w = os.pipe(); fcntl.fcntl(r, 8, -VICTIM)",
    "F_SETOWN_EX": "r, w = os.pipe(); fcntl.fcntl(r, 15, struct.pack('ii', 1, VICTIM))",
    "F_SETSIG": "r, w = os.pipe(); fcntl.fcntl(r, 10, 9)",
    "F_SETOWN by hand": "r, w = os.pipe(); call(72, 25, r, 8, VICTIM)",
    "F_SETOWN with high bits": "r, w = os.pipe(); call(72, 25, r, ctypes.c_ulong((7 << 32) | 8), VICTIM)",
    "F_SETLEASE": "fd = os.open('lease', os.O_CREAT | os.O_RDONLY); fcntl.fcntl(fd, 1024, 0)",
    "F_NOTIFY": "fd = os.open('.', os.O_RDONLY); fcntl.fcntl(fd, 1026, 0x80000001)",
    "F_SETPIPE_SZ": "r, w = os.pipe(); fcntl.fcntl(r, 1031, 1 << 20)",
    "FIOSETOWN": "a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, struct.pack('i', VICTIM))",
    "SIOCSPGRP": "a, b = socket.socketpair(); fcntl.ioctl(a, 0x8902, struct.pack('i', VICTIM))",
    "FIOASYNC": "a, b = socket.socketpair(); fcntl.ioctl(a, 0x5452, struct.pack('i', 1))",
    "FIOSETOWN by hand": "a, b = socket.socketpair(); call(16, 29, a.fileno(), 0x8901, text(struct.pack('i', VICTIM)))",
    "FIOSETOWN with high bits": "a, b = socket.socketpair(); call(16, 29, a.fileno(), ctypes.c_ulong((1 << 32) | 0x8901), text(struct.pack('i', VICTIM)))",
    "kill": "os.kill(VICTIM, 9)",
    "stop": "os.kill(VICTIM, 19)",
    "kill 0": "os.kill(0, 9)",
    "kill a group": "os.kill(-VICTIM, 9)",
    "ask whether it lives": "os.kill(VICTIM, 0)",
    "tkill": "call(200, 130, VICTIM, 9)",
    "tgkill": "call(234, 131, VICTIM, VICTIM, 9)",
    "rt_sigqueueinfo": "call(129, 138, VICTIM, 9, text(bytes(128)))",
    "rt_tgsigqueueinfo": "call(297, 240, VICTIM, VICTIM, 9, text(bytes(128)))",
    "pidfd": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)",
    "a timer for another": "call(222, 107, 1, text(struct.pack('qiii48x', 0, 9, 4, VICTIM)), text(bytes(8)))",
    "its parent's death": "assert libc.prctl(1, 9, 0, 0, 0) == 0",
    "limits of another": "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0))",
    "limits of another, read": "resource.prlimit(VICTIM, resource.RLIMIT_CPU)",
    "priority of another": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "cores of another": "os.sched_setaffinity(VICTIM, {0})",
    "scheduler of another": "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))",
    "I/O priority of another": "call(251, 30, 1, VICTIM, 0)",
    "a message queue": "call(240, 180, text('/q'), os.O_CREAT | os.O_RDWR, 0o600, 0)",
}  # fmt: skip

NETWORK = {
    "send to a name": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendto(b'x', '\\0oncurve-test-socket')",
    "send to a path": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendto(b'x', '/tmp/oncurve-test-socket')",
    "sendmsg to a name": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendmsg([b'x'], [], 0, '\\0oncurve-test-socket')",
    "sendmsg within": "a, b = socket.socketpair(); a.sendmsg([b'x'])",
    "pass a descriptor": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])",
    "sendmmsg": "a, b = socket.socketpair(); call(307, 269, a.fileno(), text(bytes(64)), 1, 0)",
    "sendto by hand": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); call(44, 206, a.fileno(), text('x'), 1, 0, text(b'\\1\\0\\0oncurve-test-socket'), 22)",
    "connect a pair": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.connect('\\0oncurve-test-socket')",
    "bind a pair": "a, b = socket.socketpair(); a.bind('mine')",
    "listen": "a, b = socket.socketpair(); a.listen()",
    "larger buffers": "a, b = socket.socketpair(); a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
    **{f"family {family}": f"socket.socket({family}, {kind})" for family, kind in ((1, 1), (2, 1), (2, 2), (10, 2), (16, 3), (17, 3), (38, 5), (40, 1), (44, 3))},
    "http": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:80', timeout=1)",
    "asyncio": "import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', 22))",
    "pair of another family": "call(53, 199, 2, 1, 0, text(bytes(8)))",
}  # fmt: skip

PROCESSES = {
    "fork": "os.fork()",
    "forkpty": "os.forkpty()",
    "vfork": "call(58, None)",
    "clone": "call(56, 220, 17, 0, 0, 0, 0)",
    "clone a namespace": "call(56, 220, 0x10000011, 0, 0, 0, 0)",
    "clone with shared memory": "call(56, 220, 0x4111, 0, 0, 0, 0)",
    "clone3": "call(435, 435, text(bytes(88)), 88)",
    "posix_spawn": "os.posix_spawn(sys.executable or '/bin/true', ['x'], {})",
    "system": "assert os.system('true') == 0",
    "popen": "assert os.popen('echo hi').read()",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'])",
    "multiprocessing spawn": "import multiprocessing as m; p = m.get_context('spawn').Process(target=print); p.start()",
    "multiprocessing forkserver": "import multiprocessing as m; p = m.get_context('forkserver').Process(target=print); p.start()",
    "a process pool": "from concurrent.futures import ProcessPoolExecutor as P; P(1).submit(int).result(3)",
    "pty": "import pty; pty.spawn('/bin/true')",
    "execve": "os.execve('/bin/true', ['true'], {})",
    "execve the interpreter": "os.execve('/proc/self/exe', ['python', '-c', 'print(\"ESCAPED\")'], {})",
    "execveat": "call(322, 281, -100, text('/bin/true'), 0, 0, 0)",
    "its own program": "open('p', 'w').write('#!/bin/true'); os.chmod('p', 0o755)",
    "libc system": "assert libc.system(b'true') == 0",
    "ptrace attach": "call(101, 117, 16, VICTIM, 0, 0)",
    "ptrace seize": "call(101, 117, 0x4206, VICTIM, 0, 0)",
    "ptrace me": "call(101, 117, 0, 0, 0, 0)",
    "process_vm_readv": "call(310, 270, VICTIM, 0, 0, 0, 0, 0)",
    "process_vm_writev": "call(311, 271, VICTIM, 0, 0, 0, 0, 0)",
    "pidfd_getfd": "call(438, 438, 3, 0, 0)",
    "kcmp": "call(312, 272, VICTIM, os.getpid(), 0, 0, 0)",
    "perf": "call(298, 241, text(bytes(112)), VICTIM, -1, -1, 0)",
    "another's memory": "open(f'/proc/{VICTIM}/mem', 'rb').read(1)",
    "another's memory map": "open(f'/proc/{VICTIM}/maps').read()",
    "another's environment": "open(f'/proc/{VICTIM}/environ').read()",
    "another's files": "os.listdir(f'/proc/{VICTIM}/fd')",
    "another's root": "os.listdir(f'/proc/{VICTIM}/root')",
    "another's folder": "os.readlink(f'/proc/{VICTIM}/cwd')",
    "process 1": "os.listdir('/proc/1/fd')",
}  # fmt: skip

FILES = {
    **{f"read {path}": f"open({path!r}, 'rb').read(1)" for path in (
        "/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/self/mem", "/proc/version", "/proc/cpuinfo",
        "/proc/meminfo", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/urandom", "/sys/kernel/uevent_seqnum", "/root/.bashrc", "/var/log/lastlog")},
    **{f"list {path}": f"os.listdir({path!r})" for path in ("/root", "/home", "/etc", "/proc", "/sys", "/var", "/run", "/tmp", "/dev/shm", "..")},
    **{f"write {path}": f"open({path!r}, 'w')" for path in ("/tmp/x", "/var/tmp/x", "/dev/shm/x", "/x", "/run/x", "../x", "/etc/x")},
    "symlink to a file": "os.symlink('/etc/passwd', 'l'); open('l').read()",
    "symlink to a folder": "os.symlink('/etc', 'l'); open('l/passwd').read()",
    "symlink to a folder, written": "os.symlink('/tmp', 'l'); open('l/oncurve-escaped', 'w')",
    "a loop of symlinks": "os.symlink('b', 'a'); os.symlink('a', 'b'); open('a')",
    "hard link": "os.link('/etc/passwd', 'l')",
    "by a folder's descriptor": "d = os.open('/', os.O_RDONLY | os.O_DIRECTORY); os.open('etc/passwd', os.O_RDONLY, dir_fd=d)",
    "by a path's descriptor": "d = os.open('/etc', os.O_PATH); os.open('passwd', os.O_RDONLY, dir_fd=d)",
    "a path's descriptor, opened": "d = os.open('/etc/passwd', os.O_PATH); open(f'/proc/self/fd/{d}').read()",
    "after a change of folder": "os.chdir('/etc'); open('passwd').read()",
    "openat2": "call(437, 437, -100, text('/etc/passwd'), text(bytes(24)), 24)",
    "by handle": "call(304, 265, -100, text(bytes(16)), 0)",
    "name to handle": "call(303, 264, -100, text('/etc/passwd'), text(bytes(64)), text(bytes(4)), 0)",
    "mapped": "mmap.mmap(os.open('/etc/passwd', os.O_RDONLY), 1, prot=1)",
    "copied": "import shutil; shutil.copy('/etc/passwd', 'p')",
    "linecache": "import linecache; assert linecache.getline('/etc/passwd', 1)",
    "an archive": "import tarfile; tarfile.open('t', 'w').add('/etc/passwd')",
    "sqlite": "import sqlite3; sqlite3.connect('/tmp/oncurve-escaped.db').execute('create table t (a)')",
    "truncate": "os.truncate('/etc/passwd', 0)",
    "remove": "os.remove('/etc/hostname')",
    "rename out": "open('m', 'w'); os.rename('m', '/tmp/oncurve-escaped')",
    "rename in": "os.rename('/etc/hostname', 'm')",
    "mkdir": "os.mkdir('/tmp/oncurve-escaped')",
    "rmdir": "os.rmdir('/tmp')",
    "chmod": "os.chmod('/tmp', 0o777)",
    "chmod own": "os.chmod('.', 0)",
    "fchmod own": "os.fchmod(os.open('.', os.O_RDONLY), 0)",
    "chown": "os.chown('.', 1, 1)",
    "utime": "os.utime('/etc/passwd')",
    "xattr": "os.setxattr('.', 'user.x', b'y')",
    "device": "os.mknod('d', 0o60666, os.makedev(8, 0))",
    "fifo": "os.mkfifo('f')",
    "mount": "call(165, 40, text('none'), text('.'), text('tmpfs'), 0, 0)",
    "bind mount": "call(165, 40, text('/etc'), text('.'), 0, 4096, 0)",
    "unmount": "call(166, 39, text('/'), 2)",
    "new mount": "call(430, 430, text('tmpfs'), 0)",
    "open tree": "call(428, 428, -100, text('/'), 1)",
    "chroot": "os.chroot('.')",
    "pivot root": "call(155, 41, text('.'), text('.'))",
    "namespace": "call(272, 97, 0x10000000)",
    "enter a namespace": "call(308, 268, 0, 0)",
    "inotify": "call(253, None)",
    "inotify 1": "call(294, 26, 0)",
    "inotify watch": "call(254, 27, 0, text('/tmp'), 0xfff)",
    "fanotify": "call(300, 262, 0, 0)",
    "fanotify mark": "call(301, 263, 0, 1, 0, -100, text('/tmp'))",
    "write the standard library": "open(os.__file__, 'a')",
    "write the sandbox": "open(sys.modules['oncurve.rewards.sandbox.zygote'].__file__, 'a')",
    "become another": "os.setuid(65534)",
    "another group": "os.setgid(65534)",
    "groups": "os.setgroups([])",
    "capabilities": "call(126, 91, text(struct.pack('=Ii', 0x20080522, 0)), text(bytes(24)))",
    "host name": "socket.sethostname('x')",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "reboot": "call(169, 142, 0xfee1dead, 672274793, 0x1234567, 0)",
    "module": "call(175, 105, 0, 0, text(''))",
    "bpf": "call(321, 280, 0, text(bytes(64)), 64)",
    "io_uring": "call(425, 425, 8, text(bytes(120)))",
    "keys": "call(250, 219, 0, -3, 0)",
    "userfaultfd": "call(323, 282, 0)",
    "aio": "call(206, 0, 8, text(bytes(8)))",
    "memory file": "os.memfd_create('x')",
    "secret memory": "call(447, 447, 0)",
    "shared memory": "call(29, 194, 1, 4096, 0o1666)",
    "semaphores": "call(64, 190, 1, 1, 0o1666)",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_AS, (1 << 45, 1 << 45))",
    "raise the limit on time": "resource.setrlimit(resource.RLIMIT_CPU, (999, 999))",
    "sync every disk": "call(162, 81)",
    "a newer call": "call(460, 460)",
    "an x32 call": "call(0x40000000 + 39, 0x40000000 + 39)",
}  # fmt: skip

SOCKET = f"oncurve-test-{os.getpid() % 10**6:06}"  # as long as the name in the table
ATTEMPTS = {f"{kind}: {name}": line.replace("oncurve-test-socket", SOCKET) for kind, table in (("signals", SIGNALS), ("network", NETWORK), ("processes", PROCESSES), ("files", FILES)) for name, line in table.items()}  # fmt: skip


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user, outside of the sandbox."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def sockets() -> Iterator[list[socket.socket]]:
    """Sockets of the host, by an abstract name and by a path."""
    path = Path("/tmp") / SOCKET
    path.unlink(missing_ok=True)
    bound = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    bound[0].bind(f"\0{SOCKET}")
    bound[1].bind(str(path))
    for each in bound:
        each.setblocking(False)
    yield bound
    for each in bound:
        each.close()
    path.unlink()


def run(sandbox: Sandbox, program: str, limits: Limits = PATIENT, **job: Any) -> dict[str, Any]:
    return dict(sandbox.run({"kind": "program", "program": program, **job}, limits))


def assert_honest_programs_run(sandbox: Sandbox) -> None:
    outcome = run(sandbox, HONEST)
    assert (outcome["ended"], outcome["output"]) == ("exit 0", "True\n"), outcome
    tests = sandbox.run({"kind": "tests", "program": "def f(x): return x", "tests": ["assert f(1) == 1"]}, PATIENT)
    assert tests["verdicts"] == [{"passed": True}]


def test_there_are_enough_attacks() -> None:
    assert len(ATTEMPTS) + len(EXHAUSTING) + len(LEFTOVERS) >= 200


@pytest.mark.parametrize("name", list(ATTEMPTS))
def test_attempts_fail(sandbox: Sandbox, victim: subprocess.Popen[bytes], sockets: list[socket.socket], name: str) -> None:
    outcome = run(sandbox, attempt(ATTEMPTS[name]), ROOM, stdin=str(victim.pid))
    assert "ESCAPED" not in outcome["output"], outcome
    assert "SyntaxError" not in outcome["errors"], outcome
    assert victim.poll() is None
    for each in sockets:
        with pytest.raises(BlockingIOError):
            each.recv(16)
    assert run(sandbox, "print('next')")["output"] == "next\n"


def test_every_refused_call_is_refused(sandbox: Sandbox) -> None:
    """Each system call of the list, with arguments that are nonsense: it fails with EPERM before the kernel looks at them."""
    numbers = {name: number[COLUMN] for name, number in lockdown.REFUSED.items() if number[COLUMN] is not None}
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {numbers!r}.items():\n"
        "    if libc.syscall(number, -1, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1: print(name, ctypes.get_errno())"
    )
    outcome = run(sandbox, program)
    assert (outcome["ended"], outcome["output"]) == ("exit 0", "")


EXHAUSTING = {
    "threads": "import threading, time\nthreading.stack_size(1 << 16)\nfor _ in range(4000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "threads by hand": START + "stack = mmap.mmap(-1, 1 << 20)\nfor _ in range(4000): libc.syscall(56 if X86 else 220, 0x50f00, ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 19), 0, 0, 0)\nwhile True: pass",
    "threads that start threads": "import threading\nthreading.stack_size(1 << 16)\ndef f(): threading.Thread(target=f).start(); threading.Thread(target=f).start()\nf()",
    "files": "n = 0\nwhile True:\n    open(str(n), 'w').close()\n    n += 1",
    "folders": "import os\nn = 0\nwhile True:\n    os.mkdir(str(n))\n    n += 1",
    "symlinks": "import os\nn = 0\nwhile True:\n    os.symlink('x', str(n))\n    n += 1",
    "temporary files": "import os\nwhile True:\n    os.open('.', os.O_TMPFILE | os.O_RDWR)",
    "one file, for ever": "while True: open('f', 'a').write('x' * 4096)",
    "many large files": "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 20))\n    n += 1",
    "output": "while True: print('x' * 1000)",
    "output without a line's end": "import sys\nwhile True: sys.stdout.write('x' * 1000)",
    "output by descriptor": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "errors": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "output from threads": "import os, threading\ndef f():\n    while True: os.write(1, b'x' * 4096)\nfor _ in range(8): threading.Thread(target=f).start()",
    "output at the end": "import atexit\ndef f():\n    while True: print('x' * 9999)\natexit.register(f)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "mapped memory": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24))",
    "a large number": "x = 9 ** 9 ** 9",
    "a large list": "x = [0] * (1 << 40)",
    "descriptors": "import os\nx = []\nwhile True: x.append(os.pipe())",
    "sockets": "import socket\nx = []\nwhile True: x.append(socket.socketpair())",
    "time": "while True: pass",
    "sleep": "import time\ntime.sleep(100)",
    "sleep at the end": "import atexit, time\natexit.register(time.sleep, 100)",
    "a thread that never ends": "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()",
    "processor time in threads": "import threading\ndef f():\n    while True: pass\nfor _ in range(20): threading.Thread(target=f).start()",
    "deaf to signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}  # fmt: skip


@pytest.mark.parametrize("name", list(EXHAUSTING))
def test_nothing_is_unlimited(sandbox: Sandbox, name: str) -> None:
    limits = Limits(seconds=2.0, memory=300 << 20, output=64 << 10, file_size=1 << 20)
    outcome = run(sandbox, EXHAUSTING[name], limits)  # raises if nothing ends it
    assert len(outcome["output"]) + len(outcome["errors"]) < 512 << 10
    assert_honest_programs_run(sandbox)


LEFTOVERS = {
    "a folder that can't be listed": "import os\nos.mkdir('d', 0o300)\nfor i in range(50): open(f'd/{i}', 'wb').write(bytes(100000))",
    "a folder without rights": "import os\nos.mkdir('d')\nopen('d/f', 'w')\nos.mkdir('d/e', 0)",
    "folders without rights in each other": "import os\nos.umask(0)\nfor i in range(20):\n    os.mkdir('d', 0o300)\n    os.chdir('d')\nopen('f', 'w').write('x')",
    "deep folders": "import os\nfor _ in range(990):\n    os.mkdir('d')\n    os.chdir('d')",
    "deep folders with files": "import os\nfor _ in range(490):\n    os.mkdir('d')\n    open('f', 'w')\n    os.chdir('d')",
    "wide and deep": "import os\nfor _ in range(48):\n    for n in range(20): os.mkdir(str(n), 0o300)\n    os.chdir('0')",
    "names that clash": "import os\nfor i in range(50):\n    os.makedirs(f'{i}/{i}/{i}')\n    open(f'{i}/{i}/f', 'w')",
    "long names": "import os\nfor _ in range(40):\n    os.mkdir('n' * 255)\n    os.chdir('n' * 255)",
    "odd names": "import os\nfor name in (b'\\xff\\xfe', b' ', b'-rf', b'\\n', b'*'):\n    os.mkdir(name)\n    open(name + b'/f', 'w')",
    "symlinks to folders": "import os\nos.mkdir('d')\nos.symlink('/tmp', 'd/l')\nos.symlink('/', 'l')\nos.symlink('..', 'up')",
    "a removed working folder": "import os\nos.mkdir('d')\nos.chdir('d')\nos.rmdir('../d')",
    "a renamed scratch": "import os\nhere = os.getcwd()\nos.chdir('/')\ntry: os.rename(here, here + '-x')\nexcept OSError: pass",
    "a removed scratch": "import os\nhere = os.getcwd()\nos.chdir('/')\ntry: os.rmdir(here)\nexcept OSError: pass",
    "open files": "kept = [open(str(i), 'wb') for i in range(40)]\nfor f in kept: f.write(bytes(1 << 19))",
    "a thread that writes on": "import threading\ndef f():\n    n = 0\n    while True:\n        try: open(str(n), 'w').write('x')\n        except OSError: pass\n        n += 1\nthreading.Thread(target=f, daemon=True).start()",
    "all its space": "n = 0\ntry:\n    while True:\n        open(str(n), 'wb').write(bytes(1 << 20))\n        n += 1\nexcept OSError: pass",
}  # fmt: skip


@pytest.mark.parametrize("name", list(LEFTOVERS))
def test_nothing_is_left(sandbox: Sandbox, name: str) -> None:
    run(sandbox, LEFTOVERS[name], Limits(seconds=4.0, memory=300 << 20, file_size=1 << 20))
    assert_honest_programs_run(sandbox)


@pytest.mark.parametrize("name", list(LEFTOVERS))
def test_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At level seccomp the scratch folder is on disk: it is empty after each program, and gone with the sandbox."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    built, fault = build_sandbox("seccomp", 1)
    assert built is not None, fault
    run(built, LEFTOVERS[name], Limits(seconds=4.0, memory=300 << 20, file_size=1 << 20))
    (scratch,) = tmp_path.iterdir()
    assert list(scratch.iterdir()) == []
    built.workers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL in the middle of a program: the zygote sees that the pipe is closed, and cleans up by itself."""
    script = (
        "import sys\nfrom oncurve.rewards.sandbox.sandbox import *\nsandbox, _ = build_sandbox('seccomp', 1)\n"
        "print('ready', flush=True)\nsandbox.run({'kind': 'program', 'program': \"import os, time\\nos.mkdir('d', 0)\\ntime.sleep(600)\"}, Limits(seconds=600))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("d")) and time.monotonic() < deadline:
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_output_of_a_tests_job_is_limited(sandbox: Sandbox) -> None:
    """Its program prints for ever: it is stopped, and no process grows with it."""
    (pid,) = sandbox.workers.pids
    peak: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak.append(sum(_resident(child) for child in _descendants(pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    program = "print('loaded')\ndef f(x):\n    while True: print('x' * 100000)"
    outcome = sandbox.run({"kind": "tests", "program": program, "tests": ["assert f(1) == 1"]}, PATIENT)
    done.set()
    watcher.join()
    assert outcome["program"] == "output"
    assert not any(verdict.get("passed") for verdict in outcome["verdicts"])
    assert max(peak, default=0) < 300 << 20


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def test_a_folder_is_removed_whatever_is_in_it(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (top / "link").symlink_to(outside)
    here = os.getcwd()
    try:
        os.chdir(top)
        for _ in range(3000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    zygote.remove_folder(str(top))
    zygote.remove_folder(str(top))  # gone: nothing to do
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "kept").read_text() == "x"
