"""RLHF end to end, and how much KL a reward costs: one reward model, then GRPO with three KL weights.

The reward model is trained on human comparisons of four fifths of the prompts; its accuracy and calibration are measured on the
other fifth. Each β is a separate run from the same policy and the same reward model. If `--minutes` stops it, give the same
command again to continue.

    python bench/frontier.py --out runs/frontier --minutes 8       the recipe rlhf; repeat until it reports that everything is
    done python bench/frontier.py --out runs/frontier --draw            the table and the plot, from the runs that exist

Writes bench/results/frontier.json and docs/images/frontier.svg.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from reporting import plot

from oncurve.operations.compare import is_finished
from oncurve.recipe.load import find_recipe, load_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.terminal.errors import silence_libraries
from oncurve.training.start import begin, resume
from oncurve.training.trainer import TimeUp

HERE = Path(__file__).resolve().parent
RESULTS, PLOT = HERE / "results" / "frontier.json", HERE.parent / "docs" / "images" / "frontier.svg"
COLOURS = ("#1f5f8b", "#b4501e", "#2b7a4b", "#8a3f8f", "#9a7400")
LAST = 10
"""Steps at the end of a run that its figures are the mean of."""


def judge_of(recipe: Recipe) -> Recipe:
    """A recipe with only the stage that trains the reward model."""
    return recipe.model_copy(update={"stages": tuple(s for s in recipe.stages if s.type == "reward_model")})


def run_of(recipe: Recipe, beta: float, judge: Path) -> Recipe:
    """A recipe with only the grpo stage, with the trained reward model and this β."""
    data = recipe.model_dump(mode="json", exclude_none=True)
    (stage,) = [s for s in data["stages"] if s["type"] == "grpo"]
    stage["kl"] = {**stage.get("kl", {}), "beta": beta}
    for reward in stage["rewards"]:
        if reward["type"] == "model":
            reward["model"] = str(judge.resolve())
    return parse_recipe({**data, "stages": [stage]})


def finished(folder: Path, recipe: Recipe, until: float) -> bool:
    """Start or resume a run for as long as there is time. Returns whether it is finished."""
    if is_finished(folder):
        return True
    minutes_left = (until - time.monotonic()) / 60
    if minutes_left <= 0:
        return False
    print(f"{folder.name}: {minutes_left:.1f} minutes left", flush=True)
    try:
        if folder.exists():
            resume(RunFolder.open(folder, folder.parent), minutes=minutes_left)
        else:
            begin(recipe, out=folder, minutes=minutes_left)
    except TimeUp:
        return False
    return True


def judged(folder: Path) -> dict[str, float]:
    """Accuracy and calibration of the reward model on pairs whose prompts it has not seen."""
    with RunReader.open(folder) as store:
        stage = store.stages()[0].name
        names = ("heldout_pair_accuracy", "calibration_error", "heldout_loss")
        return {name: curve[-1][1] for name in names if (curve := store.metric(name, stage))}


def trained(folder: Path) -> dict[str, Any]:
    """A run's reward and KL curves, and their means over the last steps. The reward of step 1 is the untrained policy's."""
    with RunReader.open(folder) as store:
        stage = store.stages()[0].name
        curves = {
            name: [value for _, value in store.metric(name, stage)] for name in ("reward", "kl", "length_mean", "entropy")
        }
        aside = [(report.step, report.metrics["reward"]) for report in store.evals()]
    ends = {f"{name}_at_end": fmean(curve[-LAST:]) for name, curve in curves.items() if curve}
    return {
        "steps": len(curves["reward"]),
        "reward_before": curves["reward"][0],
        **ends,
        "heldout_reward": aside,
        "curves": curves,
    }


def table(results: dict[str, Any]) -> str:
    reward_model = results["reward_model"]
    lines = [
        f"Reward model: {100 * reward_model.get('heldout_pair_accuracy', 0):.1f} % of held-out pairs right, calibration error "
        f"{reward_model.get('calibration_error', 0):.3f}.\n",
        "| β | steps | reward before | reward at the end | KL at the end | tokens of an answer |",
        "|---|---|---|---|---|---|",
    ]
    for beta, run in results["runs"].items():
        row = (run["reward_before"], run["reward_at_end"], run["kl_at_end"], run["length_mean_at_end"])
        lines.append(f"| {beta} | {run['steps']} | " + " | ".join(f"{value:.3g}" for value in row) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> None:
    """Plot each run as a path: KL to the right, reward upwards. The end is marked."""
    with plot(PLOT, figsize=(6, 4)) as (_, axes):
        for colour, (beta, run) in zip(COLOURS, results["runs"].items(), strict=False):
            kl, reward = (smoothed(run["curves"][name]) for name in ("kl", "reward"))
            axes.plot(kl, reward, color=colour, linewidth=1.2, alpha=0.6)
            axes.plot(run["kl_at_end"], run["reward_at_end"], "o", color=colour, label=f"β = {beta}")
        axes.set_xlabel("KL to the start, nats per token")
        axes.set_ylabel("reward")
        axes.legend(frameon=False)


def smoothed(values: list[float]) -> list[float]:
    """Running mean over the last ten steps."""
    return [fmean(values[max(0, i - LAST + 1) : i + 1]) for i in range(len(values))]


def collect(out: Path, betas: list[float]) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine = {"device": name, **{p: metadata.version(p) for p in ("oncurve", "torch", "transformers")}}
    runs = {str(beta): trained(out / f"beta-{beta}") for beta in betas if (out / f"beta-{beta}" / "run.db").is_file()}
    return {"machine": machine, "reward_model": judged(out / "reward-model"), "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rlhf", help="a recipe with a reward_model and a grpo stage")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe key")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.02, 0.1, 0.5])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time; the same command resumes")
    parser.add_argument("--draw", action="store_true", help="only print the table and draw the plot")
    args = parser.parse_args()
    silence_libraries()
    recipe, until = load_recipe(find_recipe(Path(args.recipe)), tuple(args.set)), time.monotonic() + 60 * args.minutes
    if not args.draw:
        judge = args.out / "reward-model" / "reward_models" / next(s.label for s in recipe.stages if s.type == "reward_model")
        done = finished(args.out / "reward-model", judge_of(recipe), until) and all(
            finished(args.out / f"beta-{beta}", run_of(recipe, beta, judge), until) for beta in args.betas
        )
        print("everything is done" if done else "time is up; give the same command again to continue", flush=True)
    results = collect(args.out, args.betas)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if results["runs"]:
        draw(results)
        print(table(results))


if __name__ == "__main__":
    main()
