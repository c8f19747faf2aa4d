"""How long training waits for a checkpoint: written while it waits, and written behind its back.

.venv/bin/python bench/saving.py [MIB]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from oncurve.train import saving
from oncurve.train.saving import Saver, Wanted


def seconds(size: int, behind: bool, folder: Path) -> tuple[float, float]:
    """(how long `save` took, how long until the checkpoint was whole), of a state of so many MiB."""
    saving.BEHIND_FROM = 0 if behind else 1 << 62
    tensors = {"model": {f"w{i}": torch.randn(1024, 1024) for i in range(size // 4)}}
    saver = Saver(folder)
    begun = time.perf_counter()
    saver.save(Wanted("grpo", 1, {}, keep=1), tensors)
    waited = time.perf_counter() - begun
    saver.wait()
    whole = time.perf_counter() - begun
    saver.close()
    return waited, whole


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    for behind in (False, True):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            waited, whole = seconds(size, behind, Path(folder))
        how = "in the background" if behind else "while training waits"
        print(f"{size} MiB, {how}: training waits {waited:.2f} s, the checkpoint is whole after {whole:.2f} s")


if __name__ == "__main__":
    main()
