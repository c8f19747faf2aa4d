"""Builds the C functions: compiled once, in seconds, and cached per source, compiler and processor."""

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
CPUINFO = Path("/proc/cpuinfo")
LANES = 16
"""Hidden and head sizes must be multiples of the widest SIMD vector, so that no sum has a remainder loop."""


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """The functions, compiled for this processor; None if there is no compiler or it fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    try:
        return ctypes.CDLL(str(_build([*compiler.split(), native, *FLAGS])))
    except (OSError, subprocess.SubprocessError):
        return None


def _build(command: list[str]) -> Path:
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True, timeout=60).stdout
    digest = hashlib.sha256(
        b"\0".join([*(source.read_bytes() for source in SOURCES), version, " ".join(command).encode(), _processor_features()])
    ).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncurve"
    library = folder / f"functions-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            output = Path(temporary, "functions.so")
            sources = [str(source) for source in SOURCES if source.suffix == ".c"]
            subprocess.run([*command, *sources, "-o", str(output), "-lm"], capture_output=True, check=True, timeout=120)
            output.replace(library)
    return library


def _processor_features() -> bytes:
    """Identifies the instruction set: machines that share a cache folder must not load each other's builds."""
    try:
        lines = CPUINFO.read_bytes().splitlines()
    except OSError:
        return platform.processor().encode() + platform.node().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; True if that is unknown."""
    features = _processor_features()
    return b"bf16" in features or not CPUINFO.exists()


@lru_cache(maxsize=1)
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="compiled")


def run_in_threads(call: Callable[[Work], int], items: Sequence[Work]) -> None:
    """Call a C function for each item, in parallel: ctypes releases the GIL."""
    if any(_thread_pool(torch.get_num_threads()).map(call, items)):
        raise MemoryError("a C function could not allocate memory")


def address_of(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "C reads contiguous memory"
    return tensor.data_ptr()


def pack_weight(weight: Tensor, *, transposed: bool = False) -> Tensor:
    """A linear layer's weight, [columns, rows], in the panels that the C matrix products read: for x Wᵀ, or for y W."""
    library = load_library()
    assert library is not None
    columns, rows = weight.shape
    panel = int(library.panel())
    width, depth = (rows, columns) if transposed else (columns, rows)
    out = torch.empty(-(-width // panel) * panel * depth)
    (library.pack_transposed if transposed else library.pack)(
        ctypes.c_void_p(address_of(weight)), ctypes.c_int64(columns), ctypes.c_int64(rows), ctypes.c_void_p(out.data_ptr())
    )
    return out
