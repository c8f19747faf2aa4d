"""The functions in C: built once, in seconds, and kept in the user's cache under a name made of source, compiler, processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

Work = TypeVar("Work")
SOURCES = [Path(__file__).with_name(name) for name in ("decode.c", "backbone.c", "vectors.h")]
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
LANES = 16
"""Hidden and head sizes must be multiples of the widest vector, so that every sum is made of whole ones."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The functions, compiled for this processor; None where that can't be done."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    try:
        return ctypes.CDLL(str(_built([*compiler.split(), native, *FLAGS])))
    except (OSError, subprocess.SubprocessError):
        return None


def _built(command: list[str]) -> Path:
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True, timeout=60).stdout
    name = hashlib.sha256(
        b"\0".join([*(source.read_bytes() for source in SOURCES), version, " ".join(command).encode(), _processor()])
    ).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncurve"
    if not (folder / f"functions-{name}.so").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside, "functions.so")
            sources = [str(source) for source in SOURCES if source.suffix == ".c"]
            subprocess.run([*command, *sources, "-o", str(made), "-lm"], capture_output=True, check=True, timeout=120)
            made.replace(folder / f"functions-{name}.so")
    return folder / f"functions-{name}.so"


def _processor() -> bytes:
    """What this processor can do: a cache that is shared between machines must not hand one the other's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode() + platform.node().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))


@lru_cache(maxsize=1)
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="compiled")


def side_by_side(call: Callable[[Work], int], parts: Sequence[Work]) -> None:
    """One call of a compiled function for each part. Calls leave Python, so that threads run side by side."""
    if any(_workers(torch.get_num_threads()).map(call, parts)):
        raise MemoryError("a compiled function found no memory")


def address(x: Tensor | None) -> int | None:
    if x is None:
        return None
    assert x.is_contiguous(), "C reads memory in order"
    return x.data_ptr()


def packed(weight: Tensor, *, transposed: bool = False) -> Tensor:
    """A linear layer's weight, [columns, rows], in the panels that the products read: for x Wᵀ, or for y W."""
    found = library()
    assert found is not None
    columns, rows = weight.shape
    panel = int(found.panel())
    wide, deep = (rows, columns) if transposed else (columns, rows)
    out = torch.empty(-(-wide // panel) * panel * deep)
    (found.pack_transposed if transposed else found.pack)(
        ctypes.c_void_p(address(weight)), ctypes.c_int64(columns), ctypes.c_int64(rows), ctypes.c_void_p(out.data_ptr())
    )
    return out
