"""Writes the results of bench/sweeps.py to docs/compare.md, its plots to docs/images and its numbers to bench/results.

The text between `<!-- NAME -->` and `<!-- /NAME -->` is generated here: tables, and the outcome of each expectation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reporting import put
from sweeps import PARTS, SWEEPS, outcomes_in

from oncurve.operations.compare import ArmResult
from oncurve.terminal.comparison import as_markdown, mean_and_std

ROOT = Path(__file__).resolve().parents[1]
PAGE, IMAGES, RESULTS = ROOT / "docs" / "compare.md", ROOT / "docs" / "images", ROOT / "bench" / "results"
PLOTS = {"by-samples": "held-out accuracy by samples", "by-seconds": "and by seconds", "memory": "memory"}
Runs = dict[str, list[ArmResult]]


def write_page(out: Path) -> None:
    """Write every part that has been measured; the others stay unchanged."""
    for part in PARTS:
        file = out / "compare" / "results.json" if part == "compare" else out / f"{part}.json"
        if not file.is_file():
            print(f"{part}: not measured yet")
            continue
        put(PAGE, part, WRITERS[part](file))
        shutil.copy(file, RESULTS / f"sums_{part}.json")
        if part == "compare":
            for name in PLOTS:
                shutil.copy(file.parent / f"{name}.svg", IMAGES / f"sums-{name}.svg")
    if (out / "machine.json").is_file():
        put(PAGE, "machine", about(json.loads((out / "machine.json").read_text())))


def about(facts: dict[str, Any]) -> str:
    return (
        f"Measured in {facts['minutes']} minutes on {facts['cores']} cores ({facts['system']}, load {facts['load']:.1f}), "
        f"two runs side by side with one thread each; torch {facts['torch']}, transformers {facts['transformers']}, "
        f"Python {facts['python']}."
    )


def compared(file: Path) -> str:
    runs = outcomes_in(file)
    table = as_markdown([o for results in runs.values() for o in results])
    plots = "\n\n".join(f"![{caption}](images/sums-{name}.svg)" for name, caption in PLOTS.items())
    start = 100 * (runs["grpo"][0].curve[0].accuracy or 0.0)
    start_line = f"The model that all runs start from solves {start:.1f} % of the held-out problems."
    return f"{table}\n{plots}\n\n{start_line}\n\n{compare_verdicts(runs)}"


def compare_verdicts(runs: Runs) -> str:
    """Each expectation with the numbers that decide it."""
    grpo = runs["grpo"]
    seconds = {name: float(np.mean([o.cpu_seconds for o in results])) / float(np.mean([o.cpu_seconds for o in grpo]))
               for name, results in runs.items()}  # fmt: skip
    early = float(np.mean([at(o, 0.34) for o in runs["ppo"]])) - float(np.mean([at(o, 0.34) for o in grpo]))
    rows = [
        ("rloo is as good as grpo", near(runs["rloo"], grpo), gap(runs["rloo"], grpo)),
        ("reinforce, without a baseline, is behind", behind(runs["reinforce"], grpo), gap(runs["reinforce"], grpo)),
        ("ppo is behind at a third of the way", early < 0, f"{100 * early:+.1f} points"),
        ("… and ends near grpo", near(runs["ppo"], grpo), gap(runs["ppo"], grpo)),
        ("… for twice the parameters", runs["ppo"][0].held > 1.9 * grpo[0].held, f"{runs['ppo'][0].held / grpo[0].held:.2f} ×"),
        ("… and more compute", seconds["ppo"] > 1.3, f"{seconds['ppo']:.1f} × the CPU seconds"),
        ("trpo is as good per sample", near(runs["trpo"], grpo), gap(runs["trpo"], grpo)),
        ("… and the most expensive", seconds["trpo"] == max(seconds.values()), f"{seconds['trpo']:.1f} × the CPU seconds"),
    ]
    return verdicts(rows)


def verdicts(rows: Sequence[tuple[str, bool, str]]) -> str:
    lines = [f"| {what} | {'yes' if holds else '**no**'} | {numbers.replace('-', '−')} |" for what, holds, numbers in rows]
    return "\n".join(["| expected | measured | |", "|---|---|---|", *lines])


def accuracies(runs: Sequence[ArmResult]) -> np.ndarray:
    return np.array([100 * o.accuracy for o in runs])


def standard_error(one: Sequence[ArmResult], other: Sequence[ArmResult]) -> float:
    """Standard error of the difference of two means, in points."""
    return float(np.sqrt(sum(accuracies(runs).var(ddof=1) / len(runs) for runs in (one, other))))


def gap(one: Sequence[ArmResult], other: Sequence[ArmResult]) -> str:
    off = accuracies(one).mean() - accuracies(other).mean()
    return f"{off:+.1f} points, ± {standard_error(one, other):.1f}"


def near(one: Sequence[ArmResult], other: Sequence[ArmResult]) -> bool:
    """Whether two means differ by less than two standard errors, or three points if that is more."""
    off = abs(accuracies(one).mean() - accuracies(other).mean())
    return bool(off <= max(3.0, 2 * standard_error(one, other)))


def behind(one: Sequence[ArmResult], other: Sequence[ArmResult]) -> bool:
    return bool(accuracies(one).mean() < accuracies(other).mean() - standard_error(one, other))


def at(outcome: ArmResult, share: float) -> float:
    """Accuracy at the first evaluation after this fraction of the samples."""
    return next(p.accuracy or 0.0 for p in outcome.curve if p.samples >= share * outcome.samples)


def baseline(file: Path) -> str:
    rows = json.loads(file.read_text(encoding="utf-8"))
    heads = ("", "bias", "variance", "σ²/G", "variance, leave one out", "slope", "(G − 1)/G", "slope, leave one out",
             "groups without signal")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for label, row in rows.items():
        cells = [f"{row['bias']:.3f} ± {row['its standard error']:.3f}"]
        cells += [f"{row[name]:.4f}" for name in heads[2:5]] + [f"{row[name]:.3f}" for name in heads[5:8]]
        lines.append(f"| {label} | " + " | ".join(cells) + f" | {100 * row['groups without signal']:.0f} % |")
    unbiased = all(abs(row["bias"]) <= 2 * row["its standard error"] for row in rows.values())
    pairs = rows["G = 2"]
    expectations = [
        ("the group's mean is unbiased", unbiased, f"{pairs['bias']:.3f} ± {pairs['its standard error']:.3f}"),
        ("its variance is σ²/G", all(abs(r["variance"] / r["σ²/G"] - 1) < 0.15 for r in rows.values()),
         ", ".join(f"{r['variance'] / r['σ²/G']:.2f}" for r in rows.values()) + " of it"),
        ("an advantage keeps (G − 1)/G of a deviation", all(abs(r["slope"] - r["(G − 1)/G"]) < 0.02 for r in rows.values()),
         f"{pairs['slope']:.2f} for pairs, {rows['G = 64']['slope']:.3f} for 64"),
        ("… and all of it with leave-one-out", all(abs(r["slope, leave one out"] - 1) < 0.03 for r in rows.values()),
         f"{pairs['slope, leave one out']:.2f} for pairs"),
    ]  # fmt: skip
    return "\n".join(lines) + "\n\n" + verdicts(expectations)


def sweep_table(name: str, expected: Callable[[Runs], list[tuple[str, bool, str]]]) -> Callable[[Path], str]:
    def write(file: Path) -> str:
        runs = {label: results for label, results in outcomes_in(file).items() if results}
        lines = ["| | held-out accuracy | reward, last 10 steps | steps | seconds | CPU seconds |", "|---|---|---|---|---|---|"]
        for label in SWEEPS[name]:
            rows = runs.get(label, [])
            if rows:
                rewards = mean_and_std([float(np.mean(o.rewards[-10:])) for o in rows], 3)
                means = (np.mean([getattr(o, key) for o in rows]) for key in ("steps", "seconds", "cpu_seconds"))
                lines.append(f"| {label} | {mean_and_std(list(accuracies(rows)), 1)} % | {rewards} | "
                             + " | ".join(f"{value:.0f}" for value in means) + " |")  # fmt: skip
        is_complete = set(runs) == set(SWEEPS[name]) and len({len(r) for r in runs.values()}) == 1
        seeds = f"{min(map(len, runs.values()))} seeds each." if is_complete else "Not all of its runs are done."
        return "\n".join(lines) + f"\n\n{seeds}" + ("\n\n" + verdicts(expected(runs)) if is_complete else "")

    return write


def sizes(runs: Runs) -> list[tuple[str, bool, str]]:
    means = {label: float(accuracies(r).mean()) for label, r in runs.items()}
    best, (smallest, *_, largest) = max(means, key=lambda label: means[label]), means
    return [
        ("the peak is in the middle", best not in (smallest, largest), f"at {best.partition(',')[0]}"),
        ("pairs are behind it", means[smallest] < means[best] - 1, f"{means[smallest] - means[best]:+.1f} points"),
        ("groups of 64 are behind it", means[largest] < means[best] - 1, f"{means[largest] - means[best]:+.1f} points"),
    ]


def scales(runs: Runs) -> list[tuple[str, bool, str]]:
    group, batch, none = runs["`group`"], runs["`batch`"], runs["`none`"]
    return [
        ("`batch` is as good as `group`", near(batch, group), gap(batch, group)),
        ("`batch` and `none` are equal", near(batch, none), gap(batch, none)),
    ]


def updates(runs: Runs) -> list[tuple[str, bool, str]]:
    one, two, four = runs["μ = 1"], runs["μ = 2"], runs["μ = 4"]
    cost = float(np.mean([o.cpu_seconds for o in four]) / np.mean([o.cpu_seconds for o in one]))
    return [
        ("two updates learn more than one", behind(one, two), gap(two, one)),
        ("four somewhat more than two", behind(two, four), gap(four, two)),
        ("four cost less than four times as much", cost < 4, f"{cost:.1f} × the CPU seconds"),
    ]


WRITERS: dict[str, Callable[[Path], str]] = {
    "compare": compared,
    "baseline": baseline,
    "group_size": sweep_table("group_size", sizes),
    "scale": sweep_table("scale", scales),
    "updates": sweep_table("updates", updates),
}
