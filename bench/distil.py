"""Distillation on a CPU: a larger tiny model teaches a smaller one sums. GRPO alone, distillation alone, and both.

    python bench/distil.py OUT                # the teacher, then every run; about 15 minutes of CPU time on one core
    python bench/distil.py OUT --page         # write the results in OUT to docs/distil.md, docs/images and bench/results

All runs of a seed start from the same model, trained by a short sft stage, and make as many steps of as many completions. Each
arm's learning rate is the one of its RATES with the best accuracy of samples on training prompts, over the last ten steps of a
run with a seed of its own. Held-out accuracy is not read for that. If it is stopped, the same command
resumes it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from reporting import commit, plot, put

from oncurve.operations.compare import is_finished
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import STATE, RunFolder
from oncurve.terminal.evaluation import wilson
from oncurve.training.start import begin, resume

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "distil.json"
PAGE, IMAGE = ROOT / "docs" / "distil.md", ROOT / "docs" / "images" / "distil.svg"
COLOURS = ("#1f5f8b", "#b4501e", "#4b7f3a")
SEEDS, TUNING_SEED = (0, 1, 2), 10
TASK: dict[str, Any] = {"type": "arithmetic", "digits": 2, "weights": [1, 4], "heldout": 300}
STUDENT_EXAMPLES, TEACHER_EXAMPLES = 400, 4000
REWARDS = [{"type": "answer"}, {"type": "columns"}, {"type": "format", "weight": 0.1}]
STUDENT = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "head_size": 32, "mlp_width": 192, "context": 128}
TEACHER = {"layers": 4, "width": 128, "context": 128}
SAMPLES: dict[str, Any] = {"steps": 120, "prompts_per_step": 32, "group_size": 8, "sampling": {"max_new_tokens": 40}}
ADAM = {"betas": [0.95, 0.99], "schedule": "linear", "final_share": 0.1, "warmup_steps": 10}
ARMS: dict[str, dict[str, Any]] = {
    "GRPO alone": {"type": "grpo"},
    "distillation alone": {"type": "distil"},
    "both": {"type": "distil", "reward_weight": 1.0},
}
RATES = (3e-4, 1e-3)


def recipe_of(name: str, seed: int, model: dict[str, Any], examples: int, stage: dict[str, Any]) -> Recipe:
    data = {"name": name, "seed": seed, "threads": 1, "model": model, "rewards": REWARDS, "engine": {"slots": 256}}
    return parse_recipe({**data, "task": {**TASK, "examples": examples}, "stages": [stage]}, [])


def sft(steps: int) -> dict[str, Any]:
    return {"type": "sft", "steps": steps, "batch_size": 32, "optimiser": {"learning_rate": 2e-3, "warmup_steps": 10}}


def teacher_of(out: Path) -> Path:
    """The teacher: sft on many demonstrations."""
    return run(recipe_of("teacher", 7, {"tiny": TEACHER}, TEACHER_EXAMPLES, sft(400)), out / "teacher").path


def start_of(out: Path, seed: int) -> Path:
    """The student before it is taught: sft on few demonstrations."""
    return run(recipe_of("start", seed, {"tiny": STUDENT}, STUDENT_EXAMPLES, sft(300)), out / f"start-{seed}").path


def arm(name: str, seed: int, rate: float, start: Path, teacher: Path) -> Recipe:
    options = {"teacher": {"model": str(teacher / "model")}} if ARMS[name]["type"] == "distil" else {}
    stage = {**SAMPLES, **ARMS[name], **options, "name": "learn", "optimiser": {**ADAM, "learning_rate": rate}}
    return recipe_of("student", seed, {"source": str(start / "model")}, STUDENT_EXAMPLES, stage)


def run(recipe: Recipe, path: Path) -> RunFolder:
    """The finished run at this path, made or continued if need be."""
    if is_finished(path):
        return RunFolder(path)
    return resume(RunFolder(path)) if (path / STATE).exists() else begin(recipe, out=path)


def result_of(name: str, seed: int, rate: float, made: RunFolder) -> dict[str, Any]:
    """What a run measured on training prompts: its tokens, and its curves by step."""
    with RunReader.open(made.path) as store:
        accuracy, tokens, divergence = (
            [value for _, value in store.metric(metric, "learn")] for metric in ("accuracy", "tokens", "teacher_divergence")
        )
    return {
        "arm": name,
        "seed": seed,
        "rate": rate,
        "steps": len(accuracy),
        "tokens": sum(tokens),
        "train_accuracy": mean(accuracy[-10:]),
        "accuracy_by_step": [round(value, 4) for value in accuracy],
        "divergence_by_step": [round(value, 4) for value in divergence],
    }


def heldout(path: Path) -> dict[str, Any]:
    with RunReader.open(path) as store:
        last = store.evals()[-1]
    return {"accuracy": last.accuracy, "asked": last.asked}


def folder_of(out: Path, name: str, what: object) -> Path:
    return out / f"{name.replace(' ', '-')}-{what}"


def tune(out: Path, name: str, teacher: Path) -> list[dict[str, Any]]:
    """The runs of an arm with each learning rate, without their held-out accuracy."""
    runs = []
    start = start_of(out, TUNING_SEED)
    for rate in RATES:
        made = run(arm(name, TUNING_SEED, rate, start, teacher), folder_of(out, f"tune-{name}", f"{rate:g}"))
        runs.append(result_of(name, TUNING_SEED, rate, made))
        print(f"{name}, rate {rate:g}: training accuracy {runs[-1]['train_accuracy']:.3f}", flush=True)
    return runs


def measure(out: Path) -> dict[str, Any]:
    teacher = teacher_of(out)
    tuning = [run for name in ARMS for run in tune(out, name, teacher)]
    best = {name: max((r for r in tuning if r["arm"] == name), key=lambda r: r["train_accuracy"])["rate"] for name in ARMS}
    runs = []
    for seed in SEEDS:
        start = start_of(out, seed)
        for name in ARMS:
            made = run(arm(name, seed, best[name], start, teacher), folder_of(out, name, seed))
            before = heldout(start)["accuracy"]
            runs.append({**result_of(name, seed, best[name], made), "before": before, **heldout(made.path)})
            print(f"{name}, seed {seed}: {before:.3f} -> {runs[-1]['accuracy']:.3f}", flush=True)
    return {
        "commit": commit(),
        "machine": platform.processor() or platform.machine(),
        "teacher": heldout(teacher),
        "tuning": tuning,
        "runs": runs,
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        "| | learning rate | seed | sampled tokens | before | held-out accuracy (95 % interval) | samples, last ten steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ARMS:
        runs = [r for r in results["runs"] if r["arm"] == name]
        for r in runs:
            low, high = wilson(r["accuracy"], r["asked"])
            shown = f"{100 * r['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            shares = f"{100 * r['before']:.1f} % | {shown} | {100 * r['train_accuracy']:.1f} %"
            lines.append(f"| {name} | {r['rate']:g} | {r['seed']} | {r['tokens']:,.0f} | {shares} |")
        before, after, samples = (100 * mean(r[key] for r in runs) for key in ("before", "accuracy", "train_accuracy"))
        lines.append(f"| {name} | | mean | | {before:.1f} % | **{after:.1f} %** | {samples:.1f} % |")
    teacher, completions = results["teacher"], SAMPLES["prompts_per_step"] * SAMPLES["group_size"]
    tuned = "; ".join(
        f"{name}: "
        + ", ".join(f"{100 * r['train_accuracy']:.1f} % at {r['rate']:g}" for r in results["tuning"] if r["arm"] == name)
        for name in ARMS
    )
    notes = [
        f"{results['runs'][0]['steps']} steps of {completions} completions in each run; {teacher['asked']} held-out problems, "
        f"of which the teacher solves {100 * teacher['accuracy']:.1f} %; commit {results['commit']}. Learning rates were",
        f"chosen by the accuracy of samples on training prompts (last ten steps), with another seed: {tuned}.",
    ]
    return "\n".join([*lines, "", *notes, "", "![Accuracy and divergence by step](images/distil.svg)"])


def draw(results: dict[str, Any]) -> None:
    """Means over seeds, each point the mean of ten steps."""
    with plot(IMAGE, 1, 2, figsize=(9, 3.4)) as (_, panels):
        curves = (
            ("accuracy_by_step", "accuracy of samples"),
            ("divergence_by_step", "divergence from the teacher (nats per token)"),
        )
        for panel, (key, label) in zip(panels, curves, strict=True):
            for name, colour in zip(ARMS, COLOURS, strict=True):
                of_arm = [r[key] for r in results["runs"] if r["arm"] == name and r[key]]
                means = [mean(values) for values in zip(*of_arm, strict=True)]
                tens = range(0, len(means), 10)
                if means:
                    panel.plot([i + 5 for i in tens], [mean(means[i : i + 10]) for i in tens], color=colour, label=name)
            panel.set(xlabel="step", ylabel=label, xlim=(0, None), ylim=(0, None))
        panels[0].legend(frameon=False, loc="lower right")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--page", action="store_true", help="write the results to docs/distil.md, docs/images and bench/results"
    )
    options = parser.parse_args(arguments)
    file = options.out / "distil.json"
    if not options.page:
        results = measure(options.out)
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(table(results))
        return
    results = json.loads(file.read_text())
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    put(PAGE, "distil", table(results))
    draw(results)


if __name__ == "__main__":
    main(sys.argv[1:])
