"""Restricts a child process before it runs an untrusted program. Standard library and ctypes only.

    limits       CPU time, address space, open files, file size, no core dump (setrlimit)
    capabilities all dropped, and none can be regained (no_new_privs)
    files        read the standard library, write the scratch folder, nothing else (Landlock)
    system calls no new process, no exec, no network, no signals to or tracing of others, no mounts … (seccomp)
    counts       threads and files, by the process that watches the child (seccomp's notifications)

The kernel enforces each for the rest of the process's life; the process itself can't undo them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import socket
import struct
from collections.abc import Iterable, Sequence

from oncurve.rewards.sandbox import syscalls

_LIBC = ctypes.CDLL(None, use_errno=True)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_CLONE_THREAD = 0x00010000

READ_FILE, READ = 1 << 2, (1 << 2) | (1 << 3)
"""Landlock's rights to read a file, and to list a folder too."""


def set_limits(cpu_seconds: float, memory: int, file_size: int, open_files: int) -> None:
    """Sets hard limits, which a process can't raise again. A process that exceeds its CPU time is killed."""
    seconds = max(1, int(cpu_seconds + 0.999))
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, 9)


def lock(readable: Iterable[str], scratch: str, need_landlock: bool, watcher: socket.socket) -> None:
    """Applies every restriction but the limits. Raises OSError if the kernel does not support one.

    ``watcher`` receives the descriptor on which threads and files are counted (`Counts`); this process keeps none.
    """
    drop_capabilities()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if landlock_version() > 0:
        restrict_files(readable, scratch)
    elif need_landlock:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    notices = install_counting_filter()
    socket.send_fds(watcher, [b"#"], [notices])
    os.close(notices)
    install_syscall_filter()


def _prctl(option: int, value: int, third: object = 0) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), third, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def drop_capabilities() -> None:
    """Drops all capabilities: root becomes an ordinary user. A process without capabilities may call this too."""
    header = struct.pack("=Ii", 0x20080522, 0)
    if _LIBC.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def landlock_version() -> int:
    """The kernel's Landlock version; 0 if it has none."""
    return max(0, int(_LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def restrict_files(readable: Iterable[str], scratch: str) -> None:
    """Allows reading below ``readable``, reading and writing below ``scratch``, and nothing else, symlinks included."""
    version = landlock_version()
    rights = (1 << 13) - 1 | ((1 << 13) if version >= 2 else 0) | ((1 << 14) if version >= 3 else 0)
    rules = ctypes.create_string_buffer(struct.pack("=Q", rights), 8)
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(8), ctypes.c_uint32(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    special = (1 << 0) | (1 << 6) | (1 << 9) | (1 << 11)  # execute a program, create a device or a socket
    for path in readable:
        _allow(ruleset, path, READ if os.path.isdir(path) else READ_FILE)
    _allow(ruleset, scratch, rights & ~special)
    if _LIBC.syscall(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, folder), 12)
    failed = _LIBC.syscall(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    os.close(folder)
    if failed:
        raise OSError(ctypes.get_errno(), f"landlock_add_rule for {path}")


# Classic BPF, as seccomp takes it: (code, jump if true, jump if false, constant).
_LOAD, _EQUAL, _GREATER, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
_ALLOW, _KILL, _NOTIFY = 0x7FFF0000, 0x80000000, 0x7FC00000
_ERROR = 0x00050000
_REFUSE, _NO_SUCH_CALL, _NO_TERMINAL = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS, _ERROR | errno.ENOTTY
_NUMBER, _ARCHITECTURE = 0, 4

Instruction = tuple[int, int, int, int]


def _argument(index: int) -> int:
    """Offset of the lower half of a call's argument; the upper half is 4 further."""
    return 16 + 8 * index


def syscall_filter(own_pid: int) -> list[Instruction]:
    """The filter: a call of another architecture kills the process; a refused one fails with EPERM, a newer one with ENOSYS."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, syscalls.NEWEST),  # the x32 calls of x86-64 are higher
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        *_returns(syscalls.CLONE3[column], _NO_SUCH_CALL),  # its flags are in memory, out of reach; glibc falls back to clone
        *_returns(syscalls.OPENAT2[column], _NO_SUCH_CALL),  # the same
    ]
    for numbers in syscalls.REFUSED.values():
        number = numbers[column]
        program += [] if number is None else _returns(number, _REFUSE)
    first = (_LOAD, 0, 0, _argument(0))
    program += _allow_if(syscalls.CLONE[column], [first, (_AND, 0, 0, _CLONE_THREAD), (_EQUAL, 0, 1, _CLONE_THREAD)])
    for call in (syscalls.KILL, syscalls.TGKILL):
        program += _allow_if(call[column], [first, (_EQUAL, 0, 1, own_pid)])
    program += _allow_if(syscalls.PRLIMIT64[column], [first, (_EQUAL, 0, 1, 0)])
    program += _refuse_if(syscalls.PRCTL[column], [first, (_EQUAL, 0, 1, _PR_SET_PDEATHSIG)])
    address = _argument(4)
    no_address: list[Instruction] = [(_LOAD, 0, 0, address), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, address + 4), (_EQUAL, 0, 1, 0)]
    program += _allow_if(syscalls.SENDTO[column], no_address)
    program += _allow_values(syscalls.FCNTL[column], syscalls.FCNTL_COMMANDS, _REFUSE)
    program += _allow_values(syscalls.IOCTL[column], syscalls.IOCTL_REQUESTS, _NO_TERMINAL)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def counting_filter() -> list[Instruction]:
    """A filter that reports every start of a thread and every creation of a file."""
    column, _ = _ARCHITECTURES[platform.machine()]
    program: list[Instruction] = [(_LOAD, 0, 0, _NUMBER), *_returns(syscalls.CLONE[column], _NOTIFY)]
    for numbers in syscalls.CREATING.values():
        number = numbers[column]
        program += [] if number is None else _returns(number, _NOTIFY)
    for numbers, argument in syscalls.OPENING.values():
        number, creates = numbers[column], syscalls.O_CREAT | syscalls.O_TMPFILE
        test: list[Instruction] = [(_LOAD, 0, 0, _argument(argument)), (_AND, 0, 0, creates), (_EQUAL, 0, 1, 0)]
        program += [] if number is None else _decide(number, test, _ALLOW, _NOTIFY)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _returns(number: int, verdict: int) -> list[Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, verdict)]


def _decide(number: int, test: list[Instruction], if_true: int, if_false: int) -> list[Instruction]:
    """One verdict if the test is true, else the other. The test's last instruction falls through if true, else skips one."""
    return [(_EQUAL, 0, len(test) + 2, number), *test, (_RETURN, 0, 0, if_true), (_RETURN, 0, 0, if_false)]


def _allow_if(number: int, test: list[Instruction]) -> list[Instruction]:
    return _decide(number, test, _ALLOW, _REFUSE)


def _refuse_if(number: int, test: list[Instruction]) -> list[Instruction]:
    return _decide(number, test, _REFUSE, _ALLOW)


def _allow_values(number: int, values: Sequence[int], refusal: int) -> list[Instruction]:
    """Allows the call if its second argument is one of ``values``."""
    count = len(values)
    tests: list[Instruction] = [(_EQUAL, count - i, 0, value) for i, value in enumerate(values)]
    block = [(_LOAD, 0, 0, _argument(1)), *tests, (_RETURN, 0, 0, refusal), (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(block), number), *block]


def install_syscall_filter() -> None:
    """Installs the filter for this process and every thread that it starts."""
    _install(syscall_filter(os.getpid()), 0)


def install_counting_filter() -> int:
    """Installs the filter that reports; returns the descriptor on which the reports arrive."""
    return _install(counting_filter(), _NEW_LISTENER)


def _install(program: Sequence[Instruction], flags: int) -> int:
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    pointer = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    number = _SECCOMP[_ARCHITECTURES[platform.machine()][0]]
    result = int(_LIBC.syscall(number, 1, ctypes.c_uint(flags), ctypes.create_string_buffer(pointer, len(pointer))))
    if result < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return result


_SECCOMP, _NEW_LISTENER = (317, 277), 8
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1


class Counts:
    """Answers a child's reports: it may start and create things until a limit is reached, and is then refused."""

    def __init__(self, notices: int, max_threads: int, max_files: int) -> None:
        self.notices = notices
        self._left = {True: max_threads, False: max_files}
        self._clone = syscalls.CLONE[_ARCHITECTURES[platform.machine()][0]]

    def answer(self) -> None:
        """Answers one report. The child may have been killed meanwhile."""
        report = bytearray(80)
        try:
            fcntl.ioctl(self.notices, _RECEIVE, report, True)
            number, _, _, call = struct.unpack_from("=QIIi", report)
            is_thread = call == self._clone
            self._left[is_thread] -= 1
            is_allowed = self._left[is_thread] >= 0
            refusal = 0 if is_allowed else -(errno.EAGAIN if is_thread else errno.ENOSPC)
            reply = struct.pack("=QqiI", number, 0, refusal, _CONTINUE if is_allowed else 0)
            fcntl.ioctl(self.notices, _SEND, bytearray(reply), True)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):
                raise
