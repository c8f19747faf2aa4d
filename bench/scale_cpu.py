"""Two ranks and one rank on the built-in model: cost and gain of data parallelism on a CPU with two cores.

    python bench/scale_cpu.py                # prints a table and writes bench/results/scale_cpu.json
    python bench/scale_cpu.py --steps 40

Each setting is a separate run, started as a user starts it (`oncurve train --set scale.ranks=N`), in turn, so that a machine
that warms up affects all of them equally. Seconds are medians over steps, without the first five. One rank has both cores, two
ranks have one each. Measure on an idle machine only: the load before each run is in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from oncurve.runs.database.reader import RunReader

RESULTS = Path(__file__).parent / "results" / "scale_cpu.json"
SETTINGS = [(1, "none"), (2, "none"), (2, "optimiser"), (2, "full")]
SKIPPED = 5
"""Steps at the start that are not counted: caches fill, the allocator learns."""


def run_once(ranks: int, shard: str, steps: int, folder: Path) -> dict[str, float]:
    sets = [
        f"scale.ranks={ranks}", f"scale.shard={shard}", "threads=2", f"grpo.steps={steps}", "sft.steps=20",
        "grpo.optimiser.warmup_steps=0", "grpo.prompts_per_step=32", "task.heldout=8", "grpo.eval_every=0", "grpo.save_every=0",
    ]  # fmt: skip
    options = [option for change in sets for option in ("--set", change)]
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "oncurve", "train", "arithmetic", *options, "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with RunReader.open(folder) as store:
        metrics = [store.metrics_of("grpo", n) for n in range(SKIPPED + 1, steps + 1)]
        took = [row.seconds for row in store.steps("grpo")[SKIPPED:]]
    phases = {name: median(m[f"seconds/{name}"] for m in metrics) for name in ("sample", "score", "update")}
    return {"step": median(took), **phases, "tokens": median(m["tokens"] for m in metrics), "load_before": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    measured: dict[str, list[dict[str, float]]] = {f"{ranks} {shard}": [] for ranks, shard in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for ranks, shard in SETTINGS:
                out = Path(folder) / f"{ranks}-{shard}-{turn}"
                measured[f"{ranks} {shard}"].append(run_once(ranks, shard, args.steps, out))
    rows = {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in measured.items()}
    single = rows["1 none"]["step"]
    print(f"{'ranks, shard':<16}{'step s':>9}{'sample':>9}{'score':>9}{'update':>9}{'speed-up':>10}{'load':>7}")
    for name, row in rows.items():
        row["speed_up"] = single / row["step"]
        times = "".join(f"{row[key]:>9.3f}" for key in ("step", "sample", "score", "update"))
        print(f"{name:<16}{times}{row['speed_up']:>9.2f}×{row['load_before']:>7.1f}")
    RESULTS.write_text(
        json.dumps({"cores": os.cpu_count(), "steps": args.steps, "rounds": args.rounds, "rows": rows}, indent=2) + "\n"
    )
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
