"""Restricts a child process before it runs an untrusted program. Standard library and ctypes only.

    limits       CPU time, address space, open files, file size, no core dump (setrlimit)
    capabilities all dropped, and none can be regained (no_new_privs)
    files        read the standard library, write the scratch folder, nothing else (Landlock)
    system calls no new process, no exec, no network, no signals to or tracing of others, no mounts … (seccomp)
    counts       threads and files, by the process that watches the child (seccomp's notifications)

The kernel enforces each for the rest of the process's life; the process itself can't undo them.

`REFUSED` has the numbers of the system calls that a sandboxed program may not make, on x86-64 and on 64-bit ARM (None: it has
no such call). It lists refused calls, not allowed ones, because the standard library of each Python version uses other harmless
ones. Calls newer than the newest known here are refused too (`NEWEST`).
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

from oncurve.rewards.sandbox import lockdown

_LIBC = ctypes.CDLL(None, use_errno=True)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_CLONE_THREAD = 0x00010000

READ_FILE, READ = 1 << 2, (1 << 2) | (1 << 3)
"""Landlock's right to read files; and the rights to read files and to list folders."""


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
    """Applies every restriction except the limits. Raises OSError if the kernel lacks one of them; a missing Landlock
    is skipped unless ``need_landlock``.

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
        (_GREATER, 0, 1, lockdown.NEWEST),  # the x32 calls of x86-64 are higher
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        *_returns(lockdown.CLONE3[column], _NO_SUCH_CALL),  # its flags are in memory, out of reach; glibc falls back to clone
        *_returns(lockdown.OPENAT2[column], _NO_SUCH_CALL),  # the same
    ]
    for numbers in lockdown.REFUSED.values():
        number = numbers[column]
        program += [] if number is None else _returns(number, _REFUSE)
    first = (_LOAD, 0, 0, _argument(0))
    program += _allow_if(lockdown.CLONE[column], [first, (_AND, 0, 0, _CLONE_THREAD), (_EQUAL, 0, 1, _CLONE_THREAD)])
    for call in (lockdown.KILL, lockdown.TGKILL):
        program += _allow_if(call[column], [first, (_EQUAL, 0, 1, own_pid)])
    program += _allow_if(lockdown.PRLIMIT64[column], [first, (_EQUAL, 0, 1, 0)])
    program += _refuse_if(lockdown.PRCTL[column], [first, (_EQUAL, 0, 1, _PR_SET_PDEATHSIG)])
    address = _argument(4)
    no_address: list[Instruction] = [(_LOAD, 0, 0, address), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, address + 4), (_EQUAL, 0, 1, 0)]
    program += _allow_if(lockdown.SENDTO[column], no_address)
    program += _allow_values(lockdown.FCNTL[column], lockdown.FCNTL_COMMANDS, _REFUSE)
    program += _allow_values(lockdown.IOCTL[column], lockdown.IOCTL_REQUESTS, _NO_TERMINAL)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def counting_filter() -> list[Instruction]:
    """A filter that reports every start of a thread and every creation of a file."""
    column, _ = _ARCHITECTURES[platform.machine()]
    program: list[Instruction] = [(_LOAD, 0, 0, _NUMBER), *_returns(lockdown.CLONE[column], _NOTIFY)]
    for numbers in lockdown.CREATING.values():
        number = numbers[column]
        program += [] if number is None else _returns(number, _NOTIFY)
    for numbers, argument in lockdown.OPENING.values():
        number, creates = numbers[column], lockdown.O_CREAT | lockdown.O_TMPFILE
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
    """Allows the call if its second argument is one of ``values``; otherwise the verdict is ``refusal``."""
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
    """Decides on a child's requests to start threads and to create files: they are allowed until a limit is reached."""

    def __init__(self, notices: int, max_threads: int, max_files: int) -> None:
        self.notices = notices
        self._left = {True: max_threads, False: max_files}
        self._clone = lockdown.CLONE[_ARCHITECTURES[platform.machine()][0]]

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


NEWEST = 450
"""set_mempolicy_home_node, of Linux 5.17. Higher numbers fail with ENOSYS, as on an older kernel."""

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Other processes: starting, tracing, signalling.
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "tkill": (200, 130),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    # The network.
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    # Large attack surfaces of the kernel.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "io_setup": (206, 0),
    # The machine itself.
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "sync": (162, 81),
    "syncfs": (306, 267),
    # What happens in foreign folders.
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "inotify_rm_watch": (255, 28),
    # Files and memory by other means.
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    # Memory that no limit counts.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Other processes' priority and memory.
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # What Landlock does not cover: modes, owners, times, attributes, hard links.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "truncate": (76, 45),
    "link": (86, None),
    "linkat": (265, 37),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # Users and capabilities.
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
}

# Allowed or refused depending on their arguments.
CLONE, CLONE3 = (56, 220), (435, 435)
KILL, TGKILL = (62, 129), (234, 131)
PRCTL, PRLIMIT64 = (157, 167), (302, 261)
SENDTO, OPENAT2 = (44, 206), (437, 437)

FCNTL, FCNTL_COMMANDS = (72, 25), (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Duplicate a descriptor, its flags, record locks, a pipe's size. Not an owner or a signal (F_SETOWN, F_SETSIG), which would
reach other processes, nor leases, notices of folders, or larger pipes."""
IOCTL, IOCTL_REQUESTS = (16, 29), (0x5401, 0x802C542A, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451)
"""Whether it is a terminal, its size and group, bytes to read, blocking, close on exec. Not an owner (FIOSETOWN, SIOCSPGRP)."""

# Counted by the process that watches the program: what starts a thread, and what creates a file. Opening: the number of the
# argument that has O_CREAT.
O_CREAT, O_TMPFILE = 0x40, 0x400000
CREATING: dict[str, tuple[int | None, int | None]] = {
    "creat": (85, None),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "symlink": (88, None),
    "symlinkat": (266, 36),
}
OPENING: dict[str, tuple[tuple[int | None, int | None], int]] = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
