"""How long training waits for a checkpoint: written while training waits, and written in the background.

    python bench/saving.py [MIB …]      (default: 64, 512 and 2048) prints a table, writes bench/results/saving.json

Files are written into the current folder, synced, checksummed and renamed as in a run. For comparison the table has the time
of a plain copy of the same tensors in memory: training should not wait longer than that.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from oncurve.training import checkpoint_writer
from oncurve.training.checkpoint_writer import CheckpointRequest, CheckpointWriter

RESULTS = Path(__file__).resolve().parent / "results" / "saving.json"
TIMES = 3


def state(size: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {f"w{i}": torch.randn(1024, 1024) for i in range(size // 4)}}


def seconds(size: int, behind: bool) -> tuple[float, float]:
    """(duration of `save`, time until the checkpoint is complete) for a state of this many MiB."""
    checkpoint_writer.BACKGROUND_FROM = 0 if behind else 1 << 62
    tensors = state(size)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        saver = CheckpointWriter(Path(folder))
        begun = time.perf_counter()
        saver.save(CheckpointRequest("grpo", 1, {}, keep=1), tensors)
        waited = time.perf_counter() - begun
        saver.wait()
        total = time.perf_counter() - begun
        saver.close()
    return waited, total


def copy_seconds(size: int) -> float:
    tensors = state(size)
    begun = time.perf_counter()
    copies = {name: t.clone() for name, t in tensors["model"].items()}
    took = time.perf_counter() - begun
    assert len(copies) == size // 4
    return took


def measured(size: int) -> dict[str, float]:
    row: dict[str, float] = {"mib": size, "copy": median(copy_seconds(size) for _ in range(TIMES))}
    for behind, name in ((False, "waiting"), (True, "behind")):
        both = [seconds(size, behind) for _ in range(TIMES)]
        row[f"{name}_blocked"], row[f"{name}_whole"] = (median(pair[i] for pair in both) for i in range(2))
    return row


def main() -> None:
    rows = [measured(int(size)) for size in sys.argv[1:] or (64, 512, 2048)]
    print("| state | copy in memory | training waits (background) | complete after | training waits (foreground) |")
    print("|---|---|---|---|---|")
    for row in rows:
        columns = (row[name] for name in ("copy", "behind_blocked", "behind_whole", "waiting_blocked"))
        print(f"| {row['mib']} MiB | " + " | ".join(f"{value:.2f} s" for value in columns) + " |")
    about = {"system": platform.system(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    RESULTS.write_text(json.dumps({"machine": about, "medians_of": TIMES, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
