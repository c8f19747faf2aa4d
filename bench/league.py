"""The league: every objective, and ppo, on the arithmetic task, from one start and at equal sampled tokens.

    python bench/league.py OUT --seed 0    # one seed: `oncurve compare` over all algorithms; about 4 minutes of CPU time
    python bench/league.py OUT --page      # write the finished runs in OUT to docs/compare.md, docs/images and bench/results

Two passes over each step's samples, so that ratios differ from 1: with a single update per step most objectives have the same
gradient. Objectives without a ratio make one. If it is stopped, the same command resumes it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reporting import commit, plot, put
from sweeps_page import behind, near, verdicts

from oncurve.objective_specs import BUILT_IN_OBJECTIVES
from oncurve.operations.compare import ArmResult, Comparison, ComparisonRequest, is_finished, read_result
from oncurve.recipe.load import dump_recipe, load_recipe
from oncurve.recipe.variants import with_algorithm
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import STATE, RunFolder
from oncurve.terminal.evaluation import wilson
from oncurve.training.start import begin, resume

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "league.json"
PAGE, IMAGE = ROOT / "docs" / "compare.md", ROOT / "docs" / "images" / "league.svg"
SETTINGS = ("grpo.steps=40", "grpo.updates_per_step=2", "grpo.eval_every=0")
ALGORITHMS = (*BUILT_IN_OBJECTIVES, "ppo")
LATE = slice(30, 40)
"""grpo's last ten steps. They have the same prompts in all runs of a seed, so that their rewards can be compared in pairs."""
ASKED = 400
"""Held-out problems of the recipe."""
Rule = Callable[[Sequence[ArmResult], Sequence[ArmResult]], bool]
EXPECTED: tuple[tuple[str, Rule, tuple[str, ...]], ...] = (
    ("as good as grpo: other clips of the token's ratio, other means over tokens", near,
     ("dapo", "bnpo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "dro")),
    ("as good: other scales of the rewards", near, ("dr_grpo", "gdpo")),
    ("as good: the completion's ratio through a smooth function", near, ("vespo",)),
    ("as good, for twice the parameters", near, ("ppo",)),
    ("behind: the product of a completion's ratios soon leaves the clip range", behind, ("grpo_sequence", "rloo")),
    ("behind: a narrow clip range stops most of the second update", behind, ("gspo", "gspo_token", "luspo")),
    ("behind: one update per step instead of two", behind, ("gpg", "opo", "maxrl", "reinforce")),
    ("behind: no baseline of the prompt", behind, ("reinforce_pp",)),
    ("behind: the best of the group is graded, not the mean", behind, ("pass_at_k",)),
)  # fmt: skip
"""What was expected of each algorithm in comparison with grpo, written down before the first result."""


def comparison_of(out: Path, seed: int) -> Comparison:
    recipe = load_recipe(str(ROOT / "recipes" / "compare.toml"), list(SETTINGS))
    request = ComparisonRequest(dump_recipe(recipe), ALGORITHMS, (seed,), "tokens")
    return Comparison.open(out / f"seed-{seed}", request, train_here)


def train_here(recipe: Path, folder: Path) -> None:
    """In this process: 24 short runs need not load the libraries 24 times. Memory, which that would mix up, is not reported."""
    if (folder / STATE).exists():
        resume(RunFolder(folder))
    else:
        begin(load_recipe(str(recipe), []), out=folder)


def measure(out: Path, seed: int) -> None:
    comparison = comparison_of(out, seed)
    start = next((path for path in sorted(out.glob("seed-*/start")) if is_finished(path)), None)
    if start is not None and not (comparison.folder / "start").exists():
        shutil.copytree(start, comparison.folder / "start")  # every seed starts from the same model
    comparison.on_progress = lambda line: print(line, flush=True)
    comparison.run_all()


def finished_runs(out: Path) -> dict[str, list[ArmResult]]:
    """The runs of each algorithm, of the seeds of which all algorithms have finished."""
    runs: dict[str, list[ArmResult]] = {algorithm: [] for algorithm in ALGORITHMS}
    for folder in sorted(out.glob("seed-*")):
        seed = int(folder.name.removeprefix("seed-"))
        comparison = comparison_of(out, seed)
        if all(is_finished(folder / "runs" / f"{algorithm}-{seed}") for algorithm in ALGORITHMS):
            for algorithm in ALGORITHMS:
                stage = with_algorithm(comparison.recipe, algorithm).rollout_stages[-1]
                path = folder / "runs" / f"{algorithm}-{seed}"
                runs[algorithm].append(read_result(RunFolder(path), stage, algorithm, seed, None))
    return runs


def figures_of(run: ArmResult) -> dict[str, Any]:
    figures = {"steps": run.steps, "tokens": run.tokens, "accuracy": run.accuracy}
    return {"algorithm": run.algorithm, "seed": run.seed, **figures, "late_reward": mean(run.rewards[LATE])}


def table(results: dict[str, Any]) -> str:
    by_algorithm: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        by_algorithm.setdefault(run["algorithm"], []).append(run)
    lines = [
        "| algorithm | seeds | updates per step | held-out accuracy | by seed | late reward | against grpo |",
        "|---|---|---|---|---|---|---|",
    ]
    grpo = {run["seed"]: run["late_reward"] for run in by_algorithm["grpo"]}
    for name, runs in sorted(by_algorithm.items(), key=lambda item: -mean(run["accuracy"] for run in item[1])):
        accuracies = [100 * run["accuracy"] for run in runs]
        if len(runs) > 1:
            shown = f"{mean(accuracies):.1f} ± {stdev(accuracies):.1f} %"
        else:
            low, high = wilson(runs[0]["accuracy"], ASKED)
            shown = f"{accuracies[0]:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        spec = BUILT_IN_OBJECTIVES.get(name)  # type: ignore[call-overload]
        updates = 1 if spec is not None and not spec.uses_ratio else 2
        by_seed = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
        late = mean(run["late_reward"] for run in runs)
        gaps = [run["late_reward"] - grpo[run["seed"]] for run in runs]
        cells = (name, len(runs), updates, shown, by_seed, f"{late:.2f}", "" if name == "grpo" else paired(gaps))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    tokens = mean(run["tokens"] for run in results["runs"])
    start = f"The model that all runs start from solves {100 * results['start']:.1f} %."
    note = (
        f"{tokens:,.0f} sampled tokens in each run, on average; {ASKED} held-out problems; commit {results['commit']}. {start}"
    )
    spread = (
        "± is the std over seeds; with one seed the 95 % interval over problems is shown, which leaves out the spread of "
        "seeds.\n*Late reward* is the mean reward of steps 31 to 40, and *against grpo* its difference from grpo's at the same "
        "seed, on\nthe same prompts; there ± is the standard error."
    )
    return "\n".join([*lines, "", note, spread])


def paired(gaps: Sequence[float]) -> str:
    """The mean of differences at the same seed and, with several, its standard error."""
    error = f" ± {stdev(gaps) / len(gaps) ** 0.5:.2f}" if len(gaps) > 1 else ""
    return f"{mean(gaps):+.2f}{error}".replace("-", "−")


def expectations(runs: dict[str, list[ArmResult]]) -> str:
    """Each expectation, whether it holds for all of its algorithms, and their distance from grpo in points."""
    grpo = 100 * mean(run.accuracy for run in runs["grpo"])
    rows = []
    for sentence, rule, names in EXPECTED:
        holds = [name for name in names if rule(runs[name], runs["grpo"])]
        gaps = [f"{name} {100 * mean(run.accuracy for run in runs[name]) - grpo:+.1f}" for name in names]
        shown = ", ".join(gap if name in holds else f"**{gap}**" for name, gap in zip(names, gaps, strict=True))
        rows.append((sentence, len(holds) == len(names), shown))
    return verdicts(rows)


def draw(results: dict[str, Any]) -> None:
    """A point for each run, a line for each mean; the best algorithm is at the top."""
    accuracies: dict[str, list[float]] = {}
    for run in results["runs"]:
        accuracies.setdefault(run["algorithm"], []).append(100 * run["accuracy"])
    names = sorted(accuracies, key=lambda name: mean(accuracies[name]))
    with plot(IMAGE, figsize=(7, 6)) as (_, axes):
        axes.axvline(100 * results["start"], color="#999999", linestyle="--", label="start")
        for i, name in enumerate(names):
            axes.plot(accuracies[name], [i] * len(accuracies[name]), "o", color="#1f5f8b", alpha=0.5)
            axes.plot([mean(accuracies[name])], [i], "|", color="#b4501e", markersize=14, markeredgewidth=2)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("held-out accuracy (%): points are seeds, lines are means")
        axes.legend(frameon=False, loc="lower right")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, action="append", help="run this seed; may be repeated")
    parser.add_argument(
        "--page", action="store_true", help="write the finished seeds to docs/compare.md, docs/images and bench/results"
    )
    options = parser.parse_args(arguments)
    for seed in options.seed or ():
        measure(options.out, seed)
    runs = finished_runs(options.out)
    with RunReader.open(options.out / f"seed-{runs['grpo'][0].seed}" / "start") as store:
        start = store.evals()[-1].accuracy
    results = {
        "commit": commit(),
        "machine": platform.machine(),
        "settings": list(SETTINGS),
        "start": start,
        "runs": [figures_of(run) for of_algorithm in runs.values() for run in of_algorithm],
    }
    body = table(results)
    if len(runs["grpo"]) > 1:
        body += "\n\n" + expectations(runs)
    print(body)
    if options.page:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        put(PAGE, "league", body)
        draw(results)


if __name__ == "__main__":
    main(sys.argv[1:])
