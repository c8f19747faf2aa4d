"""A recipe for a pretrained model from start to end: evaluate, train in slices of time, evaluate again.

Greedy pass@1, also between stages, and pass@8 from eight samples at temperature 1, on all held-out problems. Every finished
part is kept under `--out` and not repeated, so you can repeat the same command until everything is done, `--minutes` at a time.

    python bench/real_results.py gsm8k-smollm2 --seed 0 --heldout 1319 --out runs/real --minutes 8
    python bench/real_results.py gsm8k-smollm2 --out runs/real --minutes 8 --settle     evaluate after eight minutes of training
    python bench/real_results.py --table            the rows and the plot of docs/results.md, from all measurements

Writes bench/results/real-RECIPE-SEED.json and docs/images/real.svg.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting import plot

HERE = Path(__file__).resolve().parent
COLOURS = ("#1f5f8b", "#6aa6cc", "#b4501e", "#2b7a4b", "#8a3f8f", "#9a7400")
LINES = ("-", "--", ":")
"""With more runs than colours, of the next ones."""
CURVES = ("reward", "reward/answer", "accuracy", "length_mean", "cut_share", "no_signal_share", "entropy", "loss", "grad_norm")


def measured(target: str, recipe: str, args: argparse.Namespace, file: Path, *how: str) -> dict[str, Any]:
    """The output of `oncurve eval` for a model or run, cached in a file."""
    if not file.is_file():
        sets = [word for change in [*args.set, f"task.heldout={args.heldout}"] for word in ("--set", change)]
        command = [sys.executable, "-m", "oncurve", "eval", target, "--task", recipe, *sets, *how, "--json"]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        file.write_text(done.stdout)
        print(f"{file.stem}: {time.monotonic() - began:.0f} s", flush=True)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def trained(recipe: str, args: argparse.Namespace, out: Path, minutes: float) -> bool:
    """Train for one slice of time. Returns whether the run is finished."""
    if (out / "run.json").is_file() and json.loads((out / "run.json").read_text())["status"] == "finished":
        return True
    sets = [word for change in [*args.set, f"seed={args.seed}"] for word in ("--set", change)]
    command = [
        sys.executable,
        "-m",
        "oncurve",
        "train",
        recipe,
        *sets,
        "--out",
        str(out),
        "--resume",
        "--minutes",
        f"{minutes:.2f}",
    ]
    subprocess.run(command, check=True)
    return bool(json.loads((out / "run.json").read_text())["status"] == "finished")


def curves(out: Path) -> dict[str, Any]:
    """Curves, seconds by phase and peak memory of every stage."""
    from oncurve.runs.database.reader import RunReader

    curves_by_stage: dict[str, Any] = {}
    with RunReader.open(out) as store:
        for stage in store.stages():
            names = [*CURVES, "memory_mib", *(f"seconds/{phase}" for phase in ("sample", "score", "grade", "update", "eval"))]
            metrics = {name: store.metric(name, stage.name) for name in names}
            curves_by_stage[stage.name] = {
                "steps": stage.done,
                "minutes": round(
                    sum(v for name, curve in metrics.items() if name.startswith("seconds/") for _, v in curve) / 60, 2
                ),
                "memory_gib": round(max((v for _, v in metrics["memory_mib"]), default=0.0) / 1024, 2),
                "curves": {name: [[n, round(v, 5)] for n, v in metrics[name]] for name in CURVES if metrics[name]},
            }
        curves_by_stage["heldout"] = [[e.stage, e.step, e.accuracy, e.asked] for e in store.evals()]
    return curves_by_stage


def figures(result: dict[str, Any]) -> dict[str, Any]:
    keys = ("accuracy", "interval", "asked", "samples", "pass@1", "pass@8", "maj@8")
    return {key: result[key] for key in keys if key in result} | {"cut_share": result["metrics"]["cut_share"]}


def machine() -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, **{p: metadata.version(p) for p in ("torch", "transformers")}}


def share(result: dict[str, Any] | None) -> str:
    if result is None:
        return "–"
    low, high = result["interval"]
    return f"{100 * result.get('share', result.get('accuracy', 0)):.1f} % ({100 * low:.1f}–{100 * high:.1f})"


def table() -> str:
    lines = [
        "| recipe | seed | pass@1 before | between | pass@1 after | pass@8 before | pass@8 after | steps | minutes | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for file in sorted((HERE / "results").glob("real-*.json")):
        results = json.loads(file.read_text())
        stages = [stage for stage in results["run"].values() if isinstance(stage, dict)]
        between = ", ".join(f"{share(result)} after {stage}" for stage, result in results["between"].items())
        row = [results["recipe"], str(results["seed"]), share(results.get("before")), between or "–", share(results["after"])]
        row += [share(results.get(side, {}).get("pass@8")) for side in ("before_8", "after_8")]
        row += [", ".join(f"{s['steps']}" for s in stages)]
        row += [f"{sum(s['minutes'] for s in stages):.1f}", f"{max(s['memory_gib'] for s in stages):.1f} GiB"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def draw() -> None:
    """Plot the fraction of right answers among the samples of each grpo step, as means over ten steps; one line per run."""
    with plot(HERE.parent / "docs" / "images" / "real.svg", figsize=(7, 3.6)) as (_, axes):
        for n, file in enumerate(sorted((HERE / "results").glob("real-*.json"))):
            results = json.loads(file.read_text())
            right = [value for _, value in results["run"]["grpo"]["curves"]["reward/answer"]]
            smooth = [100 * fmean(right[max(0, i - 9) : i + 1]) for i in range(len(right))]
            colour, line = COLOURS[n % len(COLOURS)], LINES[n // len(COLOURS) % len(LINES)]
            name = f"{results['recipe']}, seed {results['seed']}"
            axes.plot(range(1, len(right) + 1), smooth, line, color=colour, label=name)
        axes.set_xlabel("step of grpo")
        axes.set_ylabel("right answers, %")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe key")
    parser.add_argument(
        "--heldout", type=int, default=1319, help="number of held-out problems; default: all of GSM8K's test split"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="folder of runs and measurements")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this time; the same command resumes")
    parser.add_argument("--settle", action="store_true", help="when the time is up, evaluate the current model")
    parser.add_argument(
        "--skip-before", action="store_true", help="skip the evaluation before training (done with another seed)"
    )
    parser.add_argument("--table", action="store_true", help="only print the table of all measurements")
    args = parser.parse_args()
    if args.table or not args.recipe:
        print(table())
        draw()
        return
    from oncurve.recipe.load import load_recipe

    until = time.monotonic() + 60 * args.minutes
    recipe = load_recipe(args.recipe, tuple(args.set))
    name, model = Path(args.recipe).stem, recipe.model.source
    folder, run = args.out / name, args.out / f"{name}-{args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    eight = ("--samples", "8", "--temperature", "1")
    results: dict[str, Any] = {"recipe": name, "seed": args.seed, "set": args.set, "model": model, "machine": machine()}
    if not args.skip_before:
        results["before"] = figures(measured(model, args.recipe, args, folder / "before.json"))
        results["before_8"] = figures(measured(model, args.recipe, args, folder / "before-8.json", *eight))
    if not trained(args.recipe, args, run, max((until - time.monotonic()) / 60, 0.0)) and not args.settle:
        print("time is up; give the same command again to continue", flush=True)
        return
    results["between"] = {}
    for stage in (s for s in recipe.stages[:-1] if s.updates_policy):
        target, file = f"{run}@{stage.label}-{stage.steps}", folder / f"{stage.label}-{args.seed}.json"
        results["between"][stage.label] = figures(measured(target, args.recipe, args, file))
    results["after"] = figures(measured(str(run), args.recipe, args, folder / f"after-{args.seed}.json"))
    results["after_8"] = figures(measured(str(run), args.recipe, args, folder / f"after-8-{args.seed}.json", *eight))
    results["run"] = curves(run)
    file = HERE / "results" / f"real-{name}-{args.seed}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(table())
    print(f"wrote {file.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
