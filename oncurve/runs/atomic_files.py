"""Atomic writes: a kill or a full disk leaves the old file or the new one, never half of either. And the disk's errors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from oncurve.errors import DiskError
from oncurve.workers.processes import is_alive

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_PERMISSION = frozenset({errno.EACCES, errno.EPERM})
BAD_PATH = frozenset({errno.ENAMETOOLONG, errno.ELOOP})


def free_bytes(path: Path) -> int | None:
    """Free space on the disk that holds, or will hold, ``path``; None if the system does not say."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def mebibytes(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / 2**20:,.1f} MiB"


def disk_error(path: Path, number: int | None, text: str, needed: int | None = None) -> DiskError:
    """The user's error for a read or write of ``path`` that failed with errno ``number``."""
    if number in NO_ROOM:
        required = "" if needed is None else f"{mebibytes(needed)} needed, "
        what = f"no space left: {required}{mebibytes(free_bytes(path))} free ({text})"
        return DiskError(
            str(path),
            what,
            because="the disk, a quota or a file size limit is full; earlier files are intact",
            fix="free some space and continue with --resume, or put a new run on another disk with --out",
        )
    if number in NO_PERMISSION:
        return DiskError(
            str(path),
            f"not allowed ({text})",
            because="this user has no permission to read or write there",
            fix="change the folder's owner or mode, or choose another folder with --out",
        )
    if number in BAD_PATH:
        return DiskError(
            str(path) if len(str(path)) < 200 else f"{str(path)[:80]}…",
            text,
            because="no file can have this name",
            fix="use a shorter name" if number == errno.ENAMETOOLONG else "remove the link that points to itself",
        )
    if number == errno.EROFS:
        return DiskError(
            str(path),
            f"read-only ({text})",
            because="the disk is mounted read-only",
            fix="remount it writable, or choose another folder with --out",
        )
    return DiskError(
        str(path),
        text,
        because="the system refused to read or write it",
        fix="check the disk and the path, then continue the run with --resume",
    )


@contextlib.contextmanager
def disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns an OSError in the body into a DiskError about ``path``. safetensors wraps the system's errors in its own exception:
    the errno is in its text."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error.errno, error.strerror or str(error), needed) from error
    except Exception as error:
        # By its name: readers of runs do not load safetensors.
        number = re.search(r"os error (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else None
        if number is None:
            raise
        raise disk_error(path, int(number[1]), os.strerror(int(number[1])), needed) from error


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems can't sync a folder; there is nothing more to do for their renames.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """`sync` of a folder and of everything in it."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            sync(path)


def read_file(path: Path) -> bytes:
    """A file's bytes. Raises OSError if it can't be read or is not a plain file: reading from a FIFO would block for ever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return file.read()


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file and waits until it is on disk. Raises OSError, which the caller turns into a message."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a temporary file and renames it to ``path``: a reader sees the complete old content or the complete new one."""
    temporary = path.with_name(f".writing-{path.name}-{os.getpid()}")
    with disk_errors(path, len(content)):
        try:
            write_durably(temporary, content)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_file_atomically(path: Path, content: bytes) -> None:
    """`replace_file`, which also creates the folder."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def partial_writes(folder: Path) -> list[Path]:
    """Temporary files and folders anywhere in a folder whose writers are dead."""

    def is_written_now(path: Path) -> bool:
        pid = path.name.rpartition("-")[2]
        return pid.isdigit() and is_alive(int(pid))

    return [path for path in folder.rglob(".writing-*") if not is_written_now(path)]


def clear_partial_writes(folder: Path) -> None:
    """Removes partial writes that a killed process left behind. Only the process that writes the run may call this."""
    for path in partial_writes(folder):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_folder_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Writes a folder by ``write(temporary)``, waits until it is on disk, and renames it to ``target``, replacing an existing
    one.

    Files get the folder's permissions: safetensors creates its own with read permission for the owner only.
    """
    temporary = target.with_name(f".writing-{target.name}")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            write(temporary)
            for file in temporary.rglob("*"):
                if file.is_file():
                    file.chmod(temporary.stat().st_mode & 0o666)
            sync_folder(temporary)
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            sync(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
