"""Every kernel compiles for every generation of GPUs, with all launch options, and its programs fit in their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.gpus import GPUS

KERNELS = {
    "_parts", "_merge", "_attend_forward", "_attend_delta", "_attend_backward_keys", "_head_forward", "_head_backward",
    "_norm_forward", "_norm_backward", "_rope_forward", "_rope_backward", "_gate_forward", "_gate_backward", "_expand",
    "_embed_norm", "_add_norm", "_rotate_store", "_any_rotate_store", "_statistics", "_sample_tokens", "_accept", "_match",
    "_draft", "_step",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RTX 4090, L4", "H100, H200"])
def test_kernels_compile_and_fit(name: str, tmp_path: Path) -> None:
    """Without a GPU: Triton brings the assembler. Others of gpus.py can be compiled for by hand; that takes minutes."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_for", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    too_large = [row for row in compiled if row["shared"] > GPUS[name].shared_memory]
    assert not too_large
    assert {row["kernel"] for row in compiled} >= KERNELS
    assert ("_product" in {row["kernel"] for row in compiled}) == (GPUS[name].is_hopper and GPUS[name].has_room)
