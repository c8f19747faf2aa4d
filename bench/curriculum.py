"""What a curriculum gains at equal sampled tokens: the built-in arithmetic task with and without `[grpo.curriculum]`.

    python bench/curriculum.py OUT            # every run, one after the other; about 8 minutes on one idle core
    python bench/curriculum.py OUT --table    # write the results in OUT to bench/results and docs/tasks.md

All runs start from one sft stage and stop after the same number of sampled tokens. The only reward is the right answer, so that
a group whose completions are all right or all wrong has no signal. If it is stopped, the same command resumes it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import mean
from typing import Any

import reporting

from oncurve.operations.compare import is_finished, run_in_process
from oncurve.recipe.load import dump_recipe, load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.variants import with_budget
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.terminal.evaluation import wilson

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "curriculum.json"
PAGE = ROOT / "docs" / "tasks.md"
SEEDS = (0, 1, 2)
TOKENS = 200_000
"""Sampled tokens of every run."""
SETTINGS = (
    "task.digits=4", "task.weights=[1, 2, 4, 8]", "task.example_weights=[2, 22, 3, 1]", "task.heldout=400",
    "grpo.steps=2000", "grpo.eval_every=0",
)  # fmt: skip
VARIANTS: dict[str, str] = {
    "none": "",
    "pass rates": "{}",
    "pools": "{pools = [0.05, 1.0, 0.05]}",
    "pools and adaptive groups": "{pools = [0.05, 1.0, 0.05], first_samples = 4}",
}
"""`grpo.curriculum` of each variant."""


def recipe_of(variant: str, seed: int, start: Path) -> Recipe:
    sets = [*SETTINGS, *([f"grpo.curriculum={VARIANTS[variant]}"] if VARIANTS[variant] else [])]
    recipe = with_budget(load_recipe(str(ROOT / "recipes" / "compare.toml"), sets), tokens=TOKENS)
    model = recipe.model.model_copy(update={"source": str(start.resolve())})
    changes = {"seed": seed, "stages": recipe.stages[-1:], "model": model, "rewards": recipe.rewards[:1]}
    return recipe.model_copy(update=changes)


def start_of(out: Path) -> Path:
    """The model after the sft stage, from which every run starts."""
    recipe = load_recipe(str(ROOT / "recipes" / "compare.toml"), list(SETTINGS))
    train(out / "start", recipe.model_copy(update={"stages": recipe.stages[:1]}))
    return RunFolder(out / "start").model


def train(folder: Path, recipe: Recipe) -> None:
    if not is_finished(folder):
        file = folder.with_suffix(".toml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dump_recipe(recipe))
        run_in_process(file, folder)


def result_of(folder: Path, variant: str, seed: int) -> dict[str, Any]:
    with RunReader.open(folder) as store:
        silent = [value for _, value in store.metric("no_signal_share", "grpo")]
        samples = [value for _, value in store.metric("no_signal_samples", "grpo")] or silent
        tokens = sum(value for _, value in store.metric("tokens", "grpo"))
        evaluation = store.evals("grpo")[-1]
    return {
        "variant": variant, "seed": seed, "steps": len(silent), "tokens": tokens, "no_signal_share": mean(silent),
        "no_signal_samples": mean(samples), "accuracy": evaluation.accuracy, "asked": evaluation.asked,
        "by_difficulty": dict(evaluation.by_difficulty),
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    lines = [
        "| `grpo.curriculum` | seed | steps | groups without signal | samples without signal | held-out accuracy (95 %) |",
        "|---|---|---|---|---|---|",
    ]
    for variant, settings in VARIANTS.items():
        runs = [run for run in results["runs"] if run["variant"] == variant]
        name = f"`{settings}`" if settings else "none"
        for run in runs:
            low, high = wilson(run["accuracy"], run["asked"])
            figures = f"{100 * run['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            shares = f"{100 * run['no_signal_share']:.1f} % | {100 * run['no_signal_samples']:.1f} %"
            lines.append(f"| {name} | {run['seed']} | {run['steps']} | {shares} | {figures} |")
        if len(runs) > 1:
            groups, samples, accuracy = (mean(r[k] for r in runs) for k in ("no_signal_share", "no_signal_samples", "accuracy"))
            shown = f"**{100 * groups:.1f} %** | **{100 * samples:.1f} %** | **{100 * accuracy:.1f} %**"
            lines.append(f"| | mean | | {shown} |")
    asked, commit = results["runs"][0]["asked"], results["commit"]
    note = f"{results['tokens']:,} sampled tokens in each run; {asked} held-out problems; commit {commit}."
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--variants", default=";".join(VARIANTS), help="names, separated by semicolons")
    options = parser.parse_args()
    runs = []
    start = start_of(options.out)
    for seed in map(int, options.seeds.split(",")):
        for variant in options.variants.split(";"):
            folder = options.out / f"{variant.replace(',', '').replace(' ', '-')}-{seed}"
            train(folder, recipe_of(variant, seed, start))
            runs.append(result_of(folder, variant, seed))
            print(json.dumps(runs[-1]), flush=True)
    if options.table:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "commit": reporting.commit()}
        results = {**machine, "tokens": TOKENS, "settings": list(SETTINGS), "runs": runs}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        reporting.put(PAGE, "curriculum", table(results))


if __name__ == "__main__":
    main()
