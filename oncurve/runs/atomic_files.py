"""Writing files so that a kill or a full disk leaves the old state or the new one, never half of either."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from oncurve.errors import DiskError
from oncurve.workers.processes import is_alive

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_PERMISSION = frozenset({errno.EACCES, errno.EPERM})


def free_bytes(path: Path) -> int | None:
    """Room left on the disk that ``path`` is, or will be, on; None where the system does not say."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def mebibytes(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / 2**20:,.1f} MiB"


def disk_error(path: Path, number: int | None, text: str, needed: int | None = None) -> DiskError:
    """The error a user sees when the system refused to read or write ``path`` with errno ``number``."""
    if number in NO_ROOM:
        wanted = "" if needed is None else f"{mebibytes(needed)} needed, "
        what = f"no room: {wanted}{mebibytes(free_bytes(path))} free ({text})"
        return DiskError(
            str(path),
            what,
            because="the disk, a quota or a file size limit is full; what was there before is intact",
            fix="free some room, or put the run on another disk with --out, then go on with --resume",
        )
    if number in NO_PERMISSION:
        return DiskError(
            str(path),
            f"not allowed ({text})",
            because="this user may not read or write there",
            fix="mend the folder's owner or mode, or choose another place with --out",
        )
    if number == errno.EROFS:
        return DiskError(
            str(path),
            f"read-only ({text})",
            because="the disk is mounted read-only",
            fix="remount it writable, or choose another place with --out",
        )
    return DiskError(
        str(path),
        text,
        because="the system refused to read or write it",
        fix="check the disk and the path; a run that was stopped by it goes on with --resume",
    )


@contextlib.contextmanager
def disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns an OSError of the body into a DiskError about ``path``."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error.errno, error.strerror or str(error), needed) from error


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's list of names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems can't sync a folder; their renames are durable by themselves or not at all.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file and waits for the disk. Raises OSError: the caller knows what it was writing, and says so."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Writes ``path`` aside and renames it: a reader sees the old content or the new one, whole."""
    aside = path.with_name(f".writing-{path.name}-{os.getpid()}")
    with disk_errors(path, len(content)):
        try:
            write_durably(aside, content)
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_file_atomically(path: Path, content: bytes) -> None:
    """The same in a folder that is made where it is not there yet."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def partial_writes(folder: Path) -> list[Path]:
    """What writers that are gone have left half-written anywhere in a folder: the names above, and those of `put_whole`."""

    def is_written_now(path: Path) -> bool:
        pid = path.name.rpartition("-")[2]
        return pid.isdigit() and is_alive(int(pid))

    return [path for path in folder.rglob(".writing-*") if not is_written_now(path)]


def clear_partial_writes(folder: Path) -> None:
    """Takes that away; for a run's one writer."""
    for path in partial_writes(folder):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_folder_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """A folder as ``write`` makes it, there whole or not at all; one that was there before is replaced. Whoever may read the
    folder may read its files: safetensors makes its own for their owner alone."""
    aside = target.with_name(f".writing-{target.name}")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            write(aside)
            for file in aside.rglob("*"):
                if file.is_file():
                    file.chmod(aside.stat().st_mode & 0o666)
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
